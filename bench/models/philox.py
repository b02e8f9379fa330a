"""Philox 4x32-10, a random number generator without state: a counter and a key to four words.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (doi:10.1145/2063384.2063405), in
torch's int64 arithmetic: integers are the same on every processor.
"""

from __future__ import annotations

from typing import Any, Final

MASK: Final = 0xFFFFFFFF
_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 bits.

    Args:
        counter: four words, each an int or an int64 tensor; tensors have one shape.
        key: two words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product fills all 64 bits: masks take away its sign, and the high halves of c1 and c3.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((second >> 32) ^ c1 ^ k0) & MASK, second
        c2, c3 = ((first >> 32) ^ c3 ^ k1) & MASK, first
        k0, k1 = (k0 + _KEY_STEPS[0]) & MASK, (k1 + _KEY_STEPS[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK
