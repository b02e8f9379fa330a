"""`export`: a results folder as tables for other tools."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import console, exit_codes
from bench.errors import NothingMeasuredError, UsageError
from bench.store.atomic import reporting_failed_writes
from sweeps.suggest import did_you_mean

if TYPE_CHECKING:
    from pandas import DataFrame

FORMATS = ("csv", "json", "parquet")


def export(results: Path, sweeps: Sequence[str], form: str, out: Path, *, as_json: bool) -> int:
    """Write `runs.FORM` and `steps.FORM` into the folder `out` and print their paths.

    Raises:
        UsageError: an unknown format or sweep, Parquet without its package, or a folder that cannot
            be written.
        NothingMeasuredError: there is no run.
    """
    if form not in FORMATS:
        raise UsageError(
            f"--to: expected one of {', '.join(FORMATS)}, found {form!r}"
            f"{did_you_mean(form, FORMATS)}"
        )
    if form == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(
            "--to parquet needs the package pyarrow, which is not installed: "
            "pip install 'mfsdp-bench[parquet]', or use --to csv"
        )
    from reports.frames import read_frames

    frames = read_frames(results, sweeps)
    for problem in frames.problems:
        console.note(f"warning: {problem}")
    if frames.runs.empty:
        raise NothingMeasuredError(f"{results} holds no run to export")
    paths = {name: out / f"{name}.{form}" for name in ("runs", "steps")}
    try:
        with reporting_failed_writes(out):
            out.mkdir(parents=True, exist_ok=True)
            _write(frames.runs, paths["runs"], form)
            _write(frames.steps, paths["steps"], form)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; name another --out") from error
    if as_json:
        counts = {"rows_runs": len(frames.runs), "rows_steps": len(frames.steps)}
        console.data_json({name: str(path) for name, path in paths.items()} | counts)
    else:
        console.data("\n".join(map(str, paths.values())))
    return exit_codes.OK


def _write(frame: DataFrame, path: Path, form: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    if form == "csv":
        frame.to_csv(partial, index=False)
    elif form == "json":
        frame.to_json(partial, orient="records", lines=False, date_format="iso", indent=1)
    else:
        frame.to_parquet(partial, index=False)
    partial.replace(path)
