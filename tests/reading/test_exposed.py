"""Exposed communication of generated traces; `tests/cli/test_cli_real_runs.py` makes a real one."""

from __future__ import annotations

import pytest

from bench.derive.exposed import exposed_communication


def event(name: str, start: float, end: float, *, cat="kernel", pid=0, tid=7):
    span = {"ts": start, "dur": end - start, "pid": pid, "tid": tid}
    return {"ph": "X", "cat": cat, "name": name, **span}


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SYMMETRIC = "ncclSymkDevKernel_ReduceScatter_LD(ncclSymkDevWorkArgs)"


ISSUED = event("c10d::allreduce_", 0, 1, cat="cpu_op", tid=1)
UNFINISHED = [{"ph": "i", "name": GATHER}, {"ph": "X", "name": GATHER}]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # Nothing computed: all of it is exposed. What a kernel covers is not, and covers once.
        ([event(GATHER, 10, 30)], {"AllGather": (1, 20, 20), "all": (1, 20, 20)}),
        (
            [
                *(event(GATHER, 10, 30), event("gemm", 0, 15)),
                event("Memcpy", 28, 40, cat="gpu_memcpy"),
            ],
            {"AllGather": (1, 20, 13)},
        ),
        (
            [event(GATHER, 0, 10), event("a", 1, 6), event("b", 2, 5), event("c", 6, 7)],
            {"AllGather": (1, 10, 4)},
        ),
        # Operations are told apart, and time that both take counts once together.
        (
            [event(GATHER, 0, 10), event(SYMMETRIC, 5, 20), event("gemm", 8, 12)],
            {"AllGather": (1, 10, 8), "ReduceScatter": (1, 15, 11), "all": (2, 20, 16)},
        ),
        # Copy engines communicate: between devices, or on a stream of NCCL's alone.
        (
            [
                event("Memcpy PtoP (Device -> Device)", 0, 10, cat="gpu_memcpy", tid=3),
                event(GATHER, 20, 30, tid=8),
                event("Memcpy DtoD (Device -> Device)", 30, 40, cat="gpu_memcpy", tid=8),
                event("Memcpy DtoD (Device -> Device)", 25, 35, cat="gpu_memcpy"),
                event("gemm", 5, 22),
            ],
            {"copies": (2, 20, 10), "AllGather": (1, 10, 3), "all": (3, 30, 13)},
        ),
        # Another device covers nothing.
        ([event(GATHER, 0, 10), event("gemm", 0, 10, pid=1)], {"AllGather": (1, 10, 10)}),
        # On a CPU only the thread that issues collectives computes.
        (
            [
                ISSUED,
                event("gloo:all_reduce", 0, 100, cat="user_annotation", tid=2),
                event("aten::mm", 10, 40, cat="cpu_op", tid=1),
                event("aten::copy_", 50, 90, cat="cpu_op", tid=2),
            ],
            {"all_reduce": (1, 100, 70)},
        ),
        # Other events count nothing.
        ([event("gemm", 0, 1), *UNFINISHED], {}),
    ],
)
def test_communication_is_exposed_where_nothing_is_computed_beside_it(events, expected):
    found = {
        name: (one.count, one.microseconds, one.exposed_microseconds)
        for name, one in exposed_communication(events).items()
    }
    assert found.keys() == (expected.keys() | {"all"} if expected else set())
    assert expected.items() <= found.items()


def test_the_share_is_unknown_where_no_time_was_taken():
    assert exposed_communication([event(GATHER, 5, 5)])["all"].fraction is None
    assert exposed_communication([event(GATHER, 0, 5)])["all"].fraction == 1.0
