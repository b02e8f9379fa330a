"""What units are given, return and leave behind, and backward passes of every kind through them."""

from __future__ import annotations

import functools
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import mfsdp_core
from conformance.judging import close, refuses, same
from conformance.small_model import Small, Unit, batch, compare_gradients, pair, plain_backward
from mfsdp_core.errors import LifecycleError

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]


@dataclass
class _Result:
    x: Tensor
    note: str = "a"


class _Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class _OneSlot:
    __slots__ = "x"  # noqa: PLC0205 - as some have it

    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Mapping(dict[str, Tensor]):
    """As those of other packages."""


def _circle(x: Tensor) -> Any:
    found = SimpleNamespace(x=x)
    found.itself = [found]
    return found


#: How a result may be wrapped, and how it is taken out.
_WRAPPINGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (1, x), lambda r: r[1]),
    "list in a dict": (lambda x: {"a": [None, x]}, lambda r: r["a"][1]),
    "dataclass": (_Result, lambda r: r.x),
    "slots": (_Slots, lambda r: r.x),
    "one slot": (_OneSlot, lambda r: r.x),
    "mapping": (lambda x: _Mapping(a=x), lambda r: r["a"]),
    "deque": (lambda x: deque([x]), lambda r: r[0]),
    "user dictionary": (lambda x: UserDict({"x": x}), lambda r: r["x"]),
    "beside a tensor": (lambda x: (x.sum(), _Slots(x)), lambda r: r[1].x + 0 * r[0]),
    "object in a circle": (_circle, lambda r: r.itself[0].x),
    "partial": (lambda x: functools.partial(torch.add, x, other=0), lambda r: r()),
    "keywords": (lambda x: functools.partial(torch.add, 0, other=x), lambda r: r()),
    "closure": (lambda x: lambda: x * 1, lambda r: r()),
    "bound": (lambda x: _Holder(x).get, lambda r: r()),
    "distribution": (lambda x: torch.distributions.Normal(x, torch.ones_like(x)), lambda r: r.mean),
    "return type": (lambda x: torch.return_types.max((x, x)), lambda r: r.values),
}


class _Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def get(self) -> Tensor:
        return self.x


class _Wrapping(Unit):
    wrapping = "tuple"

    def forward(self, x: Any) -> Any:
        return _WRAPPINGS[self.wrapping][0](super().forward(_taken(self.wrapping, x)))


def _taken(wrapping: str, x: Any) -> Tensor:
    found: Tensor = x if isinstance(x, Tensor) else _WRAPPINGS[wrapping][1](x)
    return found


class _Wrapped(Small):
    unit = _Wrapping

    def forward(self, x: Any) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return (_taken(self.units[0].wrapping, x) * self.scale).square().mean()


def test_results_may_be_wrapped_in_anything() -> None:
    """And given to the next unit as they are: gradients of all units, and of the input."""
    some = ("tuple", "object in a circle", "closure")
    for options, wrappings in (
        ({}, _WRAPPINGS),
        ({"enable_fine_grained_param_gather": True}, some),
    ):
        model, plain = pair(3, _Wrapped, **options)
        for wrapping in wrappings:
            for one in (*model.module.units, *plain.units):
                one.wrapping = wrapping
            x, y = (batch().requires_grad_() for _ in range(2))
            model(x).backward()
            plain(y).backward()
            plain.zero_grad()
            plain_backward(plain, 0)
            compare_gradients(model, plain)
            close(f"gradient of the input of a {wrapping}", x.grad, y.grad)
            model.zero_grad()
            plain.zero_grad()
            held = model.ledger.bytes_by_category()["compute_weights"]
            same("nothing is left gathered", held, _root_bytes(model))


def _root_bytes(model: Any) -> int:
    return sum(b.elements * 8 for b in model.buckets() if b.name.startswith("(root)"))


