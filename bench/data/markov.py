"""A first-order Markov chain: quick to learn, and the same on every machine.

Every state has four successors, taken with weights 8, 4, 2, 2 of 16, so a model that has learned
the chain reaches at most 1.75 bits = 1.213 nats per token (less where two successors coincide).
Only integers decide: no float threshold can fall differently on another machine.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.data.philox import words

# With more states than this, a short run would learn nothing but which tokens occur at all.
MAX_STATES: Final = 512
ENTROPY_BOUND_NATS: Final = 1.75 * math.log(2)
_BRANCHES: Final = (0,) * 8 + (1,) * 4 + (2,) * 2 + (3,) * 2
_SUCCESSORS: Final = 4
_TABLE_STREAM: Final = 1
_SAMPLE_STREAM: Final = 2


class MarkovSource:
    """Chain over min(vocab, MAX_STATES) tokens spread evenly over the vocabulary."""

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
