"""What a rank tells of a program that fails: where it was, and whose contributions count wrongly.

Scripts are for people and stay as they are: the rank wraps their `Trial` and `shard`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bench.validate.attribution import attribute

_EVENTS = 4
_KEPT_EVENTS = 400
#: Values of a row that are told, and the share of the largest error that makes a row wrong.
_VALUES = 3
_NOTABLE = 1e-3
_CORE = f"{os.sep}mfsdp_core{os.sep}"


class Progress:
    """Where the program is, also in the log of the rank, whose end is told if the rank dies."""

    def __init__(self) -> None:
        self.where = "while it was built"
        # By name, as the program compares them.
        self.parameters: dict[str, Any] = {}
        #: Of the parameter that is wrong: events of it alone are told.
        self.bucket = ""
        self._buckets: Callable[[], Iterable[Any]] = tuple
        self._events: deque[tuple[str, str]] = deque(maxlen=_KEPT_EVENTS)

    def enter(self, where: str) -> None:
        """A part of the program begins."""
        self.where = where
        _write(f"in {where}")

    def follow(self, model: Any) -> None:
        """The events of the core, if it publishes any."""
        events = getattr(model, "events", None)
        if events is not None:
            events.subscribe(self._note)
            self._buckets = model.buckets

    def look_at(self, parameter: str) -> None:
        """What follows is about it."""
        for bucket in self._buckets():
            if parameter in bucket.parameters:
                self.bucket = bucket.name

    def _note(self, event: Any) -> None:
        what = f"{event.kind} {event.operation} of {event.bucket}, {event.group}"
        self._events.append((event.bucket, what))
        _write(f"last: {what}")

    def told(self) -> list[str]:
        """As lines."""
        events = [what for bucket, what in self._events if self.bucket in ("", bucket)]
        return [f"in {self.where}", *(f"last: {what}" for what in events[-_EVENTS:])]


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def wrap(names: dict[str, Any]) -> Progress:
    """Make the program's `Trial` and `shard` tell what they do. names: of the script."""
    progress, shard = Progress(), names["shard"]

    def following(module: Any) -> Any:
        model, optimizer = shard(module)
        progress.follow(model)
        return model, optimizer

    bases = (_Diagnosing, names["Trial"])
    names["shard"] = following
    sharded = names["sharded"]

    def remembering(model: Any) -> Any:
        progress.parameters = sharded(model)
        return progress.parameters

    names["sharded"] = remembering
    names["Trial"] = type("Trial", bases, {"names": names, "progress": progress})
    return progress


_Trial: Any = object


