"""Shapes of a step that training has beside one forward and one backward pass: what is whole when.

One of four ranks on torch's fake process group: schedule and memory, and no values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core import fully_shard_model
from mfsdp_core.memory.ledger import Booking

pytestmark = pytest.mark.usefixtures("fake_group")
FAKE = (1, 4)
UNITS = 6
Step = Callable[[Any, Tensor], Tensor]


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Chain(nn.Module):
    """path: of the units, in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.units = nn.ModuleList(Unit() for _ in range(UNITS))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor, path: tuple[int, ...] = tuple(range(UNITS))) -> Tensor:
        x = self.embed(x)
        for index in path:
            x = self.units[index](x)
        return self.head(x)


def preference_pair(model: Any, x: Tensor) -> Tensor:
    return model(x) - model(x + 1)


def three_forwards(model: Any, x: Tensor) -> Tensor:
    return model(x) + model(x + 1) + model(x + 2)


def two_turns(model: Any, x: Tensor) -> Tensor:
    return model(x, (0, 1, 2, 0, 1, 2, 3, 4, 5))


def other_order(model: Any, x: Tensor) -> Tensor:
    return model(x, (5, 4, 3, 2, 1, 0))


def u_net(model: Any, x: Tensor) -> Tensor:
    """Registered as down, up, middle."""
    return model(x, (0, 1, 4, 5, 3, 2))


def encoder_twice(model: Any, x: Tensor) -> Tensor:
    """Registered behind its decoder."""
    return model(x, (3, 4, 5, 3, 4, 5, 0, 1, 2))


@dataclass
class Most:
    """Most buffers of units at once."""

    whole: int = 0
    gradients: int = 0


def most_at_once(step: Step, **options: Any) -> Most:
    """In the third of three steps."""
    model = fully_shard_model(Chain(), fsdp_unit_modules=[Unit], **options)
    held: dict[str, set[str]] = {"compute_weights": set(), "grad_bucket": set()}
    most = Most()

    def book(booking: Booking) -> None:
        if booking.role in held and not booking.bucket.startswith("(root)"):
            here = held[booking.role]
            (here.add if booking.count_bytes > 0 else here.discard)(booking.bucket)
            most.whole = max(most.whole, _units(held["compute_weights"]))
            most.gradients = max(most.gradients, _units(held["grad_bucket"]))

    # A pool's slots are booked at the start, and again within the pool as they are taken.
    model.ledger.subscribe(book)
    for number in range(3):
        most = Most() if number == 2 else most
        step(model, torch.randn(4, 16)).sum().backward()
        model.zero_grad_buffer()
    return most


ORDERS = [other_order, u_net, encoder_twice]


def _units(buckets: set[str]) -> int:
    return len({name.partition("/")[0] for name in buckets})


@pytest.mark.parametrize(
    "pool", [{}, {"fsdp_double_buffer": True}, {"maxpool_double_buffer": True}]
)
@pytest.mark.parametrize("step", [preference_pair, three_forwards, two_turns])
def test_several_calls_in_one_backward_pass_hold_two_units_whole(
    step: Step, pool: dict[str, bool]
) -> None:
    assert most_at_once(step, **pool).whole == 2


@pytest.mark.parametrize(
    "pool", [{}, {"fsdp_double_buffer": True}, {"maxpool_double_buffer": True}]
)
@pytest.mark.parametrize("step", ORDERS)
def test_units_in_another_order_than_registered_hold_two_full_gradients(
    step: Step, pool: dict[str, bool]
) -> None:
    most = most_at_once(step, **pool)
    assert (most.whole, most.gradients) == (2, 2)


class Evaluates(Chain):
    """Its first pass runs a unit without a graph besides."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == 1:
            with torch.no_grad():
                x = x + self.units[2](x)
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_pass_that_evaluates_a_unit_ends_the_overlap_of_no_other_pass(strategy: str) -> None:
    model = fully_shard_model(Evaluates(), fsdp_unit_modules=[Unit], zero_dp_strategy=strategy)
    reduced_within: list[int] = []
    kinds = ("collective", "leave")
    model.events.subscribe(lambda event: seen.append((event.operation, event.bucket)), kinds)
    for _ in range(2):
        seen: list[tuple[str, str]] = []
        model(torch.randn(4, 16)).sum().backward()
        model.zero_grad_buffer()
        end = seen.index(("backward", ""))
        reduced_within.append(sum("reduce" in operation for operation, _ in seen[:end]))
    assert reduced_within == [0, 2 * UNITS + 4]
