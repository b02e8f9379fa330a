"""What every rank did when the traces were written, it does now: schedule, bytes, memory, bits.

    GOLDEN=write python -m pytest tests/core/test_golden_traces.py

writes the files under `golden/` anew. Read the difference before you commit it.

Models compute element by element, with one sample per microbatch, SGD and factors that are powers
of two, so nothing is added up in an order that a processor chooses: bits are equal everywhere.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import mfsdp_core
from bench.testing.workers import Workers
from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_core.events import EVENT_KINDS, UNIT_KINDS, Event
from oracle.cycles import named, run_cycle
from oracle.hybrid import PAIRS
from oracle.sharded import STRATEGIES

FAKE = (1, 4)
FOLDER = Path(__file__).parent / "golden"
CORE = str(Path(mfsdp_core.__file__).parent)
STEPS = 3
SHAPE = (6, 5)
WRITTEN_BY = (3, 11)  # the Python whose calls are counted

Cell = dict[str, Any]  # arguments of `trace`
Part = tuple[str, list[str]]  # a title, and lines
ZERO3 = "optim_grads_params"
F32, B16 = torch.float32, torch.bfloat16
MIXED = (B16, F32, F32, B16)
WIDE = (F32, F32, B16, F32)
ALLOCATORS = ("temporary", "fixed_pool", "max_pool")
KINDS = ("tied", "frozen", "twice", "reversed", "nested", "recomputed", "skips", "two_forwards")
CELLS: dict[str, Cell] = {
    **{f"{s}_fp32": {"strategy": s} for s in STRATEGIES},
    **{f"{s}_bf16": {"strategy": s, "dtypes": MIXED, "microbatches": 1} for s in STRATEGIES},
    **{f"{s}_alone": {"strategy": s, "ranks": (0, 1), "dtypes": MIXED} for s in STRATEGIES},
    **{f"zero3_{a}": {"allocator": a} for a in ALLOCATORS},
    "optim_grads_fixed_pool": {"strategy": "optim_grads", "allocator": "fixed_pool"},
    **{f"zero3_{kind}": {"kind": kind} for kind in KINDS},
    **{f"no_shard_{k}": {"strategy": "no_shard", "kind": k} for k in ("evaluated", "recomputed")},
    "optim_grads_nested": {"strategy": "optim_grads", "kind": "nested", "dtypes": MIXED},
    **{
        f"{inner}_in_{outer}": {
            "strategy": inner, "ranks": (2, 1), "outer": outer, "dtypes": MIXED
        }
        for inner, outer in PAIRS
    },
    "zero3_own_main": {"dtypes": (B16, None, F32)},
    **{f"{s}_wide_grads": {"strategy": s, "dtypes": WIDE} for s in ("no_shard", ZERO3)},
    "zero3_not_ahead": {"overlap_param_gather": False},
    "optim_at_the_end": {"strategy": "optim", "overlap_grad_reduce": False},
    "zero3_budget": {"prefetch_budget_bytes": 1000},
    "zero3_by_module": {"kind": "nested", "enable_fine_grained_param_gather": True},
    "zero3_messages": {"transport": "point_to_point"},
    "zero3_unused_zero": {"kind": "skips", "unused_parameters": "zero"},
}  # fmt: skip
FAKES: dict[str, Cell] = {
    "fake_hsdp": {"ranks": (2, 2), "dtypes": MIXED},
    "fake_hfsdp": {"ranks": (2, 2), "outer": "optim"},
    "fake_optim_hfsdp": {"strategy": "optim", "ranks": (2, 2), "outer": "optim", "dtypes": MIXED},
    "fake_no_shard": {"strategy": "no_shard", "ranks": (2, 2)},
}


def _drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randint(-64, 65, shape) / 128 + 1)


class Scale(nn.Module):
    """The unit: a weight that divides by the ranks, and one that does not and is read in part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = _drawn(30), _drawn(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.view(SHAPE) + self.shift[:6]


class Stage(nn.Module):
    """A unit around two units."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = _drawn(*SHAPE)
        self.inner = nn.Sequential(Scale(), Scale())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.enter)


class Toy(nn.Module):
    """Three units between two weights of the root. kind: what is unusual."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, _drawn(*SHAPE)
        self.units = nn.ModuleList((Stage if kind == "nested" else Scale)() for _ in range(3))
        self.last = self.first if kind == "tied" else _drawn(*SHAPE)
        if kind == "frozen":
            self.units[0].scale.requires_grad_(False)
            self.units[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.first
        if self.kind == "evaluated":
            with torch.no_grad():
                x = x + self.units[1](x)
        for index in {"reversed": (2, 1, 0), "twice": (0, 1, 0, 2)}.get(self.kind, (0, 1, 2)):
            if self.kind == "recomputed" and torch.is_grad_enabled():
                x = checkpoint(self.units[index], x, use_reentrant=index == 1)
            elif (self.kind, index, dist.get_rank()) != ("skips", 1, 1):
                x = self.units[index](x)
        return x * self.last


def _mesh(outer: int, inner: int) -> DeviceMesh:
    return init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))


def trace(cell: Cell, *, has_values: bool = True) -> tuple[list[Part], int]:
    """In a rank: what `STEPS` steps do, and the core's calls in one more pass.

    has_values: collectives carry values.
    """
    return _trace(has_values=has_values, **cell)


