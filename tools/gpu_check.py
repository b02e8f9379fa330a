"""`python tools/gpu_check.py [--part PART]... [--device cpu] [--seconds N]`: check a GPU machine.

One question a part, the most valuable first, each within a limit of 8 minutes (docs/gpu.md). A part
is a command; what it prints is kept in `results/gpu-check/PART.log`, and each finding, as soon as
it is known, is a line of `findings.jsonl` next to it. A part that fails, dies or is ended at its
limit keeps its findings, and the next one begins. `--device cpu` tries the script itself: it runs
the parts `tests`, `validate` and `losses` in small, and plans the sweeps of the others.

Exit code 0: nothing failed; 1: something did; 2: unknown arguments, or no device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

ROOT: Final = Path(__file__).resolve().parents[1]
SWEEPS: Final = "tools/gpu_sweeps"
OUT: Final = Path("results", "gpu-check")
LIMIT_SECONDS: Final = 480.0
#: Between the interrupt and the end by force: a sweep writes its records, pytest its summary.
GRACE_SECONDS: Final = 15.0
_LOOK_SECONDS: Final = 0.5

Device = Literal["cpu", "cuda"]
State = Literal["passed", "no collective ran", "failed", "skipped", "ended at its limit"]


@dataclass(frozen=True)
class Part:
    """One question.

    command: behind the interpreter; {ranks} is filled in. reference: the cell whose losses the
    others must have, up to the relative difference `apart`.
    """

    question: str
    command: tuple[str, ...]
    on_cpu: tuple[str, ...]
    reference: str = ""
    apart: float = 0.0


#: Files with tests that need a device, the most valuable first.
DEVICE_TESTS: Final = (
    "tests/core/test_device.py",
    "tests/core/test_device_ranks.py",
    "tests/core/test_transformer_engine_device.py",
    "tests/cli/test_cli_cuda.py",
    "tests/run/test_phases.py",
    "tests/run/test_device_state.py",
    "tests/run/test_engine_megatron_fsdp.py",
)
#: A warning that a device gives is listed at the end, and fails no test.
_PYTEST = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "default")


def _sweep(name: str, *more: str) -> tuple[str, ...]:
    path = f"{SWEEPS}/{name}.yaml"
    return ("-m", "bench", "run", path, "--set", "launch.ranks={ranks}", *more)


def _planned(name: str, *more: str) -> tuple[str, ...]:
    return ("-m", "bench", "plan", name, *more, "--device", "H100", "--gpus", "8")


#: The largest share of another engine's step time, and of its peak of memory, that mfsdp may take.
_SPEED: Final = (
    ("single", "milliseconds", 1.02),
    ("fsdp2", "milliseconds", 1.0),
    ("fsdp2", "peak_bytes", 1.0),
)
PARTS: Final = {
    "tests": Part(
        "do the tests that need a device pass?",
        (*_PYTEST, "-m", "gpu or multigpu", *DEVICE_TESTS),
        (*_PYTEST, "-m", "gpu or multigpu", DEVICE_TESTS[0]),
    ),
    "losses": Part(
        "does every strategy train as ddp does, and is memory between steps constant?",
        _sweep("losses"),
        (
            *_sweep("losses", "--only", "engine=ddp|max_pool"),
            *("--set", "launch.device=cpu", "--set", "train.steps=4"),
        ),
        reference="ddp",
        apart=1e-4,
    ),
    "graphs": Part(
        "can a whole step be captured and replayed, with the same losses?",
        _sweep("graphs"),
        _planned(f"{SWEEPS}/graphs.yaml"),
        reference="{strategy}-cuda_graph=false",
        apart=1e-5,
    ),
    "validate": Part(
        "do the validator's cases pass on this device?",
        ("-m", "bench", "validate", "mfsdp", "--ranks", "{ranks}"),
        ("-m", "bench", "validate", "mfsdp", "--case", "mfsdp/optim/2/stack/bf16/k2"),
    ),
    "speed": Part(
        "one rank, 1B parameters: is mfsdp as fast as plain torch (1.02) and FSDP2, in its memory?",
        ("-m", "bench", "run", "gpu_one", "--only", "model.preset=1b"),
        _planned("gpu_one"),
    ),
    "buffers": Part(
        "do buffers registered with NCCL give bit-equal losses?",
        _sweep("buffers"),
        _planned(f"{SWEEPS}/buffers.yaml"),
        reference="plain",
    ),
    "fp8": Part(
        "do codes as weights, and layers of Transformer Engine, train as BF16 does?",
        _sweep("fp8"),
        _planned(f"{SWEEPS}/fp8.yaml"),
        reference="bf16",
        apart=2e-3,
    ),
    "speed_3b": Part(
        "as speed, with 3B parameters",
        ("-m", "bench", "run", "gpu_one", "--only", "model.preset=3b"),
        _planned("gpu_one", "--only", "model.preset=3b"),
    ),
}  # fmt: skip


class Findings:
    """Findings of one part: written, printed and counted as soon as they are known.

    alone: with one rank, so that what passes has communicated with nobody.
    """

    def __init__(self, part: str, out: Path, *, alone: bool) -> None:
        self._part, self._alone, self._start = part, alone, time.monotonic()
        self._file = out / "findings.jsonl"
        self.states: Counter[State] = Counter()

    def note(self, name: str, state: State, said: str = "") -> None:
        """Keep a finding."""
        if state == "passed" and self._alone:
            state = "no collective ran"
        self.states[state] += 1
        self.keep(name=name, state=state, said=said)
        print(f"  {state}: {name}{f': {said}' if said else ''}", flush=True)

    def keep(self, **values: Any) -> None:
        """A line of the file."""
        seconds = round(time.monotonic() - self._start, 1)
        with self._file.open("a") as stream:
            stream.write(json.dumps({"part": self._part, "seconds": seconds, **values}) + "\n")


def stream(
    command: Sequence[str],
    seconds: float,
    on_line: Callable[[str], None],
    *,
    log: Path,
    environment: dict[str, str] | None = None,
) -> tuple[int | None, str]:
    """Run `command`, which prints to `log`, and hand over each line, for at most `seconds`.

    Then it is interrupted, its last lines are read, and all that it has started is killed. Returns
    the exit code; at the limit None, and the beginning of a line that was not complete.
    """
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdin": subprocess.DEVNULL}
    options |= {"stderr": subprocess.STDOUT, "start_new_session": True}
    rest = unfinished = b""
    with (
        log.open("wb") as out,
        log.open("rb") as printed,
        subprocess.Popen(command, stdout=out, **options) as process,
    ):
        try:
            for limit, is_over in ((seconds, False), (GRACE_SECONDS, True)):
                if is_over:
                    unfinished = rest
                    process.send_signal(signal.SIGINT)
                end, ended = time.monotonic() + limit, False
                while not ended and time.monotonic() < end:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_LOOK_SECONDS)
                    ended = process.poll() is not None
                    *lines, rest = (rest + printed.read()).split(b"\n")
                    for line in lines:
                        on_line(line.decode(errors="replace"))
                if ended:
                    break
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return None if is_over else process.returncode, unfinished.decode(errors="replace")


_CASE = re.compile(
    r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?: \((.*)\))?\s*(?:\[ *\d+%\])?"
)
_WHY = re.compile(r"(?:FAILED|ERROR) (\S+::.*?) - (.*)")
_STATES: Final[dict[str, State]] = {"PASSED": "passed", "XFAIL": "passed", "SKIPPED": "skipped"}
#: As `[1/9] zero3  unstable in 10.3 s: ...` of `run`, and `12 of 61: CASE ...` of `validate`.
_RUN = re.compile(r"\[\d+/\d+\] (\S+) +(?!\.\.\.)(.*)")
_VALIDATED = re.compile(r"\d+ of \d+: |\S+ +failed|validation-")


def note_line(line: str, findings: Findings) -> None:
    """The finding in a line of pytest, `run` or `validate`, if there is one."""
    if case := _CASE.fullmatch(line):
        name, word, said = case.groups()
        findings.note(name, _STATES.get(word, "failed"), said or "")
    elif match := _WHY.fullmatch(line) or _RUN.match(line):
        findings.keep(name=match[1], said=match[2])
        print(f"  {match[1]}: {match[2]}", flush=True)
    elif _VALIDATED.match(line):
        findings.keep(said=line)
        print(f"  {line}", flush=True)


def run_part(name: str, device: Device, ranks: int, out: Path, seconds: float) -> Counter[State]:
    """Ask one question; how many findings of each state there are."""
    part = PARTS[name]
    print(f"{name}: {part.question}", flush=True)
    findings = Findings(name, out, alone=ranks == 1 or "gpu_one" in part.command)
    records = out / name
    chosen = part.on_cpu if device == "cpu" else part.command
    command = [sys.executable, *(word.format(ranks=ranks) for word in chosen)]
    if {"run", "validate"} & {*command}:
        command += ["--results", str(records.resolve())]
    findings.keep(ranks=ranks, device=device, command=command, **origin())
    log = out / f"{name}.log"
    noted = partial(note_line, findings=findings)
    code, unfinished = stream(command, seconds, noted, log=log, environment=environment(device))
    if "run" in command:
        for finding in judged(part, records):
            findings.note(*finding)
    if code is None:
        doing = f"; unfinished: {unfinished}" if unfinished.strip() else ""
        findings.note(name, "ended at its limit", f"{seconds:g} s{doing}")
    elif code and ("run" not in command or not findings.states):
        # A sweep whose runs are too short for a time exits with 3; its runs are judged above.
        findings.note(name, "failed", f"exit code {code}; see {log}")
    elif not findings.states:
        findings.note(name, "passed", "exit code 0")
    return findings.states


def environment(device: Device) -> dict[str, str]:
    """Of a part: this checkout first; lines of pytest are not cut."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "400", "PYTHONUNBUFFERED": "1", **hidden}


