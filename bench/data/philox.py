"""Raw 64-bit words as a pure function of (seed, stream, index).

numpy guarantees the raw output of the Philox4x64-10 bit generator (Salmon et al., SC 2011) across
versions and machines; it does not guarantee what `Generator` methods make of it, so only raw words
are used, and only with integer arithmetic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def words(seed: int, stream: int, index: int, count: int) -> NDArray[np.uint64]:
    """`count` words; `stream` keeps the uses of one seed apart, `index` is the sample's number."""
    key = np.array([seed & _MASK, stream & _MASK], dtype=np.uint64)
    # Each index owns 2**64 blocks of the counter, so that samples never overlap.
    counter = np.array([0, index & _MASK, 0, 0], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(count)
    return np.asarray(raw, dtype=np.uint64)
