"""The protocol of a token source, and which of the sources a run asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.data.corpus import read_corpus
from bench.data.markov import MarkovSource
from bench.data.random_tokens import RandomSource
from bench.data.text import TextSource
from bench.spec import DataSpec

Tokens = NDArray[np.int64]


class TokenSource(Protocol):
    """Samples numbered from 0 without end; the same number gives the same sample everywhere."""

    def sample(self, index: int) -> Tokens:
        """int64 [seq_len + 1]: inputs are all but the last token, targets all but the first."""


def build_source(spec: DataSpec, *, vocab: int, seq_len: int) -> TokenSource:
    """The source that `spec` names. Raises UsageError where the files cannot serve."""
    if spec.kind == "text":
        corpus = read_corpus(None if spec.path is None else Path(spec.path))
        return TextSource(corpus, vocab=vocab, seq_len=seq_len, seed=spec.seed)
    generated = MarkovSource if spec.kind == "markov" else RandomSource
    return generated(vocab=vocab, seq_len=seq_len, seed=spec.seed)
