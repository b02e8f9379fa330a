"""Body of a resident rank: join the group that a case needs, run the case, send what was seen."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench.errors import UnsupportedError
from bench.validate.cases import Case
from bench.validate.observation import Seen
from bench.validate.scenario import run_case
from bench.validate.serialization import packed
from bench.validate.worker_group import WorkerGroup

_COLLECTIVE_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Order:
    """One case. rendezvous: a file for the process group of the first `case.ranks` ranks."""

    case: Case
    rendezvous: str


@dataclass(frozen=True)
class Answer:
    """kind: `seen`, `unsupported` (the engine's own refusal) or `raised`; text says why."""

    rank: int
    kind: Literal["seen", "unsupported", "raised"]
    seen: Seen | None = None
    text: str = ""


def serve(group: WorkerGroup, rank: int) -> None:
    """Answer orders until the other end closes."""
    _print_into(group.folder / f"rank{rank}.log")
    sys.path[:0] = [*([str(group.core)] if group.core else []), *group.paths]
    _prepare()
    device = _device(group.device, rank)
    with Client(group.address, family="AF_UNIX") as pipe:
        pipe.send(rank)
        with stack_file(group.folder, rank).open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
            _answer_orders(pipe, rank, device, group.core)


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack when it gets SIGUSR1."""
    return folder / f"stack.rank{rank}.txt"


def _answer_orders(pipe: Connection, rank: int, device: torch.device, core: Path | None) -> None:
    rendezvous = ""
    while True:
        try:
            order: Order = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if order.rendezvous != rendezvous:
                _join(order, rank, device)
                rendezvous = order.rendezvous
            seen = run_case(order.case, rank, device)
            _check_core(core)
            answer = Answer(rank, "seen", seen)
        except UnsupportedError as refusal:
            answer = Answer(rank, "unsupported", text=refusal.reason)
        except Exception:
            answer = Answer(rank, "raised", text=traceback.format_exc())
        pipe.send_bytes(packed(answer))


def _prepare() -> None:
    """One thread, and memory that nobody has written is NaN, so that whoever reads it shows."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = True


def _device(kind: str, rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, rank)
    torch.cuda.set_device(device)
    return device


def _join(order: Order, rank: int, device: torch.device) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{order.rendezvous}",
        rank=rank,
        world_size=order.case.ranks,
        timeout=_COLLECTIVE_TIMEOUT,
    )


def _check_core(core: Path | None) -> None:
    """Refuse to judge another mfsdp_core than the one that was asked for."""
    module = sys.modules.get("mfsdp_core")
    if module is None or core is None:
        return
    found = Path(str(module.__file__)).resolve()
    if not found.is_relative_to(core.resolve()):
        raise RuntimeError(f"this rank imports {found}; expected mfsdp_core from {core}")


def _print_into(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
