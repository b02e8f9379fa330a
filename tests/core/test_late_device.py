"""The late device does what CUDA does with streams, memory and graphs, and shows what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from late.device import LateDevice, StreamError
from late.group import late_group
from late.operations import late_device
from oracle.ranks import RankPool

SEEDS = range(12)


def now(device: LateDevice, tensor: Tensor) -> list[float]:
    """What the memory holds, without waiting for anything."""
    with torch._C._DisableTorchDispatch():
        return device.beneath(tensor).clone().tolist()


def test_nothing_runs_before_the_host_reads():
    with late_device(0) as device:
        doubled = torch.ones(2) * 2
        assert now(device, doubled) != now(device, doubled)  # NaN
        assert device.ran == 0
        assert float(doubled.sum()) == 4
        assert now(device, doubled) == [2, 2]
        assert doubled.tolist() == [2, 2]


def on_two_streams(seed: int, *, waits: bool) -> list[float]:
    with late_device(seed) as device:
        side = device.stream("side")
        made = torch.ones(2) * 2
        with device.on(side):
            if waits:
                side.wait_stream(device.compute)
            more = made + 1
        if waits:
            device.compute.wait_stream(side)
        total = more + made
    return total.tolist()


def test_streams_are_in_order_where_they_wait_and_in_any_other_where_they_do_not():
    assert {tuple(on_two_streams(seed, waits=True)) for seed in SEEDS} == {(5.0, 5.0)}
    wrong = [seed for seed in SEEDS if on_two_streams(seed, waits=False) != [5.0, 5.0]]
    assert wrong
    assert len(wrong) < len(SEEDS)
    assert on_two_streams(wrong[0], waits=False) != [5.0, 5.0]  # the same seed, the same order


def after_it_was_dropped(seed: int, *, waits: bool) -> list[float]:
    with late_device(seed) as device:
        side = device.stream("side")
        made = torch.ones(2) * 2
        side.wait_stream(device.compute)
        with device.on(side):
            more = made + 1
        if waits:
            device.compute.wait_stream(side)
        del made
    return more.tolist()


def test_memory_that_is_dropped_while_another_stream_reads_it_is_spoilt():
    assert {tuple(after_it_was_dropped(seed, waits=True)) for seed in SEEDS} == {(3.0, 3.0)}
    assert any(after_it_was_dropped(seed, waits=False) != [3.0, 3.0] for seed in SEEDS)


def test_a_storage_that_was_freed_holds_nothing_until_it_is_filled_again():
    with late_device(0) as device:
        memory = torch.zeros(2)
        before, address = memory + 1, memory.data_ptr()
        memory.untyped_storage().resize_(0)
        memory.untyped_storage().resize_(8)
        after = memory + 1
        memory.fill_(4)
    assert before.tolist() == [1, 1]
    assert after.tolist() != [1, 1]
    assert memory.tolist() == [4, 4]
    assert memory.data_ptr() == address
    assert device.ran > 0


def test_a_graph_repeats_what_was_captured_and_nothing_of_what_the_host_did():
    hosts = []
    with late_device(0) as device:
        side, value, total = torch.cuda.Stream(None), torch.ones(2), torch.zeros(2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            hosts.append(1)
            total += value * 2
        assert now(device, total) == [0, 0]
        for _ in range(3):
            graph.replay()
            value += 1
    assert total.tolist() == [2 + 4 + 6] * 2
    assert hosts == [1]


def test_a_capture_ends_where_it_began_and_reads_nothing():
    with late_device(0) as device:
        side, other = device.stream("side"), device.stream("other")
        made = torch.ones(2) * 1

        def captured(step: Callable[[], object]) -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
                other.wait_stream(side)
                with device.on(other):
                    step()

        with pytest.raises(StreamError, match="unjoined work on other"):
            captured(lambda: made * 2)
        with pytest.raises(StreamError, match="not permitted"):
            captured(made.tolist)


def a_collective(seed: int, wait: bool) -> tuple[bool, list[float]]:
    group = late_group(0, 1, 2, 3)
    with late_device(seed) as device:
        values = torch.ones(2) * (dist.get_rank() + 1)
        work = dist.all_reduce(values, group=group, async_op=True)
        if wait:
            work.wait()
        ran_nothing = device.ran == 0
        result = values * 1
    return ran_nothing, result.tolist()


@pytest.mark.processes
def test_waiting_for_a_collective_orders_and_does_nothing_else(ranks: RankPool):
    assert all(ranks.run(a_collective, seed, True) == [(True, [10, 10])] * 4 for seed in range(4))
    early = [ranks.run(a_collective, seed, False) for seed in range(4)]
    assert any(result != [(True, [10, 10])] * 4 for result in early)
