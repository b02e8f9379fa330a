"""Shapes of a step that training has beside one forward and one backward pass: what is whole when.

One of four ranks on torch's fake process group: schedule and memory, and no values.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.checkpoint import checkpoint

from bench.fit.dataless import tensors_without_data
from mfsdp_core import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from mfsdp_core.events import Event
from mfsdp_core.memory.ledger import Booking

pytestmark = pytest.mark.usefixtures("fake_group")
FAKE = (1, 4)
UNITS = 6
ROOT = Path(__file__).parents[2]
Step = Callable[[Any, Tensor, int], Tensor]


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Chain(nn.Module):
    """path: of the units, in the order in which they run; of a tuple under one checkpoint, of a
    frozenset as branches, of a text by keyword.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.units = nn.ModuleList(Unit() for _ in range(UNITS))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor, path: Any = tuple(range(UNITS))) -> Tensor:
        x = self.embed(x)
        for part in path:
            if isinstance(part, int):
                x = self.units[part](x)
            elif isinstance(part, str):
                x = self.units[int(part)](x=x)
            elif isinstance(part, frozenset):
                x = torch.stack([self.units[index](x) for index in sorted(part)]).sum(0)
            else:
                x = checkpoint(self._run, part, x, use_reentrant=False)
        return self.head(x)

    def _run(self, part: tuple[int, ...], x: Tensor) -> Tensor:
        for index in part:
            x = self.units[index](x)
        return x


def along(*path: Any) -> Step:
    return lambda model, x, _number: model(x, path)


def generated(model: Any, x: Tensor, _number: int) -> Tensor:
    output = model(x)
    with torch.no_grad():
        model(model(x))
    return output


STEPS: dict[str, Step] = {
    "one forward and backward pass": along(*range(UNITS)),
    "`(model(a) - model(b)).backward()`": lambda m, x, _: m(x) - m(x + 1),
    "three forward passes, one backward pass": lambda m, x, _: m(x) + m(x + 1) + m(x + 2),
    "three units twice, then the rest": along(0, 1, 2, 0, 1, 2, 3, 4, 5),
    "one unit three times, one after another": along(0, 1, 1, 1, 2, 3, 4, 5),
    "units in the reverse of their registration": along(5, 4, 3, 2, 1, 0),
    "UNet, registered as down, up, middle": along(0, 1, 4, 5, 3, 2),
    "encoder twice and decoder once, the decoder registered first": along(
        3, 4, 5, 3, 4, 5, 0, 1, 2
    ),
    "prediction heads behind the trunk, registered first": along(2, 3, 4, 5, frozenset({0, 1})),
    "three branches": along(0, frozenset({1, 2, 3}), 4, 5),
    "a unit left out in every other step": lambda m, x, n: m(x, (0, 1, 2, 3, 4, 5)[n % 2 :]),
    "generation between forward and backward pass": generated,
    "checkpoints around two units": along((0, 1), (2, 3), (4, 5)),
}


@dataclass
class Most:
    """Most buffers at once, of gradients the root's included; gathers and reductions of units."""

    whole: int = 0
    gradients: int = 0
    gathers: int = 0
    reductions: int = 0


def _unit(bucket: str) -> str:
    return bucket.partition("/")[0]


def measured(step: Step, **options: Any) -> Most:
    """In the third and fourth step."""
    model = fully_shard_model(Chain(), fsdp_unit_modules=[Unit], **options)
    holders = {b.name: b.unit or b.parameters[0].partition(".")[0] for b in model.buckets()}
    holders["(pool)"] = "embed"
    held: dict[str, set[str]] = {"compute_weights": set(), "grad_bucket": set()}
    most = Most()

    def book(booking: Booking) -> None:
        if booking.role in held:
            here = held[booking.role]
            (here.add if booking.count_bytes > 0 else here.discard)(booking.bucket)
            modules = {role: {holders[name] for name in held[role]} for role in held}
            most.whole = max(most.whole, len(modules["compute_weights"] - {"embed", "head"}))
            most.gradients = max(most.gradients, len(modules["grad_bucket"]))

    def send(event: Event) -> None:
        if event.bucket.endswith("/0") and _unit(event.bucket) != "(root)":
            most.gathers += event.operation == "all_gather"
            most.reductions += event.operation == "reduce_scatter"

    # A pool's slots are booked at the start, and again within the pool as they are taken.
    model.ledger.subscribe(book)
    model.events.subscribe(send, ("collective",))
    for number in range(4):
        most = Most() if number == 2 else most
        step(model, torch.randn(4, 16), number).sum().backward()
        model.zero_grad_buffer()
    return most


def in_fsdp2() -> Any:
    model = Chain()
    mesh = init_device_mesh("cpu", (4,))
    for unit in model.units:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def peak_kib(make: Callable[[], Any], step: Step) -> int:
    """Of all storages of a rank, in the third and fourth step of SGD; none has contents."""
    held = most = 0

    def changed(_number: int, change: int, *_: Any) -> None:
        nonlocal held, most
        held += change
        most = max(most, held)

    with tensors_without_data(changed, lambda *_: None):
        model = make()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if isinstance(model, MegatronFSDP):
            fully_shard_optimizer(optimizer)
        for number in range(4):
            gc.collect()
            most = held if number == 2 else most
            step(model, torch.randn(4, 16), number).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return round(most / 1024)


