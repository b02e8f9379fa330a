"""Programs over `FakeCuda`, as rank 1 of four ranks of torch's fake process group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.testing.units import Block
from fake_device.loops import RUNS
from mfsdp_core import (
    CapturedStep,
    Float8Reference,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fsdp2,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_core.streams import CudaStreams
from oracle.hybrid import PAIRS
from oracle.models import Chain
from oracle.sharded import STRATEGIES

BF16, FP32 = torch.bfloat16, torch.float32
DEVICE = torch.device("cuda", 0)
POLICIES = {
    "bf16_wire": MixedPrecisionPolicy(grad_comm_dtype=BF16, main_grads_dtype=FP32),
    "one_copy": MixedPrecisionPolicy(None),
    "fp32_sums": MixedPrecisionPolicy(grad_comm_dtype=BF16, reduce_dtype=FP32),
} | {
    recipe: MixedPrecisionPolicy(weight_codec=Float8Reference(recipe))
    for recipe in ("delayed", "current", "block", "mxfp8")
}
ALLOCATORS = ("temporary", "storage_resize", "fixed_pool", "max_pool")
#: By name of a way, arguments of `train`.
WAYS: dict[str, dict[str, Any]] = {
    **{policy: {"policy": policy} for policy in POLICIES},
    **{allocator: {"allocator": allocator} for allocator in ALLOCATORS},
    "by_module": {"enable_fine_grained_param_gather": True},
    "on_demand": {"overlap_param_gather": False},
    "averages": {"average_in_collective": True},
    "nan_guard": {"check_for_nan_in_grad": True},
    "user_buffers": {"nccl_ub": True},
    "registered_pools": {"nccl_ub": True, "fsdp_double_buffer": True},
    "leaves_out": {"path": (0, 2)},
    "offloaded": {"offload": True},
    "offloaded_bf16": {"offload": True, "policy": "bf16_wire"},
    "from_host": {"start": "cpu"},
    "from_meta": {"start": "meta"},
    "captured": {"captured": True, "cuda_graph_mode": True, "fsdp_double_buffer": True},
}


def join_ranks() -> None:
    """Before the first program."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)


def train(
    inner: str,
    outer: str,
    *,
    policy: str = "",
    start: str = "cuda",
    captured: bool = False,
    path: tuple[int, ...] = (0, 1, 2),
    **options: Any,
) -> None:
    """Two steps of two microbatches, or as many as a replay needs. start: where weights are."""
    dtype = BF16 if policy else FP32
    model = fully_shard_model(
        _chain(start, dtype),
        **_place(outer),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=inner,
        mixed_precision_policy=POLICIES.get(policy, MixedPrecisionPolicy()),
        sync_model_each_microbatch=False,
        init_model_with_meta_device=start == "meta",
        device=DEVICE,
        **options,
    )
    rate = {"lr": torch.full((), 0.1, device=DEVICE), "capturable": True} if captured else {}
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), **rate))

    def step(*batches: Tensor) -> Tensor:
        for number, batch in enumerate(batches):
            with model.sync() if number else model.no_sync():
                loss = model(batch, path).float().square().mean()
                loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Any = CapturedStep(model, optimizer, step) if captured else step
    for _ in range(6 if captured else 2):
        run(*(torch.ones(2, 8, dtype=dtype, device=DEVICE) for _ in range(2)))
    assert not captured or run.is_captured
    if "nccl_ub" in options:
        report = model.buffer_registration
        outside = {name for name in report["outside"] if " of (root)/" not in name}
        assert outside <= {"all_reduce of flags"}, report
        assert not report["grown"], report