class _Leaving(Unit):
    """Leaves a loss of its own on itself, as routers do."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        self.extra = [hidden.square().mean()]
        return super().forward(x)


class _Left(Small):
    unit = _Leaving

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        for unit in self.units:
            loss = loss + unit.extra[0]
        return loss


def test_losses_may_be_left_on_modules() -> None:
    """Found in the first calls and remembered."""
    model, plain = pair(3, _Left)
    for number in range(5):
        model(batch(number)).backward()
        plain_backward(plain, number)
        compare_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


class _Lazy(Unit):
    def forward(self, x: Tensor) -> Any:
        return (one for one in (x, super().forward(x)))


class _Generating(Small):
    unit = _Lazy

    def forward(self, x: Tensor) -> Tensor:
        *_, last = self.units[0](x)
        return last.square().mean() * self.scale.sum()


class _Escaping(Small):
    """Computes with a tensor that a unit has neither returned nor left."""

    kept: list[Tensor] = []  # noqa: RUF012 - shared on purpose

    def forward(self, x: Tensor) -> Tensor:
        _Hiding.kept.clear()
        for unit in self.units:
            x = unit(x)
        return x.detach().sum() + _Hiding.kept[0].square().mean() + 0 * self.scale.sum()


class _Hiding(Unit):
    kept: list[Tensor] = []  # noqa: RUF012 - shared on purpose

    def forward(self, x: Tensor) -> Tensor:
        _Hiding.kept.append(self.up(x))
        return super().forward(x)


class _Hidden(_Escaping):
    unit = _Hiding


class _Changing(Unit):
    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.up.weight, DTensor):
            with torch.no_grad():
                self.up.weight.add_(0)
        return super().forward(x)


class _Changed(Small):
    unit = _Changing


def test_what_nobody_could_follow_is_refused() -> None:
    """Generators, hidden tensors, changes of what is gathered."""
    model, _ = pair(3, _Generating)
    refuses(LifecycleError, "returned a generator", lambda: model(batch()))
    model, _ = pair(3, _Hidden)
    refuses(LifecycleError, "neither", lambda: model(batch()).backward())
    model, _ = pair(3, _Changed)

    def twice() -> None:
        model(batch()).backward()
        model(batch()).backward()

    refuses(LifecycleError, "changed in place while its module ran", twice)


class _Joining(Unit):
    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        return super().forward(x * y), y.sin()


class _Joined(Small):
    unit = _Joining

    def forward(self, x: Tensor) -> Tensor:
        pair_of = (x * 2, x + 1)
        for unit in self.units:
            pair_of = unit(*pair_of)
        return (pair_of[0] * self.scale + pair_of[1]).square().mean()


class _Frozen(_Joined):
    """Units that train nothing; the first one is given a leaf, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.units.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        pair_of = (x, x + 1)
        for unit in self.units:
            pair_of = unit(*pair_of)
        return (pair_of[0] * self.scale + pair_of[1]).square().mean()


def test_inputs_of_frozen_units_have_gradients() -> None:
    """All of them, twice through the same graph, and after a unit that has raised on its own."""
    for options in ({}, {"enable_fine_grained_param_gather": True}):
        model, plain = pair(3, _Frozen, **options)
        for _ in range(2):
            refuses(TypeError, "missing", model.module.units[0], batch())
            x, y = (batch().requires_grad_() for _ in range(2))
            found, wanted = model(x), plain(y)
            for keeps in (True, False):
                found.backward(retain_graph=keeps)
                wanted.backward(retain_graph=keeps)
                close("gradient of the input", x.grad, y.grad)
            model.zero_grad()
            held = model.ledger.bytes_by_category()["compute_weights"]
            same("nothing is left gathered", held, _root_bytes(model))


def test_some_gradients_may_be_asked_for_alone() -> None:
    """`autograd.grad` of an input and `backward(inputs=...)` leave parameters without gradients."""
    for strategy in (0, 3):
        model, plain = pair(strategy)
        x, y = (batch().requires_grad_() for _ in range(2))
        (found,) = torch.autograd.grad(model(x), x)
        (wanted,) = torch.autograd.grad(plain(y), y)
        close("of the input", found, wanted)
        model(x).backward(inputs=[x])
        plain(y).backward(inputs=[y])
        close("of the input", x.grad, y.grad)
        assert all(p.grad is None for p in model.parameters()), "parameters got gradients"
        model(batch(1)).backward()
        plain_backward(plain, 1)
        compare_gradients(model, plain)


