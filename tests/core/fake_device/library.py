"""Makes torch's CPU build believe in CUDA devices. Imports no torch: it is loaded before that."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("cuda.cpp")
_NEEDED = ("c10", "torch_cpu")


def build(folder: Path, torch: Path) -> Path:
    """Compile `cuda.cpp` against the headers in the folder of torch; takes two seconds."""
    made = folder / "cuda.so"
    flags = ["-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
    libraries = [f"-l{name}" for name in _NEEDED]
    subprocess.run(["g++", *flags, _SOURCE, "-o", made, *libraries], check=True)
    return made


def load(library: Path, torch: Path) -> None:
    """In a process that has not imported torch, which asks what devices there are when it is."""
    for name in _NEEDED:
        ctypes.CDLL(str(torch / "lib" / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))