def train_fsdp2(*, outer: bool, policy: TorchPolicy, stays: bool | None) -> None:
    """Two steps behind FSDP2's front. stays: what `reshard_after_forward` of the units is not."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b")) if outer else None
    model = _chain("cuda", FP32)
    reshard = None if stays is None else not stays
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fsdp2.fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 8, device=DEVICE)).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _chain(device: str, dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # `Module.to` refuses fake parameters
    try:
        with torch.device(device):
            return Chain()
    finally:
        torch.set_default_dtype(before)


def _place(outer: str) -> dict[str, Any]:
    if not outer:
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))
        return {"device_mesh": mesh, "dp_shard_dim": "dp"}
    return {
        "device_mesh": init_device_mesh("cuda", (2, 2), mesh_dim_names=("outer", "inner")),
        "dp_shard_dim": "inner",
        "dp_outer_dim": "outer",
        "outer_dp_sharding_strategy": outer,
        "hybrid_fsdp_group": dist.group.WORLD,
    }


#: What crosses between host and device, or is wrong in a capture. Each is to be noticed.
def _numbers() -> Tensor:
    return torch.ones(3, device=DEVICE)


def _in_backward() -> None:
    x = _numbers().requires_grad_()
    x.register_hook(lambda gradient: gradient.sum().item() and None)
    x.sum().backward()


def _without_waiting() -> None:
    torch.ones(3, pin_memory=True).to(DEVICE, non_blocking=True)


CROSSINGS: dict[str, Callable[[], object]] = {
    "item": lambda: _numbers().sum().item(),
    "item_in_backward": _in_backward,
    "list": lambda: _numbers().tolist(),
    "nonzero": lambda: _numbers().nonzero(),
    "mask": lambda: _numbers()[_numbers() > 0],
    "to_host": lambda: _numbers().cpu(),
    "copy_to_host": lambda: torch.empty(3).copy_(_numbers()),
    "from_host": lambda: torch.ones(3).to(DEVICE),
    "new_tensor": lambda: torch.tensor([1.0], device=DEVICE),
    "pinned": _without_waiting,
    "host_index": lambda: _numbers()[torch.tensor([0, 2])],
    "two_devices": lambda: _numbers() + torch.ones(3),
}


def _captured(step: Callable[[], object]) -> None:
    CudaStreams(DEVICE).capture(step)


def _given_back(*, to_graph: bool) -> None:
    """Memory of before a capture goes after it; or memory of the capture itself."""
    kept = [] if to_graph else [_numbers()]

    def step() -> None:
        kept[:] = kept or [_numbers()]
        kept[0].add_(1)

    replay, _ = CudaStreams(DEVICE).capture(step)
    replay()
    kept.clear()
    replay()


def _in_a_pool() -> None:
    streams = CudaStreams(DEVICE)
    streams.use_pool_of(streams.registrar(None))

    def step() -> None:
        with streams.communicated():
            _numbers()

    streams.capture(step)


CAPTURES: dict[str, Callable[[], None]] = {
    **{f"captured {name}": partial(_captured, run) for name, run in CROSSINGS.items()},
    "captured wait": partial(_captured, lambda: CudaStreams(DEVICE).synchronize()),
    "captured number": partial(_captured, lambda: _numbers() * torch.tensor(2.0)),
    "captured draw": partial(_captured, lambda: torch.rand(3)),
    "captured pool": _in_a_pool,
    "replay without memory": partial(_given_back, to_graph=False),
}
TRAINING: dict[str, Callable[[], None]] = {
    f"{inner}{outer and ' in '}{outer} {way}": partial(train, inner, outer, **arguments)
    for inner, outer in [*((inner, "") for inner in STRATEGIES), *PAIRS]
    for way, arguments in WAYS.items()
    if (inner, way) != ("no_shard", "from_meta")  # refused
} | {
    f"fsdp2 {2 if outer else 1} {dtype} {stays}": partial(
        train_fsdp2, outer=outer, policy=TorchPolicy(dtype, FP32 and dtype), stays=stays
    )
    for outer in (False, True)
    for dtype in (None, BF16)
    for stays in (None, False, True)
}
PROGRAMS: dict[str, Callable[[], object]] = {
    **CROSSINGS, **CAPTURES, **TRAINING, **RUNS,
    "replay with its own memory": partial(_given_back, to_graph=True),
}  # fmt: skip
