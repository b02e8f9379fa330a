"""The package DeepSpeed, ZeRO stages 1 to 3, with an optimizer of torch.

BF16 accumulates and steps in FP32; of stage 1 its BF16_Optimizer is then in charge. Some of
its behaviour is undone here, so that it starts where the other engines start:
- it clips every step at a norm of 1: that is off, and the loop clips the shards here;
- main weights are made of weights that were rounded to BF16: they get the FP32 values afterwards;
- it casts buffers to BF16, rotary tables among them: they stay as they were;
- on a CPU it compiles an extension that adds up past gloo: that is off;
- stage 3 replaces torch's linear layer for everything in the process: it is restored when the
  engine is gone, or another is built.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
import weakref
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.optimizer import (
    build_optimizer,
    clip_shards,
    optimizer_state_bytes,
    set_learning_rate,
)
from bench.engines.protocol import UNREPORTED, Engine
from bench.errors import UnsupportedError
from bench.models.initialisation import (
    GivenValues,
    Part,
    give_placeholders,
    initial_values,
    materialise,
    takes_meta,
    write_values,
)
from bench.spec import DtypeName, ResolvedRun, StrategyName
from examples.engines import refuse_others
from examples.engines.deepspeed_inspection import DeepSpeedInspection

STAGES: Final[dict[StrategyName, int]] = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_BUCKET_ELEMENTS: Final = 500_000_000
_NAMES: Final[dict[DtypeName, str]] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


class DeepSpeedEngine(Engine):
    """DeepSpeed's engine, which owns model and optimizer."""

    _newest: weakref.ref[DeepSpeedEngine] | None = None

    def __init__(self, model: nn.Module, resolved: ResolvedRun, device: torch.device) -> None:
        self._device = device
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
        package = _package()
        DeepSpeedEngine._newest = weakref.ref(self)
        weakref.finalize(self, _put_back_linear, package)
        is_drawn = initial_values(model) is not None
        values = initial_values(model) or GivenValues(model)
        model = model.to(TORCH_DTYPES[resolved.dtypes.compute])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if is_drawn and resolved.strategy == "optim_grads_params":
                self._partition(package, model, resolved)
            materialise(model, device)
            self._start(package, model, resolved)
        self._file = str(package.__file__)
        self.inspected = DeepSpeedInspection(self.engine, package, STAGES[resolved.strategy])
        write_values(values, self.parts())
        if is_drawn and resolved.strategy == "optim_grads_params":
            write_values(values, self.inspected.compute_parts())

    def parts(self) -> list[Part]:
        """Stretches of the FP32 main weights."""
        return self.inspected.parts()

    def _start(self, package: Any, model: nn.Module, resolved: ResolvedRun) -> None:
        buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.engine, *_ = package.initialize(
            model=model,
            model_parameters=parameters,
            optimizer=build_optimizer(parameters, resolved.train),
            config=configuration(resolved, _elements(model)),
            dist_init_required=False,
        )
        for name, buffer in self.engine.module.named_buffers():
            buffer.data = buffers[name].to(buffer.device)

    def _partition(self, package: Any, model: nn.Module, resolved: ResolvedRun) -> None:
        """Shard parameters one by one: each is whole, and without values, for a moment."""
        config = configuration(resolved, _elements(model))
        init = package.zero.Init(module=nn.Module(), config_dict_or_path=config)
        give_placeholders(model, self._device)
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter.data, memory_format=torch.contiguous_format)
            init._convert_to_zero_parameters([parameter])

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        """Stage 1 reduces behind the last microbatch, the others on every one."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        loss: Tensor = self.engine(tokens, targets)
        self.engine.backward(loss * scale, scale_wrt_gas=False)
        if not is_last:
            self.engine.step()
        return loss.detach()

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """By the norm over all shards: DeepSpeed has no call for it before its step."""
        world: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
        return clip_shards(self.inspected.gradient_shards(), max_norm, [world], self._device)

    def optimizer_step(self) -> None:
        """Update the shards, gather weights as the stage does, and drop the gradients."""
        self.engine.step()

    def zero_grad(self) -> None:
        """Of a step that was not taken; `optimizer_step` drops them by itself."""
        self.engine.optimizer.zero_grad()
        self.inspected.forget_gradients()

    def set_learning_rate(self, lr: float) -> None:
        """Set it for the next step."""
        set_learning_rate(self.engine.optimizer, lr)

    def memory_by_category(self) -> dict[str, int | None]:
        """Main weights and optimizer state of this rank; DeepSpeed does not say the rest."""
        weights = sum(shard.rows.nbytes for shard in self.inspected.weights().values())
        state = optimizer_state_bytes(self.engine.basic_optimizer)
        return UNREPORTED | {"main_weights": weights, "optimizer_state": state}

    def inspection(self) -> DeepSpeedInspection:
        """For `mfsdp-bench validate`."""
        return self.inspected

    def code_path(self) -> str:
        """The file of the package."""
        return self._file


def _elements(model: nn.Module) -> int:
    """Of what is trained, whether or not it is partitioned already."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return sum(getattr(p, "ds_numel", p.numel()) for p in trained)


@takes_meta
def build(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> DeepSpeedEngine:
    """What `engine.name` names.

    Raises:
        UnsupportedError: the package is not installed, or cannot follow the run.
    """
    if resolved.launch.ranks_per_device > 1:
        raise UnsupportedError(
            "ranks-need-devices-of-their-own",
            "DeepSpeed takes the device of its local rank's number: expected "
            f"launch.ranks_per_device=1, found {resolved.launch.ranks_per_device}",
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise UnsupportedError("engine-not-here", "DeepSpeed is missing: pip install deepspeed")
    refuse_others(resolved, tuple(STAGES), main=("fp32",))
    return DeepSpeedEngine(model, resolved, device)


def _package() -> Any:
    """DeepSpeed, silenced, and without the extension that it would compile on a CPU.

    It calls collectives by names that torch has deprecated, in every step.
    """
    warnings.filterwarnings("ignore", message=r".*(all_gather_into|reduce_scatter)_tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module("deepspeed")
    # It remembers process groups of an earlier engine, which may be gone.
    package.comm.comm.cdb = None
    for name, value in list(vars(package.utils.groups).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(package.utils.groups, name, None)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    DeepSpeedEngine._newest = None
    _put_back_linear(package)
    return package


def _put_back_linear(package: Any) -> None:
    """Unless an engine still uses the replacement; the package remembers torch's."""
    newest = DeepSpeedEngine._newest
    if newest is None or newest() is None:
        remembers = package.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses
        torch.nn.functional.linear = getattr(remembers, "linear_bk", torch.nn.functional.linear)


def configuration(resolved: ResolvedRun, elements: int) -> dict[str, Any]:
    """What `deepspeed.initialize` gets for a model with so many trainable elements.

    A bucket has DeepSpeed's own size, but is hardly larger than the model: its size has to be even.
    """
    dtypes, train = resolved.dtypes, resolved.train
    bucket = min(elements + elements % 2, _BUCKET_ELEMENTS)
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": resolved.microbatches,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": STAGES[resolved.strategy],
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "communication_data_type": _NAMES[dtypes.grad_comm],
        "data_types": {"grad_accum_dtype": _NAMES[dtypes.main_grads]},
        "bf16": {"enabled": dtypes.compute == "bf16"},
        "steps_per_print": None,
    }
