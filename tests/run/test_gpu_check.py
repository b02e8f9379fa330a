"""`make gpu-check`: parts run alone, each leaves a record, and nothing unmeasured counts as met."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.launch.command import SHARED_DEVICE
from bench.launch.git import git_state
from bench.resolve.machine import CudaDevice
from bench.store import ResultsStore
from bench.validate.session import WorkerSettings
from tools.gpu_check import sharing, symmetric, training
from tools.gpu_check.__main__ import PARTS, _say, main, run_part
from tools.gpu_check.communication import judge as judge_collective
from tools.gpu_check.core import note_tests
from tools.gpu_check.memory import judge as judge_memory
from tools.gpu_check.record import (
    ROOT,
    SHARES_DEVICE,
    Check,
    PartFindings,
    PartRecord,
    state_of,
)
from tools.gpu_check.speed import judge as judge_speed
from tools.gpu_check.timed import Timed
from tools.gpu_check.trained import Trained
from tools.gpu_check.validate import note_verdicts
from tools.gpu_wheels import NCCL_LIBRARY

PASSED_ON_A_CPU = ("core", "validate", "memory", "communication", "graphs", "fp8")
JUNIT = """<testsuites><testsuite>
  <testcase classname="a" name="good"/>
  <testcase classname="a" name="bad"><failure message="1 is not 2"/></testcase>
  <testcase classname="a" name="broken"><error message="no device"/></testcase>
  <testcase classname="a" name="left_out"><skipped message="needs 2 CUDA devices"/></testcase>
