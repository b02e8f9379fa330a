"""Sweep files by their path, or by the name of a sweep that comes with the tool."""

from __future__ import annotations

from pathlib import Path

import sweeps
from bench.errors import UsageError
from sweeps.suggest import did_you_mean


def sweep_file(named: Path) -> Path:
    """The file itself, or the definition that comes with the tool under this name.

    Raises:
        UsageError: neither; lists what there is.
    """
    found = find_sweep_file(named)
    if found is not None:
        return found
    if len(named.parts) == 1:
        names = sorted(shipped_sweeps())
        what = f"no file of that name, and these sweeps come with the tool: {', '.join(names)}"
    else:
        names = sorted(path.name for path in named.parent.glob("*.yaml"))
        what = "no such file"
    raise UsageError(f"sweep {named}: {what}{did_you_mean(named.name, names)}")


def find_sweep_file(named: Path) -> Path | None:
    """As `sweep_file`, but None where there is neither."""
    try:
        found = named.exists()
    except OSError as error:
        raise UsageError(f"cannot look for the sweep {named}: {error.strerror}") from error
    if found:
        return named
    return shipped_sweeps().get(named.name.removesuffix(".yaml")) if len(named.parts) == 1 else None


def shipped_sweeps() -> dict[str, Path]:
    """Sweeps that come with the tool, by name."""
    return {path.stem: path for path in Path(sweeps.__path__[0]).glob("*.yaml")}
