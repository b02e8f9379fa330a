"""`export`: a results folder as tables for other tools."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import console
from bench.cli.console import Answer
from bench.cli.verbs.read import ExportRequest
from bench.errors import NothingMeasuredError, UsageError
from bench.store import ResultsStore
from bench.store.atomic import reporting_failed_writes
from reports import exports

if TYPE_CHECKING:
    from pandas import DataFrame


def export(request: ExportRequest) -> Answer:
    """Write runs and steps as tables, or files that other tools read, and say their paths.

    Raises:
        UsageError: an unknown sweep, Parquet without its package, or a folder that cannot be
            written.
        NothingMeasuredError: there is no run.
    """
    form, out = request.form, request.out or request.results / "export"
    if form in exports.FORMS:
        return _for_others(request, form, out)
    if form == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(
            "--format parquet needs the package pyarrow, which is not installed: "
            "pip install 'mfsdp-bench[parquet]', or use --format csv"
        )
    from reports.frames import read_frames

    frames = read_frames(request.results, request.sweeps)
    for problem in frames.problems:
        console.note(f"warning: {problem}")
    if frames.runs.empty:
        raise NothingMeasuredError(f"{request.results} holds no run to export")
    paths = {name: str(out / f"{name}.{form}") for name in ("runs", "steps")}
    try:
        with reporting_failed_writes(out):
            out.mkdir(parents=True, exist_ok=True)
            _write(frames.runs, Path(paths["runs"]), form)
            _write(frames.steps, Path(paths["steps"]), form)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; name another --out") from error
    counts = {"rows_runs": len(frames.runs), "rows_steps": len(frames.steps)}
    return Answer(lambda: paths | counts, lambda: "\n".join(paths.values()))


def _for_others(request: ExportRequest, form: str, out: Path) -> Answer:
    store = ResultsStore.open(request.results, create=False)
    known = {*store.sweeps(), *store.imports.ids()}
    if unknown := [name for name in request.sweeps if name not in known]:
        raise UsageError(
            f"no sweep {unknown[0]!r} in {store.root}; it holds:"
            f" {', '.join(sorted(known)) or 'none'}"
        )
    found = exports.exported(store, request.sweeps)
    files = exports.FORMS[form](found)
    if not files:
        why = "a commit without local changes" if form == "asv" else "a number that it has"
        raise NothingMeasuredError(
            f"{request.results} holds no finished run with {why}, which --format {form} needs"
        )
    for path, text in files.items():
        console.write_file(out / path, text)
    paths = [str(out / path) for path in files]
    return Answer(lambda: {"files": paths, "cells": len(found)}, lambda: "\n".join(paths))


def _write(frame: DataFrame, path: Path, form: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    if form == "csv":
        frame.to_csv(partial, index=False)
    elif form == "json":
        frame.to_json(partial, orient="records", lines=False, date_format="iso", indent=1)
    else:
        frame.to_parquet(partial, index=False)
    partial.replace(path)
