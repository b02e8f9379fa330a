"""What the process says to whoever started it; docs/run-states.md says which verb ends how."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from bench.errors import BenchError

OK = 0
REQUIREMENT_NOT_MET = 1
USAGE = 2
NOTHING_MEASURED = 3
INCONCLUSIVE = 4
NOT_COMPARABLE = 5
INTERNAL = 6
INTERRUPTED = 130

_PRECEDENCE = (
    INTERRUPTED,  # the user stopped it: no other verdict is complete
    INTERNAL,
    USAGE,
    NOTHING_MEASURED,
    REQUIREMENT_NOT_MET,
    NOT_COMPARABLE,
    INCONCLUSIVE,
    OK,
)


def of_error(error: Exception) -> int:
    """What an error that ends a verb makes of it."""
    if isinstance(error, BenchError):
        return error.exit_code
    full = isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}
    return NOTHING_MEASURED if full else INTERNAL


def worst(codes: Iterable[int]) -> int:
    """The code that stands if several apply: 130 > 6 > 2 > 3 > 1 > 5 > 4 > 0."""
    return min(codes, key=_PRECEDENCE.index, default=OK)
