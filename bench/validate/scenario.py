"""One case in one rank: drive the engine, and write down what is there. Judges nothing."""

from __future__ import annotations

import contextlib
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.engines.inspection import Inspectable, Inspection, LocalRows
from bench.engines.registry import build_engine
from bench.errors import UnsupportedError
from bench.models.sharding import EXPERT, TENSOR, mesh_of, tensor_mesh
from bench.spec import DtypeName
from bench.validate.cases import CLOSING_BOUNDS, EXPERT_PARALLEL, POLICIES, TENSOR_PARALLEL, Case
from bench.validate.observation import Seen, StepSeen
from bench.validate.toy_models import build_toy_model, microbatch
from bench.validate.traces import say, say_event
from bench.validate.weight_spy import WeightSpy
from bench.validate.wire_tap import WireTap

#: Small objects of torch and Python come and go; a bucket of the smallest toy model is larger.
NOISE_BYTES = 256
_LOOKS, _LOOK_SECONDS = 100, 0.01
#: Wire dtypes of the first steps of the scenario `redirected`.
REDIRECTED: tuple[DtypeName, ...] = ("fp32", "bf16")


class Bench:
    """The engine under test, its toy model and the instruments on it."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        resolved = case.resolved("cuda" if device.type == "cuda" else "cpu")
        self.case = case
        self.rank = rank
        self.device = device
        seed = 7 + (rank if case.scenario == "equalised" else 0)
        model = build_toy_model(case.model, starting_dtype(case), device, seed)
        self.spy = WeightSpy(model)
        _cut_over_meshes(model, case, device)
        self.engine: Any = build_engine(model, resolved, device)
        inspection = self.engine.inspection() if isinstance(self.engine, Inspectable) else None
        if inspection is None or Inspection not in type(inspection).__mro__:
            what = type(inspection).__name__ if inspection else "missing"
            raise UnsupportedError(
                "no-inspection",
                f"the factory of {case.engine} returned a {type(self.engine).__name__} whose "
                f"inspection() is {what}; expected an object with the methods of "
                "bench/engines/protocol.py, and inspection() that gives a subclass of "
                "bench.engines.inspection.Inspection (docs/extending.md shows one)",
            )
        self.inspection: Inspection = inspection
        with contextlib.suppress(UnsupportedError):
            self.inspection.follow(say_event)
        # DTensor adds up parts of gradients over the tensor-parallel ranks by itself.
        cut = tensor_mesh(model)
        ranks = None if cut is None else dist.get_process_group_ranks(cut.get_group(TENSOR))
        self.tap = WireTap(ranks)
        self.seen = Seen(rank, autocast=self.inspection.autocast)
        self._logged = 0
        self._accounted = 0
        # What was sent while the engine was built belongs to no step.
        with contextlib.suppress(UnsupportedError):
            self._logged = len(self.inspection.wire())
        self._accounted = self.engine.wire_bytes() or 0

    def accumulate(self, step: int, *, mark_last: bool = True, evaluates: bool = False) -> StepSeen:
        """All microbatches of a step (and evaluations), up to gradients that were looked at."""
        seen_step = StepSeen()
        count = self.case.microbatches
        for index in range(count):
            self.spy.begin(index)
            is_last = mark_last and index == count - 1
            if evaluates:
                self.evaluate(step, count + index)
            seen_step.losses.append(self.backward(step, index, is_last=is_last))
        if not mark_last:
            self.inspection.finish_gradients()
        seen_step.gradients = copied(self.inspection.gradients())
        seen_step.computed = {name: value.cpu() for name, value in self.spy.seen.items()}
        seen_step.changed = list(self.spy.changed)
        return seen_step

    def backward(self, step: int, index: int, *, is_last: bool) -> float:
        """One microbatch; its loss."""
        say(f"step {step + 1}, microbatch {index + 1}")
        tokens, targets = self.batch(step, index)
        return float(self.engine.forward_backward(tokens, targets, 1.0, is_last))

    def evaluate(self, step: int, index: int) -> None:
        """A forward pass without autograd."""
        self.inspection.evaluate(*self.batch(step, index))

    def batch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of this rank's microbatch `index`."""
        drawn = [
            microbatch(self.case.data_rank(rank), index, step, self.device)
            for rank in self.case.expert_peers(self.rank)
        ]
        tokens, targets = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        return tokens, targets

    def step(self, bound: float | None = None, *, mark_last: bool = True) -> None:
        """A cycle of microbatches, clipped to `bound` if there is one, and an optimizer step."""
        self.finish(self.accumulate(len(self.seen.steps), mark_last=mark_last), bound)

    def finish(self, seen_step: StepSeen, bound: float | None = None) -> None:
        """Clip, step, and look at what is left at rest."""
        say(f"step {len(self.seen.steps) + 1}, clipping and optimizer step")
        if bound is not None:
            norm = self.engine.clip_grad_norm(bound)
            seen_step.norm, seen_step.bound = None if norm is None else float(norm), bound
            seen_step.clipped = copied(self.inspection.gradients())
        if seen_step.stepped:
            self.engine.optimizer_step()
            seen_step.weights = self.weights()
        self.engine.zero_grad()
        if not seen_step.stepped:  # after an exception a new cycle begins with this
            seen_step.weights = self.weights()
        self.look_at_rest(seen_step)
        before = self.seen.steps[-1:]
        usual = before[0].live_bytes + NOISE_BYTES if before else sys.maxsize
        seen_step.live_bytes = settled_bytes([self.seen, seen_step], usual)
        self.seen.steps.append(seen_step)

    def look_at_rest(self, seen_step: StepSeen) -> None:
        """Wire and memory, after a step."""
        seen_step.sent = self.tap.take()
        with self.noting("log"):
            log = self.inspection.wire()
            seen_step.log, self._logged = log[self._logged :], len(log)
        sent = self.engine.wire_bytes()
        if sent is not None:
            seen_step.accounted_bytes, self._accounted = sent - self._accounted, sent
        with self.noting("ledger"):
            seen_step.held_bytes = self.inspection.held_bytes()

    def forget_wire(self) -> None:
        """What was sent so far belongs to no step."""
        self.look_at_rest(StepSeen())

    def weights(self) -> dict[str, LocalRows]:
        """Copies of this rank's rows of the main weights."""
        return {name: copied_shard(shard) for name, shard in self.inspection.weights().items()}

    def look_once(self) -> None:
        """What does not change from step to step."""
        self.seen.initial = self.weights()
        with self.noting("buckets"):
            self.seen.buckets = self.inspection.buckets()

    @contextlib.contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Keep the reason where the engine has no counterpart for `what`."""
        try:
            yield
        except UnsupportedError as refusal:
            self.seen.lacking[what] = refusal.reason


def run_case(case: Case, rank: int, device: torch.device) -> Seen:
    """Run `case` as rank `rank` of its process group, which exists.

    Raises:
        UnsupportedError: the engine cannot do it, by its own account.
    """
    start = time.process_time()
    say("building the engine")
    set_aside()
    before = live_bytes()
    bench = Bench(case, rank, device)
    with bench.tap:
        bench.look_once()
        _SCENARIOS[case.scenario](bench)
        _train_on(bench)
    seen = bench.seen
    del bench
    gc.collect()
    seen.left_bytes = settled_bytes(seen, before + NOISE_BYTES) - before
    seen.cpu_seconds = time.process_time() - start
    return seen


def starting_dtype(case: Case) -> torch.dtype:
    """Dtype of the model that an engine is built from: FP32, or FP64 where everything is."""
    return torch.float64 if case.policy == "fp64" else torch.float32


def _cut_over_meshes(model: nn.Module, case: Case, device: torch.device) -> None:
    """Cut the toy model by tensor parallelism, or spread its experts, where the case says so."""
    if size := TENSOR_PARALLEL.get(case.model):
        mesh = mesh_of(device, case.ranks, outer=1, last=TENSOR, last_size=size)
        model.cut(mesh)  # type: ignore[operator]
    elif size := EXPERT_PARALLEL.get(case.model):
        mesh = mesh_of(device, case.ranks, outer=1, last=EXPERT, last_size=size)
        model.spread(mesh)  # type: ignore[operator]


# -- scenarios ---------------------------------------------------------------------------------


def _train_on(bench: Bench) -> None:
    """How every case ends: a bug may show in what follows on what a scenario did."""
    for bound in CLOSING_BOUNDS:
        bench.step(bound)
    if bench.case.recipe == "none":  # codes are made of main weights, and change none
        with bench.noting("whole weights"):
            weights = bench.inspection.whole_weights()
            bench.seen.whole = {name: weight.detach().cpu() for name, weight in weights.items()}


def _train(bench: Bench) -> None:
    bench.step()


def _unmarked(bench: Bench) -> None:
    bench.step(mark_last=False)


def _ahead(bench: Bench) -> None:
    """Whatever was gathered before a step must not be used after it."""
    for step in range(2):
        seen_step = bench.accumulate(step, evaluates=True)
        bench.evaluate(step, 2 * bench.case.microbatches)
        bench.inspection.gather_ahead()
        bench.finish(seen_step)


def _again(bench: Bench) -> None:
    """The gradients seen are those of the step's microbatches and of one more."""
    seen_step = bench.accumulate(0)
    seen_step.stepped = False
    try:
        seen_step.losses.append(bench.backward(0, bench.case.microbatches, is_last=True))
        seen_step.gradients = copied(bench.inspection.gradients())
    except Exception as error:
        bench.seen.refusal = f"{type(error).__name__}: {error}"
    bench.finish(seen_step)


