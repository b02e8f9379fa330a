"""What the counter sees of a step, in this process."""

from __future__ import annotations

import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.derive.counts import COUNTED, CountRow
from bench.derive.exposed import merged
from bench.meters.call_sites import CallSites
from bench.meters.operation_counter import OperationCounter, varying
from bench.worker.counting import is_compiled


def counted(step) -> list[CountRow]:
    counter = OperationCounter(CallSites())
    with counter.counting():
        step()
    return counter.rows()


def total(rows: list[CountRow], metric: str) -> int:
    return sum(map(COUNTED[metric][1], rows))


def row(rows: list[CountRow], name: str) -> CountRow:
    return next(one for one in rows if one.name == name)


def test_a_cast_is_named_with_both_dtypes_its_bytes_and_its_caller():
    weights = torch.ones(1000)
    found = row(counted(weights.bfloat16), "aten._to_copy float32>bfloat16")
    assert (found.kind, found.count, found.bytes) == ("cast", 1, 4000 + 2000)
    assert (found.allocations, found.allocated_bytes) == (1, 2000)
    assert "test_operation_counter.py" in found.site
    assert found.line > 0


def test_a_copy_reads_and_writes_and_a_fill_only_writes():
    one, other = torch.ones(10), torch.zeros(10)
    rows = counted(lambda: (one.copy_(other), one.zero_()))
    assert row(rows, "aten.copy_ float32").bytes == 80
    assert row(rows, "aten.zero_ float32").bytes == 40
    assert total(rows, "copies") == 2
    assert total(rows, "allocations") == 0


def test_views_move_nothing_and_allocate_nothing():
    value = torch.ones(4, 4)

    def step():
        value.view(16)[2:].detach()

    rows = counted(step)
    assert total(rows, "operations") == 3
    assert total(rows, "copied_bytes") == total(rows, "allocations") == 0


def test_the_backward_pass_its_hooks_and_recomputation_are_seen():
    model, value = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.ones(2, 8)
    model[0].weight.register_hook(lambda grad: grad.double().float())

    def plain():
        model(value).sum().backward()

    def recomputed():
        checkpoint(model, value, use_reentrant=False).sum().backward()

    recomputed()  # torch loads what it recomputes with when it is first asked to
    rows = counted(plain)
    assert row(rows, "aten._to_copy float32>float64").count == 1
    assert row(rows, "aten.addmm float32").count == 2
    assert row(rows, "aten.mm float32").count == 3
    assert row(counted(recomputed), "aten.addmm float32").count > 2


def test_a_storage_that_grows_is_an_allocation_and_one_that_is_freed_is_none():
    storage = torch.ones(100).untyped_storage()

    def step():
        storage.resize_(0)
        storage.resize_(400)

    found = row(counted(step), "storage.resize_")
    assert (found.count, found.allocations, found.allocated_bytes) == (2, 1, 400)


def test_a_python_loop_and_a_sleep_are_seen():
    values = [1, 2, 3]

    def length(item: int) -> int:
        return item

    def short():
        length(1)

    def long():
        for item in values:
            length(item)
        time.sleep(0.001)

    few, many = counted(short), counted(long)
    assert total(many, "python_calls") >= total(few, "python_calls") + 2
    assert (total(few, "waits"), total(many, "waits")) == (0, 1)


def turn(times: int) -> None:
    while times:
        times -= 1


def test_lines_of_a_loop_that_calls_nothing_are_counted_by_function():
    one, many = counted(lambda: turn(1)), counted(lambda: turn(40_000))
    assert total(many, "python_lines") - total(one, "python_lines") == 2 * 39_999
    lines = {one.site.partition(":")[2]: one for one in many if one.kind == "python_line"}
    assert (lines["turn"].count, lines["turn"].line) == (80_001, turn.__code__.co_firstlineno)
    assert total(one, "python_calls") == total(many, "python_calls")


def test_turns_of_a_loop_on_one_line_are_counted():
    def on_one_line(times):
        return [None for _ in range(times)]

    few, many = counted(lambda: on_one_line(1)), counted(lambda: on_one_line(1000))
    assert total(many, "python_lines") - total(few, "python_lines") == 999


def test_lines_of_the_harness_do_not_count():
    rows = counted(lambda: merged([(1.0, 2.0)] * 1000))
    assert not [one for one in rows if one.site.startswith("bench/")]


def test_a_trace_function_that_was_there_before_is_there_again():
    def mine(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(mine)
    try:
        counted(lambda: turn(1))
        assert sys.gettrace() is mine
    finally:
        sys.settrace(before)


@pytest.mark.usefixtures("world_of_one")
def test_a_wait_behind_a_matrix_product_is_hidden_and_one_without_is_exposed():
    value, matrix = torch.ones(8), torch.ones(4, 4)

    def hidden():
        work = dist.all_reduce(value, async_op=True)
        matrix @ matrix
        work.wait()

    def exposed():
        matrix @ matrix
        dist.all_reduce(value)

    before, after = counted(hidden), counted(exposed)
    assert total(before, "collectives") == total(after, "collectives") == 1
    assert total(before, "collective_bytes") == 32
    assert total(before, "waits") == total(after, "waits") == 1
    assert (total(before, "exposed_waits"), total(after, "exposed_waits")) == (0, 1)


def test_nothing_of_the_counter_stays_behind():
    before = dist.Work.wait
    counted(lambda: torch.ones(1))
    assert dist.Work.wait is before
    assert [one for one in counted(lambda: None) if not one.kind.startswith("python")] == []


def test_two_counts_that_differ_name_the_rows():
    value = torch.ones(1)
    once, twice = counted(lambda: value.add_(1)), counted(lambda: value.add_(1).add_(1))
    assert varying(once, once) == []
    assert "aten.add_ float32" in {text.split(" at ")[0] for text in varying(once, twice)}


def test_what_torch_compile_runs_is_counted_without_it():
    model, value = nn.Linear(4, 4), torch.ones(2, 4)
    compiled = torch.compile(model, backend="eager")
    compiled(value)
    rows = counted(lambda: compiled(value).sum().backward())
    assert row(rows, "aten.addmm float32").count == 1
    assert (is_compiled(compiled), is_compiled(model)) == (True, False)
    model.compile(backend="eager")
    assert is_compiled(model)
