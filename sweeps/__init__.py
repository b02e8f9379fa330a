"""Many runs: a sweep file becomes a matrix, a plan and, through `bench.launch`, records."""

from pathlib import Path


def shipped_sweeps() -> dict[str, Path]:
    """The definitions that come with the tool, by name."""
    return {path.stem: path for path in Path(__path__[0]).glob("*.yaml")}