def _redirected(bench: Bench) -> None:
    for dtype in REDIRECTED:
        bench.inspection.set_wire_dtype(dtype)
        bench.step()
    bench.inspection.set_wire_dtype(POLICIES[bench.case.policy][3])


def _equalised(bench: Bench) -> None:
    bench.inspection.equalise_weights()
    bench.seen.initial = bench.weights()
    bench.forget_wire()
    bench.step()


def _reloaded(bench: Bench) -> None:
    with contextlib.suppress(UnsupportedError):
        # Copies in the compute dtype exist afterwards, and become stale.
        bench.evaluate(9, 0)
    other = build_toy_model(bench.case.model, starting_dtype(bench.case), bench.device, seed=8)
    wanted = {name: p.detach() for name, p in other.named_parameters()}
    bench.inspection.load_whole_weights(wanted)
    bench.seen.initial = bench.weights()
    last = next(reversed(wanted))
    # Other values: whatever of them is taken all the same is wrong in the next step.
    lacking = {name: weight + 1 for name, weight in wanted.items() if name != last}
    try:
        bench.inspection.load_whole_weights(lacking)
    except UnsupportedError:
        raise
    except Exception as error:
        bench.seen.refusal = f"{type(error).__name__}: {error}"
    bench.forget_wire()


def _exported(bench: Bench) -> None:
    names: list[str | None] = [tempfile.mkdtemp() if bench.rank == 0 else None]
    dist.broadcast_object_list(names)
    folder = Path(str(names[0]))
    try:
        exported = bench.inspection.exports(folder / "weights", *bench.batch(9, 0))
    finally:
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    bench.seen.exported = {
        way: {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
        for way, weights in exported.items()
    }
    bench.forget_wire()


_SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "train": _train,
    "unmarked": _unmarked,
    "again": _again,
    "ahead": _ahead,
    "redirected": _redirected,
    "equalised": _equalised,
    "exported": _exported,
    "reloaded": _reloaded,
}


