"""Runs that keep NCCL logs: what they set, what they note, and how they are audited."""

from __future__ import annotations

import json

import pytest

from bench.errors import ConfigError, NothingMeasuredError
from bench.launch.command import nccl_variables
from bench.launch.rank import give_nccl_a_log
from bench.resolve.resolution import EVIDENCE_STEPS, resolve_anywhere
from bench.spec import RunSpec
from nccl_lines import coll, info, init, on_cuda, ring, sym
from reports.nccl.audit import audit_run
from reports.nccl.verdicts import Verdict, judge, parse_requirements


def resolved(**launch):
    return on_cuda(launch, measure={"nccl": "evidence"}, train={"steps": 50})


def test_an_evidence_run_is_short_and_not_comparable_in_time():
    run = resolved()
    assert run.train.steps == EVIDENCE_STEPS
    assert not run.measure.comparable_in_time
    assert '"nccl":"evidence"' in run.canonical_json()
    assert '"nccl"' not in resolve_anywhere(RunSpec()).canonical_json()
    with pytest.raises(ConfigError, match="NCCL_DEBUG_FILE"):
        resolved(env={"NCCL_DEBUG_FILE": "elsewhere"})


def test_it_sets_what_nccl_needs_and_each_rank_its_own_file(tmp_path):
    variables = nccl_variables(resolved())
    assert {"TUNING", "COLL", "REG", "INIT", "ENV"} <= set(
        variables["NCCL_DEBUG_SUBSYS"].split(",")
    )
    (tmp_path / "100%").mkdir()
    give_nccl_a_log(tmp_path / "100%", 3, variables)
    assert variables["NCCL_DEBUG_FILE"] == str(tmp_path / "100%%" / "nccl" / "rank3.log")
    assert nccl_variables(resolved(device="cpu")) == {}


def write_run(folder):
    nccl = folder / "nccl"
    nccl.mkdir(parents=True)
    spec = {"launch": {"device": "cuda"}, "measure": {"nccl": "evidence"}}
    (folder / "spec.json").write_text(json.dumps(spec))
    for rank in range(2):
        call = coll("AllGather", comm=f"0xa{rank}", count=64, dtype=7, ranks=2)
        first = [
            init(rank, f"0xa{rank}", ranks=2)[-1],
            call,
            *[ring("AllGather", 256)] * (rank == 0),
        ]
        second = [call, *[sym("AllGather", "AllGather_LL", 256, works=1)] * (rank == 0)]
        texts = ["".join(f"{info(line, rank)}\n" for line in part) for part in (first, second)]
        (nccl / f"rank{rank}.log").write_text("".join(texts))
        marks = [(1, len(texts[0])), (2, len(texts[0]) + len(texts[1]))]
        lines = [json.dumps({"iteration": i, "offset_bytes": o}) for i, o in marks]
        (nccl / f"iterations.rank{rank}.jsonl").write_text("\n".join(lines) + "\n{cut")
        groups = {
            "groups": [{"role": "inner", "ranks": [0, 1]}, {"role": "outer", "ranks": [rank]}]
        }
        (nccl / f"groups.rank{rank}.json").write_text(json.dumps(groups))


def test_communicators_get_their_role_and_iterations_their_boundaries(tmp_path):
    write_run(tmp_path)
    audit = audit_run(tmp_path)
    [row] = audit.rows
    assert (row.communicator.role, row.verdict) == ("inner", Verdict.MIXED)
    wanted = parse_requirements("inner.AG=sym")
    assert [r.state for r in judge(audit, wanted)] == ["not met"]
    assert [r.state for r in judge(audit, wanted, 1)] == ["met"]
    assert [r.state for r in judge(audit, wanted, 2)] == ["no evidence"]
    assert [r.state for r in judge(audit, wanted, 7)] == ["no evidence"]


def test_a_run_without_logs_says_that_nccl_wrote_none(tmp_path):
    write_run(tmp_path)
    for log in (tmp_path / "nccl").glob("rank*.log"):
        log.unlink()
    with pytest.raises(NothingMeasuredError, match="NCCL wrote nothing"):
        audit_run(tmp_path)


@pytest.mark.parametrize("groups", [7, [3, {"role": "inner"}, {"role": "inner", "ranks": [[0]]}]])
def test_damaged_groups_name_no_role_and_damaged_marks_are_left_out(tmp_path, groups):
    write_run(tmp_path)
    (tmp_path / "spec.json").write_text(json.dumps({"launch": groups, "measure": groups}))
    for rank in (0, 1):
        (tmp_path / "nccl" / f"groups.rank{rank}.json").write_text(json.dumps({"groups": groups}))
        marks = f'[]\n{{"iteration": 1, "offset_bytes": {"9" * 5000}}}\n'
        (tmp_path / "nccl" / f"iterations.rank{rank}.jsonl").write_text(marks)
    [row] = audit_run(tmp_path).rows
    assert (row.communicator.role, row.verdict) == ("", Verdict.MIXED)
