"""The commits between two refs, as a bisection walks through them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError
from bench.launch.arm.worktree import commit_of, git


@dataclass(frozen=True)
class Commit:
    """One commit; `subject` is the first line of its message."""

    sha: str
    parents: tuple[str, ...]
    author: str
    date: str
    subject: str


def first_parents(repository: Path, good: str, bad: str) -> list[Commit]:
    """From the commit after `good` to `bad`, oldest first, merges as one commit each.

    Raises:
        UsageError: an unknown ref, or `good` is no ancestor of `bad`.
    """
    good, bad = (commit_of(repository, ref, "bisect") for ref in (good, bad))
    if git(repository, "merge-base", "--is-ancestor", good, bad).returncode != 0:
        raise UsageError(
            f"--good {good[:12]} is no ancestor of --bad {bad[:12]}, so no commit between them"
            " brought the change; `git merge-base` names a commit that both have"
        )
    if good == bad:
        raise UsageError(f"--good and --bad are both {good[:12]}; name two commits")
    return _listed(repository, bad, good)


def merged(repository: Path, merge: Commit) -> list[Commit]:
    """What a merge brought in: the first-parent chain of its second parent, oldest first."""
    return _listed(repository, merge.parents[1], merge.parents[0])


def _listed(repository: Path, tip: str, without: str) -> list[Commit]:
    form = "--format=%H%x1f%P%x1f%an%x1f%cs%x1f%s"
    found = git(repository, "log", "--first-parent", "--reverse", form, tip, f"^{without}")
    if found.returncode != 0:
        raise UsageError(f"git cannot list the commits up to {tip[:12]}: {found.stderr.strip()}")
    parts = (line.split("\x1f") for line in found.stdout.splitlines())
    return [Commit(sha, tuple(parents.split()), *rest) for sha, parents, *rest in parts]
