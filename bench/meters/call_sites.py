"""Call sites: the innermost frame of the engine, or else of the caller of torch.

Frames of torch and of Python's library are skipped, except torch's files that are the engine under
test (`EngineRow.torch_code`).
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import torch

import bench

_CHECKOUT: Final = str(Path(bench.__file__).parents[1])
_TORCH: Final = str(Path(torch.__file__).parent)
_LIBRARY: Final = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_PACKAGES: Final = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_WITHIN: Final = re.compile(r"\.<locals>\.<[a-z]+>")
"""Of a name: a comprehension or lambda, which other Pythons inline."""


class CallSites:
    """Finds call sites, each as `file.py:function` with the file below checkout or packages."""

    def __init__(self, torch_code: Sequence[str] = ()) -> None:
        """torch_code: patterns below the folder that holds torch, as in a row of engines."""
        self._patterns = tuple(pattern.removeprefix("torch/") for pattern in torch_code)
        self._known: dict[CodeType, str | None] = {}
        # The code of an arm may lie in any folder that is imported from.
        folders = {_CHECKOUT, *_PACKAGES, *(folder.rstrip("/") for folder in sys.path)} - {
            "",
            *_LIBRARY,
        }
        self._folders = sorted(folders, key=len, reverse=True)

    def of_code(self, code: CodeType) -> str | None:
        """The name of a function; None for one that is skipped."""
        if code not in self._known:
            self._known[code] = self._named(code)
        return self._known[code]

    def of_frame(self, frame: FrameType | None) -> tuple[str, int]:
        """The site that `frame` works for, and its line; ("", 0) if there is none."""
        while frame is not None:
            site = self.of_code(frame.f_code)
            if site is not None:
                return site, frame.f_lineno
            frame = frame.f_back
        return "", 0

    def _named(self, code: CodeType) -> str | None:
        file = code.co_filename
        if file.startswith("<") or code.co_name == "<module>":
            return None
        name = _WITHIN.sub("", code.co_qualname)
        if file.startswith(f"{_TORCH}/"):
            below = Path(file).relative_to(_TORCH)
            ours = any(_matches(below, pattern) for pattern in self._patterns)
            return f"torch/{below.as_posix()}:{name}" if ours else None
        for folder in self._folders:
            if file.startswith(f"{folder}/"):
                below = Path(file).relative_to(folder)
                if below.parts[0].startswith("."):  # an environment inside of the checkout
                    continue
                return f"{below.as_posix()}:{name}"
        if file.startswith(tuple(folder for folder in _LIBRARY if folder)):
            return None
        return f"{Path(file).name}:{name}"


def is_of_engine(site: str) -> bool:
    """Whether a site is no part of the harness: neither loop, data nor its own models."""
    return bool(site) and (not site.startswith("bench/") or site.startswith("bench/engines/"))


def _matches(below: Path, pattern: str) -> bool:
    """Whether a path fits `a/**/*.py` or `a/b.py`."""
    folder, star, _ = pattern.partition("/**")
    return below.is_relative_to(folder) if star else below.as_posix() == pattern
