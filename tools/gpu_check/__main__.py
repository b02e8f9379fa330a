"""`python -m tools.gpu_check [--part PART]... [--device cpu|cuda] [--out FOLDER]`.

The check of a machine with GPUs, in parts that run alone, each below its time limit; the same
script with `--device cpu` tries itself out on any machine, in small sizes. Every part is a process
of its own and leaves `FOLDER/PART.json`, however it ends; one that fails does not stop the next.

Exit code 0: no part failed; 1: one did; 2: unknown arguments or no such device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from bench.launch.command import nccl_library
from bench.store import ResultsStore
from bench.store.run_folder import utc_now
from tools.gpu_check import sharing
from tools.gpu_check.record import (
    ROOT,
    Check,
    Device,
    PartFindings,
    PartRecord,
    State,
    state_of,
)

PARTS = ("core", "validate", "speed", "memory", "symmetric", "communication", "graphs", "fp8")
LIMIT_SECONDS = 240.0
_GRACE_SECONDS = 5.0
_LOG_CHARACTERS = 1000
_BAD: tuple[State, ...] = ("failed", "crashed", "timed_out")


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="every part if left out")
    parser.add_argument("--device", choices=get_args(Device), default="cuda")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="results/gpu-check if left out")
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="limit of a part")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        return _inside(options.part[0], options.device, options.out, options.seconds)
    if options.device == "cuda" and not _has_device():
        sys.stderr.write(
            "expected: a CUDA device that torch sees\nfound:    none\n"
            "change:   use a machine with one and a CUDA build of torch, or --device cpu, which "
            "tries this script out\n"
        )
        return 2
    out = options.out or ResultsStore.open("results", create=True).root / "gpu-check"
    out.mkdir(parents=True, exist_ok=True)
    added = _shared_device() if options.device == "cuda" else {}
    states = [
        run_part(part, options.device, out, options.seconds, added)
        for part in options.part or PARTS
    ]
    counted = ", ".join(f"{number} {_words(state)}" for state, number in Counter(states).items())
    sys.stdout.write(f"{len(states)} parts: {counted}\n")
    return 1 if any(state in _BAD for state in states) else 0


def _shared_device() -> dict[str, str]:
    """Say whether two ranks can share the device; what tells the parts."""
    import torch

    found = sharing.find(torch.cuda.device_count(), os.environ)
    sys.stdout.write(f"ranks that share a device: {found.said}\n")
    sys.stdout.flush()
    return found.variables()


def run_part(
    part: str,
    device: Device,
    out: Path,
    limit_seconds: float,
    added: Mapping[str, str] = MappingProxyType({}),
) -> State:
    """Run one part in a process of its own, print a line about it, and see that it has a record.

    added: to its environment.
    """
    record, log = out / f"{part}.json", out / f"{part}.log"
    record.unlink(missing_ok=True)
    started, start = utc_now(), time.monotonic()
    ending = _run_process(part, device, out, limit_seconds, added)
    seconds = time.monotonic() - start
    if ending is not None or not record.exists():
        tail = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
        state, said = ending or ("crashed", f"it left no record; the end of its log:\n{tail}")
        checks = (Check(part, state, said),)
        PartRecord(
            part, device, state, seconds, limit_seconds, started, checks, {}, log.name
        ).write(out)
    return _say(record, seconds)


def _run_process(
    part: str,
    device: Device,
    out: Path,
    limit_seconds: float,
    added: Mapping[str, str],
) -> tuple[State, str] | None:
    """How the process was ended from outside, if it was."""
    environment = {**os.environ, "PYTHONPATH": _python_path(), **added}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else nccl_library(environment)
    command = [sys.executable, "-m", "tools.gpu_check", "--inside", "--part", part]
    command += ["--device", device, "--out", str(out.resolve()), "--seconds", str(limit_seconds)]
    with (out / f"{part}.log").open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return "timed_out", f"ended after {limit_seconds:g} s, its limit"
        finally:
            _end(process)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the part and what it has started; ranks die with the process that forked them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


def _inside(part: str, device: Device, out: Path, limit_seconds: float) -> int:
    """The part itself."""
    started, start = utc_now(), time.monotonic()
    module = importlib.import_module(f"tools.gpu_check.{part}")
    try:
        findings: PartFindings = module.check(device)
    except Exception:
        text = traceback.format_exc()
        sys.stdout.write(text)
        findings = PartFindings([Check(part, "crashed", text[-_LOG_CHARACTERS:])])
    checks = tuple(findings.checks)
    PartRecord(
        part,
        device,
        state_of(checks),
        time.monotonic() - start,
        limit_seconds,
        started,
        checks,
        findings.measurements,
        f"{part}.log",
    ).write(out)
    return 0


def _say(path: Path, seconds: float) -> State:
    document = json.loads(path.read_text())
    counts = Counter(check["state"] for check in document["checks"])
    found = ", ".join(f"{count} {_words(state)}" for state, count in counts.items())
    state: State = document["state"]
    sys.stdout.write(f"{document['part']:13} {_words(state):17} {seconds:6.1f} s  {found}\n")
    tried = {"passed", "no_collective_ran", "failed"}
    reasons = {c["said"] for c in document["checks"] if c["state"] not in tried}
    for check in document["checks"]:
        if check["state"] in _BAD:
            sys.stdout.write(f"  {check['state']}: {check['name']}: {check['said']}\n")
    for reason in sorted(reasons - {c["said"] for c in document["checks"] if c["state"] in _BAD}):
        sys.stdout.write(f"  not tried: {reason}\n")
    sys.stdout.flush()
    return state


def _words(state: State) -> str:
    return state.replace("_", " ")


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
