"""Engine `ddp`: torch's DistributedDataParallel, reducing in the gradient communication dtype.

Weights and gradients stay in the main dtype; another compute dtype runs under autocast.
Microbatches before the last run under `no_sync`, so there is one reduction per step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from bench.engines.dtypes import TORCH_DTYPES, main_dtype
from bench.engines.inspection import StockInspection
from bench.engines.ring_bytes import RingBytes
from bench.engines.stock import StockEngine, autocast, scaled_backward
from bench.models.initialisation import initial_values, materialise, takes_meta
from bench.spec import ResolvedDtypes, ResolvedRun

Reduction = torch.futures.Future[Tensor]
CommHook = Callable[[dist.ProcessGroup, GradBucket], Reduction]
_COMPRESSING: dict[torch.dtype, CommHook] = {
    torch.bfloat16: default_hooks.bf16_compress_hook,
    torch.float16: default_hooks.fp16_compress_hook,
}


@takes_meta
class DdpEngine(StockEngine):
    """Replicated weights, bucketed all-reduce overlapped with the backward.

    Bytes are counted in the communication hook, bucket by bucket.
    """

    _ring: RingBytes

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("engine ddp needs an initialised default process group")
        self._dtypes = resolved.dtypes
        self._device = device
        self._ring = RingBytes(group.size())
        model = model.to(main_dtype(resolved.dtypes))
        agrees = initial_values(model) is not None  # by construction
        materialise(model, device)
        self._ddp = DistributedDataParallel(
            model,
            init_sync=not agrees,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(group, _counted(resolved.dtypes, self._ring))
        super().__init__(self._ddp, resolved)

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        """Local gradients accumulate in the buckets; the last microbatch reduces them."""
        with nullcontext() if is_last else self._ddp.no_sync():
            with autocast(self._dtypes, self._device):
                loss = self._ddp(tokens, targets)
            return scaled_backward(loss, scale)

    def memory_by_category(self) -> dict[str, int]:
        """Gradients are views of the reduction buckets; a narrower dtype needs a copy of them.

        The copies live per bucket; all of them at once is the upper bound that is given.
        """
        categories = self.persistent_bytes()
        comm, main = TORCH_DTYPES[self._dtypes.grad_comm], main_dtype(self._dtypes)
        copied = sum(p.numel() for p in self.parameters) * comm.itemsize if comm != main else 0
        return categories | {"communication_buffers": copied}

    def inspection(self) -> StockInspection:
        """For `mfsdp-bench validate`."""
        return StockInspection(self._ddp, prefix="module.")

    def code_path(self) -> str:
        """The file of torch's DistributedDataParallel."""
        return inspect.getfile(DistributedDataParallel)


def _counted(dtypes: ResolvedDtypes, ring: RingBytes) -> CommHook:
    """The hook of `dtypes`, counting into `ring`.

    Holds neither engine nor model: the reducer, which is C++, holds the hook, and Python's
    collector cannot see a cycle through it.
    """
    wire = TORCH_DTYPES[dtypes.grad_comm]
    hook = default_hooks.allreduce_hook if wire == main_dtype(dtypes) else _COMPRESSING[wire]

    # DDP checks the annotations of a hook at registration, so they cannot be strings.
    def counted(group: dist.ProcessGroup, bucket: GradBucket) -> Reduction:
        ring.all_reduce(bucket.buffer().numel() * wire.itemsize)
        return hook(group, bucket)

    counted.__annotations__ = {"bucket": GradBucket, "return": Reduction}
    return counted
