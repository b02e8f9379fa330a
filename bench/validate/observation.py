"""What one rank saw while it ran a case: plain data and CPU tensors, judged elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from bench.engines.inspection import BucketContents, LocalRows, WireEntry


@dataclass(frozen=True)
class Sent:
    """One call of a collective, or one message, as torch's dispatcher saw it.

    operation: torch's own name, as `allreduce_` or `send`. elements: of the full buffer of a
    collective, of the tensor of a message. ranks: in its group. group: torch's name of it, which
    may differ between the groups of two ranks and is not compared.
    """

    operation: str
    dtype: str
    elements: int
    payload_bytes: int
    ranks: int
    group: str = field(default="", compare=False)


@dataclass
class StepSeen:
    """One step. Microbatches count from 0.

    gradients: before clipping. clipped: after it to the norm `bound`, None where the step did not
    clip. stepped: whether the optimizer took them. computed: the weights that the modules of the
    first microbatch read; changed: (microbatch, weight) that read something else in a later one.
    held_bytes, live_bytes: at rest after the step, by the engine's account and by the tensors that
    exist.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, LocalRows | None] = field(default_factory=dict)
    norm: float | None = None
    bound: float | None = None
    stepped: bool = True
    clipped: dict[str, LocalRows | None] | None = None
    weights: dict[str, LocalRows] = field(default_factory=dict)
    computed: dict[str, Tensor] = field(default_factory=dict)
    changed: list[tuple[int, str]] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    log: list[WireEntry] = field(default_factory=list)
    accounted_bytes: int | None = None
    held_bytes: dict[str, int] | None = None
    live_bytes: int = 0


@dataclass
class Seen:
    """All of it. lacking: what the engine has no counterpart for, and why.

    cpu_seconds: of this process, for this case. left_bytes: of tensors that exist after the engine
    was deleted and did not before it was built. autocast: whether the engine computes under
    autocast on main weights instead of casting them. exported: whole weights by each way out of the
    engine. refusal: the error of something that had to be
    """

    rank: int
    initial: dict[str, LocalRows] = field(default_factory=dict)
    steps: list[StepSeen] = field(default_factory=list)
    whole: dict[str, Tensor] | None = None
    buckets: list[BucketContents] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    left_bytes: int = 0
    refusal: str | None = None
    autocast: bool = False
    exported: dict[str, dict[str, Tensor]] | None = None
    cpu_seconds: float = 0.0
