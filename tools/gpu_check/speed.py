"""Part `speed`: one rank, engines side by side, through `mfsdp-bench run`.

At one rank FSDP2 skips both of its collectives, and this package makes none either: what is
measured is hooks, casts, copies and the optimizer, not communication.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.record import RunRecord
from bench.store import ResultsStore
from tools.gpu_check.record import ROOT, Device, PartFindings

#: Together below the limit of a part.
_SECONDS, _ENDING_SECONDS = 200, 25
_WARM_UP = 4
#: Bounds on this package's step time and peak memory, as a share of another engine's.
TARGETS = {"single": {"milliseconds": 1.02}, "fsdp2": {"milliseconds": 1.0, "peak_bytes": 1.0}}
_SWEEPS: dict[Device, Path] = {
    "cuda": ROOT / "sweeps" / "gpu_one.yaml",
    "cpu": Path(__file__).with_name("speed_cpu.yaml"),
}


def check(device: Device) -> PartFindings:
    """Run the part."""
    findings = PartFindings(on_one_rank=True)
    with TemporaryDirectory() as folder:
        findings.measurements["exit_code"] = _measured(device, folder, findings)
        records = list(ResultsStore.open(Path(folder), create=True).records())
    numbers: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        engine = record.resolved.engine
        label = f"{engine.name} graph" if engine.setting("cuda_graph") else engine.name
        name = f"{record.resolved.model_name} {label}"
        state = record.status.state
        findings.expect(name, state == "ok", f"the run ended as {state}")
        if state == "ok":
            key = (record.resolved.model_name, label)
            numbers[key] = findings.measurements[name] = numbers_of(record)
    findings.expect("runs", bool(records), f"{len(records)} runs were recorded")
    judge(numbers, findings, device)
    return findings


def _measured(device: Device, folder: str, findings: PartFindings) -> int:
    """Run what fits; records of runs that have ended by then are there. The exit code."""
    command = [sys.executable, "-m", "bench", "run", str(_SWEEPS[device]), "--results", folder]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        findings.note("all runs", "skipped", f"what has not ended after {_SECONDS} s is left out")
        process.send_signal(signal.SIGINT)
        return process.wait(_ENDING_SECONDS)
    finally:
        process.kill()


def numbers_of(record: RunRecord) -> dict[str, Any]:
    """Median step time without the warm-up, and the peak of the device's allocator."""
    samples = record.steps[0]
    milliseconds = [sample.milliseconds for sample in samples[_WARM_UP:] or samples]
    found: dict[str, Any] = {"milliseconds": median(milliseconds), "steps": len(milliseconds)}
    peaks = [sample.device_peak_bytes for sample in samples if sample.device_peak_bytes]
    if peaks:
        found["peak_bytes"] = max(peaks)
    return found


def judge(
    numbers: Mapping[tuple[str, str], Mapping[str, float]], findings: PartFindings, device: Device
) -> None:
    """Compare with the targets, which are those of a GPU; elsewhere the ratios are only shown."""
    for model in sorted({model for model, _ in numbers}):
        ours = numbers.get((model, "mfsdp"))
        for engine, bounds in TARGETS.items():
            theirs = numbers.get((model, engine))
            for quantity, bound in bounds.items():
                name = f"{model}: mfsdp/{engine} {quantity} at most {bound}"
                if ours is None or theirs is None or quantity not in {*ours} & {*theirs}:
                    findings.note(name, "skipped", "unmeasured: a run of the pair has no number")
                    continue
                ratio = ours[quantity] / theirs[quantity]
                if device == "cpu":
                    findings.note(name, "skipped", f"{ratio:.3f}, not judged on a CPU")
                else:
                    findings.expect(name, ratio <= bound, f"{ratio:.3f}")
