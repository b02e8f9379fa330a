"""A collective by itself: right values on every transport, and wrong ones are told apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from bench.engines import collective
from bench.engines.collective import CollectiveEngine, WrongValuesError
from bench.engines.stream_order import StreamOrder
from bench.record import RunRecord, RunStatus
from bench.resolve.resolution import resolve_anywhere
from bench.spec import CollectiveName, DtypeSpec, EngineSpec, LaunchSpec, RunSpec, TrainSpec
from bench.store.samples import read_samples
from bench.worker.collective import OperationClock, measure_collective
from bench.worker.rank_process import RankProcess
from mfsdp_core.comm.protocol import Done, Summed
from mfsdp_core.streams import Streams
from oracle.ranks import RankPool, mesh
from test_user_buffers import Twin

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
OPERATIONS = get_args(CollectiveName)


def resolved(ranks: int = 2, dtype: str = "fp32", steps: int = 8, **settings: Any):
    spec = RunSpec(
        engine=EngineSpec(name="collective", **settings),
        dtypes=DtypeSpec(compute=dtype),
        train=TrainSpec(steps=steps),
        launch=LaunchSpec(ranks=ranks),
    )
    return resolve_anywhere(spec)


def group_of(ranks: int) -> Any:
    return dist.new_group([0, 1, 2]) if ranks == 3 else mesh(ranks).get_group("dp")


@pytest.mark.sample
@pytest.mark.on_ranks
@pytest.mark.parametrize("ranks_in_group", [2, 3, 4])
@pytest.mark.parametrize("transport", ["native", "point_to_point"])
def test_every_operation_brings_what_it_should(ranks_in_group: int, transport: str) -> None:
    """In every dtype, twice with operations in between."""
    group = group_of(ranks_in_group)
    if dist.get_rank() >= ranks_in_group:
        return
    with pytest.MonkeyPatch.context() as patch:
        # So that parts and slices end at different elements.
        patch.setattr(collective, "CHECKED_ELEMENTS", 100)
        for operation, dtype in product(OPERATIONS, ("fp64", "fp32", "bf16", "fp16")):
            if operation == "broadcast" and transport != "native":
                continue
            asked = {"operation": operation, "size_bytes": 2304, "transport": transport}
            engine = CollectiveEngine(resolved(ranks_in_group, dtype, **asked), CPU, group)
            engine.check()
            engine.start().wait()  # of zeros, which any number of sums leaves as they are
            assert not engine._full.any()
            assert not engine._own.any()
            engine.check()
            engine.close()


@pytest.mark.parametrize("count", [2, 3, 36, 37, 128, 256, 257, 1000, 4096])
def test_sums_over_any_number_of_ranks_are_exact_in_bf16(count: int) -> None:
    values, index = collective.ExactValues(count, CPU), torch.arange(20_000)
    total = sum(values.of(index, rank) for rank in range(count))
    assert torch.equal(values.summed(index), total)
    assert torch.equal(total.bfloat16().float(), total)
    assert 0 < total.max() <= 256
    assert len(total.unique()) > 1


class _Broken:
    """A communicator whose second rank spoils one element of the result."""

    def __init__(self, inner: Any, result: str) -> None:
        self.inner, self.result = inner, result

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.inner, name)
        if name not in OPERATIONS:
            return operation

        def spoiled(first: torch.Tensor, *rest: Any, **options: Any) -> Any:
            pending = operation(first, *rest, **options)
            pending.wait()
            if self.inner.rank == 1:
                first[17] += 1
            return pending

        return spoiled


def complaint(operation: str, wrong: Callable[..., Any] | None = None) -> str:
    """What is said of a result with one wrong element, or of that of `wrong`."""
    engine = CollectiveEngine(resolved(operation=operation, size_bytes=4096), CPU, group_of(2))
    made: Any = engine._communicator
    if wrong is None:
        engine._communicator = _Broken(made, operation)
    else:
        setattr(made, operation, partial(wrong, getattr(made, operation)))
    try:
        engine.check()
    except WrongValuesError as error:
        return str(error)
    return ""


@pytest.mark.on_ranks
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_wrong_element_on_one_rank_is_named(operation: str) -> None:
    said = complaint(operation)
    if dist.get_rank() == 0:
        assert said == ""
        return
    at = 17 + (512 if operation == "reduce_scatter" else 0)
    assert f"{operation} of 4096 bytes by native, plain memory: rank 1 expected" in said
    assert f"in element {at} and found" in said
    assert "; 1 of " in said


def swapped(gather: Any, full: torch.Tensor, own: torch.Tensor, bucket: str) -> Any:
    """A gather that brings the right slices in the wrong order."""
    pending = gather(full, own, bucket)
    pending.wait()
    full.copy_(full.roll(full.numel() // 2))
    return pending


def own_twice(_reduce: Any, full: torch.Tensor, _bucket: str, **_options: Any) -> Any:
    """A sum that takes this rank's values for the other's."""
    return Summed(full.mul_(2), Done())


@pytest.mark.on_ranks
@pytest.mark.parametrize(
    ("operation", "wrong"), [("all_gather", swapped), ("all_reduce", own_twice)]
)
def test_wrong_orders_and_sums_of_the_wrong_ranks_are_seen(
    operation: str, wrong: Callable[..., Any]
) -> None:
    assert "elements are wrong" in complaint(operation, wrong)


@pytest.mark.on_ranks
@pytest.mark.parametrize(
    ("registration", "level"), [("symmetric", "symmetric"), ("registered", "plain")]
)
def test_both_buffers_lie_in_the_pool_that_is_registered_and_given_back(
    registration: str, level: str
) -> None:
    """By a twin of NCCL's backend, which writes down what it is asked."""
    twin = Twin(CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streams, "of", staticmethod(lambda _device: twin))
        engine = CollectiveEngine(resolved(registration=registration), CPU, group_of(2))
    engine.check()
    report = engine.buffer_registration()
    assert (report["wanted"], report["groups"]["world"]["got"]) == (level, level)
    engine.close()
    log = [line for line in twin.log if line != "synchronize"]
    assert log == ["allocate", f"group 0: register {level}", "group 0: deregister"]
    after = {"got": "none", "reason": "deregistered"}
    assert engine.buffer_registration()["groups"]["world"] == after


