"""How a program drives mfsdp_core."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mfsdp_core
from bench.validate.drivers.driver import Driver
from bench.validate.program import Program


class Mfsdp(Driver):
    """By its drop-in functions."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.options.setdefault("sync_model_each_microbatch", False)

    def shard(self, module: Any) -> tuple[Any, Any]:
        """The wrapped model; decoupled gradients, which no optimizer of torch takes, stay as is."""
        axes: dict[str, Any] = {}
        if self.program.mode != "flat":
            axes = {"dp_shard_dim": "inner", "dp_outer_dim": "outer"}
            axes |= {"hybrid_fsdp_group": dist.group.WORLD}
            axes |= {"outer_dp_sharding_strategy": int(self.program.mode == "hfsdp")}
        model = mfsdp_core.fully_shard_model(
            module,
            device_mesh=self.mesh(),
            fsdp_unit_modules=module.unit_classes,
            zero_dp_strategy=self.program.strategy,
            mixed_precision_policy=mfsdp_core.MixedPrecisionPolicy(main_params_dtype=None),
            **axes,
            **self.options,
        )
        optimizer = self.sgd(model.parameters())
        if not self.options.get("use_decoupled_grad"):
            optimizer = mfsdp_core.fully_shard_optimizer(optimizer)
        return model, optimizer

    def follow(self, model: Any, write: Callable[[str], None]) -> None:
        """The events of the core."""
        model.events.subscribe(
            lambda event: write(f"{event.kind} {event.operation} of {event.bucket}, {event.group}")
        )

    def accumulating(self, model: Any, last: bool) -> AbstractContextManager[object]:
        """By `sync` and `no_sync`; where every pass completes the gradients, by `no_sync` alone."""
        if last and not self.options["sync_model_each_microbatch"]:
            return model.sync()  # type: ignore[no-any-return]
        return super().accumulating(model, last)

    def finish(self, model: Any, end: str) -> None:
        """At once, or begun before."""
        if end == "start":
            model.start_grad_sync()
        model.finish_grad_sync()

    def gradient(self, parameter: Any) -> Tensor | None:
        """Gathered."""
        name = "decoupled_grad" if self.options.get("use_decoupled_grad") else "grad"
        gradient = getattr(parameter, name, None)
        return None if gradient is None else self.weight(gradient)

    def weight(self, parameter: Any) -> Tensor:
        """Gathered."""
        weight: Tensor = mfsdp_core.gather_full(parameter.detach())
        return weight

    def clip(self, model: Any, bound: float) -> Tensor:
        """By the core's own function."""
        norm: Tensor = mfsdp_core.clip_grad_norm_(model, bound)
        return norm

    def forget(self, model: Any, optimizer: Any) -> None:
        """By the model."""
        del optimizer
        model.zero_grad_buffer()

    def held(self, model: Any) -> dict[str, int]:
        """Bytes by category; weights are visible as shards whenever no pass runs.

        Compute weights of the root last until main weights change, and are left out.
        """
        if not all(hasattr(p.data, "device_mesh") for p in model.module.parameters()):
            raise AssertionError("whole weights at rest")
        used = sum(entry.count_bytes for entry in model.ledger.alive() if entry.in_pool)
        # The optimizer's state comes with the first step.
        held: dict[str, int] = model.ledger.bytes_by_category()
        for entry in model.ledger.alive():
            if entry.role == "compute_weights" and entry.bucket.startswith("(root)/"):
                held["compute_weights"] -= entry.count_bytes
        return held | {"optimizer_state": 0, "in_pools": used}

    def send_gradients_in(self, model: Any, dtype: torch.dtype) -> None:
        """Reduce in `dtype` from here on."""
        sums = dtype if "native" in model.transports.values() else None
        changed = dataclasses.replace(model.mp_policy, grad_comm_dtype=dtype, reduce_dtype=sums)
        model.reset_mixed_precision_policy(changed)

    def gather_ahead(self, model: Any) -> None:
        """Gather weights that no pass has requested yet."""
        model.start_param_sync()

    def resume(self, model: Any, optimizer: Any, module: Any) -> tuple[Any, Any]:
        """A checkpoint, loaded into a new model with other weights."""
        folder: list[Any] = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        mfsdp_core.save_checkpoint(f"{folder[0]}/step", model, optimizer)
        fresh, its_optimizer = self.shard(module)
        for group in its_optimizer.param_groups:
            group["lr"] = 7.0  # the one that was saved is to count
        mfsdp_core.load_checkpoint(f"{folder[0]}/step", fresh, its_optimizer)
        shutil.rmtree(folder[0], ignore_errors=True)
        return fresh, its_optimizer


DRIVER = Mfsdp