class _Diagnosing(_Trial):
    """Before the script's `Trial`: explains a wrong gradient by what ranks and passes give."""

    names: dict[str, Any]
    progress: Progress
    passes: int

    def __init__(self) -> None:
        self._ran: list[tuple[int, Any, float]] = []
        super().__init__()

    def choose(self, paths: Any) -> Any:
        found = super().choose(paths)
        units = ", ".join(f"rank {r}: {p}" for r, p in enumerate(paths))
        self.progress.enter(f"cycle {self.cycle}, pass {self.passes} ({units})")
        return found

    def plain(self, paths: Any, times: float = 1) -> Any:
        found = super().plain(paths, times)
        if times:
            self._ran.append((self.passes, paths, times))
        return found

    def finish(self, end: str) -> None:
        self.progress.enter(f"cycle {self.cycle}, completing the gradients")
        super().finish(end)

    def step(self) -> None:
        self.progress.enter(f"cycle {self.cycle}, optimizer step")
        super().step()

    def forget(self) -> None:
        super().forget()
        self._ran.clear()

    def end_cycle(self) -> None:
        try:
            super().end_cycle()
        except AssertionError as error:
            lines = [
                f"alive: {one.role} of {one.bucket}, {one.count_bytes} B of {one.category}"
                for one in self.model.ledger.alive()
                if one.category in str(error) or one.in_pool
            ]
            raise AssertionError("\n".join([str(error), *lines[:_EVENTS]])) from None

    def compare(self, what: str, wanted: Any, look: Any, *size: Any) -> None:
        seen: list[Any] = []

        def looking(parameter: Any) -> Any:
            seen.append(look(parameter))
            return seen[-1]

        try:
            super().compare(what, wanted, looking, *size)
        except AssertionError as error:
            name = list(self.progress.parameters)[len(seen) - 1] if seen else ""
            pair = (seen[-1], wanted.get(name)) if seen else ()
            if what != "gradient" or not pair or not all(isinstance(p, Tensor) for p in pair):
                raise
            self.progress.look_at(name)
            lines = [_rows_off(seen[-1], wanted[name]), *self._explained(name, seen[-1])]
            raise AssertionError("\n".join([str(error), *lines])) from None

    def _explained(self, name: str, found: Tensor) -> list[str]:
        """Of the whole gradient, else of this rank's rows, which the others did not change."""
        contributions = [self._contributions(rank, name) for rank in range(self.ranks)]
        for rows in (slice(None), *self._own_rows(name)):
            ofs = [[[gradient[rows]] for gradient in row] for row in contributions]
            told = attribute([found[rows]], ofs, rank=self.rank)
            if told is not None and told.lines:
                return list(told.lines)
        return []

    def _own_rows(self, name: str) -> Iterator[slice]:
        """Of the first and the last rank, whose rows are the first and the last ones."""
        parameter = self.progress.parameters[name]
        local = getattr(parameter, "_local_tensor", None)
        count = len(local) if local is not None and local.ndim else 0
        if count and self.rank == 0:
            yield slice(0, count)
        elif count and self.rank == self.ranks - 1:
            yield slice(-count, None)

    def _contributions(self, rank: int, name: str) -> list[Tensor]:
        """To the gradient of a parameter, by pass; 1 / ranks of each are in the right one."""
        parameter = dict(self.expected.named_parameters())[name]
        passes, found = self.passes, []
        kept = {p: p.grad for p in self.expected.parameters()}
        for number, paths, times in self._ran:
            self.passes = number
            self.expected.zero_grad()
            self.expected.path = paths[rank % len(paths)]
            loss = self.expected(*self.batch(rank))
            (loss * times * self.ranks / self.names["DIVISOR"]).backward()
            gradient = parameter.grad
            found.append(torch.zeros_like(parameter) if gradient is None else gradient)
        self.passes = passes
        for p, gradient in kept.items():
            p.grad = gradient
        return found


def _rows_off(found: Tensor, wanted: Tensor) -> str:
    """Which rows are wrong, since ranks hold rows, and the first values of the first of them."""
    found, wanted = (one.detach().double().reshape(len(wanted), -1) for one in (found, wanted))
    errors = (found - wanted).abs().amax(1)
    rows = (errors > errors.max() * _NOTABLE).nonzero().flatten().tolist()
    some = [
        ", ".join(f"{value:.9g}" for value in one[rows[0], :_VALUES].tolist())
        for one in (wanted, found)
    ]
    which = "all rows are" if len(rows) == len(wanted) else f"of {len(wanted)} rows {rows} are"
    share = float(errors.max() / wanted.abs().max())
    fine = (d for d in (torch.float64, torch.float32, torch.bfloat16) if share < torch.finfo(d).eps)
    kind = next((f", as far as rounding to {d} would be" for d in fine), "")
    return f"{which} off{kind}; row {rows[0]}: expected [{some[0]}], found [{some[1]}]"


def core_frames(trace: TracebackType | None) -> list[str]:
    """The lines of the core that an exception went through, innermost last."""
    return [
        f"at mfsdp_core/{frame.filename.rpartition(_CORE)[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(trace)
        if _CORE in frame.filename
    ][-2:]
