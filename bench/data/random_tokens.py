"""Uniform random tokens: nothing to learn, the loss stays near ln(vocab); for pure speed runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.data.philox import words

_STREAM = 3


class RandomSource:
    """Independent tokens, uniform up to the remainder of 2**64 / vocab."""

    def __init__(self, *, vocab: int, seq_len: int, seed: int) -> None:
        self._vocab = np.uint64(vocab)
        self._seq_len = seq_len
        self._seed = seed

    def sample(self, index: int) -> NDArray[np.int64]:
        """int64 [seq_len + 1]."""
        drawn = words(self._seed, _STREAM, index, self._seq_len + 1) % self._vocab
        return drawn.astype(np.int64)
