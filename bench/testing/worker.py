"""Body of a forked rank: join the process group that a call needs, call, send what came back."""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, TCPStore

from bench.launch.process import print_into
from bench.testing.call import FunctionCall, WorkerGroup, World

_COLLECTIVE_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class CallResult:
    """value: what the call returned; error: the traceback where it raised, else empty."""

    value: Any = None
    error: str = ""


def serve(group: WorkerGroup, rank: int) -> None:
    """Answer calls until the other end closes."""
    print_into(log_file(group.folder, rank))
    # A fatal signal leaves the stack in the log.
    faulthandler.enable(sys.stderr, all_threads=False)
    # gloo's thread, once woken, spins on a lock that it would otherwise have taken the core from.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    sys.path[:0] = [*([str(group.core)] if group.core else []), *group.paths]
    torch.set_num_threads(1)
    if group.device != "cpu":
        torch.cuda.set_device(torch.device(group.device, rank % torch.cuda.device_count()))
    with Client(group.address, family="AF_UNIX") as pipe:
        pipe.send(rank)
        with stack_file(group.folder, rank).open("w", encoding="utf-8") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
            _answer_calls(pipe, rank, group)


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack when it gets SIGUSR1."""
    return folder / f"stack.rank{rank}.txt"


def log_file(folder: Path, rank: int) -> Path:
    """Where a rank writes what it prints."""
    return folder / f"rank{rank}.log"


def _answer_calls(pipe: Connection, rank: int, group: WorkerGroup) -> None:
    joined: World | None = None
    while True:
        try:
            content = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            world, call = unpacked(content)
            if world != joined:
                _join(world, rank, group.device)
                joined = world
            answer = CallResult(call.run())
            _check_core(group.core)
            content = packed(answer)
        except BaseException:
            content = packed(CallResult(error=traceback.format_exc()))
        pipe.send_bytes(content)


def request(world: World, call: FunctionCall) -> bytes:
    """What `_answer_calls` reads."""
    return packed((world, call))


def _join(world: World, rank: int, device: str) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # A file says where the store is, and is not the store: who waits for a key there polls (10 ms).
    place = FileStore(world.rendezvous, world.ranks)
    port = 0 if rank == 0 else int(place.get("port"))
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    place.set("port", str(store.port))
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=store,
        rank=rank,
        world_size=world.ranks,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=None if device == "cpu" else torch.device(device, torch.cuda.current_device()),
    )


def _check_core(core: Path | None) -> None:
    """Refuse to judge another mfsdp_core than the one that was requested."""
    module = sys.modules.get("mfsdp_core")
    if module is None or core is None:
        return
    file = Path(str(module.__file__)).resolve()
    if not file.is_relative_to(core.resolve()):
        raise RuntimeError(f"this rank imports {file}; expected mfsdp_core from {core}")


def packed(value: Any) -> bytes:
    """`value` by value: strided CPU tensors as their elements, all else as pickle has it.

    torch pickles every tensor as an archive of its own, which takes ten times as long for the small
    ones that ranks send by the thousand.
    """
    buffer = io.BytesIO()
    _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """What was packed; tensors have memory of their own."""
    return pickle.loads(content)  # noqa: S301 - from our own ranks


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.requires_grad:
            return NotImplemented
        if value.device.type != "cpu":
            return NotImplemented
        elements = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (bytearray(elements), value.dtype, tuple(value.shape))


def _tensor(elements: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not elements:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(elements, dtype=dtype).view(shape)
