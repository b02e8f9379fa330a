"""What a step holds and sends: from traces of few layers to a model of many.

[Note: layers that repeat] A Llama is traced with 3, 4 and 5 layers. Bytes of a category at the same
place (the first two units and the last two of each pass, the loss, the update) are taken as linear
in the number of layers, and between the second unit and the last but one as linear in the unit. So
3 and 4 say what 5 is: where the trace of 5 has another peak or sends something else, the prediction
says that it is not linear. A hybrid and a model of the user's own are traced whole. Set-up counts
as one moment, the highest of many: it may lie above what 4 and 5 layers say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Self

from bench.fit.trace import CATEGORIES, HOST, MICROBATCHES, SETUP, Message, Moment, Trace, trace
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun

_FEW: Final = (3, 4)
_CHECKED: Final = 5
_EDGE: Final = 2
#: A block of the CUDA caching allocator is a multiple of this, and of a large one up to 1 MiB
#: stays unused (`c10/cuda/CUDACachingAllocator`: kMinBlockSize, kSmallSize).
_BLOCK_BYTES: Final = 512
_UNSPLIT_BYTES: Final = 1 << 20

Bytes = Mapping[str, int]


@dataclass(frozen=True)
class LiveStorageGroup:
    """Storages of one kind that exist at the peak. contents: as `float32[4, 8]`, of each."""

    category: str
    contents: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Traffic:
    """Messages of one rank and step. bytes: of one whole buffer; axis: the mesh dimension."""

    operation: str
    axis: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Prediction:
    """One rank of a run.

    steps: the most that is held in every part of a step, by category, in order. setup_bytes: the
    most before the first step. host_bytes: the most that is kept in host memory by offload, which
    no other number has in it. rounding_bytes: what a caching allocator may waste on the storages
    of the peak, at most; fragmentation over many steps is not predicted. is_linear: False where a
    check of the extrapolation failed, None where nothing was extrapolated or checked.
    """

    resolved: ResolvedRun
    steps: tuple[tuple[Moment, Bytes], ...]
    setup_bytes: int
    host_bytes: int
    alive: tuple[LiveStorageGroup, ...]
    collectives: tuple[Traffic, ...]
    wire_bytes: int | None
    traced_layers: tuple[int, ...]
    is_linear: bool | None

    @property
    def peak_moment(self) -> Moment:
        """When most is held."""
        return max(self.steps, key=lambda step: sum(step[1].values()))[0]

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak."""
        moment = dict(self.steps)[self.peak_moment]
        return {name: moment[name] for name in CATEGORIES if moment.get(name)}

    @property
    def peak_bytes(self) -> int:
        """Of a step."""
        return sum(self.by_category.values())

    @property
    def rounding_bytes(self) -> int:
        """See the class."""
        return sum(
            block.count * (_UNSPLIT_BYTES if block.bytes >= _UNSPLIT_BYTES else _BLOCK_BYTES)
            for block in self.alive
        )

    def to_document(self) -> dict[str, Any]:
        """Plain data, with every choice that was made."""
        return {
            "peak_bytes": self.peak_bytes,
            "by_category": self.by_category,
            "peak_moment": self.peak_moment._asdict(),
            "alive": [vars(block) for block in self.alive],
            "setup_bytes": self.setup_bytes,
            "host_bytes": self.host_bytes,
            "rounding_bytes": self.rounding_bytes,
            "collectives": [vars(collective) for collective in self.collectives],
            "wire_bytes": self.wire_bytes,
            "moments": [
                {**moment._asdict(), "by_category": dict(held)} for moment, held in self.steps
            ],
            "traced_layers": list(self.traced_layers),
            "is_linear": self.is_linear,
            "resolved": self.resolved.model_dump(mode="json"),
        }


def predict(resolved: ResolvedRun, *, every_layer: bool = False, check: bool = True) -> Prediction:
    """What one rank of `resolved` holds and sends.

    Args:
        resolved: of `bench.resolve`; the machine it names need not exist.
        every_layer: trace all, not a few of those that repeat.
        check: trace once more, to see whether layers add up.

    Raises:
        UnsupportedError: it cannot be traced without a device, without contents, or in the
            address space of this machine.
        UsageError: this process has a process group.
    """
    shape = resolved.shape
    if every_layer or shape is None or shape.hybrid is not None or shape.layers <= _CHECKED:
        return _prediction(resolved, _View.of(trace(resolved), resolved), (), None)
    views = [_View.of(trace(_cut(resolved, layers)), resolved) for layers in _FEW]
    is_linear = None
    if check:
        third = _View.of(trace(_cut(resolved, _CHECKED)), resolved)
        is_linear = _extended(views[0], views[1], _CHECKED).agrees(third)
        views = [views[-1], third]
    full = _extended(views[0], views[1], shape.layers)
    return _prediction(resolved, full, [view.units for view in views], is_linear)