def measured_in_fsdp2(step: Step, patches: pytest.MonkeyPatch) -> Most:
    most, whole = Most(), set[object]()
    gather, leave = FSDPParamGroup.unshard, FSDPParamGroup._to_sharded

    def unshard(group: Any, *arguments: Any) -> None:
        was = group._all_gather_result
        gather(group, *arguments)
        if isinstance(group.modules[0], Unit) and group._all_gather_result is not was:
            whole.add(group)
            most.gathers += 1
            most.whole = max(most.whole, len(whole))

    def to_sharded(group: Any) -> None:
        whole.discard(group)
        leave(group)

    patches.setattr(FSDPParamGroup, "unshard", unshard)
    patches.setattr(FSDPParamGroup, "_to_sharded", to_sharded)
    model = in_fsdp2()
    for number in range(4):
        if number == 2:
            most.whole = most.gathers = 0
        step(model, torch.randn(4, 16), number).sum().backward()
        model.zero_grad()
    return most


def row_of(name: str) -> list[int]:
    """What the page says: five numbers of the core, and three of FSDP2."""
    page = ROOT / "docs" / "evidence" / "2026-11-25-speed-and-memory.md"
    (row,) = (line for line in page.read_text().splitlines() if line.startswith(f"| {name} |"))
    return [int(cell) for cell in row.split("|")[2:-1]]


@pytest.mark.parametrize("name", STEPS)
def test_what_a_step_holds_and_sends_is_in_the_table(name: str) -> None:
    """Counts of collectives are of two steps."""
    step = STEPS[name]
    found = measured(step)
    peak = peak_kib(lambda: fully_shard_model(Chain(), fsdp_unit_modules=[Unit]), step)
    assert [*vars(found).values(), peak] == row_of(name)[:5]


@pytest.mark.nightly  # they change with torch alone
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's own, of FSDP2
@pytest.mark.parametrize("name", STEPS)
def test_numbers_of_fsdp2_are_in_the_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_in_fsdp2(STEPS[name], monkeypatch)
    numbers = [found.whole, found.gathers, peak_kib(in_fsdp2, STEPS[name])]
    assert numbers == row_of(name)[5:]


@pytest.mark.sample
@pytest.mark.parametrize("pool", ["fixed_pool", "max_pool"])
@pytest.mark.parametrize("name", STEPS)
def test_pools_of_two_slots_serve_the_step(name: str, pool: str) -> None:
    found = measured(STEPS[name], allocator=pool)
    assert (found.whole, found.gradients) == (2, 2)


def test_units_that_are_called_by_keyword_are_released_at_the_same_moment() -> None:
    """Also where their weights are frozen, so that only their inputs' gradients tell."""
    for frozen in (False, True):
        orders = []
        for path in (tuple(range(UNITS)), tuple(map(str, range(UNITS)))):
            module = Chain()
            module.units.requires_grad_(not frozen)
            model: Any = fully_shard_model(module, fsdp_unit_modules=[Unit])
            order: list[tuple[str, str, str]] = []
            for number in range(2):
                if number:
                    model.events.subscribe(
                        lambda e, to=order: to.append((e.kind, e.operation, e.bucket))
                    )
                model(torch.randn(4, 16), path).sum().backward()
                model.zero_grad_buffer()
            orders.append(order)
        assert orders[0] == orders[1]
        assert len([kind for kind, _, _ in orders[0] if kind == "release"]) > UNITS


def test_ranks_of_a_fake_group_wait_for_nobody_whatever_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`fit` names it after the backend of the run that it predicts."""
    monkeypatch.setattr(dist, "get_backend", lambda _group=None: "nccl")
    assert measured(STEPS["three units twice, then the rest"]).whole == 2


@pytest.mark.parametrize("pool", [{}, {"fsdp_double_buffer": True}])
def test_a_step_gives_back_the_weights_of_the_root_which_it_makes_stale(
    pool: dict[str, Any],
) -> None:
    """With a pool, which CUDA graphs need, they stay where they are. Frozen ones are not stale."""
    module = Chain()
    module.embed.requires_grad_(False)
    seen: list[Tensor] = []
    module.head.register_forward_pre_hook(lambda head, _: seen.append(head.weight.data))
    module.embed.register_forward_pre_hook(lambda embed, _: seen.append(embed.weight.data))
    model = fully_shard_model(module, fsdp_unit_modules=[Unit], **pool)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.SGD(weights, lr=0.1))
    for _ in range(2):
        seen.clear()
        model(torch.randn(4, 16)).sum().backward()
        embed, head = (tensor.untyped_storage() for tensor in seen)
        assert head.nbytes() == 1024
        optimizer.step()
        assert (embed.nbytes(), head.nbytes()) == (1024, 1024 if pool else 0)
        booked = {b.bucket for b in model.ledger.alive() if b.role == "compute_weights"}
        assert "(root)/0" in booked
        assert ("(root)/2" in booked) == bool(pool)
        optimizer.zero_grad()


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
