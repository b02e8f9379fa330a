"""Random programs of a training loop, and a rank that runs one beside plain torch.

A program is cycles of steps; a step is a forward pass over five units, each of which does what a
letter says, with or without a backward pass. All ranks run the same program on data of their own;
where a step says so, they take different paths through the units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer, gather_full
from oracle.models import Block, loss
from oracle.ranks import WORLD, two_axes
from oracle.ranks import mesh_of_every_replica as mesh
from oracle.reference import relative_difference

UNITS = 5
#: r run, s skip, p run without the branch, d run and drop the result, t run twice, c run with
#: activations recomputed, k the same in torch's reentrant way.
LETTERS = "rspdtck"
#: Letters that ranks may mix freely in one step (docs/core-limits.md).
MIXED_LETTERS = "rspdc"


class DeliberateError(Exception):
    """Raised by a unit because the program says so."""


@dataclass(frozen=True)
class Step:
    """A forward pass. kind: micro (with backward), eval (no_grad), unused (no backward), failing.

    paths: letters of the units, by data-parallel rank modulo the number of paths. fails: for kind
    `failing`, where the exception comes from (forward, recompute, backward) and from which unit.
    """

    kind: str
    paths: tuple[str, ...]
    fails: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class Program:
    """strategy, mode (flat, hsdp, hfsdp) and prefetch of the model; cycles: (steps, end, steps?).

    A cycle ends by `finish` (finish_grad_sync), `start` (start_grad_sync first) or `sync` (its last
    microbatch says so); then the optimizer steps, or does not.
    """

    strategy: int
    mode: str
    prefetch: bool
    cycles: tuple[tuple[tuple[Step, ...], str, bool], ...]


class Unit(Block):
    """A unit with a branch that may be left out, and exceptions on demand."""

    def __init__(self) -> None:
        super().__init__(width=8, hidden=16)
        self.branch = nn.Linear(8, 8)
        self.fails = ""

    def forward(self, x: Tensor, branched: bool) -> Tensor:
        y = super().forward(x)
        recomputing = torch._C._current_graph_task_id() != -1
        if self.fails == ("recompute" if recomputing else "forward"):
            raise DeliberateError
        if self.fails == "backward" and y.requires_grad:
            y.register_hook(_fail)
        return y + self.branch(x).tanh() if branched else y


class Walk(nn.Module):
    """Parameters before and after a path through the units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.units = nn.ModuleList(Unit() for _ in range(UNITS))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, path: str) -> Tensor:
        x = self.first(x)
        for unit, letter in zip(self.units, path, strict=True):
            for _ in range(2 if letter == "t" else 1):
                x = self._step(unit, letter, x)
        return self.last(x)

    def _step(self, unit: nn.Module, letter: str, x: Tensor) -> Tensor:
        if letter == "s":
            return x
        if letter in "ck" and torch.is_grad_enabled():
            return checkpoint(unit, x, True, use_reentrant=letter == "k")
        y = unit(x, letter != "p")
        return x if letter == "d" else y


@dataclass
class Run:
    """One rank's state while it runs a program. expected: plain torch, on the data of all ranks."""

    program: Program
    model: Any
    optimizer: Any
    expected: nn.Module
    rank: int
    ranks: int
    passes: int = 0
    microbatches: int = 0

    def path(self, step: Step, rank: int) -> str:
        return step.paths[rank % len(step.paths)]

    def step(self, step: Step, *, is_last: bool) -> None:
        """Run `step`; what it adds to the gradient is added to the expected one."""
        self.passes += 1
        inputs = [_inputs(self.passes, rank) for rank in range(self.ranks)]
        mine = inputs[self.rank], self.path(step, self.rank)
        if step.kind == "eval":
            with torch.no_grad(), _evaluating(self.model):
                found = self.model(*mine)
                torch.testing.assert_close(found, self.expected(*mine), rtol=1e-12, atol=1e-12)
        elif step.kind == "unused":
            self.model(*mine)
        elif step.kind == "failing":
            self._fail(step, mine)
        else:
            with self.model.sync() if is_last else self.model.no_sync():
                loss(self.model(*mine)).backward()
            self.microbatches += 1
            for rank, value in enumerate(inputs):
                part = loss(self.expected(value, self.path(step, rank))) / self.ranks
                part.backward()

    def _fail(self, step: Step, mine: tuple[Tensor, str]) -> None:
        phase, number = step.fails
        unit = self.model.module.units[number]
        unit.fails = phase
        try:
            with self.model.no_sync():
                loss(self.model(*mine)).backward()
        except DeliberateError:
            pass
        else:
            raise AssertionError(f"{step} did not fail")
        finally:
            unit.fails = ""
        if phase != "forward":
            # What came before the exception stays in the accumulators.
            self.begin_cycle()

    def begin_cycle(self) -> None:
        self.model.zero_grad_buffer()
        self.expected.zero_grad()
        self.microbatches = 0

    def compare(self) -> None:
        """The gradient is the oracle's; there is none without a microbatch."""
        found = dict(self.model.named_parameters())
        for name, wanted in self.expected.named_parameters():
            gradient = found[f"module.{name}"].grad
            if not self.microbatches:
                assert gradient is None, f"{name} has a gradient without a backward pass"
                continue
            assert (gradient is None) == (wanted.grad is None), name
            if gradient is None:
                continue
            error = relative_difference({name: gather_full(gradient)}, {name: wanted.grad})
            assert error < 1e-10, f"gradient of {name}: {error}"


def run_program(program: Program) -> None:
    """In a rank: run it all, and check gradients, the ledger and visible shards as it goes."""
    run = _start(program)
    at_rest = run.model.ledger.bytes_by_category()
    for steps, end, optimizes in program.cycles:
        last = max((n for n, step in enumerate(steps) if step.kind == "micro"), default=None)
        for number, step in enumerate(steps):
            if end == "sync" and last is not None and number > last and step.kind == "failing":
                continue  # its backward pass would come after the cycle's last one
            run.step(step, is_last=end == "sync" and number == last)
        if end == "start":
            run.model.start_grad_sync()
        run.model.finish_grad_sync()
        run.compare()
        if optimizes:
            _optimize(run)
        run.begin_cycle()
        held = run.model.ledger.bytes_by_category()
        assert held == at_rest, f"held at rest: {held} instead of {at_rest}"
        assert all(hasattr(p.data, "device_mesh") for p in run.model.module.parameters())


def _optimize(run: Run) -> None:
    run.optimizer.step()
    with torch.no_grad():
        for parameter in run.expected.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.05)


def _start(program: Program) -> Run:
    torch.manual_seed(4)
    module = Walk().double()
    torch.manual_seed(4)
    expected = Walk().double()
    arguments: dict[str, Any] = {"device_mesh": mesh(2)["dp"]}
    rank, ranks = mesh(2).get_local_rank("dp"), 2
    if program.mode != "flat":
        axes, both = two_axes()
        rank, ranks = torch.distributed.get_rank(), WORLD
        arguments = {
            "device_mesh": axes,
            "dp_shard_dim": "inner",
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": both,
            "outer_dp_sharding_strategy": int(program.mode == "hfsdp"),
        }
    model: Any = fully_shard_model(
        module,
        fsdp_unit_modules=[Unit],
        zero_dp_strategy=program.strategy,
        sync_model_each_microbatch=False,
        overlap_param_gather=program.prefetch,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
        **arguments,
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    return Run(program, model, optimizer, expected, rank, ranks)


def _inputs(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(2, 8, dtype=torch.float64, generator=generator)


def _fail(_gradient: Tensor) -> None:
    raise DeliberateError


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()
