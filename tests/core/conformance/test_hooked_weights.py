"""Weights that bring hooks of their own for their gather, beside plain torch with what they send.

The tensors here send their values in BF16, in one part or in two, and modules compute with those.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import mfsdp_core
from bench.testing.toy_models import build
from conformance.judging import close, refuses, same
from conformance.small_model import (
    Recomputing,
    Small,
    batch,
    compare_gradients,
    compare_weights,
    plain_backward,
)
from mfsdp_core.errors import ConfigurationError, LifecycleError

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_FP32 = torch.float32
_RATE = 0.1


class _Sent(torch.Tensor):
    """Around plain values. kind: of the hooks, or what is wrong with them."""

    _values: Any
    #: What the kind `small` sends.
    small = torch.float8_e4m3fn

    @staticmethod
    def __new__(cls: Any, values: Tensor, kind: str) -> _Sent:
        del kind
        made: _Sent = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype
        )
        return made

    def __init__(self, values: Tensor, kind: str) -> None:
        self._values, self._kind = values, kind

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["_values"], self._kind

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, kind: str, _size: Any, _stride: Any) -> _Sent:
        return cls(inner["_values"], kind)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        plain, options = tree_map_only(_Sent, lambda one: one._values, (args, kwargs or {}))
        made = func(*plain, **options)
        keeps = [torch.ops.aten.detach.default]
        keeps += [] if args[0]._kind == "no view" else [torch.ops.aten.view.default]
        return type(args[0])(made, args[0]._kind) if func in keeps else made

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        same("the mesh", (mesh.ndim, mesh.size()), (1, dist.get_world_size()))
        return self.inputs(), "known"

    def inputs(self) -> tuple[Tensor, ...]:
        high = self._values.to(torch.bfloat16)
        if self._kind == "two parts":
            return high, torch.zeros_like(high)
        if self._kind in ("nothing", "small"):
            return (self._values.to(self.small),) if self._kind == "small" else ()
        return (high[:1],) if self._kind == "rows" else (high,)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        same("metadata", metadata, "known")
        total = sum(part.to(param_dtype) for part in outputs)
        if out is None:
            return total, (total,)
        same("the same memory", out.dtype, param_dtype)
        out.copy_(total[: len(out)])
        return None


class _SentNewer(_Sent):
    """With the newer form of the first hook."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        same("of", (type(module), mp_policy.param_dtype), (nn.Linear, _FP32))
        same("strides", outer_stride, (outer_size[1], 1))
        rows = -(-outer_size[0] // mesh.size())
        same("rows, padding included", len(self._values) in (rows, outer_size[0]), True)
        return self.inputs(), "known"


def _wrapped(plain: nn.Module, kind: str, sent: type[_Sent]) -> nn.Module:
    module = copy.deepcopy(plain)
    for linear in (one for one in module.modules() if isinstance(one, nn.Linear)):
        linear.weight = nn.Parameter(sent(linear.weight.detach(), kind))
    return module


def _sharded(module: nn.Module, strategy: int, **options: Any) -> Any:
    policy = mfsdp_core.MixedPrecisionPolicy(_FP32)
    units = list(module.unit_classes)
    return mfsdp_core.fully_shard_model(
        module,
        fsdp_unit_modules=units,
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
        **options,
    )


def _as_sent(plain: nn.Module) -> nn.Module:
    """The same with what modules compute with: matrices rounded to BF16."""
    sent = copy.deepcopy(plain)
    with torch.no_grad():
        for p in (p for p in sent.parameters() if p.ndim > 1):
            p.copy_(p.to(torch.bfloat16))
    return sent


def test_models_train_on_what_their_weights_send() -> None:
    """Over three steps; weights that are exported and loaded are the main ones."""
    for strategy, kind, sent, module, options in (
        (0, "one part", _Sent, Small, {}),
        (1, "two parts", _SentNewer, Small, {}),
        (2, "two parts", _Sent, Recomputing, {}),
        (3, "one part", _SentNewer, Recomputing, {}),
        (3, "two parts", _Sent, Small, {"enable_fine_grained_param_gather": True}),
    ):
        plain = build(module, _FP32, 3, 0.4)
        model = _sharded(_wrapped(plain, kind, sent), strategy, **options)
        optimizer = mfsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=_RATE))
        for step in range(3):
            computed = _as_sent(plain)
            x = batch(step, dtype=_FP32)
            with torch.no_grad():
                close("an evaluation", model(x), computed(x), 1e-6)
            model(x).backward()
            plain_backward(computed, step)
            compare_gradients(model, computed, 1e-5)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p, q in zip(plain.parameters(), computed.parameters(), strict=True):
                    p.sub_(torch.as_tensor(q.grad) * _RATE)
            compare_weights(model, plain, 1e-5)
        held = model.ledger.bytes_by_category()["communication_buffers"]
        same("nothing stays gathered", held == 0, strategy == 3)
        # What was sent in BF16, and the sum that the second hook makes of it in FP32.
        each = 2 * (1 + (kind == "two parts")) + 4
        least = each * sum(p.numel() for p in plain.parameters() if p.ndim > 1)
        same("what the second hook made stays", held >= least, strategy < 3)
        others = [b for b in model.buckets() if not any("weight" in n for n in b.parameters)]
        held = model.ledger.bytes_by_category()["compute_weights"]
        if strategy < 3:
            same("kept whole: others", held, 4 * sum(b.elements for b in others))
        exported = mfsdp_core.export_state_dict(model)
        for name, value in exported.items():
            close(name, value, plain.state_dict()[name], 1e-5)
        other = {f"module.{n}": v + 1 for n, v in plain.state_dict().items()}
        model.load_state_dict(other)
        plain.load_state_dict({n.removeprefix("module."): v for n, v in other.items()})
        compare_weights(model, plain, 1e-6)
        x = batch(5, dtype=_FP32)
        close("after loading", model(x).detach(), _as_sent(plain)(x).detach(), 1e-5)


def test_hooks_that_break_their_word_are_refused() -> None:
    """Of other rows than those of the shard, or of a class that does not last."""
    for kind, words in (
        ("rows", "padding included: expected as many"),
        ("nothing", "returned no tensors: expected one or more"),
        ("no view", "does not stay one through detach and view"),
    ):
        broken = _wrapped(build(Small, _FP32, 3, 0.4), kind, _Sent)
        refuses(ConfigurationError, words, _sharded, broken, 3)
    small = type("_Small", (_Sent,), {})
    model = _sharded(_wrapped(build(Small, _FP32, 3, 0.4), "small", small), 3)
    small.small = torch.float8_e5m2
    wanted = "float8_e4m3fn)] before. Expected the same"
    refuses(LifecycleError, wanted, lambda: model(batch(0, dtype=_FP32)))
    module: Any = _wrapped(build(Small, _FP32, 3, 0.4), "one part", _Sent)
    module.units[0].up.weight.register_post_accumulate_grad_hook(lambda _: None)
    refuses(ConfigurationError, "has hooks for its gradient", lambda: _sharded(module, 3))