def timed(folder: str) -> None:
    """All four ranks: the barrier of a step is one of the world."""
    run = resolved(4, operation="reduce_scatter", size_bytes=65536, operations=3)
    assert run.collective is not None
    process = RankProcess(dist.get_rank(), 4, CPU)
    measure_collective(run, run.collective, process, Path(folder))


def test_a_run_leaves_a_sample_per_step_and_rank_without_a_loss(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(timed, str(tmp_path))
    steps = read_samples(tmp_path, [])
    run = resolved(4, operation="reduce_scatter", size_bytes=65536, operations=3)
    record = RunRecord("r", run, RunStatus(state="ok"), {}, steps)
    assert record.is_whole
    assert record.losses == []
    assert sorted(steps) == [0, 1, 2, 3]
    for samples in steps.values():
        assert len(samples) == 8
        assert all(one.latency_milliseconds > 0 for one in samples)
        assert all(one.milliseconds > 0 for one in samples)
    runtime = json.loads((tmp_path / "runtime.json").read_text())
    assert runtime["transports"] == {"world": "native"}
    assert runtime["buffer_registration"] is None


class _Order(StreamOrder):
    """Also in words: what is issued, and what the current stream waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def issued(self, name: str, group: object, reads: Any, writes: Any) -> int:
        self.words.append("issued")
        return super().issued(name, group, reads, writes)

    def waited(self, number: int) -> None:
        self.words.append(f"waited for {number}")
        super().waited(number)


@pytest.mark.on_ranks
@pytest.mark.parametrize("transport", ["native", "point_to_point"])
def test_nothing_waits_between_operations_that_are_timed_on_their_groups_stream(
    transport: str,
) -> None:
    run = resolved(2, operation="reduce_scatter", size_bytes=65536, transport=transport)
    engine, order = CollectiveEngine(run, CPU, group_of(2)), _Order()
    with engine._streams.observed(order):
        engine.enqueue(3)
    engine.check()
    waits = [f"waited for {number}" for number in (1, 2, 3)]
    each = [word for wait in waits for word in ("issued", wait)]
    assert order.words == (["issued"] * 3 + waits if transport == "native" else each)
    assert order.unwaited == []


def test_on_a_device_operations_are_enqueued_between_two_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Logged:
        def __init__(self, **_options: bool) -> None:
            pass

        def start(self) -> Logged:
            log.append("start")
            return self

        def enqueue(self, operations: int) -> None:
            log.append(f"{operations} enqueued")

        def wait(self) -> None:
            log.append("wait")

        def synchronize(self) -> None:
            log.append("synchronize")

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, _later: Logged) -> float:
            return 40.0

    monkeypatch.setattr(dist, "barrier", lambda: log.append("barrier"))
    monkeypatch.setattr(torch.cuda, "Event", Logged)
    process = RankProcess(0, 2, torch.device("cuda", 0))
    times = OperationClock(Logged(), 4, process).step()  # type: ignore[arg-type]
    assert log[:13] == ["barrier", *["start", "wait", "synchronize"] * 4]
    assert log[13:] == ["barrier", "event", "4 enqueued", "event", "synchronize"]
    assert times.milliseconds == 10.0
    assert times.host_milliseconds is not None
