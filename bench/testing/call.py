"""What ranks and the server that forks them get: a function by its address, groups, worlds."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FunctionCall:
    """A module-level function and its arguments. file: where the function was written."""

    module: str
    file: str
    name: str
    arguments: tuple[Any, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> FunctionCall:
        """The address of `function`.

        Raises:
            TypeError: a lambda or a nested function, which no other process can find.
        """
        name = function.__qualname__
        if "<" in name:
            raise TypeError(f"{name} is not a module-level function, so a rank cannot find it")
        return cls(function.__module__, function.__code__.co_filename, name, arguments)

    def run(self) -> Any:
        """Call it in this process."""
        return getattr(self._loaded(), self.name)(*self.arguments)

    def _loaded(self) -> Any:
        """The module as this process knows it; test files are loaded by path, as pytest does."""
        module = sys.modules.get(self.module)
        if module is not None:
            return module
        if not Path(self.file).name.startswith("test_"):
            return importlib.import_module(self.module)
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {self.file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True)
class WorkerGroup:
    """Ranks to fork. core: folder that holds mfsdp_core, None for the checkout's own.

    address: the socket that each connects to. folder: where each writes what it prints.
    paths: further folders to import from, which come before those of the fork server.
    """

    ranks: int
    address: str
    folder: Path
    device: str
    core: Path | None = None
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reap:
    """Ask how these processes, which have ended or are about to, came to their end."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class World:
    """A process group of the first `ranks` ranks. rendezvous: a file of its own."""

    ranks: int
    rendezvous: str