# -- copies and bytes --------------------------------------------------------------------------


def copied_shard(shard: LocalRows) -> LocalRows:
    """On the CPU, in memory of its own."""
    return replace(shard, rows=shard.rows.detach().to("cpu", copy=True))


def copied(shards: dict[str, LocalRows | None]) -> dict[str, LocalRows | None]:
    """Every shard by `copied_shard`."""
    return {name: None if p is None else copied_shard(p) for name, p in shards.items()}


def set_aside() -> None:
    """Hide what is there from `live_bytes`: looking through all of torch for tensors takes long.

    Cyclic garbage goes first, since the collector never looks at what was set aside again.
    """
    gc.collect()
    gc.freeze()


def settled_bytes(kept: object, expected: int) -> int:
    """`live_bytes`, looked at again for a while if it is more than `expected`.

    A thread of the backend may drop the tensors of a finished collective a little later, and much
    later on a busy machine.
    """
    held = live_bytes(kept)
    for _ in range(_LOOKS):
        if held <= expected:
            break
        time.sleep(_LOOK_SECONDS)
        gc.collect()
        held = live_bytes(kept)
    return held


def live_bytes(kept: object = ()) -> int:
    """Bytes behind all tensors that Python knows of, each storage once, without those in `kept`.

    What autograd alone holds is not seen, nor what was there before the case began.
    """
    own = {t.untyped_storage().data_ptr() for t in _tensors_in(kept)}
    storages: dict[int, int] = {}
    for tensor in gc.get_objects():
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and not tensor.is_sparse:
            storage = tensor.untyped_storage()
            # Meta tensors say a size, and have no memory.
            if storage.nbytes() and storage.data_ptr() not in {0, *own}:
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors_in(kept: object) -> Iterator[Tensor]:
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, dict):
        for value in kept.values():
            yield from _tensors_in(value)
    elif isinstance(kept, list | tuple):
        for value in kept:
            yield from _tensors_in(value)
    elif isinstance(kept, Seen | StepSeen | LocalRows):
        yield from _tensors_in(
            list(vars(kept).values()) if not isinstance(kept, LocalRows) else kept.rows
        )
