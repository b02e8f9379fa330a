"""What every verb is: a class of options that `run`s, and the one `Answer` that it gives.

Its fields are arguments and options of the command line, its text is the help. Imports little: what
a verb needs to run it imports when it runs, so that `--help` stays fast.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import typer

from bench.cli import console
from bench.cli.exit_codes import OK
from bench.errors import UsageError
from reports.renderers.document import Block, TableBlock
from reports.renderers.render import render
from reports.renderers.table import Table

if TYPE_CHECKING:
    from bench.plan import Plan
    from bench.resolve.machine import Machine
    from bench.store import ResultsStore
    from reports.compare.policy import Policy
    from sweeps.selected_sweep import SelectedSweep

DEFAULT_RESULTS = Path("results")
_SPAN = re.compile(r"(?:(\d+)\s*h)?\s*(?:(\d+)\s*m(?:in)?)?\s*(?:(\d+)\s*s)?")


def option(flag: str, help: str, default: Any = None, **limits: Any) -> Any:
    """A field that is an option; `flag` is `--name METAVAR`, or `--name` for a switch."""
    name, _, metavar = flag.partition(" ")
    info = typer.Option(name, metavar=metavar or None, help=help, **limits)
    return dataclasses.field(default=default, metadata={"typer": info})


def argument(
    metavar: str,
    help: str,
    default: Any = dataclasses.MISSING,
) -> Any:
    """A field that is an argument, required where there is no default."""
    info = typer.Argument(metavar=metavar, help=help)
    return dataclasses.field(default=default, metadata={"typer": info})


@dataclass(frozen=True)
class Answer:
    """What a verb found: a document for people, data for JSON, and the exit code.

    document: blocks, or a text whose characters stay (a log, a rendered page). remarks: to stderr,
    behind it. failure: of a later step (a report on runs that are made); it is printed behind what
    there is, and `code` and `data` count it.
    """

    document: Sequence[Block] | str
    data: Any
    code: int = OK
    remarks: tuple[str, ...] = ()
    failure: Exception | None = None

    def text(self, form: str = "table") -> str:
        """The document as Markdown (`md`; `refresh` of `compare`), or as plain text."""
        if isinstance(self.document, str):
            return self.document
        return render(self.document, "md" if form in ("md", "refresh") else "terminal")

    def show(self, *, as_json: bool = False, form: str = "table") -> int:
        """Print it, and return the exit code."""
        if as_json:
            console.data_json(self.data)
        elif text := self.text(form).rstrip("\n"):
            console.data(text)
        for line in self.remarks:
            console.note(line)
        return self.code


def columns(
    titles: Sequence[str], rows: Iterable[tuple[str, ...]], *, left: int | None = None
) -> TableBlock:
    """A table whose first `left` columns (default all) align left."""
    return TableBlock(Table.of(titles, rows, left=len(titles) if left is None else left))


def pruned_cells(plan: Plan) -> list[Block]:
    """Every pruned cell with its rule and reason."""
    rows = [(cell.id, cell.rule, cell.reason) for cell in plan.pruned]
    return [columns(("pruned", "rule", "reason"), rows)] if rows else []


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, argument))
@dataclass(frozen=True, kw_only=True)
class Verb:
    """A frozen dataclass of its options; one without a name holds options that verbs share.

    ALL: those with a name, by it.
    """

    ALL: ClassVar[dict[str, type[Verb]]] = {}

    as_json: bool = option("--json", "Print JSON to stdout.", False)

    def __init_subclass__(cls, name: str = "") -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        if name:
            Verb.ALL[name] = cls

    def run(self) -> Answer:
        """Do what the verb says; the answer holds the exit code."""
        raise NotImplementedError


class ResultsOption(Verb):
    """Of verbs that read or write a results folder."""

    results: Path = option("--results FOLDER", "The results folder.", DEFAULT_RESULTS)

    def store(self, *, create: bool = False) -> ResultsStore:
        """The results folder.

        Raises:
            UsageError: not one, or there is none and it is not to be created.
        """
        from bench.store import ResultsStore

        return ResultsStore.open(self.results, create=create)


class CellOptions(Verb):
    """Settings of all cells of a sweep, and which cells are wanted."""

    assignments: tuple[str, ...] = option(
        "--set PATH=VALUE", "Fix a setting in every cell, as train.steps=50.", ()
    )
    only: tuple[str, ...] = option(
        "--only EXPR", "Keep matching cells only: KEY=PATTERN[|PATTERN][,...].", ()
    )
    skip: tuple[str, ...] = option("--skip EXPR", "Leave matching cells out.", ())

    def select(self, named: Path, machine: Machine | None = None, **more: Any) -> SelectedSweep:
        """The sweep file `named` as it would run on `machine`, by default this one.

        more: what else `SelectedSweep.of` takes.

        Raises:
            UsageError: the file, an option or a cell is wrong.
        """
        from bench.resolve.machine import Machine
        from sweeps.selected_sweep import Cells, SelectedSweep

        cells = Cells(self.assignments, self.only, self.skip)
        return SelectedSweep.of(named, machine or Machine.detect(), cells, **more)


class MachineOptions(Verb):
    """A machine that is not this one."""

    device: str | None = option("--device NAME", "Plan for GPUs of this name, as H100.")
    gpus: int | None = option("--gpus N", "So many of --device, 8 in a node.", min=1, max=4096)

    def machine(self) -> Machine | None:
        """What the two describe, None without them.

        Raises:
            UsageError: one of them is missing, or such a machine cannot be.
        """
        from bench.resolve.machine import described_machine

        if self.device is None and self.gpus is None:
            return None
        if self.device is None or self.gpus is None:
            raise UsageError(
                "--device and --gpus describe a machine together: give both, or neither"
            )
        return described_machine(self.device, self.gpus)


class ArmsOption(Verb):
    """Of verbs that compare arms."""

    arms: tuple[str, ...] = option(
        "--arm NAME=WHAT",
        "One side of a comparison; give two or more. WHAT is a git ref, . (the working tree), or"
        " pairs git: repo: checkout: python: packages: with commas between.",
        (),
    )


class BudgetOption(Verb):
    """Of verbs that run blocks until a time is spent."""

    budget: str | None = option(
        "--budget TIME", "Add blocks of the arms for so long, as 10m or 90s."
    )

    def budget_seconds(self) -> float | None:
        """Seconds of `10m`, `90s`, `1h30m`; None without the option.

        Raises:
            UsageError: anything else, or no time at all.
        """
        if self.budget is None:
            return None
        match = _SPAN.fullmatch(self.budget.strip())
        hours, minutes, seconds = (int(n or 0) for n in (match.groups() if match else (0, 0, 0)))
        total = float(hours * 3600 + minutes * 60 + seconds)
        if total <= 0:
            raise UsageError(
                f"--budget: expected a time such as 10m, 90s or 1h30m, found {self.budget!r}"
            )
        return total


class PolicyOption(Verb):
    """Of verbs that judge."""

    policy: Path | None = option("--policy FILE.yaml", "Tolerances and requirements.")

    def rules(self) -> Policy:
        """The policy of the file, or the default one.

        Raises:
            UsageError: the file cannot be read, or is wrong; with lines.
        """
        from reports.compare.policy import Policy, parse_policy
        from sweeps.document import read_document

        if self.policy is None:
            return Policy()
        document = read_document(self.policy, "metrics")
        return parse_policy(document.data, document.line, document.source)


class SweepOptions(CellOptions, ArmsOption):
    """What the command line says about a sweep."""

    sweep: Path = argument(
        "SWEEP", "A sweep file, or the name of a sweep that comes with the tool."
    )
    repeat: int | None = option("--repeat N", "Runs of each cell.", min=1, max=1000)
    interleave: bool = option("--interleave", "Run the arms alternately, block by block.", False)
    launcher: str = option(
        "--launcher NAME",
        "Where runs are made: local, in the allocation of this Slurm job (slurm), or on hosts that"
        " a command reaches (command). A launcher of your own is package.module:NAME.",
        "local",
    )
    launcher_options: tuple[str, ...] = option(
        "--launcher-option KEY=VALUE", "A setting of the launcher, as hosts=hosts.txt.", ()
    )

    def select_arms(self, machine: Machine, *, interleave: bool = False) -> SelectedSweep:
        """The sweep and its arms as they would run on `machine`."""
        blocks = self.interleave or interleave
        return self.select(
            self.sweep, machine, arms=self.arms, repeat=self.repeat, interleave=blocks
        )
