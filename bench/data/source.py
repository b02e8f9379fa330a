"""Sources of tokens (a Markov chain has a file of its own), and which one a run asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.data.corpus import read_corpus
from bench.data.markov import MarkovSource
from bench.data.philox import words
from bench.errors import UsageError
from bench.spec import DataSpec

BYTE_VALUES: Final = 256
_RANDOM_STREAM: Final = 3
_TEXT_STREAM: Final = 4

Tokens = NDArray[np.int64]


class TokenSource(Protocol):
    """Samples numbered from 0 without end; the same number gives the same sample everywhere."""

    def sample(self, index: int) -> Tokens:
        """int64 [seq_len + 1]: inputs are all but the last token, targets all but the first."""


class RandomSource:
    """Independent tokens, uniform up to the remainder of 2**64 / vocab: nothing to learn.

    The loss stays near ln(vocab); for pure speed runs.
    """

    def __init__(self, *, vocab: int, seq_len: int, seed: int) -> None:
        self._vocab = np.uint64(vocab)
        self._seq_len = seq_len
        self._seed = seed

    def sample(self, index: int) -> Tokens:
        """int64 [seq_len + 1]."""
        drawn = words(self._seed, _RANDOM_STREAM, index, self._seq_len + 1) % self._vocab
        return drawn.astype(np.int64)


class TextSource:
    """Windows of a byte corpus: token = byte value, so the vocabulary must hold 256 tokens.

    Sample i is the window that starts at a position drawn from (seed, i).
    """

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

    def sample(self, index: int) -> Tokens:
        """int64 [seq_len + 1]."""
        start = int(words(self._seed, _TEXT_STREAM, index, 1)[0]) % self._starts
        return self._corpus[start : start + self._window].astype(np.int64)


def build_source(spec: DataSpec, *, vocab: int, seq_len: int) -> TokenSource:
    """The source that `spec` names. Raises UsageError where the files cannot serve."""
    if spec.kind == "text":
        corpus = read_corpus(None if spec.path is None else Path(spec.path))
        return TextSource(corpus, vocab=vocab, seq_len=seq_len, seed=spec.seed)
    generated = MarkovSource if spec.kind == "markov" else RandomSource
    return generated(vocab=vocab, seq_len=seq_len, seed=spec.seed)