def _cut(resolved: ResolvedRun, layers: int) -> ResolvedRun:
    shape = resolved.shape
    assert shape is not None
    return resolved.model_copy(update={"shape": shape.model_copy(update={"layers": layers})})


@dataclass
class _View:
    """What a trace says about its step, or what two of them say about one of more layers."""

    units: int
    held: dict[Moment, dict[str, int]]
    alive: dict[Moment, Counter[tuple[str, str, int]]]
    traffic: Counter[Message]
    setup_bytes: int
    host_bytes: int
    wire_bytes: int | None

    @classmethod
    def of(cls, traced: Trace, resolved: ResolvedRun) -> _View:
        """Every moment at its highest. What was booked under a later name counts under it."""
        live: Counter[str] = Counter()
        sizes: dict[int, int] = {}
        held: dict[Moment, dict[str, int]] = {}
        totals: dict[Moment, int] = {}
        stamps: dict[Moment, int] = {}
        total = setup = entered = 0
        changes = _changes(traced, of_host=False)
        for stamp, (number, change, at) in enumerate(changes):
            moment = traced.moments[at]
            if at >= traced.first:
                for passed in traced.moments[max(entered, traced.first) : at + 1]:
                    if total > totals.get(passed, -1):
                        totals[passed], held[passed], stamps[passed] = total, dict(live), stamp
            entered = at
            live[traced.kinds[number].category] += change
            total += change
            if moment.phase == SETUP:
                setup = max(setup, total)
            elif at >= traced.first and total > totals.get(moment, -1):
                totals[moment], held[moment], stamps[moment] = total, dict(live), stamp + 1
        peak = max(totals, key=lambda moment: totals[moment])
        for number, change, _ in changes[: stamps[peak]]:
            sizes[number] = sizes.get(number, 0) + change
        alive = Counter(
            (traced.kinds[number].category, traced.kinds[number].contents, size)
            for number, size in sizes.items()
            if size
        )
        times = _repeated(resolved.microbatches)
        traffic: Counter[Message] = Counter()
        for message, microbatch in traced.messages:
            traffic[message] += times if microbatch == 1 else 1
        wire = None
        if traced.wire_bytes is not None:
            step, second = traced.wire_bytes
            wire = step + (times - 1) * second
        on_host = accumulate(change for _, change, _ in _changes(traced, of_host=True))
        host = max(on_host, default=0)
        return cls(traced.units, held, {peak: alive}, traffic, setup, host, wire)

    @property
    def peak(self) -> tuple[Moment, int]:
        """The moment at which most is held, and how much."""
        totals = {moment: sum(held.values()) for moment, held in self.held.items()}
        return max(totals.items(), key=lambda total: total[1])

    def agrees(self, other: _View) -> bool:
        """Whether both hold as much at most, at the same moment, and send the same."""
        return self.peak == other.peak and +self.traffic == +other.traffic


def _changes(traced: Trace, *, of_host: bool) -> list[tuple[int, int, int]]:
    kinds = traced.kinds
    return [booked for booked in traced.changes if (kinds[booked[0]].category == HOST) == of_host]


def _repeated(microbatches: int) -> int:
    """Microbatches that the second of a trace stands for."""
    return max(1, microbatches - MICROBATCHES + 1)


def _extended(few: _View, more: _View, units: int) -> _View:
    """`few` and `more`, of one layer more, taken on to as many as `units`."""

    def line(low: int, high: int) -> int:
        return low + (high - low) * (units - few.units)

    def at(moment: Moment, unit: int | None, from_end: int | None) -> dict[str, int]:
        def of(view: _View) -> Mapping[str, int]:
            index = unit if from_end is None else view.units - 1 - from_end
            return view.held.get(moment._replace(unit=index), {})

        low, high = of(few), of(more)
        return {name: line(low.get(name, 0), high.get(name, 0)) for name in {**low, **high}}

    held: dict[Moment, dict[str, int]] = {}
    for moment in _in_order(more.held, more.units, units):
        unit = moment.unit
        if unit is None or unit < _EDGE:
            held[moment] = at(moment, unit, None)
        elif units - 1 - unit < _EDGE:
            held[moment] = at(moment, None, units - 1 - unit)
        else:
            first, last = at(moment, 1, None), at(moment, None, 1)
            share, span = unit - 1, units - 1 - _EDGE
            held[moment] = {
                name: first.get(name, 0) + (last.get(name, 0) - first.get(name, 0)) * share // span
                for name in {**first, **last}
            }
    traffic: Counter[Message] = Counter()
    for low_key, high_key in _pairs(few.traffic, more.traffic):
        message = high_key._replace(bytes=line(low_key.bytes, high_key.bytes))
        traffic[message] += line(few.traffic[low_key], more.traffic[high_key])
    (low,), (high,) = few.alive.values(), more.alive.values()
    alive = Counter({key: line(low[key], high[key]) for key in {*low, *high}})
    (peak,) = more.alive
    wire = None
    if few.wire_bytes is not None and more.wire_bytes is not None:
        wire = line(few.wire_bytes, more.wire_bytes)
    setup = line(few.setup_bytes, more.setup_bytes)
    host = line(few.host_bytes, more.host_bytes)
    return _View(units, held, {peak: +alive}, traffic, setup, host, wire)