def _trace(
    *,
    has_values: bool,
    strategy: str = ZERO3,
    kind: str = "plain",
    microbatches: int = 2,
    ranks: tuple[int, int] = (0, 2),
    outer: str = "no_shard",
    dtypes: tuple[torch.dtype | None, ...] = (F32, F32),
    **options: Any,
) -> tuple[list[Part], int]:
    torch.manual_seed(0)
    mesh = _mesh(ranks[0] or dist.get_world_size() // ranks[1], ranks[1])
    if ranks[0]:
        options |= {"hybrid_fsdp_group": dist.group.WORLD, "outer_dp_sharding_strategy": outer}
    model = fully_shard_model(
        Toy(kind).to(dtypes[0]),
        device_mesh=mesh if ranks[0] else mesh["inner"],
        dp_shard_dim="inner",
        dp_outer_dim="outer" if ranks[0] else None,
        fsdp_unit_modules=[Stage, Scale] if kind == "nested" else [Scale],
        nested_units="all",
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(*dtypes[1:]),
        sync_model_each_microbatch=False,
        **options,
    )
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.SGD(weights, lr=2**-6, momentum=0.5))
    parts: list[Part] = []
    end = model.events.subscribe(
        lambda event: parts[-1][1].append(_line(event)), (*EVENT_KINDS, *UNIT_KINDS)
    )

    def run(step: int) -> None:
        inputs = [_inputs(step, number).to(dtypes[0]) for number in range(microbatches)]
        if kind != "two_forwards":
            return run_cycle(model, torch.sum, inputs)
        torch.stack([model(one) for one in inputs]).sum().backward()
        return model.finish_grad_sync()

    for step in range(STEPS):
        parts.append((f"step {step + 1}", []))
        run(step)
        parts[-1][1].append(f"held {_held(model)}")
        gradients = {name: p.grad for name, p in named(model)}
        optimizer.step()
        bits = [f"{k} {_bits(gradients[k])} {_bits(weight)}" for k, weight in named(model)]
        optimizer.zero_grad()
    end()
    rest = [f"held {_held(model)}", f"peak {model.ledger.peak_bytes}"]
    parts.append(("gradients and weights", [*rest, *(bits if has_values else [])]))
    return parts, _calls(run)


def _inputs(step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + 10 * step + microbatch)
    return torch.randint(-64, 65, SHAPE, generator=generator) / 128 + 1


def _line(event: Event) -> str:
    if event.kind in UNIT_KINDS:
        return f"{'>' if event.kind == 'enter' else '<'} {event.operation} {event.bucket}".strip()
    words = [event.kind.replace("collective", ""), event.operation, event.bucket, event.dtype]
    where = f"{event.group}/{event.group_size}"
    return " ".join(word for word in (*words, str(event.payload_bytes), where) if word)


def _held(model: Any) -> str:
    held = model.ledger.bytes_by_category()
    return ", ".join(f"{name} {count}" for name, count in held.items() if count)


def _bits(shard: Any) -> str:
    if shard is None:
        return "none"
    own = shard.detach().to_local().contiguous().view(torch.uint8)
    return hashlib.blake2s(own.numpy().tobytes(), digest_size=4).hexdigest()


def _calls(run: Any) -> int:
    """Calls of the core's own functions but generators, and those of C that they make."""
    count = 0

    def on_call(frame: Any, kind: str, _argument: Any) -> None:
        nonlocal count
        code = frame.f_code
        if kind in {"call", "c_call"} and code.co_filename.startswith(CORE):
            # How far `all` of a generator over a set goes depends on addresses.
            count += not code.co_flags & inspect.CO_GENERATOR

    gc.disable()
    sys.setprofile(on_call)
    try:
        run(0)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.processes
@pytest.mark.parametrize("name", CELLS)
def test_two_ranks_do_what_they_did(name: str, worlds: Workers) -> None:
    compare(name, worlds.run(trace, CELLS[name], ranks=2, seconds=60.0))


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", FAKES)
def test_one_of_four_ranks_does_what_it_did(name: str) -> None:
    compare(name, [trace(FAKES[name], has_values=False)])


def test_no_trace_is_of_a_cell_that_is_gone() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {*CELLS, *FAKES}


def compare(name: str, by_rank: list[tuple[list[Part], int]]) -> None:
    path, calls = FOLDER / f"{name}.txt", [calls for _, calls in by_rank]
    found: list[str] = []
    seen: dict[str, str] = {}  # a part that was there before is named, not repeated
    for rank, (parts, _) in enumerate(by_rank):
        for title, lines in parts:
            head = f"rank {rank}, {title}"
            first = seen.setdefault("\n".join(lines), head)
            found += [f"## {head}", *(lines if first == head else [f"as {first}"])]
    if os.environ.get("GOLDEN") == "write":
        assert sys.version_info[:2] == WRITTEN_BY, "this version of Python counts other calls"
        path.write_text("\n".join((f"calls {' '.join(map(str, calls))}", *found)) + "\n")
    counted, *wanted = path.read_text().splitlines()
    assert found == wanted, first_difference(name, wanted, found)
    if sys.version_info[:2] != WRITTEN_BY:
        print(f"calls are not compared: Python {WRITTEN_BY} counted them")  # noqa: T201 - a reason
        return
    most = [int(word) for word in counted.split()[1:]]
    assert all(map(int.__le__, calls, most)), f"{name}: {calls} calls by rank, at most {most}"


def first_difference(name: str, wanted: list[str], found: list[str]) -> str:
    pairs = list(itertools.zip_longest(wanted, found, fillvalue="(nothing)"))
    index = next(i for i, (one, other) in enumerate(pairs) if one != other)
    title = next(line for line in reversed(found[: index + 1]) if line.startswith("##"))
    before = [f"    {line}" for line in found[max(0, index - 4) : index]]
    after = [f"  {a:60} | {b}" for a, b in pairs[index : index + 6]]
    return "\n".join((f"{name}: {title}", *before, "  then what was | what is:", *after))
