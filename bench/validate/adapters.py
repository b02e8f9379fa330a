"""Engines made of what a training script has: a model that was wrapped, and its optimizer.

    def shard(model):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters())

    engine = from_callable(shard)           # mfsdp-bench validate my_module:engine

The callable gets a model on its device, in the dtype of the case. The model names its units in
`unit_classes` and takes tokens and targets; it returns the mean loss.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines.dtypes import main_dtype
from bench.engines.inspection import Inspection, LocalRows, StockInspection
from bench.engines.protocol import EngineFactory
from bench.engines.stock import StockEngine
from bench.errors import UnsupportedError
from bench.spec import ResolvedRun, StrategyName
from bench.validate.cases import Case

#: Of every parameter, by its name in the bare model: the weight that the optimizer updates and its
#: gradient (None for none), as they lie on this rank. A frozen one has no gradient.
Shards = Callable[[nn.Module], Mapping[str, tuple[LocalRows, LocalRows | None]]]
_OWN = "the callable of from_callable"


@dataclass(frozen=True)
class _Ways:
    """How a step is taken: what a script calls for it. trained: of each weight, whether it is.

    source: who was handed in. shards: as `from_callable` takes them.
    """

    trained: dict[str, bool]
    source: Callable[..., Any]
    backward: Callable[[Tensor], object]
    without_reduction: Callable[[], AbstractContextManager[object]]
    clip: Callable[[float], Tensor | None] | None
    shards: Shards | None = None


_NO_MESHES = "models that were cut over meshes of their own are not checked for a callable"


def from_callable(
    wrap: Callable[[nn.Module], tuple[nn.Module, Any]],
    *,
    strategy: StrategyName = "optim_grads_params",
    shards: Shards | None = None,
) -> EngineFactory:
    """The engine of a callable that takes a model and returns it wrapped, with its optimizer.

    Microbatches before the last run under the wrapped model's `no_sync()`, or between two calls of
    its `set_requires_gradient_sync`, if it has one of them. Its `clip_grad_norm_` clips, or else
    torch's. The optimizer is an AdamW by its groups, and gets the learning rate, betas, epsilon and
    weight decay of the case.

    Args:
        wrap: of a module, so that ranks find the engine.
        strategy: what it shards; other cases are refused.
        shards: where the weights lie. Without it, parameters are whole, or DTensors.
    """

    def build(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> CallableEngine:
        bare = _accepted(model, resolved, device, strategy)
        trained = {name: p.requires_grad for name, p in bare.named_parameters()}
        wrapped, optimizer = wrap(bare)
        clip = getattr(wrapped, "clip_grad_norm_", None)
        ways = _Ways(trained, wrap, Tensor.backward, lambda: _deferred(wrapped), clip, shards)
        return CallableEngine(wrapped, optimizer, resolved, ways)

    return build


def from_accelerate(
    make: Callable[[], Any], *, strategy: StrategyName = "no_shard"
) -> EngineFactory:
    """The engine of accelerate, with the Accelerator that `make` returns and torch's AdamW.

    On CPU ranks accelerate prepares a model for DistributedDataParallel, which shards nothing.
    """

    def build(model: nn.Module, resolved: ResolvedRun, device: torch.device) -> CallableEngine:
        bare = _accepted(model, resolved, device, strategy)
        trained = {name: p.requires_grad for name, p in bare.named_parameters()}
        # What a launcher would have said; accelerate looks for it, though the group exists.
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        os.environ |= {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        made = make()
        parameters = [parameter for parameter in bare.parameters() if parameter.requires_grad]
        wrapped, optimizer = made.prepare(bare, torch.optim.AdamW(parameters))

        def clip(bound: float) -> Tensor | None:
            norm: Tensor | None = made.clip_grad_norm_(wrapped.parameters(), bound)
            return norm

        ways = _Ways(trained, make, made.backward, lambda: made.no_sync(wrapped), clip)
        return CallableEngine(wrapped, optimizer, resolved, ways)

    return build


def _accepted(
    model: nn.Module, resolved: ResolvedRun, device: torch.device, strategy: StrategyName
) -> nn.Module:
    """The model as the callable gets it.

    Raises:
        UnsupportedError: the case asks for what a callable cannot know.
    """
    dtypes, engine = resolved.dtypes, resolved.engine
    if resolved.strategy != strategy:
        raise UnsupportedError("one-strategy", f"{_OWN} has strategy={strategy!r}")
    if engine.outer_size > 1:
        raise UnsupportedError("one-axis", f"{_OWN} shards on one axis")
    if {dtypes.compute, dtypes.main_grads, dtypes.grad_comm} != {dtypes.main_params}:
        raise UnsupportedError("one-dtype", f"{_OWN} does not know mixed precision")
    plainly = Case(engine.name, strategy).resolved("cpu").engine.settings.model_dump()
    changed = {n for n, value in engine.settings.model_dump().items() if plainly.get(n) != value}
    if changed:
        raise UnsupportedError("own-settings", f"{_OWN} does not know {', '.join(sorted(changed))}")
    if hasattr(model, "tensor_mesh") or hasattr(model, "expert_mesh"):
        raise UnsupportedError("plain-weights", _NO_MESHES)
    return model.to(device, main_dtype(dtypes))


@contextmanager
def _deferred(model: Any) -> Iterator[None]:
    """Without a reduction, where the wrapped model has a way to leave it out."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
        return
    set_reduction = getattr(model, "set_requires_gradient_sync", lambda _: None)
    set_reduction(False)
    try:
        yield
    finally:
        set_reduction(True)


