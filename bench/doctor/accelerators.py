"""torch, CUDA, NCCL, symmetric memory and the FP8 libraries, as they are once they are loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from bench.doctor.finding import DoctorFinding, Level
from bench.resolve import Machine

_PROBE_SECONDS = 120.0
_SYMMETRIC_SINCE = (2, 27)
_FP8_SINCE = (8, 9)
# Module: its name, what it gives, how to get it.
_COMPANIONS = {
    "transformer_engine.pytorch": (
        "Transformer Engine",
        "FP8 layers and quantised weights",
        "pip install 'mfsdp-bench[gpu]' beside a CUDA build of torch",
    ),
}


def accelerator_findings(machine: Machine) -> list[DoctorFinding]:
    """Loads torch in a process of its own, which takes seconds."""
    facts, problem = _probe()
    if facts is None:
        remedy = "install torch again; python -c 'import torch' says more"
        return [DoctorFinding("problem", "torch loads", problem, "every run", remedy)]
    return judged(facts, has_gpu=bool(machine.cuda_devices))


def _probe() -> tuple[dict[str, Any] | None, str]:
    command = [sys.executable, "-W", "ignore", "-m", "bench.doctor.torch_probe"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return None, f"not within {_PROBE_SECONDS:g} s"
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return None, f"no: exit code {done.returncode}, {last[:200]}"
    return facts, ""


def judged(facts: dict[str, Any], *, has_gpu: bool) -> list[DoctorFinding]:
    """Findings from what `bench.doctor.torch_probe` says."""
    found = [DoctorFinding("ok", "torch loads", facts["torch"]), _cuda(facts, has_gpu=has_gpu)]
    found += [_nccl(facts["nccl"]), _symmetric(facts), _fp8(facts)]
    found += [_companion(name, facts["loads"].get(name)) for name in _COMPANIONS]
    return found


def _cuda(facts: dict[str, Any], *, has_gpu: bool) -> DoctorFinding:
    compiled = facts["cuda_compiled"]
    if facts["cuda_usable"]:
        return DoctorFinding("ok", "CUDA", f"compiled with {compiled}, usable")
    if compiled is None:
        remedy = "install a CUDA build of torch: make venv TORCH=torch==VERSION"
        found = "this torch is compiled without it"
        level: Level = "problem" if has_gpu else "note"
        return DoctorFinding(level, "CUDA", found, "runs on GPUs", remedy)
    if has_gpu:
        remedy = "update the driver; nvidia-smi shows the CUDA version that it knows"
        found = f"compiled with {compiled}, but torch cannot use the devices of this machine"
        return DoctorFinding("problem", "CUDA", found, "runs on GPUs", remedy)
    return DoctorFinding(
        "note", "CUDA", f"compiled with {compiled}; no device here", "runs on GPUs"
    )


def _nccl(nccl: dict[str, str | None]) -> DoctorFinding:
    compiled, loaded = nccl["compiled"], nccl["loaded"]
    if compiled is None and loaded is None:
        remedy = "install a CUDA build of torch"
        return DoctorFinding(
            "note", "NCCL", "none in this torch", "collectives between GPUs", remedy
        )
    found = f"compiled with {compiled or 'unknown'}, loaded {loaded or 'unknown'}"
    if compiled == loaded or loaded is None:
        return DoctorFinding("ok", "NCCL", found)
    remedy = "expected with LD_PRELOAD or a library of the cluster; else pip install nvidia-nccl"
    return DoctorFinding("note", "NCCL", found, "the version that torch was tested with", remedy)


def _symmetric(facts: dict[str, Any]) -> DoctorFinding:
    what, gives = "symmetric memory", "NCCL's symmetric kernels (nccl_ub): fewer SMs, lower latency"
    loaded = _version(facts["nccl"]["loaded"] or facts["nccl"]["compiled"])
    wanted = ".".join(map(str, _SYMMETRIC_SINCE))
    missing = []
    if loaded < _SYMMETRIC_SINCE:
        missing.append(f"NCCL {wanted} or later")
    if not facts["symmetric_pools"]:
        missing.append("a torch that registers memory pools as symmetric (2.9 or later, CUDA)")
    if not facts["devices"]:
        missing.append("GPUs")
    if facts["pairs_without_peer_access"]:
        i, j = facts["pairs_without_peer_access"][0]
        missing.append(f"access between devices (device {i} cannot read device {j}; NVLink)")
    if missing:
        return DoctorFinding(
            "note",
            what,
            f"no: lacks {'; '.join(missing)}",
            gives,
            "a newer torch with its NCCL; GPUs joined by NVLink",
        )
    single = " (one device: nothing to exchange here)" if len(facts["devices"]) == 1 else ""
    return DoctorFinding("ok", what, f"NCCL, torch and devices can{single}")


def _fp8(facts: dict[str, Any]) -> DoctorFinding:
    devices = facts["devices"]
    able = [one for one in devices if tuple(one["capability"]) >= _FP8_SINCE]
    if devices and len(able) == len(devices):
        return DoctorFinding("ok", "FP8 on devices", "every device multiplies in FP8")
    found = f"{len(able)} of {len(devices)} devices" if devices else "no device"
    remedy = "GPUs of compute capability 8.9 or later (Ada, Hopper, Blackwell)"
    return DoctorFinding("note", "FP8 on devices", found, "matrix products in FP8", remedy)


def _companion(name: str, problem: str | None) -> DoctorFinding:
    shown, gives, remedy = _COMPANIONS[name]
    what = f"{shown} loads"
    if problem == "":
        return DoctorFinding("ok", what, "yes")
    if problem is None:
        return DoctorFinding("note", what, "not installed", gives, remedy)
    return DoctorFinding("note", what, f"no: {problem[:200]}", gives, remedy)


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "0").split(".") if part.isdecimal())
