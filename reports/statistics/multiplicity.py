"""Many cells, many chances for a false alarm: Benjamini-Hochberg."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def adjusted(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted so that at most alpha of all alarms raised at alpha are false on average.

    Valid for independent and for positively dependent tests (cells measured side by side).
    """
    given = np.asarray(p_values, dtype=float)
    falling = np.argsort(-given, kind="stable")
    scaled = given[falling] * (given.size / np.arange(given.size, 0, -1))
    found = np.empty_like(given)
    found[falling] = np.minimum(1.0, np.minimum.accumulate(scaled))
    return [float(value) for value in found]
