"""Which of a row of commits is the first bad one, with as few looks as possible. Pure.

    good  c0  c1  c2  c3  c4  bad      c4 is known to be bad, what is before c0 to be good
               ^ looked at: good, so c0 and c1 are; the next look is at c3

A commit that cannot be judged is skipped, and the one next to it is looked at. If only skipped ones
are left before the first bad one, all of them are candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Answer = Literal["good", "bad", "skip"]


@dataclass(frozen=True)
class Found:
    """The first bad commit is one of `candidates`, oldest first; of one if it is known."""

    candidates: tuple[str, ...]
    looks: int


def first_bad(commits: Sequence[str], look: Callable[[str], Answer]) -> Found:
    """Narrow down the first bad one of `commits`, oldest first, of which the last is bad."""
    good, bad = -1, len(commits) - 1
    skipped: set[int] = set()
    looks = 0
    while True:
        middle = (good + bad) / 2
        open_ones = [i for i in range(good + 1, bad) if i not in skipped]
        if not open_ones:
            return Found(tuple(commits[good + 1 : bad + 1]), looks)
        index = min(open_ones, key=lambda i: abs(i - middle))
        looks += 1
        answer = look(commits[index])
        if answer == "skip":
            skipped.add(index)
        elif answer == "bad":
            bad = index
        else:
            good = index
