"""What is kept of one run: plain data, versioned, torch-free. Files are `bench.store`'s.

Raw samples are never edited. Everything that a formula makes out of them (`RunSummary`) carries the
formula's name and is rebuilt by `bench.derive` whenever it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.spec import ResolvedRun
from bench.workload import Provenance, Workload

SCHEMA_VERSION = 1

RunState = Literal[
    "running",
    "ok",
    "out_of_memory",
    "timeout",
    "crashed",
    "hang",
    "nan",
    "unstable",
    "interrupted",
    "unsupported",
]
Amount = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=1e-6, le=1e12)]
"""From a nanosecond to 30 years."""
FINISHED_GOOD: frozenset[str] = frozenset({"ok", "unstable"})
#: Ended from outside before it was over, for no fault of its own.
STOPPED: frozenset[str] = frozenset({"interrupted"})
_SHOWN = 8


_Model = TypeVar("_Model", bound=BaseModel)


def understood(model: type[_Model], document: object) -> _Model | None:
    """What a record has, as `model`; None where it is absent or cannot be read."""
    try:
        return model.model_validate(document)
    except ValidationError:
        return None


def shortened(numbers: Sequence[int]) -> str:
    """`0, 3, 5`; of many, the first eight and how many there are besides."""
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return ", ".join(map(str, numbers[:_SHOWN])) + more


@dataclass(frozen=True, slots=True)
class StepSample:
    """One optimizer step as one rank saw it. One line of `steps.node<K>.jsonl`.

    step: 1-based. milliseconds: wall time of the step, data loading included; of a collective, the
    time of one operation among others. loss: mean over this rank's microbatches, before the update;
    None where nothing is trained. grad_norm: global, before clipping (same on all ranks);
    without clipping of the first two steps alone.
    tokens: this rank's share of those consumed. wire_bytes: bytes this rank sent by the ring
    convention (gather and scatter (n-1)/n of the full buffer, all-reduce twice that).
    rss_bytes: resident set after the step. device_peak_bytes: the device allocator's peak since
    set-up, None on CPU. cpu_milliseconds: CPU time of the step by thread (main, autograd,
    transport, other), None where the system does not tell. phase_milliseconds: parts of the
    step, by the device's own events on CUDA (`bench.meters.phases`). host_milliseconds: until
    the host had enqueued the step, None on CPU. device: what this rank read of its device
    behind the step: allocator's bytes and retries, and where it is known clocks (MHz), power,
    temperature and reasons of throttling. What no step can be was not measured: its line does
    not count.
    """

    step: int
    milliseconds: Milliseconds
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    tokens: Amount
    wire_bytes: Amount | None
    rss_bytes: Amount
    device_peak_bytes: Amount | None = None
    cpu_milliseconds: dict[str, Annotated[float, Field(ge=0)]] | None = None
    phase_milliseconds: dict[str, float] | None = None
    host_milliseconds: float | None = None
    device: dict[str, Any] | None = None

    def values(self) -> dict[str, Any]:
        """By name, as they are; `dataclasses.asdict` would copy every one of them."""
        return {name: getattr(self, name) for name in self.__slots__}


class RunStatus(BaseModel):
    """`status.json`: written when the run starts, replaced atomically when it ends.

    arm: side of a comparison, None outside of one. repeat: repeat of the cell, and so the number of
    its block. attempt: counts, from 1, how often an interleaved block was started; None for a run
    that belongs to no interleaved block. code_proof: whether every rank showed that it runs the
    code of its arm (or of this checkout); None where the ranks did not get that far.
    inputs: path -> SHA-256 of what a run read besides: modules that its ranks imported from outside
    of the environment, and the data. code: identity of the code; `code_with_inputs` at the end.
    digest: hashes of the raw files and of this status, written at the end (`store.digest`).
    """

    model_config = ConfigDict(extra="ignore")

    schema_version: int = SCHEMA_VERSION
    state: RunState = "running"
    reason: str = ""
    exit_code: int | None = None
    failed_rank: int | None = None
    started_utc: str = ""
    ended_utc: str | None = None
    sweep: str | None = None
    cell: str | None = None
    repeat: int = 0
    arm: str | None = None
    attempt: int | None = None
    code: str = ""
    inputs: dict[str, str] = {}
    code_proof: Literal["proven", "mismatch"] | None = None
    comparable_in_time: bool = True
    digest: dict[str, str] | None = None

    def is_of(self, code: str) -> bool:
        """Whether the run had this code, with whatever inputs."""
        return self.code == code_with_inputs(code, self.inputs)


def code_with_inputs(code: str, inputs: Mapping[str, str]) -> str:
    """Identity of a run that read `inputs` (path -> digest) too: 16 hex digits.

    The same files have the same identity in any folder.
    """
    if not inputs:
        return code
    lines = sorted(f"{path.rpartition('/')[2]} {digest}" for path, digest in inputs.items())
    return hashlib.sha256("\n".join((code, *lines)).encode()).hexdigest()[:16]


class SteadyWindow(BaseModel):
    """Steps [first, last] (1-based, inclusive) that count; not `stable`: no time is reported."""

    first: int
    last: int
    stable: bool
    method: str
    reason: str = ""


class RunSummary(BaseModel):
    """Numbers derived from raw samples; None means not measured, never zero.

    memory_by_category_bytes: at the moment of `ledger_peak_bytes` if that was measured, else the
    highest of each category, whose sum is an upper bound.
    cpu_milliseconds_median: CPU time of a step over all ranks and threads; by_thread: of which.
    counts: what one step does, over all ranks, by metric (`bench.derive.counts.COUNTED`).
    phase_milliseconds: parts of a step, on the rank that took longest. host_milliseconds: on that
    rank, until the step was enqueued.
    `notes` says in words what was withheld and why.
    """

    model_config = ConfigDict(extra="ignore")

    formula: str
    steady: SteadyWindow | None = None
    step_milliseconds_median: float | None = None
    step_milliseconds_p90: float | None = None
    tokens_per_second: float | None = None
    tflops_per_second_per_device: float | None = None
    mfu: float | None = None
    peak_tflops: float | None = None
    final_loss: float | None = None
    final_grad_norm: float | None = None
    wire_bytes_per_step: float | None = None
    rss_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    ledger_peak_bytes: int | None = None
    ledger_is_measured: bool = False
    memory_by_category_bytes: dict[str, int] = {}
    counts: dict[str, int] = {}
    cpu_milliseconds_median: float | None = None
    cpu_milliseconds_by_thread: dict[str, float] = {}
    phase_milliseconds: dict[str, float] = {}
    host_milliseconds_median: float | None = None
    notes: tuple[str, ...] = ()


class MemoryChange(BaseModel):
    """Bytes that one buffer took (positive) or gave back (negative) at one time of a step.

    milliseconds: since the step began. category: as in `memory_by_category_bytes`. bucket, role:
    the buffer, as `layers.0/0` and `compute_weights`; "" where unknown. in_pool: the buffer uses a
    slot of a pool whose bytes are counted already, so the total does not change.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    milliseconds: float = 0.0
    category: str
    bytes: int
    bucket: str = ""
    role: str = ""
    in_pool: bool = False

    @property
    def unit(self) -> str:
        """Owner of the bucket, as `layers.0`; "" where the buffer belongs to none."""
        return self.bucket.rpartition("/")[0]


