"""A program, run: a sharded model and plain torch, compared after every pass, cycle and step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.testing.units import KINDS, Block, DeliberateError, Outer, run_units
from bench.validate.drivers.driver import Driver
from bench.validate.program import FEATURES, META, Cycle, Pass, Program

_TOLERANCES = {"float64": 1e-10, "float32": 2e-5}


class DiffersError(Exception):
    """The engine does something else than plain torch."""


class Model(nn.Module):
    """Layers of the root around units, which do what `path` says: a letter each."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.path = ""
        self.loss_scale = program.loss_scale
        self.first = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, FEATURES)
        self.units = nn.ModuleList(
            KINDS[unit.kind](unit.hidden, FEATURES, branched=True) for unit in program.units
        )
        units: list[Any] = list(self.units)
        kinds = dict.fromkeys(type(unit) for unit in units)
        self.unit_classes = [*kinds | (dict.fromkeys([Block]) if Outer in kinds else {})]
        if program.root == "tied":
            self.last.weight = self.first.weight
        for unit, shape in zip(units, program.units, strict=True):
            if shape.tie == "root":
                unit.branch.weight = self.first.weight
            elif shape.tie == "unit":
                unit.branch.weight = units[0].branch.weight
        if program.root == "frozen":
            self.first.requires_grad_(False)
        for unit, shape in zip(units, program.units, strict=True):
            if shape.frozen:
                part = unit.get_parameter(unit.first) if shape.frozen == "part" else unit
                part.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        x = self.first(x)
        x = run_units(self.units, self.path, x)
        return F.mse_loss(self.last(x), target) * self.loss_scale