</testsuite></testsuites>"""


def states(findings: PartFindings) -> dict[str, str]:
    return {check.name: check.state for check in findings.checks}


def record(folder: Path, part: str):
    return json.loads((folder / f"{part}.json").read_text())


def trained(**changes) -> Trained:
    flat = [100 << 20] * 8
    values = {
        "losses": [1.0] * 8,
        "milliseconds": [50.0, 20.0, 4.0, 6.0, 5.0, 5.0, 5.0, 5.0],
        "resting_bytes": flat,
        "allocated_bytes": flat,
        "reserved_bytes": flat,
        "peak_allocated_bytes": 1,
        "allocation_retries": 0,
    }
    return Trained(**(values | changes))


@pytest.mark.parametrize(
    ("of_checks", "wanted"),
    [
        ((), "failed"),
        (("passed", "skipped"), "passed"),
        (("passed", "failed"), "failed"),
        (("skipped",), "skipped"),
        (("failed", "crashed"), "crashed"),
    ],
)
def test_a_part_passes_only_if_something_was_tried_and_nothing_failed(of_checks, wanted):
    assert state_of(Check("a", state) for state in of_checks) == wanted


def test_a_part_that_dies_or_hangs_has_a_record_and_does_not_stop_the_next(tmp_path):
    assert run_part("no_such_part", "cpu", tmp_path, 60.0) == "crashed"
    assert "invalid choice" in record(tmp_path, "no_such_part")["checks"][0]["said"]
    assert run_part("core", "cpu", tmp_path, 0.05) == "timed_out"
    found = record(tmp_path, "core")
    assert found["checks"][0]["said"] == "ended after 0.05 s, its limit"
    assert found["git"] == git_state(ROOT)
    assert found["machine"]["hostname"]


@pytest.mark.nightly
def test_every_part_can_be_tried_out_on_a_cpu(tmp_path):
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    found = {part: record(tmp_path, part)["state"] for part in PARTS}
    assert {found[part] for part in PASSED_ON_A_CPU} == {"passed"}
    assert found["speed"] == "no_collective_ran"
    assert set(found.values()) <= {"passed", "no_collective_ran", "skipped"}
    measured = record(tmp_path, "memory")["measurements"]
    assert measured["storage_resize"]["ledger"]["bytes"] > 0


@pytest.mark.parametrize(
    ("shares", "devices", "wanted"), [("", 1, 1), ("yes", 1, 2), ("yes", 8, 8), ("", 8, 8)]
)
def test_ranks_share_one_device_only_where_nccl_was_seen_to(monkeypatch, shares, devices, wanted):
    monkeypatch.setenv(SHARES_DEVICE, shares)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    assert training.rank_count("cuda") == wanted
    findings = PartFindings()
    training.note_ranks("cuda", findings)
    assert bool(findings.checks) == findings.on_one_rank == (wanted == 1)
    spec = training.small_run("cuda", {"name": "mfsdp"})["launch"]["ranks_per_device"]
    assert spec == (2 if wanted > devices else 1)


def test_what_holds_on_one_rank_has_not_passed_but_no_collective_ran(tmp_path, capsys):
    findings = PartFindings(on_one_rank=True)
    findings.expect("losses", True, "equal")
    findings.note("captured", "skipped", "a CPU has no graphs")
    assert state_of(findings.checks) == "no_collective_ran"
    findings.on_one_rank = False
    findings.expect("over NCCL", True, "equal")
    assert state_of(findings.checks) == "passed"
    PartRecord(
        "core", "cuda", "passed", 1.0, 2.0, "", tuple(findings.checks), {}, "core.log"
    ).write(tmp_path)
    _say(tmp_path / "core.json", 1.0)
    assert "1 no collective ran, 1 skipped, 1 passed" in capsys.readouterr().out
    findings.on_one_rank = True
    findings.expect("weights", False, "differ")
    assert state_of(findings.checks) == "failed"


def trial(says: str) -> tuple[str, ...]:
    """A process that stands for the two ranks of a trial."""
    return (sys.executable, "-c", f"import json, os, sys, time\n{says}")


def test_two_ranks_that_have_added_up_share_the_device_and_parts_are_told(tmp_path):
    library = tmp_path / NCCL_LIBRARY
    library.parent.mkdir()
    library.touch()
    asked = (
        "assert os.environ['NCCL_MULTI_RANK_GPU_ENABLE'] == '1'\n"
        "assert os.environ['NCCL_NVLS_ENABLE'] == '0'\n"
        "print(json.dumps({'nccl': os.environ['LD_PRELOAD'], 'sums': [3.0, 3.0]}))"
    )
    found = sharing.find(1, {"NCCL_LIB": ""}, tmp_path, trial(asked))
    assert found.works
    assert str(library) in found.said
    told = found.variables()
    assert told[SHARES_DEVICE] == found.said
    assert (told["NCCL_LIB"], told["NCCL_MULTI_RANK_GPU_ENABLE"]) == (str(library), "1")
    named = sharing.find(1, {"NCCL_LIB": "/of/the/user.so"}, tmp_path, trial(asked))
    assert named.library == "/of/the/user.so"


OLD = "print(json.dumps({'nccl': '2.28.9'}))"


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (OLD, "NCCL 2.28.9 puts one rank on a device"),
        ("time.sleep(60)", "was ended after 1 s"),
        ("sys.exit('CUDA driver version is insufficient')", "with 1: CUDA driver version"),
        ("os.kill(os.getpid(), 11)", "ended with -11"),
        ("print(json.dumps({'nccl': '2.31.2', 'sums': [3.0, 1.0]}))", "up to [3.0, 1.0]"),
    ],
)
def test_a_trial_that_does_not_add_up_leaves_one_rank_and_says_why(tmp_path, says, words):
    seconds = 1.0 if "sleep" in says else 60.0
    found = sharing.find(1, {}, tmp_path, trial(says), seconds)
    assert not found.works
    assert words in found.said
    assert "make gpu-wheels NCCL=13" in found.said
    assert found.variables() == {SHARES_DEVICE: ""}


def test_where_the_newer_library_fails_torchs_own_is_tried(tmp_path):
    says = f"sys.exit('no') if 'LD_PRELOAD' in os.environ else {OLD.replace('2.28.9', '2.30.7')}"
    says = says.replace("'}", "', 'sums': [3.0, 3.0]}")
    found = sharing.find(1, {"NCCL_LIB": "/broken.so"}, tmp_path, trial(says))
    assert (found.works, found.library) == (True, None)
    assert "NCCL_LIB" not in found.variables()


def test_several_devices_are_not_shared(tmp_path):
    found = sharing.find(8, {}, tmp_path, trial("sys.exit('asked')"))
    assert (found.works, found.said) == (False, "8 devices: a rank on each")


def test_the_validator_puts_two_ranks_on_a_shared_device(monkeypatch):
    device = CudaDevice("H200", 1, (9, 0))
    monkeypatch.setattr("bench.resolve.machine.visible_cuda_devices", lambda: (device,))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert WorkerSettings.of_this_machine(2, 1.0).ranks == 1
    for name, value in SHARED_DEVICE.items():
        monkeypatch.setenv(name, value)
    assert WorkerSettings.of_this_machine(2, 1.0).ranks == 2
    assert WorkerSettings.of_this_machine(None, 1.0).ranks == 1


def test_without_a_device_the_check_says_so_and_ends(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tools.gpu_check.__main__._has_device", lambda: False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_tests_of_a_device_are_counted_one_by_one_with_the_reason_of_those_left_out(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    findings = PartFindings()
    note_tests(tmp_path / "junit.xml", findings)
    wanted = {"good": "passed", "bad": "failed", "broken": "failed", "left_out": "skipped"}
    assert states(findings) == {f"a::{name}": state for name, state in wanted.items()}
    assert findings.checks[-1].said == "needs 2 CUDA devices"


def test_cases_of_the_validator_that_cannot_run_are_counted_by_their_reason():
    cases = [
        {"case": "a", "state": "passed", "reason": "", "settings": {"ranks": 2}},
        {"case": "b", "state": "failed", "reason": "", "settings": {"ranks": 2}},
        {"case": "e", "state": "passed", "reason": "", "settings": {"ranks": 1}},
        {"case": "c", "state": "not_applicable", "reason": "needs 2 ranks"},
        {"case": "d", "state": "not_applicable", "reason": "needs 2 ranks"},
    ]
    findings = PartFindings()
    note_verdicts({"cases": cases, "device": "cuda"}, findings)
    assert states(findings) == {
        "a": "passed",
        "b": "failed",
        "e": "no_collective_ran",
        "2 cases": "skipped",
    }


def test_a_target_is_met_missed_or_unmeasured_and_never_judged_on_a_cpu():
    numbers = {
        ("1b", "mfsdp"): {"milliseconds": 103.0, "peak_bytes": 9.0},
        ("1b", "single"): {"milliseconds": 100.0, "peak_bytes": 5.0},
        ("1b", "fsdp2"): {"milliseconds": 110.0},
    }
    on_cuda, on_cpu = PartFindings(), PartFindings()
    judge_speed(numbers, on_cuda, "cuda")
    judge_speed(numbers, on_cpu, "cpu")
    assert list(states(on_cuda).values()) == ["failed", "passed", "skipped"]
    assert set(states(on_cpu).values()) == {"skipped"}


def test_memory_that_grows_at_rest_and_retries_of_the_allocator_fail():
    quiet, growing, retried = PartFindings(), PartFindings(), PartFindings()
    judge_memory("pool", trained(), quiet)
    assert state_of(quiet.checks) == "passed"
    judge_memory("pool", trained(reserved_bytes=[(100 + 2 * i) << 20 for i in range(8)]), growing)
    assert states(growing)["pool: reserved minus allocated at rest"] == "failed"
    judge_memory("pool", trained(allocation_retries=1), retried)
    assert states(retried)["pool: no retries"] == "failed"


def test_a_collective_with_a_wrong_value_or_without_its_registration_fails():
    report = {"wanted": "symmetric", "groups": {"world": {"got": "plain", "reason": "no windows"}}}
    engine = {"name": "collective", "operation": "all_reduce", "size_bytes": 1 << 20}
    good, bad, plain = PartFindings(), PartFindings(), PartFindings()
    judge_collective("sum", engine, [Timed(1.0, "", None), Timed(2.0, "", None)], good)
    assert good.checks[0].said == "2000.0 us, bus bandwidth 0.524 GB/s"
    judge_collective("sum", engine, [Timed(1.0, "", None), Timed(2.0, "rank 1", None)], bad)
    assert (bad.checks[0].state, bad.checks[0].said) == ("failed", "rank 1")
    judge_collective("sum", engine, [Timed(1.0, "", report)] * 2, plain)
    assert states(plain) == {"sum": "passed", "sum: registered": "failed"}
    assert plain.checks[1].said == "no windows"


@pytest.mark.parametrize(("ranks", "wanted"), [(2, "failed"), (3, "passed")])
def test_losses_of_registered_buffers_are_bit_equal_where_every_sum_has_two_terms(ranks, wanted):
    findings = PartFindings()
    symmetric.compare([2.0, 1.0], [2.0, 1.0000001], ranks, findings)
    assert [check.state for check in findings.checks] == [wanted]


def test_its_records_lie_in_a_results_folder_that_runs_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tools.gpu_check.__main__.run_part", lambda *_: "passed")
    assert main(["--device", "cpu", "--part", "fp8"]) == 0
    assert (ResultsStore.open("results", create=False).root / "gpu-check").is_dir()
