"""What a run asked of NCCL and what its log proves: in a row's words, and in the headline."""

from __future__ import annotations

import json

import pytest

from nccl_lines import coll, info, init, on_cuda, ring, sym
from reports.nccl.audit import audit_paths, audit_run
from reports.nccl.expectations import shortfalls, verdict_text
from reports.nccl.verdicts import judge, parse_requirements

UB = {"nccl_ub": True, "double_buffer": True, "allocator": "fixed_pool"}


def symmetric(operation, kernel, size=256):
    return sym(operation, f"{operation}_{kernel}", size, works=1)


def copy_engine(operation, size=256):
    return f"{operation} [Copy Engine]: {size} Bytes -> cudaMemcpy"


def audit(tmp_path, gathers, reductions, version="2.29.3"):
    """Of a log in which every gather and every reduction is told by the given lines."""
    nccl = tmp_path / "nccl"
    nccl.mkdir(parents=True)
    spec = {"launch": {"device": "cuda"}, "measure": {"nccl": "evidence"}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    lines = [f"NCCL version {version}+cuda13.0", *init(0, ranks=2)]
    for operation, told in (("AllGather", gathers), ("ReduceScatter", reductions)):
        for line in told:
            size = int(line.split(" Bytes")[0].split()[-1]) if " Bytes" in line else 256
            lines += [coll(operation, count=size // 4, dtype=7, ranks=2), line]
    (nccl / "rank0.log").write_text("".join(f"{info(line)}\n" for line in lines))
    return audit_run(tmp_path)


def resolved(*, engine=None, **launch):
    return on_cuda(launch, engine=engine or {})


SYMMETRIC = ([symmetric("AllGather", "ST")], [symmetric("ReduceScatter", "LD")])
REGULAR = ([ring("AllGather", 256)], [ring("ReduceScatter", 256)])


PARTLY = (SYMMETRIC[0], REGULAR[1])
NVLS = ([ring("AllGather", 256, algorithm="NVLS")], [ring("ReduceScatter", 256, algorithm="NVLS")])
COLLNET = (
    [ring("AllGather", 256, algorithm="COLLNET_DIRECT")],
    [ring("ReduceScatter", 256, algorithm="COLLNET_CHAIN")],
)
COPIED = {"engine": UB, "copy_engine": True}


@pytest.mark.parametrize(
    ("asked", "told", "lacks"),
    [
        ({}, REGULAR, None),
        ({"engine": UB}, SYMMETRIC, None),
        ({"engine": UB}, PARTLY, "symmetric kernels and did not get them: ReduceScatter REGULAR"),
        ({"engine": UB | {"symmetric_registration": False}}, PARTLY, None),
        # Of the copy engine, its own line.
        (COPIED, ([copy_engine("AllGather")], SYMMETRIC[1]), None),
        (COPIED, SYMMETRIC, "copy-engine gathers and did not get them: AllGather SYMMETRIC"),
        # Of NVLS, the algorithm or multicast.
        ({"nvls": "on"}, NVLS, None),
        (
            {"nvls": "on"},
            ([symmetric("AllGather", "STMC")], [symmetric("ReduceScatter", "LDMC")]),
            None,
        ),
        ({"nvls": "on"}, (NVLS[0], REGULAR[1]), "NVLS (NVLink SHARP) and did not get them: Red"),
        ({"nvls": "on"}, SYMMETRIC, "NVLS (NVLink SHARP) and did not get them: AllGather SYM"),
        ({"nvls": "off"}, SYMMETRIC, None),
        ({"collnet": "on"}, COLLNET, None),
        ({"collnet": "on"}, REGULAR, "CollNet (SHARP) and did not get them: AllGather REGULAR"),
    ],
)
def test_what_was_asked_for_is_shown_by_kernels_alone(tmp_path, asked, told, lacks):
    found = shortfalls(resolved(**asked), audit(tmp_path, *told))
    assert len(found) == (lacks is not None)
    assert all(text.startswith(f"requested {lacks}") for text in found)
    assert ("AllGather" in "".join(found)) == ("AllGather" in (lacks or ""))


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (REGULAR, "AllGather REGULAR on 24 channels; ReduceScatter REGULAR on 24 channels"),
        (SYMMETRIC, "AllGather SYMMETRIC on 9 channels; ReduceScatter SYMMETRIC on 9 channels"),
        (
            ([symmetric("AllGather", "ST", 300), ring("AllGather", 100)], []),
            "AllGather 25 % REGULAR on 24 channels, 75 % SYMMETRIC on 9 channels",
        ),
    ],
)
def test_a_verdict_is_a_share_of_the_bytes_where_kinds_are_mixed(tmp_path, told, text):
    assert verdict_text(audit(tmp_path, *told)) == text


def test_without_a_log_or_a_line_of_the_copy_engine_nothing_is_proved(tmp_path):
    silent = audit(tmp_path, ["some other line"], SYMMETRIC[1], version="2.28.9")
    (text,) = shortfalls(resolved(**COPIED), silent)
    assert "copy-engine gathers" in text
    (text,) = shortfalls(resolved(engine=UB), None)
    assert "no log tells" in text
    assert "measure.nccl: evidence" in text
    assert shortfalls(resolved(), None) == []


GATHERED = info(sym("AllGather", "AllGather_ST", works=1))
RINGED = info(ring("AllGather", 8192))


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ([GATHERED], "met"),
        ([*map(info, init(0)), GATHERED], "met"),
        ([GATHERED, RINGED], "not met"),
        ([GATHERED, RINGED.partition("nel{")[0]], "no evidence"),
        ([GATHERED, RINGED.partition("NG")[0]], "no evidence"),
        ([RINGED.partition("IMPLE")[0] + GATHERED], "no evidence"),
        ([GATHERED, "lGather: 8192 Bytes -> Algo RI" + GATHERED], "no evidence"),
        ([GATHERED, RINGED.replace("AllGather", "AllReduce").partition("NG")[0]], "met"),
        ([info(coll("AllGather")), GATHERED] * 3, "met"),
        ([info(coll("AllGather"))] * 6 + [GATHERED], "no evidence"),
        ([info(coll("AllGather")), "iteration 1 / 9 |", GATHERED], "met"),
        ([info(sym("AllGather", "AllReduce_ST", works=1))], "not met"),
    ],
)
def test_damage_and_calls_without_a_line_are_no_evidence(tmp_path, lines, state):
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    log = audit_paths([tmp_path])
    (result,) = judge(log, parse_requirements("AG=sym"))
    assert result.state == state
    [lack] = (
        shortfalls(resolved(engine=UB), log) if state != "met" else ["requested symmetric kernels"]
    )
    assert lack.startswith("requested symmetric kernels")
    assert ("does not prove it" in lack) == (state == "no evidence")


def test_damage_before_the_iterations_that_count_is_no_matter(tmp_path):
    lines = (RINGED.partition("NG")[0], "iteration 1 / 9 |", GATHERED)
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    wanted = parse_requirements("AG=sym")
    found = [judge(audit_paths([tmp_path]), wanted, after)[0].state for after in (None, 1)]
    assert found == ["no evidence", "met"]
