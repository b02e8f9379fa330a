"""What was seen of a case, and what should have been, computed once and shared by all checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.inspection import BucketContents, LocalRows
from bench.spec import DtypeName
from bench.testing import rounding
from bench.testing.reference import Named
from bench.validate import joining
from bench.validate.cases import POLICIES, Case
from bench.validate.observation import Seen, StepSeen
from bench.validate.reference import RawStep, Reference, ReferenceOptimizer
from bench.validate.scenario import REDIRECTED
from bench.validate.toy_models import BATCH, POSITIONS
from bench.verdict import Finding


class WrongError(Exception):
    """The check fails. measured: how far off, in words."""

    def __init__(self, finding: Finding, measured: str = "") -> None:
        super().__init__(finding)
        self.finding = finding
        self.measured = measured


def wrong(step: int | None = None, measured: str = "", **fields: object) -> WrongError:
    """What is wrong, in a step that is counted from 0 here and from 1 for people."""
    counted = None if step is None else step + 1
    return WrongError(Finding.model_validate({"step": counted, **fields}), measured)


class NotApplicableError(Exception):
    """The check does not apply to this engine or case; says why."""


def numbers_apart(expected: Tensor | float, value: Tensor | float) -> dict[str, str]:
    """Both around where they differ most, with as many digits as tell them apart, 6 at least."""
    expected, value = (torch.as_tensor(number, dtype=torch.float64) for number in (expected, value))
    difference = (value - expected).abs().flatten()
    at = int(difference.nan_to_num(torch.inf).argmax()) if value.numel() else None
    texts = ("", "")
    for digits in range(6, 18):
        texts = numbers(expected, at, digits), numbers(value, at, digits)
        if texts[0] != texts[1]:
            break
    return dict(zip(("expected", "found"), texts, strict=True))


def difference(expected: Tensor, value: Tensor | None) -> dict[str, str] | None:
    """What to say of both; None where they have the same shape and bits."""
    if value is None:
        return {"expected": numbers(expected), "found": "nothing"}
    if value.shape != expected.shape:
        shapes = (f"shape {tuple(tensor.shape)}" for tensor in (expected, value))
        return dict(zip(("expected", "found"), shapes, strict=True))
    return None if torch.equal(value, expected) else numbers_apart(expected, value)


def numbers(tensor: Tensor, at: int | None = None, digits: int = 6) -> str:
    """The first numbers of a tensor, or those around element `at` of it."""
    flat = tensor.detach().flatten()
    start = 0 if at is None else max(0, min(at - 1, flat.numel() - 3))
    shown = ", ".join(f"{value:.{digits}g}" for value in flat[start : start + 3].double().tolist())
    more = ", ..." if flat.numel() > start + 3 else ""
    return f"[{'..., ' if start else ''}{shown}{more}]" if flat.numel() else "no elements"


#: ||difference|| / ||expected|| that one step of right arithmetic stays within, by main dtype.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


class CaseEvidence:
    """A case, what its ranks saw, and the reference.

    Raises (from its properties):
        JoiningError: shards that do not fit together.
    """

    def __init__(self, case: Case, seen: Sequence[Seen], device: torch.device) -> None:
        self.case = case
        self.seen = seen
        self.reference = Reference(case, device, autocast=seen[0].autocast)
        self.tolerance = TOLERANCE[self.reference.main]
        self._raw: dict[int, RawStep] = {}

    @property
    def ranks(self) -> range:
        """All ranks of the case."""
        return range(len(self.seen))

    @cached_property
    def steps(self) -> range:
        """Steps that every rank has, up to the first after which a weight is NaN or Inf.

        What follows is computed from it, by the reference as well.
        """
        count = min(len(watched.steps) for watched in self.seen)
        if not _finite(watched.initial for watched in self.seen):
            return range(0)
        poisoned = (s for s in range(count) if not _finite(w.steps[s].weights for w in self.seen))
        return range(next(poisoned, count - 1) + 1)

    def each(self, steps: Iterable[int] | None = None) -> Iterator[tuple[int, int, StepSeen]]:
        """Of all steps, or of these: the step, the rank, and what it saw."""
        for step in self.steps if steps is None else steps:
            for rank, watched in enumerate(self.seen):
                yield step, rank, watched.steps[step]

    def require(self, *parts: str) -> None:
        """Of what the engine may have no counterpart for, what a check needs.

        Raises:
            NotApplicableError: it has none.
        """
        for part in parts:
            if part in self.seen[0].lacking:
                raise NotApplicableError(self.seen[0].lacking[part])

    @property
    def fed_steps(self) -> list[int]:
        """Those whose gradients, as found, are finite: what is made of others says nothing."""
        gradients = ([w.steps[step].gradients for w in self.seen] for step in self.steps)
        return [step for step, held in zip(self.steps, gradients, strict=True) if _finite(held)]

    @property
    def updated_steps(self) -> list[int]:
        """Steps that the optimizer has taken."""
        return [step for step in self.steps if self.seen[0].steps[step].stepped]

    @property
    def tokens(self) -> int:
        """That a step divides its gradients by, where losses are per token: its own."""
        each = self.case.microbatches * self.case.data_ranks * BATCH * POSITIONS
        return each if self.case.per_token else 1

    @property
    def settled_steps(self) -> list[int]:
        """Steps that hold and gather what the tables of the strategies say."""
        reads_ahead = self.case.scenario == "ahead"
        return self.updated_steps[-1:] if reads_ahead else self.updated_steps

    @property
    def trainable(self) -> list[str]:
        """Parameters that have a gradient."""
        return self.reference.trainable

    @property
    def reduces_every_microbatch(self) -> bool:
        """Whether the strategy has no room for a whole gradient."""
        return "gradients" in self.case.sharded

    @cached_property
    def initial(self) -> Named:
        """Whole main weights before the first step, as they were found."""
        return self.whole([watched.initial for watched in self.seen])

    @cached_property
    def weights(self) -> list[Named]:
        """Whole main weights after each step, as they were found."""
        return [self.whole([watched.steps[s].weights for watched in self.seen]) for s in self.steps]

    def before(self, step: int) -> Named:
        """Whole main weights that `step` began with, as they were found."""
        return self.initial if step == 0 else self.weights[step - 1]

    def encoded_before(self, step: int) -> list[Named]:
        """Main weights at every encoding before that which `step` computes with, since a load.

        Frozen ones are encoded once.
        """
        earlier = [self.before(other) for other in self.updated_steps if other < step]
        return [{name: watched[name] for name in self.trainable} for watched in earlier]

    def is_encoded(self, bucket: BucketContents) -> bool:
        """Whether the weights of a buffer are quantised on their way: those of matrices."""
        shapes = [self.reference.shapes[name] for name in bucket.parameters]
        return self.case.recipe != "none" and all(len(s) > 1 and prod(s) for s in shapes)

    def raw(self, step: int) -> RawStep:
        """g[r, j] of `step`."""
        if step not in self._raw:
            count = self.case.microbatches + (not self.seen[0].steps[step].stepped)
            before, earlier = self.before(step), self.encoded_before(step)
            self._raw[step] = self.reference.step(before, step, count, earlier)
        return self._raw[step]

    def wire_dtype(self, step: int) -> DtypeName:
        """Dtype in which gradients are to travel in `step`."""
        if self.case.scenario == "redirected" and step < len(REDIRECTED):
            return REDIRECTED[step]
        return POLICIES[self.case.policy][3]

    def expected_gradient(self, name: str, step: int) -> tuple[Tensor, Tensor | None]:
        """The gradient, FP64; with a slack per element where dtypes differ on the way.

        Where losses are per token, the sum over all of them.
        """
        summed = self.case.data_ranks if self.case.per_token else 1
        mean, slack = self._mean(name, step)
        return mean * summed, None if slack is None else slack * summed

    def _mean(self, name: str, step: int) -> tuple[Tensor, Tensor | None]:
        compute, _, grads, _ = (TORCH_DTYPES[d] for d in POLICIES[self.case.policy])
        wire = TORCH_DTYPES[self.wire_dtype(step)]
        # Where contributions cancel, what is left may be smaller than their roundings to 32 bits.
        if compute == grads == wire == torch.float64:
            return self.raw(step).mean(name), None
        outer = self.case.outer
        # The core adds up as the gradients are; a divisor that is no power of two rounds before.
        scatters = bool(self.case.sharded) and self.case.outer == 1
        wide = (
            self.case.transport != "native"
            and self.case.resolved("cpu").engine.known_row.dtypes.sums
        )
        wide = wide and torch.finfo(grads).eps < torch.finfo(wire).eps
        exact = wide and scatters and self.case.data_ranks.bit_count() == 1
        further = not self.seen[0].steps[step].stepped
        model = rounding.Model(
            grads,
            wire,
            self.case.inner,
            outer,
            self.reduces_every_microbatch,
            rounds_sum=not exact,
            again=further and not self.reduces_every_microbatch,
        )
        return rounding.expected(self.raw(step).contributions(name), model)

    def gradient_shards(self, name: str, step: int) -> list[LocalRows | None]:
        """Before clipping, of all ranks."""
        return [watched.steps[step].gradients.get(name) for watched in self.seen]

    def gradients(self, step: int, *, clipped: bool = False) -> dict[str, Tensor | None]:
        """Whole gradients, as they were found; None where no rank has one."""
        steps = [watched.steps[step] for watched in self.seen]
        held = [(seen.clipped or {}) if clipped else seen.gradients for seen in steps]
        gradients: dict[str, Tensor | None] = {}
        for name in self.trainable:
            shards = [of_rank[name] for of_rank in held if of_rank.get(name) is not None]
            is_complete = len(shards) == len(held)
            shape = self.reference.shapes[name]
            gradients[name] = joining.joined(name, shards, shape) if is_complete else None  # type: ignore[arg-type]
        return gradients

    def whole(self, shards: Sequence[dict[str, LocalRows]]) -> Named:
        """Every parameter, put together."""
        shapes = self.reference.shapes
        absent = [name for name in shapes if any(name not in of_rank for of_rank in shards)]
        if absent:
            raise joining.JoiningError(f"no weights of {', '.join(absent)} on some rank")
        return {
            name: joining.joined(name, [of_rank[name] for of_rank in shards], shape)
            for name, shape in shapes.items()
        }

    def optimizer(self) -> ReferenceOptimizer:
        """A fresh reference optimizer at the initial weights."""
        return ReferenceOptimizer(self.case, self.initial, self.trainable)

    def bucket_of(self, name: str) -> str | None:
        """The engine's buffer that holds `name`, if it tells."""
        for bucket in self.seen[0].buckets:
            if name in bucket.parameters:
                return bucket.name
        return None

    def used_elements(self, bucket: BucketContents) -> int:
        """Elements of its parameters, without padding."""
        return sum(prod(self.reference.shapes[name]) for name in bucket.parameters)

    def wire_lines(self, step: int, name: str | None, rank: int = 0) -> tuple[str, ...]:
        """What the engine logged, or else what was seen, of a step (of one parameter's bucket)."""
        seen_step = self.seen[rank].steps[step]
        bucket = self.bucket_of(name) if name else None
        lines = [
            f"{e.operation} {e.dtype} {e.payload_bytes} B over {e.group} ({e.group_size} ranks), "
            f"bucket {e.bucket}"
            for e in seen_step.log
            if bucket is None or e.bucket == bucket
        ] or [
            f"{s.operation} {s.dtype} {s.payload_bytes} B, {s.ranks} ranks" for s in seen_step.sent
        ]
        return _counted(lines, f"rank {rank}, step {step + 1}: ")


def _finite(shards: Iterable[Mapping[str, LocalRows | None]]) -> bool:
    held = (shard for of_rank in shards for shard in of_rank.values() if shard is not None)
    return all(bool(torch.isfinite(shard.rows).all()) for shard in held)


def _counted(lines: Sequence[str], prefix: str, most: int = 8) -> tuple[str, ...]:
    """Equal neighbours as one line with a count."""
    grouped: list[tuple[str, int]] = []
    for line in lines:
        if grouped and grouped[-1][0] == line:
            grouped[-1] = (line, grouped[-1][1] + 1)
        else:
            grouped.append((line, 1))
    shown = [prefix + (f"{n} x {line}" if n > 1 else line) for line, n in grouped[:most]]
    if len(grouped) > most:
        shown.append(f"{prefix}... and {len(grouped) - most} more")
    return tuple(shown)
