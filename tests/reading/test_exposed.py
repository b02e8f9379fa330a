"""Exposed communication of generated traces; `tests/cli/test_cli_trace.py` makes a real one."""

from __future__ import annotations

from bench.derive.exposed import exposed_communication


def event(name: str, start: float, end: float, *, cat="kernel", pid=0, tid=7):
    span = {"ts": start, "dur": end - start, "pid": pid, "tid": tid}
    return {"ph": "X", "cat": cat, "name": name, **span}


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SYMMETRIC = "ncclSymkDevKernel_ReduceScatter_LD(ncclSymkDevWorkArgs)"


def shown(*events):
    return {
        name: (found.count, found.microseconds, found.exposed_microseconds)
        for name, found in exposed_communication(events).items()
    }


def test_nothing_computed_means_all_of_it_is_exposed():
    assert shown(event(GATHER, 10, 30)) == {"AllGather": (1, 20, 20), "all": (1, 20, 20)}


def test_what_a_kernel_covers_is_not_exposed():
    copy = event("Memcpy", 28, 40, cat="gpu_memcpy")
    found = shown(event(GATHER, 10, 30), event("gemm", 0, 15), copy)
    assert found["AllGather"] == (1, 20, 13)


def test_kernels_that_overlap_cover_once():
    found = shown(event(GATHER, 0, 10), event("a", 1, 6), event("b", 2, 5), event("c", 6, 7))
    assert found["AllGather"] == (1, 10, 4)


def test_operations_are_told_apart_and_time_that_both_take_counts_once_together():
    found = shown(event(GATHER, 0, 10), event(SYMMETRIC, 5, 20), event("gemm", 8, 12))
    assert found == {
        "AllGather": (1, 10, 8),
        "ReduceScatter": (1, 15, 11),
        "all": (2, 20, 16),
    }


def test_another_device_covers_nothing():
    found = shown(event(GATHER, 0, 10), event("gemm", 0, 10, pid=1))
    assert found["AllGather"] == (1, 10, 10)


def test_on_a_cpu_only_the_thread_that_issues_collectives_computes():
    issued = event("c10d::allreduce_", 0, 1, cat="cpu_op", tid=1)
    found = shown(
        issued,
        event("gloo:all_reduce", 0, 100, cat="user_annotation", tid=2),
        event("aten::mm", 10, 40, cat="cpu_op", tid=1),
        event("aten::copy_", 50, 90, cat="cpu_op", tid=2),
    )
    assert found["all_reduce"] == (1, 100, 70)


def test_other_events_and_traces_without_communication_count_nothing():
    unfinished = [{"ph": "i", "name": GATHER}, {"ph": "X", "name": GATHER}]
    assert shown(event("gemm", 0, 1), *unfinished) == {}
    assert shown() == {}


def test_the_share_is_unknown_where_no_time_was_taken():
    assert exposed_communication([event(GATHER, 5, 5)])["all"].fraction is None
    assert exposed_communication([event(GATHER, 0, 5)])["all"].fraction == 1.0
