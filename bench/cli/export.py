"""`export`: a results folder as tables for other tools."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
        if self.form not in ("csv", "json", "parquet"):
            return self._for_others()
        if self.form == "parquet" and importlib.util.find_spec("pyarrow") is None:
            raise UsageError(
                "--format parquet needs the package pyarrow, which is not installed: "
                "pip install 'mfsdp-bench[parquet]', or use --format csv"
            )
        from bench.store.atomic import reporting_failed_writes
        from reports.frames import read_frames

        frames = read_frames(self.results, self.sweeps)
        for problem in frames.problems:
            console.note(f"warning: {problem}")
        if frames.runs.empty:
            raise NothingMeasuredError(f"{self.results} holds no run to export")
        out, tables = self._out, {"runs": frames.runs, "steps": frames.steps}
        paths = {name: str(out / f"{name}.{self.form}") for name in tables}
        try:
            with reporting_failed_writes(out):
                out.mkdir(parents=True, exist_ok=True)
                for name, table in tables.items():
                    _write(table, Path(paths[name]), self.form)
        except OSError as error:
            raise UsageError(
                f"cannot write to {out}: {error.strerror}; name another --out"
            ) from error
        counts = {f"rows_{name}": len(table) for name, table in tables.items()}
        return Answer([Code("\n".join(paths.values()))], paths | counts)

    @property
    def _out(self) -> Path:
        return self.out or self.results / "export"

    def _for_others(self) -> Answer:
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
        paths = [str(self._out / path) for path in files]
        for path, text in zip(paths, files.values(), strict=True):
            console.write_file(Path(path), text)
        return Answer([Code("\n".join(paths))], {"files": paths, "cells": len(cells)})


def _write(frame: DataFrame, path: Path, form: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    if form == "json":
        frame.to_json(partial, orient="records", lines=False, date_format="iso", indent=1)
    else:
        (frame.to_csv if form == "csv" else frame.to_parquet)(partial, index=False)
    partial.replace(path)
