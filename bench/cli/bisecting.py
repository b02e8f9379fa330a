"""`bisect`: which commit changed a metric, by running its cells at the commits between two refs.

Every commit that is looked at is an arm of a sweep of its own (`NAME-bisect-COMMIT`), so what has
run is found again by the records, and the same command goes on where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.cli import console, exit_codes, running
from bench.cli.answer import Answer
from bench.cli.chosen_sweep import choose
from bench.cli.options import SweepRequest
from bench.cli.policies import judged_metric, read_policy
from bench.cli.verbs.judge import BisectRequest
from bench.derive.metrics import Metric
from bench.errors import BenchError, NothingMeasuredError, UsageError
from bench.launch.arm.request import ArmRequest
from bench.launch.code import checkout_root
from bench.launch.git import Commit, commit_of, first_parents, merged
from bench.store import ResultsStore
from bench.store.errors import StoreFullError, StoreGoneError, StoreLockedError
from reports.gates.gate import gate
from reports.gates.judgement import Judgement
from reports.gates.noise import calibrations
from reports.gates.pairing import Sides, sides_of_arms, sides_of_sweeps
from sweeps.bisection import Answer as Look
from sweeps.bisection import first_bad
from sweeps.resume import RunOptions

_GOOD: Final = "good"
_HERE: Final = "here"
_FIRST_BLOCKS: Final = 8
_MORE_BLOCKS: Final = 4
_CHANGED: Final = ("regressed", "improved")


def run_bisect(asked: BisectRequest) -> Answer:
    """Find the commit; exit code 3 if only a range of commits is left.

    Raises:
        UsageError: an unknown metric or ref, or another runner uses the results folder.
        NothingMeasuredError: good and bad do not differ, or cannot be measured; or the results
            folder is full or gone.
    """
    metric = judged_metric(asked.metric, "--metric")
    repository = (asked.repo or checkout_root()).resolve()
    commits = first_parents(repository, asked.good, asked.bad)
    looker = _Looker(asked, repository, metric)
    console.note(f"{len(commits)} commits from {asked.good} to {asked.bad}")
    looker.compare_ends(asked.good, commits[-1].sha)
    found, looks = _narrowed(commits, looker), len(looker.judged)
    return Answer(
        lambda: _document(found, looker, looks),
        lambda: _text(found, looker, f"of {len(commits)}, after a look at {looks}"),
        exit_codes.OK if len(found) == 1 else exit_codes.NOTHING_MEASURED,
    )


def _document(found: Sequence[Commit], looker: _Looker, looks: int) -> dict[str, Any]:
    judged = looker.judged.get(found[-1].sha)
    return {
        "metric": looker.metric.name,
        "cell": looker.cell,
        "looked_at": looks,
        "candidates": [
            {"commit": c.sha, "author": c.author, "date": c.date, "subject": c.subject}
            for c in found
        ],
        "change": None if judged is None else _change(judged),
        "whole_change": None if looker.whole is None else _change(looker.whole),
        "reason": "" if judged is None else judged.reason,
        "skipped": looker.skipped,
    }


def _text(found: Sequence[Commit], looker: _Looker, of_which: str) -> str:
    judged = looker.judged.get(found[-1].sha)
    head = "first commit with the change" if len(found) == 1 else "one of these commits"
    lines = [f"{head}, {of_which}:"]
    lines += [f"  {c.sha[:12]} {c.date} {c.author}: {c.subject}" for c in found]
    if judged is not None:
        lines.append(f"{looker.cell}: {looker.metric.name} {_change(judged)}")
        lines += [f"  {judged.reason}"] if judged.reason else []
        if looker.whole is not None and looker.whole.head != judged.head:
            lines.append(f"of the whole change: {_change(looker.whole)}")
    return "\n".join(lines)


def _narrowed(commits: list[Commit], looker: _Looker) -> list[Commit]:
    """The candidates; of a merge that is the cause, those within what it brought in."""
    by_sha = {commit.sha: commit for commit in commits}
    found = [by_sha[sha] for sha in first_bad(list(by_sha), looker.look)]
    if len(found) == 1 and len(found[0].parents) > 1:
        inside = merged(looker.repository, found[0])
        if inside and looker.look(inside[-1].sha) == "bad":
            return _narrowed(inside, looker)
    return found


class _Looker:
    """Runs commits and compares them with the good one, in the cell that changed most.

    judged: commit -> how it compares; skipped: commit -> why it could not be.
    """

    def __init__(self, request: BisectRequest, repository: Path, metric: Metric) -> None:
        self.repository = repository
        self.metric = metric
        self.judged: dict[str, Judgement] = {}
        self.skipped: dict[str, str] = {}
        self.cell = ""
        self._request = request
        self._good = self._good_sweep = ""
        self.whole: Judgement | None = None
        policy = read_policy(request.policy)
        rules = {name: replace(rule, gate="off") for name, rule in policy.rules.items()}
        rules[metric.name] = replace(policy.rules[metric.name], gate="required", named=True)
        self._policy = replace(policy, rules=rules)

    def compare_ends(self, good: str, bad: str) -> None:
        """Find the cell and the direction of the change.

        Raises:
            NothingMeasuredError: there is none, or an end cannot be measured.
        """
        self._good = good
        try:
            judged = self._against_good(bad)
        except StoreLockedError:
            raise
        except UsageError as error:
            raise NothingMeasuredError(f"good and bad cannot be compared: {error}") from error
        changed = [one for one in judged if one.verdict in _CHANGED]
        if not changed:
            found = "; ".join(
                f"{one.cell} {one.verdict}" + (f" ({one.reason})" if one.reason else "")
                for one in judged
            )
            raise NothingMeasuredError(
                f"{bad} is not different from {good} in {self.metric.name}, so there is nothing"
                f" to look for: {found or 'no cell was measured'}"
            )
        most = max(changed, key=_size)
        self.cell, self.whole = most.cell, most
        self.judged[bad] = most
        console.note(f"{bad}: {most.cell}: {self.metric.name} {_change(most)}")

    def look(self, sha: str) -> Look:
        """Whether a commit has the change of the bad one."""
        try:
            judged = next(one for one in self._against_good(sha) if one.cell == self.cell)
        except (StoreLockedError, StoreGoneError, StoreFullError):
            raise  # of the results folder, and no fault of the commit
        except (BenchError, StopIteration) as error:
            why = str(error) or "its cell was not measured"
            self.skipped[sha] = why
            console.note(f"{sha[:12]} skipped: {why}")
            return "skip"
        self.judged[sha] = judged
        if judged.verdict in ("inconclusive", "unmeasured"):
            self.skipped[sha] = judged.reason
            console.note(f"{sha[:12]} skipped: {judged.verdict}: {judged.reason}")
            return "skip"
        answer: Look = "bad" if self._has_half(judged) else "good"
        little = answer == "good" and judged.verdict in _CHANGED
        why = ", less than half of the change" if little else ""
        console.note(f"{sha[:12]} {answer}: {_change(judged)}{why}")
        return answer

    def _has_half(self, judged: Judgement) -> bool:
        """Half of the whole change or more is there: less is the change of another commit."""
        if self.whole is None or judged.verdict != self.whole.verdict:
            return False
        return _size(judged) >= _size(self.whole) / 2

    def _against_good(self, ref: str) -> list[Judgement]:
        if self.metric.judge == "interval":
            return self._in_blocks(ref)
        self._good_sweep = self._good_sweep or self._run({_HERE: self._good})
        good, here = self._good_sweep, self._run({_HERE: ref})
        store = ResultsStore.open(self._request.results, create=False)
        return self._judgements(sides_of_sweeps(store, good, here, arms=(_HERE, _HERE)))

    def _in_blocks(self, ref: str) -> list[Judgement]:
        """Blocks of both commits in turn, until they decide or are as many as may be."""
        blocks = min(_FIRST_BLOCKS, self._request.most_blocks)
        while True:
            name = self._run({_GOOD: self._good, _HERE: ref}, blocks)
            store = ResultsStore.open(self._request.results, create=False)
            judged = self._judgements(sides_of_arms(store, name, _GOOD, _HERE))
            own = [one for one in judged if not self.cell or one.cell == self.cell]
            open_ones = [one for one in own if one.verdict == "inconclusive"]
            if not open_ones or blocks >= self._request.most_blocks:
                return judged
            blocks = min(blocks + _MORE_BLOCKS, self._request.most_blocks)

    def _judgements(self, sides: Sides) -> list[Judgement]:
        store = ResultsStore.open(self._request.results, create=False)
        return list(gate(sides, self._policy, calibrations(store)).judgements)

    def _run(self, refs: Mapping[str, str], blocks: int = 1) -> str:
        """Run what is missing at these commits; the id of their sweep.

        Raises:
            UsageError: a commit cannot be run at all.
            NothingMeasuredError: no run of it finished.
        """
        cells = self._request.cells
        if self.metric.judge == "count":
            cells = replace(cells, assignments=(*cells.assignments, "measure.counts=true"))
        wanted = SweepRequest(sweep=self._request.sweep, cells=cells, repeat=blocks)
        sweep = choose(wanted)
        sweep = sweep.only(c.id for c in sweep.chosen.cells if self.cell in ("", c.id))
        arms = tuple(ArmRequest(arm, git=ref, repo=self._request.repo) for arm, ref in refs.items())
        commit = commit_of(self.repository, refs[_HERE], "bisect")[:12]
        name = f"{sweep.id}-bisect-{commit}{'-blocks' if len(arms) > 1 else ''}"
        store = ResultsStore.open(self._request.results, create=True)
        sweep = replace(sweep.with_arms(name, arms), named_by_code=True).prepared(store)
        outcome = running.run_missing(sweep, store, RunOptions())
        if outcome.interrupted:
            raise KeyboardInterrupt
        if not outcome.good:
            why = "; ".join(f"{run.state}: {run.reason}" for run in outcome.failed[:1])
            raise NothingMeasuredError(f"no run finished ({why or 'every cell is pruned'})")
        return sweep.id


def _size(judged: Judgement) -> float:
    return abs((judged.head or 0.0) - (judged.base or 0.0))


def _change(judged: Judgement) -> str:
    """`regressed, 48 to 52 (+4)`."""
    if judged.base is None or judged.head is None:
        return judged.verdict
    difference = judged.head - judged.base
    return f"{judged.verdict}, {judged.base:,.6g} to {judged.head:,.6g} ({difference:+,.6g})"
