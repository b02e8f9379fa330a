"""What the tab key offers in place of a sweep or a run. Reads names of folders only."""

from __future__ import annotations

from pathlib import Path

import typer

from sweeps import shipped_sweeps


def offer_definitions(incomplete: str) -> list[str]:
    """Sweeps that come with the tool, then the sweep files of the folder that is typed."""
    folder = incomplete[: incomplete.rfind("/") + 1]
    files = [folder + path.name for path in _entries(Path(folder)) if path.suffix == ".yaml"]
    return [name for name in [*sorted(shipped_sweeps()), *files] if name.startswith(incomplete)]


def offer_kept(context: typer.Context, incomplete: str) -> list[str]:
    """Ids of sweeps, imported runs and runs in the results folder that `--results` names."""
    results = Path(context.params.get("results") or "results")
    paths = [*_entries(results / "sweeps"), *_entries(results / "imports")]
    paths += [run for cell in _entries(results / "runs") for run in _entries(cell)]
    names = [path.relative_to(results).as_posix().partition("/")[2] for path in paths]
    return [name for name in names if name.startswith(incomplete)]


def offer_any(context: typer.Context, incomplete: str) -> list[str]:
    """Of a verb that takes a sweep file as well as an id."""
    return [*offer_kept(context, incomplete), *offer_definitions(incomplete)]


def _entries(folder: Path) -> list[Path]:
    """Sorted; hidden ones are left out. A folder that cannot be read has none."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []
