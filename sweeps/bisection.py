"""Which of a row of commits is the first bad one, with as few looks as possible. Pure.

    good  c0  c1  c2  c3  c4  bad      c4 is known to be bad, what is before c0 to be good
               ^ looked at: good, so c0 and c1 are; the next look is at c3

A commit that cannot be judged is skipped, and the one next to it is looked at. If only skipped ones
are left before the first bad one, all of them are candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

Answer = Literal["good", "bad", "skip"]


def first_bad(commits: Sequence[str], look: Callable[[str], Answer]) -> list[str]:
    """The first bad one of `commits`, oldest first, of which the last is bad.

    Several, oldest first, where it is one of them and nobody can say which.
    """
    good, bad = -1, len(commits) - 1
    skipped: set[int] = set()
    while True:
        middle = (good + bad) / 2
        open_ones = [i for i in range(good + 1, bad) if i not in skipped]
        if not open_ones:
            return list(commits[good + 1 : bad + 1])
        index = min(open_ones, key=lambda i: abs(i - middle))
        answer = look(commits[index])
        if answer == "skip":
            skipped.add(index)
        elif answer == "bad":
            bad = index
        else:
            good = index
