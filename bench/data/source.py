"""The protocol of a token source, and the table of the sources that exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.data.corpus import read_corpus
from bench.data.markov import MarkovSource
from bench.data.random_tokens import RandomSource
from bench.data.text import TextSource
from bench.spec import DataKind, DataSpec

Tokens = NDArray[np.int64]


class TokenSource(Protocol):
    """Samples numbered from 0 without end; the same number gives the same sample everywhere."""

    def sample(self, index: int) -> Tokens:
        """int64 [seq_len + 1]: inputs are all but the last token, targets all but the first."""
        ...


def _text(spec: DataSpec, vocab: int, seq_len: int) -> TokenSource:
    corpus = read_corpus(None if spec.path is None else Path(spec.path))
    return TextSource(corpus, vocab=vocab, seq_len=seq_len, seed=spec.seed)


def _markov(spec: DataSpec, vocab: int, seq_len: int) -> TokenSource:
    return MarkovSource(vocab=vocab, seq_len=seq_len, seed=spec.seed)


def _random(spec: DataSpec, vocab: int, seq_len: int) -> TokenSource:
    return RandomSource(vocab=vocab, seq_len=seq_len, seed=spec.seed)


_SOURCES: dict[DataKind, Callable[[DataSpec, int, int], TokenSource]] = {
    "text": _text,
    "markov": _markov,
    "random": _random,
}


def build_source(spec: DataSpec, *, vocab: int, seq_len: int) -> TokenSource:
    """The source that `spec` names. Raises UsageError where the files cannot serve."""
    return _SOURCES[spec.kind](spec, vocab, seq_len)
