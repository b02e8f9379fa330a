"""A pool of gloo ranks that outlives single tests, so that one launch serves many cases.

The pool's ranks form a world of `WORLD` processes. Data-parallel groups of 1, 2 and 4 ranks are cut
out of it as the inner axis of a mesh ("replica", "dp"): with `dp` = 2 the two halves of the world
work on the same case at the same time. A test sends a function; every rank runs it and sends back
what it returned. A rank that raises, dies or outlives the time limit ends the pool (a half-finished
collective leaves gloo unusable); the next call starts a new one.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WORLD = 4
GROUP_SIZES = (1, 2, 4)
_START_SECONDS = 90.0
_GRACE_SECONDS = 2.0
_COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class RankFailureError(Exception):
    """One or more ranks raised, died or hung; the message holds what each of them said."""


_meshes: dict[int, DeviceMesh] = {}


def mesh(group_size: int) -> DeviceMesh:
    """In a rank: the mesh whose `dp` axis has `group_size` ranks; both axes are named."""
    return _meshes[group_size]


@cache
def two_axes() -> tuple[DeviceMesh, Any]:
    """In a rank: the world as two outer by two inner ranks, and the group over both axes."""
    axes = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("outer", "inner"))
    return axes, axes["outer", "inner"]._flatten("outer_inner").get_group()


class RankPool:
    """Starts its ranks at the first `run`, ends them at `close` or at the first failure."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, function: Callable[..., Any], *arguments: Any, seconds: float = 60.0
    ) -> list[Any]:
        """Runs `function(*arguments)` on all ranks, returns the results in rank order.

        `function` is a module-level function of a test file or of this package.
        """
        if not self._processes:
            self._start()
        request = (*_address(function), arguments)
        for pipe in self._pipes:
            pipe.send_bytes(_packed(request))
        return self._collect(seconds)

    @property
    def pids(self) -> list[int]:
        """Process ids of the living ranks; empty when none is started."""
        return [process.pid for process in self._processes]

    def close(self, *, grace_seconds: float = _GRACE_SECONDS) -> None:
        """Ends every rank, kindly if it listens and by SIGKILL if it does not."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + grace_seconds
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for rank in range(WORLD):
            ours, theirs = Pipe()
            # Not multiprocessing: its resource tracker would outlive the ranks.
            start = f"from oracle.ranks import serve; serve({rank}, {theirs.fileno()})"
            process = subprocess.Popen(
                [sys.executable, "-c", start, self._folder.name],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(_START_SECONDS)

    def _collect(self, seconds: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < WORLD:
            waiting = [p for rank, p in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                answers[rank] = self._receive(rank)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        failures = [f"rank {r}: {what}" for r, (good, what) in sorted(answers.items()) if not good]
        if failures or len(answers) < WORLD:
            failures += self._stacks_of_silent_ranks(answers, seconds)
            self.close(grace_seconds=0.0)
            raise RankFailureError("\n".join(failures))
        return [answers[rank][1] for rank in range(WORLD)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            good, result = torch.load(
                io.BytesIO(self._pipes[rank].recv_bytes()), weights_only=False
            )
        except (EOFError, OSError):
            process = self._processes[rank]
            process.wait(timeout=_GRACE_SECONDS)
            return False, f"died with exit code {process.returncode}"
        return bool(good), result

    def _stacks_of_silent_ranks(self, answers: dict[int, Any], seconds: float) -> list[str]:
        silent = [rank for rank in range(len(self._processes)) if rank not in answers]
        for rank in silent:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5 if silent else 0)
        assert self._folder is not None
        return [
            f"rank {rank}: no answer (limit {seconds:g} s), was in\n"
            + _stack_file(self._folder.name, rank).read_text()
            for rank in silent
        ]


def serve(rank: int, descriptor: int) -> None:
    """Body of a rank: join the world, then answer requests until the other end closes."""
    pipe, folder = Connection(descriptor), sys.argv[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with _stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=WORLD,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        for size in GROUP_SIZES:
            _meshes[size] = init_device_mesh(
                "cpu", (WORLD // size, size), mesh_dim_names=("replica", "dp")
            )
        _answer(pipe, lambda: None)
        while True:
            try:
                request = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except (EOFError, OSError):
                break
            module, path, name, arguments = request
            _answer(pipe, lambda m=module, p=path, n=name, a=arguments: _function(m, p, n)(*a))
    # No orderly shutdown: its barrier could wait for a dead peer.
    os._exit(0)


def _answer(pipe: Connection, work: Callable[[], Any]) -> None:
    try:
        message = _packed((True, work()))
    except BaseException:
        message = _packed((False, traceback.format_exc()))
    pipe.send_bytes(message)


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    name = function.__qualname__
    if "<" in name:
        raise TypeError(f"{name} is not a module-level function, so a rank cannot find it")
    return function.__module__, function.__code__.co_filename, name


def _function(module_name: str, path: str, name: str) -> Callable[..., Any]:
    """The function as this process knows it; test files are loaded by path, as pytest does."""
    module = sys.modules.get(module_name)
    if module is None:
        if Path(path).name.startswith("test_"):
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    found: Callable[..., Any] = getattr(module, name)
    return found


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack.rank{rank}"