class MemoryTimeline(BaseModel):
    """`timeline` in `memory.json`: one step of rank 0, change by change.

    start: everything that was held when the step began (`milliseconds` 0), changes: what came and
    went in it, in order; marks: (milliseconds, name) of its parts.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int
    milliseconds: float
    start: tuple[MemoryChange, ...]
    changes: tuple[MemoryChange, ...]
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class RunOutline:
    """What an overview of many runs needs of each; `damage` as that of its record."""

    run_id: str
    resolved: ResolvedRun
    status: RunStatus
    damage: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """As of its record."""
        return self.status.state in FINISHED_GOOD and not self.damage


class RankPlacement(BaseModel):
    """Where the ranks of a run were: node and local rank of each, by rank."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    nodes: tuple[str, ...]
    local_ranks: tuple[int, ...]

    @property
    def ranks_by_node(self) -> dict[str, list[int]]:
        """In the order of the nodes' first ranks."""
        steps: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            steps.setdefault(node, []).append(rank)
        return steps


@dataclass(frozen=True)
class RunRecord:
    """One run, read back. `problems` names what was damaged or missing; reading never raises it.

    changed: of them, what was changed after the end of the run.
    """

    run_id: str
    resolved: ResolvedRun
    status: RunStatus
    environment: dict[str, Any]
    steps: dict[int, list[StepSample]]
    memory: dict[str, Any] | None = None
    counts: dict[str, Any] | None = None
    problems: tuple[str, ...] = field(default_factory=tuple)
    changed: tuple[str, ...] = ()

    @property
    def workload(self) -> Workload:
        """What ran, in the terms of any framework."""
        return Workload.of(self.resolved)

    @property
    def runtime(self) -> Mapping[str, Any]:
        """What ranks said of themselves; empty where they did not get that far."""
        runtime = self.environment.get("runtime")
        return runtime if isinstance(runtime, Mapping) else {}

    @property
    def placement(self) -> RankPlacement | None:
        """None where not every rank said where it was, and in older records."""
        placement = understood(RankPlacement, self.runtime.get("placement"))
        if placement is None:
            return None
        ranks = self.resolved.launch.ranks
        has_all = len(placement.nodes) == len(placement.local_ranks) == ranks
        return placement if has_all else None

    @property
    def provenance(self) -> Provenance:
        """Measured here: what is imported is `bench.store.imports`'s."""
        return Provenance()

    @property
    def damage(self) -> tuple[str, ...]:
        """Why a run does not count: files changed after its end, damaged ones, missing steps.

        Of a run that did not finish only what was changed after its end.
        """
        if self.status.state not in FINISHED_GOOD:
            return self.changed
        expected = self.resolved.train.steps
        counts = {rank: len(self.steps.get(rank, ())) for rank in range(self.resolved.launch.ranks)}
        short = [rank for rank, count in counts.items() if count < expected]
        lacking = [f"rank {rank} has {counts[rank]} of {expected} steps" for rank in short[:_SHOWN]]
        if len(short) > _SHOWN:
            lacking.append(f"{len(short) - _SHOWN} more ranks lack steps")
        return (*self.problems, *lacking)

    @property
    def is_whole(self) -> bool:
        """The run finished, no file is damaged, and every rank has every step."""
        return self.status.state in FINISHED_GOOD and not self.damage

    @property
    def losses(self) -> list[float]:
        """Loss per step, averaged over the ranks that have the step (only steps all ranks have)."""
        means = []
        for ranks in zip(*self.steps.values(), strict=False):
            losses = [sample.loss for sample in ranks if sample.loss is not None]
            if len(losses) == len(ranks):
                means.append(sum(losses) / len(losses))
        return means
