"""Many cells, many chances for a false alarm: Benjamini-Hochberg."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats


def adjusted(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted so that at most alpha of all alarms raised at alpha are false on average.

    Valid for independent and for positively dependent tests (cells measured side by side).
    """
    if not p_values:
        return []
    found = stats.false_discovery_control(np.asarray(p_values, dtype=float), method="bh")
    return [float(value) for value in found]
