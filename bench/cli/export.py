"""`export`: a results folder as tables for other tools."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.cli import console
from bench.cli.report import SweepIds
from bench.cli.verb import Answer, option
from bench.errors import NothingMeasuredError, UsageError
from reports.renderers.document import Code

if TYPE_CHECKING:
    from pandas import DataFrame


class ExportVerb(SweepIds, name="export"):
    """Write runs and steps as tables, or files that other tools read.

    csv, json, parquet: one row per run, and one per step of a rank; units are in the names of
    columns (reports.frames.read_frames("results") has the same). golden, torchtitan: values of
    steps, a file per run. pytorch, bencher, github-action-benchmark, asv: a number per cell.

    Examples:
        export --format csv
        export speed --format bencher --out /tmp/speed
    """

    form: Literal[
        "csv",
        "json",
        "parquet",
        "golden",
        "torchtitan",
        "pytorch",
        "bencher",
        "github-action-benchmark",
        "asv",
    ] = option("--format", "The format of the files.", "csv")
    out: Path | None = option("--out FOLDER", "Where to write; RESULTS/export if left out.")

    def run(self) -> Answer:
        """The paths of what was written."""
        is_table = self.form in ("csv", "json", "parquet")
        files, data = self._tables() if is_table else self._for_others()
        out = self.out or self.results / "export"
        paths = {name: str(out / name) for name in files}
        for name, content in files.items():
            console.write_file(Path(paths[name]), content)
        named = {Path(name).stem: path for name, path in paths.items()}
        written = named if is_table else {"files": [*paths.values()]}
        return Answer([Code("\n".join(paths.values()))], written | data)

    def _tables(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Contents by the names of their files, and their rows."""
        from reports.frames import read_frames

        if self.form == "parquet" and importlib.util.find_spec("pyarrow") is None:
            raise UsageError(
                "--format parquet needs the package pyarrow, which is not installed: "
                "pip install 'mfsdp-bench[parquet]', or use --format csv"
            )
        frames = read_frames(self.results, self.sweeps)
        for problem in frames.problems:
            console.note(f"warning: {problem}")
        if frames.runs.empty:
            raise NothingMeasuredError(f"{self.results} holds no run to export")
        tables = {"runs": frames.runs, "steps": frames.steps}
        return (
            {f"{name}.{self.form}": _content(table, self.form) for name, table in tables.items()},
            {f"rows_{name}": len(table) for name, table in tables.items()},
        )

    def _for_others(self) -> tuple[dict[str, Any], dict[str, int]]:
        """As `_tables`, of the cells that have what the format needs."""
        from reports import exports

        store = self.store()
        known = {*store.sweeps(), *store.imports.ids()}
        if unknown := [name for name in self.sweeps if name not in known]:
            raise UsageError(
                f"no sweep {unknown[0]!r} in {store.root}; it holds:"
                f" {', '.join(sorted(known)) or 'none'}"
            )
        cells = exports.exported(store, self.sweeps)
        files = exports.FORMS[self.form](cells)
        if not files:
            why = "a commit without local changes" if self.form == "asv" else "a number that it has"
            raise NothingMeasuredError(
                f"{self.results} holds no finished run with {why}, which --format {self.form} needs"
            )
        return files, {"cells": len(cells)}


def _content(frame: DataFrame, form: str) -> str | bytes:
    write: dict[str, Callable[[], str | bytes]] = {
        "csv": lambda: frame.to_csv(index=False),
        "parquet": lambda: frame.to_parquet(index=False),
        "json": lambda: frame.to_json(orient="records", date_format="iso", indent=1),
    }
    return write[form]()
