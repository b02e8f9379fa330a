"""Initial values that any rank writes alone: any part of a parameter, on any device.

[Note: one start] Element i of a parameter is a function of (seed, name, i). Word i % 4 of Philox
under the key of (seed, name) and the counter i // 4 gives it: the sum of the word's four bytes less
its mean is an integer, and one FP32 product makes a value of it. So every engine, every split over
ranks and every processor begins with the same bits. Sums of four bytes have 1021 values, the
spread that is wanted, and no tails beyond 3.45 standard deviations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02
_RESIDUAL_OUTPUTS = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "mamba.output.weight",
    "experts.down",
    "experts.shared.down.weight",
)
_STEP_SIZES = (1e-3, 1e-1)
_DECAY_RATES = (1.0, 16.0)

_WORDS: Final = 4
_SUM_MEAN: Final = 4 * 255 // 2
#: Of a sum of four bytes: each has the variance (256^2 - 1) / 12.
_SUM_DEVIATION: Final = math.sqrt(4 * (256**2 - 1) / 12)
#: Elements that are drawn at once: temporaries, of 14 bytes each, stay in a CPU's
#: cache, and keep a device busy.
CHUNK_ELEMENTS: Final = {"cpu": 2**17, "cuda": 2**20}


def _nothing() -> None:
    pass


@dataclass
class InitialValues:
    """Of a model's parameters.

    seed: of the run. residual_writes: projections that write to the residual stream. shapes: of
    whole parameters by name. first_rows: where a rank's own parameter begins in the whole one, of
    those that it holds a share of. on_chunk: called while values are written.
    """

    seed: int
    residual_writes: int
    shapes: Mapping[str, Sequence[int]]
    first_rows: dict[str, int] = field(default_factory=dict)
    on_chunk: Callable[[], None] = _nothing

    def fill_(self, out: Tensor, name: str, start: int = 0) -> None:
        """Write elements [start, start + out.numel()) of the parameter, flattened in C order."""
        start += self.first_rows.get(name, 0) * prod(self.shapes[name][1:])
        self._fill(out.view(1, -1), name, start, 0)

    def fill_part_(self, out: Tensor, name: str, offsets: Sequence[int]) -> None:
        """Write the part of the parameter that begins at `offsets` and has the shape of `out`.

        It may be cut along dim 0 and along one other. A flat `out` of a parameter of more dims is
        a stretch of it: see `fill_`.
        """
        rows, first, stride = as_rows(out, offsets, self.shapes[name])
        first += self.first_rows.get(name, 0) * prod(self.shapes[name][1:])
        self._fill(rows, name, first, stride)

    @torch.no_grad()
    def _fill(self, rows: Tensor, name: str, first: int, stride: int) -> None:
        """rows: [rows, elements of each]; row r begins at `first` + r * stride."""
        shape = self.shapes[name]
        if len(shape) == 1:
            rule = _VECTORS.get(name.rpartition(".")[2], torch.ones)
            rows.copy_(rule(*shape)[first : first + rows.numel()])
            return
        key, scale = self._key(name), self._deviation(name, shape) / _SUM_DEVIATION
        for part, begin in chunks(rows, first, stride):
            part.copy_(_drawn(part, begin, stride, key).mul_(scale))
            self.on_chunk()

    def _key(self, name: str) -> tuple[int, int]:
        digest = hashlib.blake2s(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    def _deviation(self, name: str, shape: Sequence[int]) -> float:
        """Projections that write to the residual stream are scaled by 1 / sqrt(residual_writes).

        So its variance does not grow with depth (GPT-2).
        """
        if name.endswith(_RESIDUAL_OUTPUTS):
            return STANDARD_DEVIATION / math.sqrt(self.residual_writes)
        if name.endswith("conv_weight"):
            # A channel of the convolution has only `kernel` inputs: keep their variance.
            return 1 / math.sqrt(shape[-1])
        return STANDARD_DEVIATION


def as_rows(part: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> tuple[Tensor, int, int]:
    """A part of a parameter as a matrix whose rows are stretches of the flattened parameter.

    Returns:
        The matrix, a view; the number of its first element, and from row to row.
    """
    if part.dim() != len(shape):
        return part.view(1, -1), offsets[0], 0
    cut = max((dim for dim in range(1, len(shape)) if part.shape[dim] != shape[dim]), default=0)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(map(prod, zip(offsets, strides, strict=True)))
    count = prod(part.shape[:cut])
    if cut == 0 or not part.numel():
        return part.view(1, -1), first, 0
    return part.view(count, -1), first, strides[cut - 1]


def chunks(
    rows: Tensor, first: int, stride: int, device: str | None = None
) -> Iterator[tuple[Tensor, int]]:
    """Parts of `rows` that are drawn at once on `device`, and where the first element of each is.

    device: its kind; None is that of `rows`.
    """
    if not rows.numel():
        return
    size = CHUNK_ELEMENTS.get(device or rows.device.type, CHUNK_ELEMENTS["cpu"])
    count, length = rows.shape
    # Rows together have to begin at the same word of their counters.
    high = 1 if stride % _WORDS else max(1, size // length)
    for row in range(0, count, high):
        for column in range(0, length, size):
            yield rows[row : row + high, column : column + size], first + row * stride + column


def _drawn(like: Tensor, first: int, stride: int, key: tuple[int, int]) -> Tensor:
    """Centred sums in FP32, [rows, elements], of the shape and on the device of `like`."""
    rows, length = like.shape
    skipped = first % _WORDS
    counters = torch.arange(-(-(skipped + length) // _WORDS), device=like.device)
    if rows > 1:
        steps = torch.arange(rows, device=like.device) * (stride // _WORDS)
        counters = counters + steps.unsqueeze(1)
    counters = (counters + first // _WORDS).view(rows, -1)
    last = (first + (rows - 1) * stride + length) // _WORDS
    high: Any = counters >> 32 if last > MASK else 0
    sums = torch.empty(*counters.shape, _WORDS, device=like.device)
    for index, word in enumerate(philox((counters & MASK, high, 0, 0), key)):
        pairs = (word & 0xFF00FF) + ((word >> 8) & 0xFF00FF)
        sums[..., index] = (pairs & 0xFFFF) + (pairs >> 16) - _SUM_MEAN
    return sums.flatten(1)[:, skipped : skipped + length]


def _fp32(values: list[float]) -> Tensor:
    # Computed by Python, whose results do not depend on the vector unit as torch's do.
    return torch.tensor(values, dtype=torch.float32)


def _spread(bounds: tuple[float, float], count: int) -> list[float]:
    low, high = bounds
    return [low + (high - low) * index / max(1, count - 1) for index in range(count)]


def _log_decay_rates(heads: int) -> Tensor:
    """Logarithms of rates evenly spread over the range of Mamba-2 (arXiv:2405.21060)."""
    return _fp32([math.log(rate) for rate in _spread(_DECAY_RATES, heads)])


def _step_bias(heads: int) -> Tensor:
    """The step size of a head is softplus of this: geometrically spread over Mamba's range."""
    low, high = (math.log(size) for size in _STEP_SIZES)
    return _fp32(
        [math.log(math.expm1(math.exp(exponent))) for exponent in _spread((low, high), heads)]
    )


_VECTORS: Final[dict[str, Callable[[int], Tensor]]] = {
    "log_decay": _log_decay_rates,
    "step_bias": _step_bias,
    "conv_bias": torch.zeros,
    "bias": torch.zeros,
}
"""By the last part of the name; all other vectors are weights of norms, which begin at one."""


MASK: Final = 0xFFFFFFFF
_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 bits by Philox 4x32-10, a generator of random numbers without state.

    Salmon et al. 2011, doi:10.1145/2063384.2063405, in torch's int64 arithmetic: integers are the
    same on every processor.

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