class Trial:
    """The two models. Passes are methods by the kind of the pass; plain torch sees all data.

    say: is called with the part of the program that begins.
    """

    def __init__(self, program: Program, driver: Driver, say: Callable[[str], None]) -> None:
        self.program, self.say = program, say
        self.driver: Any = driver
        self.dtype: torch.dtype = getattr(torch, program.dtype)
        self.tolerance = self.least = 0.0 if program.exact else _TOLERANCES[program.dtype]
        options = dict(program.options)
        self.divisor = 1 if options.get("calculate_per_token_loss") else program.ranks
        # Whether what nobody used is to have a gradient of zeros.
        self.zeros = bool(options.get("reduce_scatter_unused_params"))
        self.zeros |= options.get("unused_parameters") == "zero"
        self.expected, self.module = self._models()
        self.model, self.optimizer = driver.shard(self.module)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.reference = driver.sgd(self.expected.parameters())
        self.passes, self.backwards, self.cycle = 0, 0, 1
        self.at_rest = driver.held(self.model)

    def _models(self) -> tuple[Any, Any]:
        """Plain and to be sharded, equal. On the meta device, sharding draws the weights again."""
        torch.manual_seed(4)
        if META not in dict(self.program.options):
            expected = Model(self.program).to(self.dtype)
            return expected, copy.deepcopy(expected)
        torch.set_default_dtype(self.dtype)
        expected = Model(self.program)
        with torch.device("meta"):
            module = Model(self.program)
        torch.manual_seed(4)
        return expected, module

    def run(self) -> None:
        """All cycles, then two plain ones: what went before may show in them alone.

        Raises:
            DiffersError: the two models differ.
        """
        cycles = self.program.cycles
        plain = Pass("micro", ("r" * len(self.program.units),))
        closing = Cycle((plain,), optimizes=all(cycle.optimizes for cycle in cycles))
        ahead = False
        for cycle in (*cycles, closing, closing):
            self._run_cycle(cycle)
            # What was gathered ahead is there until a pass has used it.
            ahead = cycle.ahead or (ahead and {p.kind for p in cycle.passes} <= {"failing"})
            self.forget()
            if not ahead:
                self._compare_held()
            self.cycle += 1

    def _run_cycle(self, cycle: Cycle) -> None:
        if cycle.resumes:
            self._resume()
        if cycle.loads:
            self._load()
        if cycle.wire:
            dtype = getattr(torch, cycle.wire)
            self.driver.send_gradients_in(self.model, dtype)
            self.tolerance = max(self.tolerance, 8 * torch.finfo(dtype).eps)
        synced, each = cycle.end == "sync", cycle.end == "each"
        for index, pass_ in enumerate(cycle.passes):
            # Its backward pass would come after the cycle's last one.
            if not (synced and pass_.kind == "failing" and -1 < cycle.last < index):
                getattr(self, pass_.kind)(pass_, each or (synced and index == cycle.last))
        self._finish(cycle.end)
        if cycle.scale != 1.0:
            self._scale(cycle.scale)
        if cycle.clip:
            wanted = nn.utils.clip_grad_norm_(self.expected.parameters(), cycle.clip)
            self._close("norm", self.driver.clip(self.model, cycle.clip), wanted)
        if cycle.ahead:
            self.driver.gather_ahead(self.model)
        if cycle.optimizes:
            self.say(f"cycle {self.cycle}, optimizer step")
            self.optimizer.step()
            self.reference.step()
            self._compare("weight after the step", self._weights(), self.driver.weight)

    # -- passes --------------------------------------------------------------------------------

    def micro(self, action: Pass, last: bool) -> None:
        """Forward and backward."""
        loss = self.driver.train(self.model, self._choose(action), last)
        self.backwards += 1
        self._close("loss", loss.detach(), self._plain(action))

    def _twice(self, action: Pass, last: bool) -> None:
        """Two backward passes: through one graph, or through two, the later one first."""
        batch = self._choose(action)
        is_one = action.kind == "double"
        with self.driver.accumulating(self.model, last):
            losses = [self.model(*batch) for _ in range(1 if is_one else 2)]
            with self.driver.accumulating(self.model, False):
                losses[-1].backward(retain_graph=is_one)
            with self.driver.accumulating(self.model, last):
                losses[0].backward()
        self.backwards += 2
        wanted = self._plain(action, times=2)
        for what, loss in zip(("loss", "loss of the second pass"), losses, strict=False):
            self._close(what, loss.detach(), wanted)

    double = pair = _twice

    def evaluate(self, action: Pass, _last: bool) -> None:
        """No autograd."""
        batch = self._choose(action)
        self.model.eval()
        with torch.no_grad():
            loss, wanted = self.model(*batch), self._plain(action, times=0)
        self.model.train()
        self._close("loss of an evaluation", loss, wanted)

    def unused(self, action: Pass, _last: bool) -> None:
        """A graph that nobody runs backward."""
        self.model(*self._choose(action))

    def failing(self, action: Pass, _last: bool) -> None:
        """An exception from a unit, which the training loop survives."""
        batch, (phase, unit) = self._choose(action), action.fails
        twin = copy.deepcopy(self.expected)
        twin.path, twin.units[unit].fails = self.module.path, phase
        self.module.units[unit].fails = phase
        raised = wanted = False
        try:
            twin(*batch).backward()
        except DeliberateError:
            wanted = True
        try:
            self.driver.train(self.model, batch, False)
        except DeliberateError:
            raised = True
        finally:
            self.module.units[unit].fails = ""
        # What is frozen neither recomputes nor has a backward pass to fail in.
        self._check(raised == wanted, f"raised: {raised}, in plain torch: {wanted}")
        if phase != "forward" or not raised:
            # What came before the exception stays in the accumulators.
            self.forget()
        _empty_queue()

    def guarded(self, action: Pass, _last: bool) -> None:
        """A batch that the guard refuses; the training loop drops the cycle."""
        inputs, target = self._choose(action)
        (target.flatten()[:1] if action.fails[0] else inputs).fill_(float(action.fails[0] or "nan"))
        refused = "nothing"
        try:
            self.driver.train(self.model, (inputs, target), False)
            self.driver.finish(self.model, "finish")
        except ArithmeticError as error:
            refused = type(error).__name__
        self._check(refused == "NonFiniteGradientError", f"raised {refused}")
        self.forget()
        _empty_queue()

    # -- what a cycle does besides them ---------------------------------------------------------

    def forget(self) -> None:
        """Drop the gradients of both models."""
        self.driver.forget(self.model, self.optimizer)
        self.expected.zero_grad()
        self.backwards = 0

    def _finish(self, end: str) -> None:
        """Complete the gradients, and compare them."""
        self.say(f"cycle {self.cycle}, completing the gradients")
        self.driver.finish(self.model, end)
        plain = dict(self.expected.named_parameters())
        for parameter in plain.values() if self.zeros and self.backwards else ():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        largest = [float(p.grad.abs().max()) for p in plain.values() if p.grad is not None]
        self._compare("gradient", self._gradients(), self.driver.gradient, max([*largest, 0.0]))

    def _scale(self, factor: float) -> None:
        self.model.scale_gradients(factor)
        for gradient in self._gradients().values():
            if gradient is not None:
                gradient.mul_(factor)
        self._compare("scaled gradient", self._gradients(), self.driver.gradient)

    def _load(self) -> None:
        """Whole weights from outside."""
        changed = {n: p.detach() * 0.9 for n, p in self.expected.state_dict().items()}
        self.expected.load_state_dict(changed)
        self.driver.load(self.model, changed)

    def _resume(self) -> None:
        """Continue from a checkpoint, with another model."""
        self.module = Model(self.program).to(self.dtype)
        self.model, self.optimizer = self.driver.resume(self.model, self.optimizer, self.module)
        self.at_rest = self.driver.held(self.model)
        self._compare("loaded weight", self._weights(), self.driver.weight)

    # -- plain torch, and comparisons ----------------------------------------------------------

    def _choose(self, action: Pass) -> Tensor:
        """The next pass takes its paths, by rank; returns this rank's inputs and targets."""
        self.passes += 1
        units = ", ".join(f"rank {rank}: {path}" for rank, path in enumerate(action.paths))
        self.say(f"cycle {self.cycle}, pass {self.passes} ({units})")
        self.module.path = action.paths[self.rank % len(action.paths)]
        return self._batch(self.rank)

    def _batch(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.passes + rank)
        drawn: Tensor = torch.randn(2, 2, FEATURES, generator=generator, dtype=torch.float64)
        return drawn.to(self.dtype)

    def _plain(self, action: Pass, times: int = 1) -> Tensor:
        """The pass in plain torch, for all ranks; returns this rank's loss."""
        losses: list[Tensor] = []
        for rank in range(self.ranks):
            self.expected.path = action.paths[rank % len(action.paths)]
            loss = self.expected(*self._batch(rank))
            if times:
                (loss * times / self.divisor).backward()
            losses.append(loss.detach())
        return losses[self.rank]

    def _gradients(self) -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in self.expected.named_parameters()}

    def _weights(self) -> dict[str, Tensor | None]:
        return {name: p.detach() for name, p in self.expected.named_parameters()}

    def _compare(
        self,
        what: str,
        wanted: Mapping[str, Tensor | None],
        look: Callable[[Any], Tensor | None],
        size: float | None = None,
    ) -> None:
        for name, parameter in self.driver.sharded(self.model).items():
            value, right = look(parameter), wanted[name]
            said, plain = ("None" if value is None else "not None" for value in (value, right))
            self._check(said == plain, f"{what} of {name} is {said}, in plain torch it is {plain}")
            if value is not None and right is not None:
                self._close(f"{what} of {name}", value, right, size)
                if self.tolerance > self.least:
                    right.copy_(value.reshape(right.shape))  # rounding on the wire, judged once

    def _close(self, what: str, value: Tensor, wanted: Tensor, size: float | None = None) -> None:
        size = float(wanted.abs().max()) if size is None else size
        value = value.reshape(()) if not wanted.shape and value.numel() == 1 else value
        error = float((value.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
        self._check(
            value.shape == wanted.shape and error <= self.tolerance * (size + 1e-3),
            f"{what} is off by {error:.3g} of {size:.3g}",
        )

    def _compare_held(self) -> None:
        now = self.driver.held(self.model)
        more = {name: count - self.at_rest[name] for name, count in now.items()}
        more = {name: count for name, count in more.items() if count}
        self._check(not more, f"held at rest, beyond the first bytes: {more}")

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise DiffersError(f"cycle {self.cycle}, pass {self.passes}: {otherwise}")


def _empty_queue() -> None:
    """Autograd's queue holds the graph of a pass that raised until another one runs."""
    torch.zeros((), requires_grad=True).clone().backward()
