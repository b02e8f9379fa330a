"""What a run begins with, as one number for each parameter, however its engine has cut it.

The sum over elements of a hash of (number of the element, bits of its FP32 value), modulo 2^64:
each rank adds up its own part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bench.engines.protocol import Engine
from bench.models.initial_values import as_rows, chunks
from bench.models.initialisation import Part
from bench.worker.counting import gathered
from bench.worker.rank_process import RankProcess

UNEQUAL = "unequal"
_BITS = 64
_MASK = 0xFFFFFFFF
# Of SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195), as int64.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**_BITS
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**_BITS), (27, 0x94D049BB133111EB - 2**_BITS))
_LAST_SHIFT = 31


def fingerprints(
    engine: Engine, first_rows: Mapping[str, int], process: RankProcess
) -> dict[str, str]:
    """Hex digits by name of the parameter, the same on every rank; `unequal` where replicas differ.

    Empty if the engine has no parts. Collective.

    Args:
        engine: has not stepped yet.
        first_rows: where own parameters begin in those of all ranks, of experts.
        process: this rank.
    """
    own = []
    for part in getattr(engine, "parts", list)():
        first = first_rows.get(part.name, 0)
        begin = (part.offsets[0] + first, *part.offsets[1:]) if part.offsets else ()
        moved = part._replace(offsets=begin)
        own.append((part.name, begin, tuple(part.rows.shape), _sum(moved)))
    sums: dict[str, int] = {}
    known: dict[object, int] = {}
    unequal = set()
    for name, begin, shape, fingerprint in (row for rank in gathered(own, process) for row in rank):
        key = (name, begin, shape)
        if key not in known:
            known[key] = fingerprint
            sums[name] = (sums.get(name, 0) + fingerprint) % 2**_BITS
        elif known[key] != fingerprint:
            unequal.add(name)
    return {
        name: UNEQUAL if name in unequal else f"{fingerprint:016x}"
        for name, fingerprint in sums.items()
    }


@torch.no_grad()
def _sum(part: Part) -> int:
    total = 0
    rows, first, stride = as_rows(part.rows.contiguous(), part.offsets, part.shape)
    for values, begin in chunks(rows, first, stride):
        count, length = values.shape
        steps = torch.arange(count, device=values.device) * stride + begin
        numbers = steps.unsqueeze(1) + torch.arange(length, device=values.device)
        bits = values.float().contiguous().view(torch.int32).to(torch.int64) & _MASK
        total += int(_mixed(numbers * _GOLDEN + bits).sum())
    return total


def _mixed(words: Tensor) -> Tensor:
    for shift, factor in _MIXING:
        words = (words ^ _shifted(words, shift)) * factor
    return words ^ _shifted(words, _LAST_SHIFT)


def _shifted(words: Tensor, shift: int) -> Tensor:
    """To the right, without the sign."""
    return (words >> shift) & ((1 << (_BITS - shift)) - 1)