class CallableEngine(StockEngine):
    """A wrapped model and its optimizer, by the methods of the protocol."""

    def __init__(
        self, model: nn.Module, optimizer: Any, resolved: ResolvedRun, ways: _Ways
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._ways = ways
        train = resolved.train
        for group in optimizer.param_groups:
            if not {"lr", "betas", "eps", "weight_decay"} <= group.keys():
                raise UnsupportedError(
                    "no-adamw",
                    "expected an optimizer whose groups have lr, betas, eps and weight_decay, as"
                    f" torch.optim.AdamW; found {type(optimizer).__name__} with {sorted(group)}",
                )
            group |= {"lr": train.lr, "betas": (train.beta1, train.beta2), "eps": train.eps}
            group["weight_decay"] = train.weight_decay

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, scale: float, is_last: bool
    ) -> Tensor:
        """As a training script does it."""
        with nullcontext() if is_last else self._ways.without_reduction():
            loss: Tensor = self.model(tokens, targets)
            self._ways.backward(loss if scale == 1.0 else loss * scale)
        return loss.detach()

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """By the wrapped model's own way, if it has one."""
        clip = self._ways.clip
        return super().clip_grad_norm(max_norm) if clip is None else clip(max_norm)

    def memory_by_category(self) -> dict[str, int]:
        """Of the parameters that the optimizer has."""
        return self.persistent_bytes()

    def inspection(self) -> StockInspection:
        """By its shards, or by the parameters of the wrapped model."""
        trained = self._ways.trained
        if self._ways.shards is not None:
            return _ShardInspection(self.model, self._ways.shards, trained)
        first = next(iter(dict(self.model.named_parameters())))
        prefix = first.removesuffix(next(iter(trained)))
        return StockInspection(self.model, prefix=prefix, autocast=False)

    def code_path(self) -> str:
        """The file of the callable."""
        return inspect.getsourcefile(self._ways.source) or ""


class _ShardInspection(StockInspection):
    """By what the author of an engine says of its shards."""

    def __init__(self, model: nn.Module, shards: Shards, trained: Mapping[str, bool]) -> None:
        super().__init__(model, autocast=False)
        self._shards = shards
        self._trained = trained

    def gradients(self) -> dict[str, LocalRows | None]:
        """Second of each pair."""
        held = self._shards(self._model)
        return {name: gradient for name, (_, gradient) in held.items() if self._trained[name]}

    def weights(self) -> dict[str, LocalRows]:
        """First of each pair."""
        return {name: held for name, (held, _) in self._shards(self._model).items()}

    def whole_weights(self) -> dict[str, Tensor]:
        """Not offered: where shards lie is said, and no way to put them together."""
        return Inspection.whole_weights(self)

    def load_whole_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Not offered."""
        Inspection.load_whole_weights(self, weights)
