"""In what two runs are too unlike to be compared, and which rates compare all the same. Pure.

What a side does not say is no difference. A name that says less than another one, as `H100` next to
`NVIDIA H100 80GB HBM3`, is the same name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.workload import Workload
from reports.renderers import quantity

_NAMES = {"model": "model", "device": "device"}
_COUNTS = {
    "ranks": "number of devices",
    "global_batch": "global batch",
    "batch": "batch (of how many devices is not said)",
    "seq_len": "sequence length",
}
_SHAPES = ("parameters", "layers", "hidden")
_DTYPES = {
    "compute_dtype": "compute dtype",
    "main_params_dtype": "dtype of main weights",
    "main_grads_dtype": "dtype of main gradients",
    "grad_comm_dtype": "dtype of gradient communication",
}
_TOKENS = "tokens per step"
_SECTIONS = {
    "ranks": "launch.ranks",
    "global_batch": "train.global_batch",
    "seq_len": "train.seq_len",
    **dict.fromkeys(("model", *_SHAPES), "shape"),
    **dict.fromkeys(_DTYPES, "dtypes"),
}
_WORD = re.compile(r"\d+(?:\.\d+)?b\b|\d+(?:\.\d+)?|[a-z]+")
_DTYPE_WORDS = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "float64": "fp64"}
_NUMBERS = {*_COUNTS.values(), _TOKENS}
_SAME_WORK = {"number of devices", "device", *_DTYPES.values()}
_LEAST_TOKENS = 0.01


@dataclass(frozen=True)
class Unlike:
    """One thing in which two runs differ, as text. section: of a sweep file, "" if none."""

    name: str
    base: str
    head: str
    section: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.base}, {self.head}"


@dataclass(frozen=True)
class Pace:
    """How fast one run is. Medians; rates are of all its devices together; None is not known.

    tokens: by step, as the run counts them.
    """

    workload: Workload
    milliseconds: float | None = None
    tokens_per_second: float | None = None
    teraflops_per_device: float | None = None
    tokens: Mapping[int, int] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float | None:
        """Sequences of the global batch."""
        batch, time = self.workload.global_batch, self.milliseconds
        return batch / time * 1e3 if batch and time else None

    def per_device(self, rate: float | None) -> float | None:
        """A rate of all devices, shared among them."""
        ranks = self.workload.ranks
        return rate / ranks if rate is not None and ranks else None


@dataclass(frozen=True)
class NumberChange:
    """One number of each run, in a unit."""

    name: str
    unit: str
    base: float
    head: float

    @property
    def ratio(self) -> float | None:
        """Head over base."""
        return self.head / self.base if self.base else None

    def __str__(self) -> str:
        both = ", ".join(quantity.significant(value) for value in (self.base, self.head))
        return f"{self.name} {both} ({quantity.ratio(self.ratio)})"


def unlike(base: Workload, head: Workload) -> tuple[Unlike, ...]:
    """Everything that must agree and does not."""
    differences = []
    for key, name in (_COUNTS | _NAMES | _DTYPES).items():
        before, after = getattr(base, key), getattr(head, key)
        if before is None or after is None or _is_same(key, before, after):
            continue
        first, second = (f"{v:,}" if key in _COUNTS else str(v) for v in (before, after))
        differences.append(Unlike(name, first, second, _SECTIONS.get(key, "")))
    if base.framework == head.framework and "model" not in {why.name for why in differences}:
        differences += _other_shape(base, head)
    return tuple(differences)


def unlike_paces(base: Pace, head: Pace) -> tuple[Unlike, ...]:
    """As `unlike`, and tokens of a step that the runs count themselves."""
    differences = unlike(base.workload, head.workload)
    if {difference.name for difference in differences} & {"global batch", "sequence length"}:
        return differences
    steps = base.tokens.keys() & head.tokens.keys()
    if all(abs(head.tokens[step] / base.tokens[step] - 1) <= _LEAST_TOKENS for step in steps):
        return differences
    texts = (_span([side.tokens[step] for step in steps]) for side in (base, head))
    return (*differences, Unlike(_TOKENS, *texts))


def is_of_work(difference: Unlike) -> bool:
    """Whether it changes what a step computes, so that losses do not compare."""
    return difference.name not in _SAME_WORK


def is_of_dtypes(difference: Unlike) -> bool:
    """Whether it is a dtype."""
    return difference.name in _DTYPES.values()


def only_compared(workload: Workload) -> Workload:
    """What `unlike` compares, and nothing else."""
    named = (*_COUNTS, *_NAMES, *_SHAPES, *_DTYPES)
    return Workload.model_construct(
        framework=workload.framework, **{key: getattr(workload, key) for key in named}, settings={}
    )


def text_of(differences: Iterable[Unlike]) -> str:
    """`global batch 8, 16; sequence length 4,096, 2,048`."""
    return "; ".join(dict.fromkeys(map(str, differences)))


def comparable_rates(differences: Sequence[Unlike], base: Pace, head: Pace) -> list[NumberChange]:
    """Rates per second, and per device, that both have; none where more than sizes differ."""
    names = {difference.name for difference in differences}
    if names - _NUMBERS:
        return []
    of_all = [("tokens/s", base.tokens_per_second, head.tokens_per_second)]
    if None in of_all[0] and "sequence length" not in names:
        of_all = [("samples/s", base.samples_per_second, head.samples_per_second)]
    shared = [
        (f"{name} per device", base.per_device(before), head.per_device(after))
        for name, before, after in of_all
    ]
    shared.append(("TFLOP/s per device", base.teraflops_per_device, head.teraflops_per_device))
    rates = shared if "number of devices" in names else of_all + shared
    return [
        NumberChange(name, "", before, after) for name, before, after in rates if before and after
    ]


def _other_shape(base: Workload, head: Workload) -> list[Unlike]:
    for key in _SHAPES:
        before, after = getattr(base, key), getattr(head, key)
        if before is not None and after is not None and before != after:
            first, second = (f"of {value:,} {key}" for value in (before, after))
            return [Unlike("model", first, second, _SECTIONS[key])]
    return []


def _is_same(key: str, before: object, after: object) -> bool:
    if key in _COUNTS:
        return before == after
    first, second = _words(str(before)), _words(str(after))
    return first == second if key in _DTYPES else first <= second or second <= first


def _words(text: str) -> set[str]:
    plain = text.lower().removeprefix("torch.")
    return (
        {plain}
        if plain in _DTYPE_WORDS.values()
        else ({_DTYPE_WORDS[plain]} if plain in _DTYPE_WORDS else {*_WORD.findall(plain)})
    )


def _span(tokens: Sequence[int]) -> str:
    least, most = min(tokens), max(tokens)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


_SAME_TIME = 0.01
_OTHER_RATE = 0.03
_OTHER_NORM = 0.05
_SAME_LOSS = 0.01
_ROUND = 0.03
_MOST_STEPS = 0.95
_LEAST_STEPS = 3
_LEAST_DEVICES = 4  # a factor of two can have any cause


def rate_without_time(time: float | None, rates: Mapping[str, float | None]) -> list[str]:
    """One text per rate that changes while the time of a step does not.

    Args:
        time: step time, head over base.
        rates: by name, head over base.
    """
    if time is None or abs(time - 1) >= _SAME_TIME:
        return []
    texts = []
    for name, rate in rates.items():
        if rate is None or abs(rate - 1) <= _OTHER_RATE:
            continue
        what = "formula, model" if "FLOP" in name else "tokens per step"
        texts.append(
            f"{name} {quantity.ratio(rate)} at the same step time"
            f" ({quantity.change(time - 1, 2)}): {what} or device count differ"
        )
    return texts


def trade_off(time: float | None, memory: float | None) -> str:
    """Speed that is bought with memory, or memory with time; both are head over base. Else "".

    Steps of one run say nothing of noise, so changes below 1 % of either are none.
    """
    if time is None or memory is None or min(abs(time - 1), abs(memory - 1)) < _SAME_TIME:
        return ""
    if (time < 1) == (memory < 1):
        return ""
    words = "faster, but with more memory" if time < 1 else "less memory, but slower"
    changes = (quantity.change(ratio - 1, 2) for ratio in (time, memory))
    return "{}: time {}, peak of a device {}".format(words, *changes)


def norm_without_loss(
    losses: tuple[Mapping[int, float], Mapping[int, float]],
    norms: tuple[Mapping[int, float], Mapping[int, float]],
    devices: int | None = None,
) -> str:
    """Gradient norms that differ steadily, in one direction, though losses do not; else "".

    Args:
        losses: by step, of base and head.
        norms: the same of gradient norms.
        devices: of both runs, to name the factor by.
    """
    apart = [abs(after / before - 1) for before, after in _both(losses)]
    factors = [after / before for before, after in _both(norms)]
    if min(len(apart), len(factors)) < _LEAST_STEPS:
        return ""
    middle = median(factors)
    beyond = [
        factor > 1 + _OTHER_NORM if middle > 1 else factor < 1 - _OTHER_NORM for factor in factors
    ]
    alike = [share <= _SAME_LOSS for share in apart]
    if not all(sum(flags) >= _MOST_STEPS * len(flags) for flags in (beyond, alike)):
        return ""
    least, most = (quantity.ratio(factor) for factor in (min(factors), max(factors)))
    span = "" if least == most else f" ({least} to {most})"
    return (
        f"the gradient norm differs steadily and the loss does not: head / base"
        f" {quantity.ratio(middle)}{span} over {len(factors)} steps, losses within"
        f" {quantity.share(max(apart), 2)}{_named(max(middle, 1 / middle), devices)}"
    )


def _both(values: tuple[Mapping[int, float], Mapping[int, float]]) -> list[tuple[float, float]]:
    base, head = values
    pairs = [(base[step], head[step]) for step in sorted(base.keys() & head.keys())]
    return [pair for pair in pairs if all(value > 0 and math.isfinite(value) for value in pair)]


def _named(factor: float, devices: int | None) -> str:
    if devices is None or devices < _LEAST_DEVICES:
        return ""
    for size, words in ((devices, "the number"), (math.sqrt(devices), "the root of the number")):
        if abs(factor / size - 1) <= _ROUND:
            return f"; the factor is {words} of devices ({devices})"
    return ""