def test_units_run_alone_frozen_twice_and_recomputed() -> None:
    """On their own outside of the model; as parts of a checkpoint; with a leaf given twice."""
    model, plain = pair(3)
    for number in range(2):
        x = batch(number)
        model.module.units[1](x).square().mean().backward()
        model.finish_grad_sync()
        for rank in range(torch.distributed.get_world_size()):
            loss = plain.units[1](batch(number, rank)).square().mean()
            (loss / torch.distributed.get_world_size()).backward()
        found = model.module.units[1].up.weight.grad
        close("alone", mfsdp_core.gather_full(found), plain.units[1].up.weight.grad)
        model.zero_grad()
        plain.zero_grad()
    for reentrant in (True, False):
        for options in ({}, {"enable_fine_grained_param_gather": True}):
            model, plain = pair(3, **options)
            for one in (model.module, plain):
                for unit in one.units:
                    inner = unit.up
                    unit.up = _Checkpointed(inner, reentrant)
            x, y = (batch().requires_grad_() for _ in range(2))
            model(x).backward()
            plain(y).backward()
            close("input", x.grad, y.grad)
            plain.zero_grad()
            for rank in range(torch.distributed.get_world_size()):
                # Reentrant checkpoints of what needs no gradient give none to parameters.
                loss = plain(batch(0, rank).requires_grad_())
                (loss / torch.distributed.get_world_size()).backward()
            same("parameters", len(list(model.parameters())), len(list(plain.parameters())))
            wanted = {n.replace(".inner", ""): p.grad for n, p in plain.named_parameters()}
            for name, p in model.named_parameters():
                plain_name = name.removeprefix("module.").replace(".inner", "")
                close(name, mfsdp_core.gather_full(p.grad), wanted[plain_name])


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return found


class _Again(Unit):
    """Runs itself once more, as trees and recursive networks do."""

    def forward(self, x: Tensor, again: int = 1) -> Tensor:
        """[..., WIDTH] to the same."""
        x = super().forward(x)
        return self(x, again - 1) if again else x


class _Recursive(Small):
    unit = _Again


def test_units_may_run_inside_themselves() -> None:
    """Gradients of both runs."""
    for strategy in (0, 3):
        model, plain = pair(strategy, _Recursive)
        model(batch(0)).backward()
        plain_backward(plain, 0)
        compare_gradients(model, plain)


def test_hooks_on_parameters_see_the_reduced_gradient() -> None:
    """Once per cycle; their results take its place; for sums the other kind of hook."""
    for strategy in (0, 3):
        model, plain = pair(strategy, sync_model_each_microbatch=False)
        calls: list[str] = []

        def double(gradient: Any, c: list[str] = calls) -> Any:
            c.append("double")
            return gradient * 2

        def look(parameter: Any, c: list[str] = calls) -> None:
            c.append("sum" if parameter.grad is not None else "none")

        weight, own = model.module.units[0].up.weight, plain.units[0].up.weight
        handles = [weight.register_hook(double), weight.register_hook(lambda _: None)]
        handles.append(weight.register_post_accumulate_grad_hook(look))
        with model.sync():
            model(batch(0)).backward()
        plain_backward(plain, 0)
        own.grad.mul_(2)
        compare_gradients(model, plain)
        same("calls", calls, ["double", "sum"])
        model.zero_grad()
        plain.zero_grad()
        model(batch(0)).backward()

        def last(m: Any = model) -> None:
            with m.sync():
                m(batch(1)).backward()

        refuses(LifecycleError, "has summed up several", last)
        model.zero_grad()
        handles[0].remove()
        handles[1].remove()
        model(batch(0)).backward()
        last()
        plain_backward(plain, 0, 1)
        compare_gradients(model, plain)
        same("sums", calls, ["double", "sum", "sum"])
        model.zero_grad()
        handles[2].remove()
        handle = weight.register_hook(lambda g: g.to_local())
        refuses(LifecycleError, "expected None or a DTensor", last)
        handle.remove()
