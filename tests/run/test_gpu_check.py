"""The check of a GPU machine: what each part finds is kept as soon as it is known."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest

from tools import gpu_check
from tools.gpu_check import DEVICE_TESTS, PARTS, ROOT, Findings, Part, note_line, run_part, stream

#: Prints, and ends neither by itself nor when it is interrupted; its child goes on.
NEVER_ENDS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("a.py::one PASSED [ 50%]\\na.py::two[a b] ", end="", flush=True)
while True:
    time.sleep(600)
"""


class Clock:
    """Stands still until a line has come, and then is past every limit."""

    now = 0.0

    def monotonic(self):
        return self.now

    def on_line(self, _line):
        self.now += 1e6


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(gpu_check, "time", made)
    return made


def kept(out):
    return [json.loads(line) for line in (out / "findings.jsonl").read_text().splitlines()]


def own(command, **changes):
    """A part that runs `command` of Python."""
    return Part("?", ("-c", command), ("-c", command), **changes)


def test_a_subprocess_that_never_ends_is_ended_and_its_lines_are_known(clock, tmp_path):
    lines = []

    def on_line(line):
        lines.append(line)
        clock.on_line(line)

    found = stream((sys.executable, "-c", NEVER_ENDS), 3.0, on_line, log=tmp_path / "log")
    assert found == (None, "a.py::two[a b] ")
    assert lines[0] == "a.py::one PASSED [ 50%]"
    assert lines[-1].endswith("interrupted")


def test_a_child_that_goes_on_does_not_hold_up_a_part_that_has_ended(tmp_path):
    code = NEVER_ENDS.partition("while True")[0] + "sys.exit(4)"
    found = stream((sys.executable, "-c", code), 300.0, [].append, log=tmp_path / "log")
    assert found == (4, "")


def test_what_a_part_found_before_its_limit_is_kept_and_the_next_part_runs(
    tmp_path, monkeypatch, clock
):
    def noted(line, findings):
        note_line(line, findings)
        if "three" not in line:
            clock.on_line(line)

    monkeypatch.setattr(gpu_check, "note_line", noted)
    monkeypatch.setitem(PARTS, "stuck", own(NEVER_ENDS))
    monkeypatch.setitem(PARTS, "next", own("print('a.py::three SKIPPED (needs 2 devices)')"))
    assert run_part("stuck", "cpu", 2, tmp_path, 3.0) == {"passed": 1, "ended at its limit": 1}
    assert run_part("next", "cpu", 2, tmp_path, 60.0) == {"skipped": 1}
    found = kept(tmp_path)
    assert [one["part"] for one in found if "git" in one] == ["stuck", "next"]
    assert [(one["name"], one["state"]) for one in found if "state" in one] == [
        ("a.py::one", "passed"),
        ("stuck", "ended at its limit"),
        ("a.py::three", "skipped"),
    ]
    assert found[2]["said"] == "3 s; unfinished: a.py::two[a b] "
    assert "interrupted" in (tmp_path / "stuck.log").read_text()


def test_a_part_that_dies_has_failed(tmp_path):
    name = "dies"
    PARTS[name] = own("import sys; sys.exit(1)")
    try:
        assert run_part(name, "cpu", 2, tmp_path, 60.0) == {"failed": 1}
    finally:
        del PARTS[name]


def test_what_passes_on_one_rank_is_counted_apart(tmp_path, capsys):
    findings = Findings("tests", tmp_path, alone=True)
    for line in (
        "a.py::one PASSED                       [ 10%]",
        "a.py::two[a b] FAILED [ 20%]",
        "FAILED a.py::two[a b] - AssertionError: 1 == 2",
        "[1/9] zero3 ...",
        "[1/9] zero3  ok in 10.3 s",
        "12 of 61: mfsdp/optim/2/stack/bf16/k2",
        "another line",
    ):
        note_line(line, findings)
    assert findings.states == {"no collective ran": 1, "failed": 1}
    said = [one["said"] for one in kept(tmp_path)]
    assert said == ["", "", "AssertionError: 1 == 2", "ok in 10.3 s", said[-1]]
    assert "failed: a.py::two[a b]" in capsys.readouterr().out


def record(cell, loss, state="ok", milliseconds=1.0, allocated=0):
    samples = [
        SimpleNamespace(
            loss=loss,
            milliseconds=milliseconds,
            device_peak_bytes=5,
            device={"allocated_bytes": allocated * step, "allocation_retries": 0},
        )
        for step in range(8)
    ]
    status = SimpleNamespace(cell=cell, state=state, reason="as the test wants")
    return SimpleNamespace(status=status, steps={0: samples})


def judged(monkeypatch, part, *records):
    store = SimpleNamespace(records=lambda: list(records))
    monkeypatch.setattr("bench.store.ResultsStore.open", lambda *_, **__: store)
    return {name: (state, said) for name, state, said in gpu_check.judged(part, ROOT)}


def test_losses_and_memory_of_a_sweep_are_judged_also_when_a_run_failed(monkeypatch):
    runs = (
        record("ddp", 2.0),
        record("zero3", 2.1),
        record("zero2", 2.00001, allocated=1 << 20),
        record("zero1", 9.0, "crashed"),
    )
    found = judged(monkeypatch, PARTS["losses"], *runs)
    assert found["zero3"][0] == "failed"
    assert found["zero2"][0] == "passed"
    assert found["zero1"] == ("failed", "crashed: as the test wants")
    states = {name: state for name, (state, _) in found.items() if name.endswith("memory")}
    assert states == {"ddp: memory": "passed", "zero3: memory": "passed", "zero2: memory": "failed"}
    alone = judged(monkeypatch, PARTS["graphs"], record("zero3-cuda_graph=true", 2.0))
    assert alone["zero3-cuda_graph=true"][0] == "skipped"


def test_speed_is_judged_against_plain_torch_and_fsdp2(monkeypatch):
    runs = (record("1b-single", 1.0), record("1b-fsdp2", 1.0), record("1b-mfsdp", 1.0, "ok", 1.5))
    found = judged(monkeypatch, PARTS["speed"], *runs)
    assert found["mfsdp/single milliseconds, at most 1.02"] == ("failed", "1.500")
    assert found["mfsdp/fsdp2 peak_bytes, at most 1.0"] == ("passed", "1.000")


def test_every_test_that_needs_a_device_is_in_the_part_of_tests():
    marked = re.compile(r"pytest\.mark\.(gpu|multigpu)\b")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = {str(f.relative_to(ROOT)) for f in files if marked.search(f.read_text())}
    assert found == {*DEVICE_TESTS}


@pytest.mark.parametrize("name", [name for name, part in PARTS.items() if part.reference])
def test_a_sweep_has_the_cell_that_its_others_are_compared_with(name):
    (path,) = (word for word in PARTS[name].command if word.endswith(".yaml"))
    label = PARTS[name].reference.partition("-")[0]
    assert label == "{strategy}" or f"label: {label}" in (ROOT / path).read_text()
