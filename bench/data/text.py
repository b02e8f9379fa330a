"""Windows of a byte corpus: token = byte value, so the vocabulary must hold 256 tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.data.philox import words
from bench.errors import UsageError

BYTE_VALUES = 256
_STREAM = 4


class TextSource:
    """Sample i is the window that starts at a position drawn from (seed, i)."""

    def __init__(self, corpus: NDArray[np.uint8], *, vocab: int, seq_len: int, seed: int) -> None:
        if vocab < BYTE_VALUES:
            raise UsageError(
                f"model.vocab: expected at least {BYTE_VALUES} for byte tokens, found {vocab}; "
                "raise the vocabulary or use data.kind: markov"
            )
        if corpus.size <= seq_len:
            raise UsageError(
                f"data.path: expected more than train.seq_len = {seq_len} bytes of text, found "
                f"{corpus.size}; name a larger file or folder, or shorten the sequence"
            )
        self._corpus = corpus
        self._window = seq_len + 1
        self._starts = corpus.size - seq_len
        self._seed = seed

    def sample(self, index: int) -> NDArray[np.int64]:
        """int64 [seq_len + 1]."""
        start = int(words(self._seed, _STREAM, index, 1)[0]) % self._starts
        return self._corpus[start : start + self._window].astype(np.int64)