def _pairs(few: Counter[Message], more: Counter[Message]) -> list[tuple[Message, Message]]:
    """The same messages of both; one whose size grows with the layers has another size in each."""
    keys = [(key, key) for key in {*few, *more} if key in few and key in more]
    alone = [
        sorted(key for key in traffic if key not in other)
        for traffic, other in ((few, more), (more, few))
    ]
    for low, high in zip(*alone, strict=False):
        if low[:2] == high[:2] and few[low] == more[high]:
            keys.append((low, high))
    rest = [key for traffic in alone for key in traffic if not any(key in pair for pair in keys)]
    return keys + [(key, key) for key in rest]


def _in_order(moments: Mapping[Moment, Any], few: int, units: int) -> list[Moment]:
    """The moments of a step of `units`, from those of one of `few`."""
    stretched: list[Moment] = []
    for moment in moments:
        if moment.unit is None:
            stretched.append(moment)
        elif moment.unit == (few - 1 if moment.phase == "backward" else 0):
            order = range(units)
            every = reversed(order) if moment.phase == "backward" else order
            stretched += [moment._replace(unit=unit) for unit in every]
    return stretched


def _prediction(
    resolved: ResolvedRun, view: _View, layers: Sequence[int], is_linear: bool | None
) -> Prediction:
    (alive,) = view.alive.values()
    groups = [
        LiveStorageGroup(category, contents, count, size)
        for (category, contents, size), count in alive.items()
    ]
    return Prediction(
        resolved=resolved,
        steps=tuple(view.held.items()),
        setup_bytes=view.setup_bytes,
        host_bytes=view.host_bytes,
        alive=tuple(
            sorted(
                groups,
                key=lambda group: (-group.count * group.bytes, group.category, group.contents),
            )
        ),
        collectives=tuple(
            Traffic(message.operation, message.axis, count, message.bytes)
            for message, count in sorted(view.traffic.items())
            if count
        ),
        wire_bytes=view.wire_bytes,
        traced_layers=tuple(layers),
        is_linear=is_linear,
    )


#: For the CUDA context, NCCL's buffers and library workspaces, which are not predicted.
HEADROOM_BYTES: Final = 2 * 2**30


@dataclass(frozen=True)
class Verdict:
    """spare_bytes: negative where it does not fit. largest: the category to attack then.

    fits: the steps do. setup_fits: whether what a rank holds before the first one, setup_bytes at
    most, fits as well.
    """

    device: str
    device_bytes: int
    fits: bool
    spare_bytes: int
    largest: str
    largest_bytes: int
    setup_fits: bool
    setup_bytes: int

    @classmethod
    def of(cls, prediction: Prediction, machine: Machine) -> Self | None:
        """On the first device of `machine`; None where it has none whose memory is known.

        Ranks that share a device have equal parts of it.
        """
        devices = machine.cuda_devices
        if not devices or devices[0].memory_bytes is None:
            return None
        sharing = prediction.resolved.launch.ranks_per_device
        room = devices[0].memory_bytes // sharing - HEADROOM_BYTES
        spare = room - prediction.peak_bytes
        held = prediction.by_category
        largest = max(held, key=lambda name: held[name])
        return cls(
            device=devices[0].name,
            device_bytes=devices[0].memory_bytes // sharing,
            fits=spare >= 0,
            spare_bytes=spare,
            largest=largest,
            largest_bytes=held[largest],
            setup_fits=prediction.setup_bytes <= room,
            setup_bytes=prediction.setup_bytes,
        )

    def setup_text(self) -> str:
        """A sentence about what comes before the steps."""
        return (
            f"set-up does not fit: each rank holds {gigabytes(self.setup_bytes)} at most before"
            " the first step"
        )

    def text(self) -> str:
        """A sentence."""
        size = f"{self.device} of {gigabytes(self.device_bytes)}"
        head = f"{gigabytes(HEADROOM_BYTES)} are left for context, NCCL and libraries"
        if self.fits:
            return f"fits {size} with {gigabytes(self.spare_bytes)} to spare ({head})"
        return (
            f"does not fit {size}: {gigabytes(-self.spare_bytes)} too much ({head});"
            f" {gigabytes(self.largest_bytes)} are {self.largest.replace('_', ' ')}"
        )


def gigabytes(size: int) -> str:
    """Powers of ten, as datasheets count."""
    return f"{size / 1e9:,.2f} GB"
