"""Engine `deepspeed`: DeepSpeed's ZeRO stages 1 to 3 behind `deepspeed.initialize`.

Strategies: optim is stage 1, optim_grads stage 2, optim_grads_params stage 3. Stage 0 is not
offered: in BF16 it cuts the optimizer state as stage 1 does, and in FP32 it is ddp.
What DeepSpeed does by itself, and what is made of it here:
- gradient accumulation: `backward(scale_wrt_gas=False)` on a loss that is scaled already, and the
  end of a step is told to it (`set_gradient_accumulation_boundary`); the loop calls `step` once;
- clipping: within its optimizer step, by `clip_grad`, which is set for that step alone. The norm
  that `clip_grad_norm` returns is filled in by the step;
- mixed precision: FP32 weights under its own `torch_autocast`, and `communication_data_type`. Its
  `bf16` mode is not used: gradients of several microbatches come out otherwise than those of the
  other engines, by a divisor in stage 1 and by roundings in stage 3;
- logging and an extension for messages in shared memory, which it would compile: both are off.
"""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines.deepspeed_inspection import CUTS_PARAMETERS, DeepSpeedInspection
from bench.engines.optimizer import build_optimizer, optimizer_state_bytes, set_learning_rate
from bench.errors import UnsupportedError
from bench.spec import DeepSpeedSettings, ResolvedRun, StrategyName

STAGES: Final[dict[StrategyName, int]] = {
    "optim": 1,
    "optim_grads": 2,
    "optim_grads_params": 3,
}


class DeepSpeedEngine:
    """The engine that `deepspeed.initialize` returns, driven microbatch by microbatch."""

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        if resolved.train.optimizer == "precision_aware_adamw":
            raise UnsupportedError(
                "deepspeed_optimizer",
                "deepspeed keeps FP32 weights and gradients in wrappers of its own, where"
                " precision_aware_adamw finds nothing to do: set train.optimizer to adamw or sgd",
            )
        _prepare(device)
        self.stage = STAGES[resolved.strategy]
        self.model = model
        self._norm: Tensor | None = None
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=parameters,
            optimizer=build_optimizer(parameters, resolved.train),
            config=configuration(resolved, sum(p.numel() for p in model.parameters())),
            dist_init_required=False,
        )

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        """Stages 2 and 3 reduce every microbatch, the others the sum of all."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        loss: Tensor = self._engine(tokens, targets)
        self._engine.backward(loss if scale == 1.0 else loss * scale, scale_wrt_gas=False)
        return loss.detach()

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """The norm, NaN until the step has clipped by it."""
        self.optimizer.clip_grad = max_norm
        self._norm = torch.full((), float("nan"))
        return self._norm

    def optimizer_step(self) -> None:
        """Clips, steps, refreshes the compute weights and forgets the gradients."""
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        if self._norm is not None:
            self._norm.fill_(float(self._engine.get_global_grad_norm()))
        self._norm, self.optimizer.clip_grad = None, 0.0

    def zero_grad(self) -> None:
        """DeepSpeed's step has done it."""

    def set_learning_rate(self, lr: float) -> None:
        """Set it for the next step."""
        set_learning_rate(self.optimizer, lr)

    def memory_by_category(self) -> dict[str, int]:
        """What its wrappers hold at rest: FP32 partitions, their state, weights to compute with.

        Gradients and buckets come and go inside of DeepSpeed, and are not in it.
        """
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        compute = sum(_held_bytes(p) for p in self.model.parameters())
        state = optimizer_state_bytes(inner)
        main = sum(p.nbytes for group in inner.param_groups for p in group["params"])
        return {"main_weights": main, "compute_weights": compute, "optimizer_state": state}

    def pool_plan(self) -> dict[str, Any] | None:
        """DeepSpeed does not say how it allocates."""
        return None

    def wire_bytes(self) -> int | None:
        """Unknown: DeepSpeed's own log of collectives waits for each, which would change times."""
        return None

    def gathered_bytes(self) -> dict[str, int] | None:
        """As `wire_bytes`."""
        return None

    def save_checkpoint(self, folder: Path) -> None:
        """DeepSpeed's own form: one file of weights and one of optimizer state per rank."""
        self._engine.save_checkpoint(str(folder))

    def inspection(self) -> DeepSpeedInspection:
        """For `mfsdp-bench validate`."""
        return DeepSpeedInspection(self.model, self._engine, self.stage)

    def code_path(self) -> str:
        """The file of DeepSpeed's engine."""
        return inspect.getfile(deepspeed.DeepSpeedEngine)


def configuration(resolved: ResolvedRun, elements: int) -> dict[str, Any]:
    """What `deepspeed.initialize` gets as `config`; `elements` of the model bound its buckets."""
    settings = resolved.engine.settings
    if not isinstance(settings, DeepSpeedSettings):
        settings = DeepSpeedSettings()
    stage, train, dtypes = STAGES[resolved.strategy], resolved.train, resolved.dtypes
    overlaps = settings.overlap_comm
    if overlaps is None:
        overlaps = stage == CUTS_PARAMETERS
    # A bucket that holds the whole model is as good as a larger one, and is allocated.
    zero = {
        "stage": stage,
        "reduce_bucket_size": min(settings.reduce_bucket_elements, elements),
        "allgather_bucket_size": min(settings.gather_bucket_elements, elements),
        "stage3_prefetch_bucket_size": min(settings.prefetch_elements, elements),
        "stage3_param_persistence_threshold": settings.persistence_threshold_elements,
        "overlap_comm": overlaps,
        "contiguous_gradients": settings.contiguous_gradients,
    }
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": resolved.microbatches,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": {
            "enabled": dtypes.compute != "fp32",
            "dtype": "bfloat16",
            # Modules whose parameters would travel in BF16 whatever the run asks for.
            "lower_precision_safe_modules": [],
        },
        "communication_data_type": dtypes.grad_comm,
        "steps_per_print": None,
    }


def _prepare(device: torch.device) -> None:
    """Before DeepSpeed looks around: what it runs on, and that the process group is another one.

    It keeps groups and its backend in globals, which outlive a process group.
    """
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    compatible: Any = deepspeed.ops.__compatible_ops__
    if device.type == "cpu":
        compatible["deepspeed_shm_comm"] = False
    deepspeed.comm.comm.cdb = None
    groups: Any = deepspeed.utils.groups
    groups._WORLD_GROUP = None


def _held_bytes(parameter: Tensor) -> int:
    """Of a parameter: the rank's part where it was cut, and the whole where that is there."""
    part: Tensor | None = getattr(parameter, "ds_tensor", None)
    return parameter.nbytes + (0 if part is None else part.nbytes)


def build(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> DeepSpeedEngine:
    """Factory of `bench.engines.registry`."""
    return DeepSpeedEngine(model, resolved, device)
