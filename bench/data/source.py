"""Sources of tokens, the same on every machine, and which one a run asks for.

numpy guarantees the raw output of the Philox4x64-10 bit generator (Salmon et al., SC 2011) across
versions and machines; it does not guarantee what `Generator` methods make of it, so only raw words
are used, and only with integer arithmetic.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.errors import UsageError
from bench.spec import DataSpec

# With more states than this, a short run would learn nothing but which tokens occur at all.
MAX_STATES: Final = 512
ENTROPY_BOUND_NATS: Final = 1.75 * math.log(2)
_BRANCHES: Final = (0,) * 8 + (1,) * 4 + (2,) * 2 + (3,) * 2
_SUCCESSORS: Final = 4
_TABLE_STREAM: Final = 1
_SAMPLE_STREAM: Final = 2


class MarkovSource:
    """A first-order chain over min(vocab, MAX_STATES) tokens spread evenly over the vocabulary.

    Every state has four successors, taken with weights 8, 4, 2, 2 of 16, so a model that has
    learned the chain reaches at most 1.75 bits = 1.213 nats per token (less where two coincide).
    """

    def __init__(self, *, vocab: int, seq_len: int, seed: int) -> None:
        states = min(vocab, MAX_STATES)
        drawn = words(seed, _TABLE_STREAM, 0, states * _SUCCESSORS) % np.uint64(states)
        # One row of 16 next states per state: a draw of 4 bits indexes it directly.
        successors = drawn.reshape(states, _SUCCESSORS).astype(np.int64)
        self._table: list[int] = successors[:, list(_BRANCHES)].ravel().tolist()
        self._token = np.arange(states, dtype=np.int64) * (vocab // states)
        self._seq_len = seq_len
        self._seed = seed

    @property
    def states(self) -> int:
        """Number of tokens that occur."""
        return len(self._token)

    def sample(self, index: int) -> NDArray[np.int64]:
        """int64 [seq_len + 1]: a walk from a start state of its own."""
        drawn = words(self._seed, _SAMPLE_STREAM, index, self._seq_len + 1)
        state = int(drawn[0]) % self.states
        # The high bits: the walk is sequential, so it runs over a plain list of small integers.
        choices = (drawn[1:] >> np.uint64(60)).tolist()
        walk = [state]
        table = self._table
        for choice in choices:
            state = table[16 * state + choice]
            walk.append(state)
        return self._token[walk]


_MASK = (1 << 64) - 1


def words(seed: int, stream: int, index: int, count: int) -> NDArray[np.uint64]:
    """`count` words; `stream` keeps the uses of one seed apart, `index` is the sample's number."""
    key = np.array([seed & _MASK, stream & _MASK], dtype=np.uint64)
    # Each index owns 2**64 blocks of the counter, so that samples never overlap.
    counter = np.array([0, index & _MASK, 0, 0], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(count)
    return np.asarray(raw, dtype=np.uint64)


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


_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# A corpus is read into memory by every rank; more text than this adds nothing to a benchmark run.
MAX_CORPUS_BYTES = 256 * 2**20


def read_corpus(path: Path | None) -> NDArray[np.uint8]:
    """`corpus_bytes` as an array. Raises UsageError where there is nothing to read."""
    corpus = np.frombuffer(corpus_bytes(path), dtype=np.uint8)
    if corpus.size == 0:
        raise UsageError(
            f"data.path: expected text, found no bytes in {path or 'the standard library'}; "
            "name a file or folder with text in it, or use data.kind: markov"
        )
    return corpus


def corpus_bytes(path: Path | None) -> bytes:
    """All bytes of a file, of a folder's files by sorted relative path, or of the standard library.

    Of the standard library the `.py` sources without test folders, which some systems do not ship:
    real text on a fresh machine without a download. Hidden files are skipped. Reading stops after
    MAX_CORPUS_BYTES. Raises UsageError where a file cannot be read.
    """
    pieces: list[bytes] = []
    room = MAX_CORPUS_BYTES
    for file in _files(path):
        try:
            with file.open("rb") as opened:
                pieces.append(opened.read(room))
        except OSError as error:
            raise UsageError(
                f"data.path: expected readable files, found {file}: {error.strerror}; "
                "make it readable or name another file or folder"
            ) from error
        room -= len(pieces[-1])
        if room <= 0:
            break
    return b"".join(pieces)


def _files(path: Path | None) -> Iterator[Path]:
    if path is None:
        yield from _standard_library()
    elif path.is_file():
        yield path
    elif path.is_dir():
        yield from _sorted_files(path)
    else:
        raise UsageError(
            f"data.path: expected a file or folder, found nothing at {path}; "
            "correct the path, or leave it out to train on the standard library's sources"
        )


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from _sorted_files(root, ".py", skipped=_SKIPPED_FOLDERS)


def _sorted_files(
    root: Path, ending: str = "", *, skipped: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Visible files by relative path; folders that are hidden or `skipped` are not looked into."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not (name.startswith(".") or name in skipped)]
        visible = (name for name in files if name.endswith(ending) and not name.startswith("."))
        paths += [file for file in map(Path(folder).joinpath, visible) if file.is_file()]
    yield from sorted(paths, key=Path.as_posix)
