"""The checks of `doctor`: packages, torch, limits of the system, the results folder. Torch-free."""

from __future__ import annotations

import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, Literal

from bench.errors import BenchError
from bench.launch.code import installed_version
from bench.resolve import Machine
from bench.spec import known_engine
from bench.store.file_lock import FileLock, is_locked

_MINIMUM_PYTHON = (3, 11)
_NEEDED = (
    *("torch", "numpy", "pandas", "matplotlib", "pydantic", "ruamel.yaml", "typer", "rich"),
    *("jinja2", "junitparser", "psutil", "zstandard", "nvtx"),
)
_EXTRAS = (
    ("gpu", "nvidia-ml-py", "names, memory, clocks and power caps of GPUs in every record"),
    ("gpu", "transformer-engine", "FP8 layers and quantised weights of Transformer Engine"),
    ("", "megatron-fsdp", "the engines megatron_fsdp and megatron_fsdp_v2, by 0.6, on CUDA"),
    ("parquet", "pyarrow", "export --format parquet"),
    ("tensorboard", "tensorboard", "event files of TensorBoard: import, baseline save"),
    ("safetensors", "safetensors", "checkpoints in the safetensors format"),
)
_PROBE_SECONDS = 120.0
_SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 2**30
_ENOUGH_OPEN_FILES = 4096


@dataclass(frozen=True)
class DoctorFinding:
    """level: `note` is a capability that is absent or a doubt, `problem` keeps runs from starting.

    gives: what the missing piece would give. remedy: how to get it, a command where there is one.
    """

    level: Literal["ok", "note", "problem"]
    what: str
    found: str
    gives: str = ""
    remedy: str = ""


def package_findings() -> list[DoctorFinding]:
    """Packages by their metadata: none of them is loaded."""
    version, core = platform.python_version(), util.find_spec("mfsdp_core")
    again, every = "install mfsdp-bench again", "every run needs it"
    findings = [DoctorFinding("ok", "python", version)]
    if sys.version_info < _MINIMUM_PYTHON:
        wanted = ".".join(map(str, _MINIMUM_PYTHON))
        findings = [
            DoctorFinding("problem", "python", version, every, f"install {wanted} or later")
        ]
    for name in _NEEDED:
        had = installed_version(name)
        findings.append(
            DoctorFinding("problem", name, "missing", every, again)
            if had is None
            else DoctorFinding("ok", name, had)
        )
    if core is None or not core.origin:
        findings.append(
            DoctorFinding("problem", "mfsdp_core", "missing", "the engine mfsdp", again)
        )
    for group, name, gives in _EXTRAS:
        had = installed_version(name)
        remedy, is_other = f"pip install 'mfsdp-bench[{group}]'", False
        if not group:
            engine = known_engine(name.replace("-", "_"))
            remedy, is_other = engine.install, engine.other_release() is not None
        findings.append(
            DoctorFinding("note", name, had or "not installed", gives, remedy)
            if had is None or is_other
            else DoctorFinding("ok", name, had)
        )
    return findings