def origin() -> dict[str, Any]:
    """Machine, packages and commit."""
    from bench.launch.environment import package_versions
    from bench.launch.git import git_state
    from bench.resolve.machine import Machine

    machine = Machine.detect()
    return {
        "machine": [machine.cpu_name, *machine.cuda_device_names],
        "packages": package_versions(),
        "git": git_state(ROOT),
    }


def judged(part: Part, folder: Path) -> Iterator[tuple[str, State, str]]:
    """What the records of a sweep show: also of one that was ended before its last run."""
    from bench.store import ResultsStore

    records = {r.status.cell or "": r for r in ResultsStore.open(folder, create=True).records()}
    finished = {name: r for name, r in records.items() if r.status.state in {"ok", "unstable"}}
    for name in records.keys() - finished.keys():
        status = records[name].status
        yield name, "failed", f"{status.state}: {status.reason}"
    for name, record in finished.items():
        base = part.reference.format(strategy=name.partition("-")[0])
        if not base or name == base:
            continue
        if base not in finished:
            yield name, "skipped", f"{base}, its reference, did not finish"
            continue
        apart = losses_apart(finished[base].steps, record.steps)
        said = f"losses differ by {apart:.1e} of those of {base}; allowed {part.apart:.0e}"
        yield name, "passed" if apart <= part.apart else "failed", said
    for name, record in finished.items():
        yield from _memory(name, record.steps.get(0, []))
    if not part.reference:
        yield from _speed(finished)


