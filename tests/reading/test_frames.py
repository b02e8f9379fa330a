"""A results folder as frames: the numbers of reports, one row per run and one per step."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from recorded_runs import Recorded, record_run, resolved_run

from bench.record import RunSummary
from bench.spec import LaunchSpec
from reports.frames import read_frames


def test_counts_and_cpu_time_by_thread_are_columns(store, monkeypatch):
    counted = RunSummary(
        formula="", counts={"copies": 3}, cpu_milliseconds_by_thread={"autograd": 1.5}
    )
    monkeypatch.setattr("reports.frames.summarise", lambda _: counted)
    record_run(store, Recorded(resolved_run(), cell="a"))
    (row,) = read_frames(store.root).runs.to_dict("records")
    assert (row["counts.copies"], row["cpu.autograd_milliseconds"]) == (3, 1.5)


def test_what_was_not_measured_is_missing_and_its_column_is_one_of_numbers(store):
    record_run(store, Recorded(resolved_run(), cell="a", state="crashed", reason="boom"))
    frames = read_frames(store.root)
    (row,) = frames.runs.to_dict("records")
    assert (row["state"], row["reason"]) == ("crashed", "boom")
    assert math.isnan(row["step_milliseconds_median"])
    for name in ("mfu", "device_peak_bytes", "final_loss"):
        assert frames.runs[name].dtype == "float64"
    assert frames.steps["device_peak_bytes"].dtype == "float64"


def test_settings_are_columns_and_secrets_are_not(store):
    launch = LaunchSpec(ranks=2, env={"NCCL_PROTO": "LL", "HF_TOKEN": "hf_0123456789"})
    environment = {"git": {"commit": "a" * 40, "dirty": True}}
    record_run(store, Recorded(resolved_run(launch=launch), cell="a", environment=environment))
    (row,) = read_frames(store.root).runs.to_dict("records")
    assert (row["engine.name"], row["train.steps"], row["env.NCCL_PROTO"]) == ("mfsdp", 20, "LL")
    assert "hf_0123456789" not in str(row)
    assert (row["git_dirty"], type(row["ledger_is_measured"])) == (True, bool)


def test_the_sweeps_that_are_asked_for(store):
    for sweep in ("a", "b"):
        record_run(store, Recorded(resolved_run(), cell="c", sweep=sweep))
    assert set(read_frames(store.root, ["b"]).runs["sweep"]) == {"b"}
    assert len(read_frames(store.root).runs) == 2
    broken = next(iter(store.records(sweep="a"))).run_id
    (store.root / "runs" / broken / "spec.json").write_text("{")
    frames = read_frames(store.root)
    assert len(frames.runs) == 1
    assert any(broken in problem for problem in frames.problems)


@pytest.mark.parametrize(
    "form", ["csv", "json", pytest.param("parquet", marks=pytest.mark.needs("pyarrow"))]
)
def test_export_writes_the_same_frames(quickstart_root, tmp_path, form):
    from bench.cli.export import ExportVerb

    ExportVerb(results=quickstart_root, form=form, out=tmp_path / "out").run()
    read = {"csv": pd.read_csv, "json": pd.read_json, "parquet": pd.read_parquet}[form]
    frames = read_frames(quickstart_root)
    for name, frame in (("runs", frames.runs), ("steps", frames.steps)):
        back = read(tmp_path / "out" / f"{name}.{form}")
        assert list(back.columns) == list(frame.columns)
        numbers = frame.select_dtypes("float64").columns
        pd.testing.assert_frame_equal(
            back[numbers].astype("float64"), frame[numbers], rtol=1e-9, check_index_type=False
        )