def torch_findings(machine: Machine) -> list[DoctorFinding]:
    """Loads torch in a process of its own, which takes seconds."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.doctor.torch_probe"]
    remedy = "install torch again; python -c 'import torch' says more"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
        facts = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        problem = f"not within {_PROBE_SECONDS:g} s"
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"no: exit code {done.returncode}, {last[:200]}"
    else:
        return judged(facts, has_gpu=bool(machine.cuda_devices))
    return [DoctorFinding("problem", "torch loads", problem, "every run", remedy)]


def judged(facts: dict[str, Any], *, has_gpu: bool) -> list[DoctorFinding]:
    """Findings from what `bench.doctor.torch_probe` says."""
    compiled = facts["cuda_compiled"]
    state = "this torch is compiled without it"
    remedy = "install a CUDA build of torch: make venv TORCH=torch==VERSION"
    if compiled is not None:
        state = f"compiled with {compiled}, but torch cannot use the devices of this machine"
        remedy = "update the driver; nvidia-smi shows the CUDA version that it knows"
        if not has_gpu:
            state = f"compiled with {compiled}; no device here"
            remedy = "a machine with an NVIDIA GPU and its driver; inside a container, --gpus all"
    cuda = DoctorFinding("problem" if has_gpu else "note", "CUDA", state, "runs on GPUs", remedy)
    if facts["cuda_usable"]:
        cuda = DoctorFinding("ok", "CUDA", f"compiled with {compiled}, usable")
    findings = [DoctorFinding("ok", "torch loads", facts["torch"]), cuda]
    built, loaded = facts["nccl"]["compiled"], facts["nccl"]["loaded"]
    if built != loaded and loaded is not None:
        state = f"compiled with {built or 'unknown'}, loaded {loaded}"
        remedy = "expected with LD_PRELOAD or a library of the cluster; else install torch again"
        gives = "the version that torch was tested with"
        findings.append(DoctorFinding("note", "NCCL", state, gives, remedy))
    elif built is not None:
        findings.append(DoctorFinding("ok", "NCCL", built))
    return findings


def machine_findings(machine: Machine) -> list[DoctorFinding]:
    """Devices, and the limits of the system that end a run."""
    names = ", ".join(machine.cuda_device_names)
    return [
        DoctorFinding("ok", "CUDA devices", names or "none: cells with launch.device cuda prune"),
        shared_memory(_SHARED_MEMORY),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]


def shared_memory(folder: Path) -> DoctorFinding:
    """Size of the memory through which processes of one machine exchange data."""
    free_bytes = shutil.disk_usage(folder).free if folder.is_dir() else 0
    room = f"{free_bytes / 2**30:.1f} GiB free in {folder}"
    if free_bytes >= _ENOUGH_BYTES:
        return DoctorFinding("ok", "shared memory", room)
    gives = "room for NCCL between ranks of one machine, which fails to start without"
    remedy = "docker run --shm-size=8g or --ipc=host; on a host, mount -o remount,size=8g /dev/shm"
    return DoctorFinding("note", "shared memory", room, gives, remedy)


def open_files(soft: int, hard: int) -> DoctorFinding:
    """Each rank holds a socket to every other rank."""
    at_most = "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_OPEN_FILES:
        return DoctorFinding("ok", "open files", at_most)
    remedy = f"ulimit -n {'unlimited' if hard == resource.RLIM_INFINITY else hard}"
    gives = "groups of many ranks: each holds sockets to the others"
    return DoctorFinding("note", "open files", f"{at_most} per process (ulimit -n)", gives, remedy)


def results_findings(results: Path) -> list[DoctorFinding]:
    """About `results`, or about the folder that it would be made in."""
    folder = where = results.expanduser().absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
            locks = _locks(Path(scratch))
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "choose a folder that you may write with --results, or free some space"
        state = f"{where}: cannot be written: {error.strerror}"
        return [DoctorFinding("problem", "results folder", state, "records", remedy)]
    state = f"{where}, {free_bytes / 2**30:.1f} GiB free"
    if free_bytes >= _ENOUGH_BYTES:
        return [DoctorFinding("ok", "results folder", state), locks]
    remedy = "free some space, or point --results at another disk"
    return [DoctorFinding("note", "results folder", state, "room for records", remedy), locks]


def _locks(scratch: Path) -> DoctorFinding:
    lock = FileLock(scratch / "lock")
    fault = "a lock that was taken does not show"
    try:
        if lock.acquire("doctor") and is_locked(lock.path):
            return DoctorFinding("ok", "file locks", "work")
    except BenchError as error:
        fault = str(error)
    finally:
        lock.release()
    gives = "one runner per folder, and runs that are known to live"
    remedy = "a local disk, or mount the file system with locks (Lustre: -o flock)"
    return DoctorFinding("problem", "file locks", fault, gives, remedy)
