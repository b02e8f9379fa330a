"""What a comparison is asked to compare, and whether that is what was measured.

A name says little: `head` may be one commit today and another tomorrow. So whoever names a sweep
file gets numbers of its configurations and of the code that its arms are now, or none at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from bench.errors import NotComparableError
from bench.record import code_with_inputs
from reports.gates.cell_samples import CellSamples
from reports.gates.pairing import Sides
from reports.views.no_number import NOT_RUN

_MOST_NAMED = 5


@dataclass(frozen=True)
class ExpectedRun:
    """One cell of one arm. config_hash: None where the cell cannot be planned on this machine."""

    config_hash: str | None
    code: str


@dataclass(frozen=True)
class Expected:
    """What is asked for.

    runs: by cell and arm. described: arm -> what it is now, in words. changed: of the inputs of a
    run (path -> digest), those that are not what they were.
    """

    runs: Mapping[tuple[str, str | None], ExpectedRun]
    described: Mapping[str | None, str]
    changed: Callable[[Mapping[str, str]], Sequence[str]]

    @property
    def codes(self) -> dict[tuple[str, str | None], str]:
        """Code by cell and arm."""
        return {where: run.code for where, run in self.runs.items()}


def checked(
    sides: Sides, expected: Expected, arms: tuple[str | None, ...], only: Sequence[str] = ()
) -> Sides:
    """`sides`, with expected cells that nobody has measured among those that failed.

    Args:
        sides: the cells that are judged.
        expected: what they are to be.
        arms: of head, and of base before it where base is of the same sweep.
        only: patterns of the cells that are judged, none for all.

    Raises:
        NotComparableError: a cell has another configuration or measured other code.
    """
    wrong = [
        found
        for pair in sides.pairs
        for arm, side in zip(arms, (pair.base, pair.head)[-len(arms) :], strict=True)
        if (found := _difference(side, arm, expected))
    ]
    if wrong:
        hidden = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise NotComparableError(
            f"what was measured is not what is asked for: {'; '.join(wrong[:_MOST_NAMED])}{hidden}."
            f" {WHAT_TO_DO}"
        )
    known = {_cell(pair.head, arms[-1]) for pair in sides.pairs}
    known |= {name for name, _ in (*sides.failed, *sides.pruned, *sides.not_comparable)}
    missing = {cell for cell, arm in expected.runs if arm in arms} - known
    if only:
        missing = {cell for cell in missing if any(fnmatchcase(cell, one) for one in only)}
    return replace(sides, failed=sides.failed + tuple((cell, NOT_RUN) for cell in sorted(missing)))


WHAT_TO_DO = (
    "Run the sweep again to measure what is asked for, or name the sweep by its id to judge what is"
    " there"
)


def _difference(samples: CellSamples, arm: str | None, expected: Expected) -> str:
    cell = _cell(samples, arm)
    wanted = expected.runs.get((cell, arm))
    if wanted is None:
        return ""
    who = f"{cell} [{arm}]" if arm else cell
    if samples.code != code_with_inputs(wanted.code, samples.inputs):
        commit = f"commit {samples.commit[:12]}" if samples.commit else "an unknown commit"
        return (
            f"{who} was measured at {commit} (code {samples.code or 'unknown'}), asked for is"
            f" {expected.described[arm]} (code {wanted.code})"
        )
    if changed := expected.changed(samples.inputs):
        return f"{who} was measured before {', '.join(changed[:_MOST_NAMED])} changed"
    if wanted.config_hash not in (None, samples.config_hash):
        return (
            f"{who} was measured with configuration {samples.config_hash}, asked for is"
            f" {wanted.config_hash}"
        )
    return ""


def _cell(samples: CellSamples, arm: str | None) -> str:
    return samples.name.removesuffix(f" [{arm}]")