def losses_apart(losses: dict[int, list[Any]], other: dict[int, list[Any]]) -> float:
    """The largest relative difference of two runs' losses, which are means over ranks."""
    means = [
        [sum(s.loss for s in step) / len(step) for step in zip(*steps.values(), strict=True)]
        for steps in (losses, other)
    ]
    return max((abs(a - b) / abs(a) for a, b in zip(*means, strict=True)), default=float("inf"))


def _memory(name: str, samples: Sequence[Any]) -> Iterator[tuple[str, State, str]]:
    """Of a device: what is allocated behind a step stays, and nothing had to be tried again."""
    seen = [sample.device for sample in samples if sample.device]
    settled = [state["allocated_bytes"] for state in seen[len(seen) // 2 :]]
    if settled:
        grew, retries = max(settled) - settled[0], seen[-1]["allocation_retries"]
        steady: State = "passed" if grew < 1 << 20 and not retries else "failed"
        yield f"{name}: memory", steady, f"grew by {grew:,} bytes, {retries} retries"


def _speed(finished: dict[str, Any]) -> Iterator[tuple[str, State, str]]:
    """Ratios to other engines."""
    numbers: dict[str, dict[str, float]] = {}
    for name, record in finished.items():
        samples = record.steps[0][4:] or record.steps[0]
        peak = max(sample.device_peak_bytes or 0 for sample in samples)
        time_ = median(sample.milliseconds for sample in samples)
        numbers[name.partition("-")[2]] = {"milliseconds": time_, "peak_bytes": peak}
    for engine, quantity, bound in _SPEED:
        name = f"mfsdp/{engine} {quantity}, at most {bound}"
        if {"mfsdp", engine} <= numbers.keys():
            ratio = numbers["mfsdp"][quantity] / numbers[engine][quantity]
            yield name, "passed" if ratio <= bound else "failed", f"{ratio:.3f}"
        else:
            yield name, "skipped", "a run of the pair did not finish"


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="all if left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="limit of a part")
    options = parser.parse_args(arguments)
    import torch

    ranks = torch.cuda.device_count() if options.device == "cuda" else 2
    if not ranks:
        sys.stderr.write(
            "expected: a CUDA device that torch sees\nfound:    none\n"
            "change:   use a machine with one and a CUDA build of torch, or --device cpu\n"
        )
        return 2
    if ranks == 1:
        print("one device, so one rank: no collective runs, and what passes says nothing of NCCL")
    OUT.mkdir(parents=True, exist_ok=True)
    total: Counter[State] = Counter()
    for name in options.part or PARTS:
        states = run_part(name, options.device, ranks, OUT, options.seconds)
        total += states
        print(f"{name}: {_counted(states)}", flush=True)
    print(f"all: {_counted(total)}; lines of {OUT / 'findings.jsonl'}")
    return 1 if total["failed"] or total["ended at its limit"] else 0


def _counted(states: Counter[State]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
