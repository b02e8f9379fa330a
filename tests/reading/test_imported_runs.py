"""Imported runs: beside measured ones, with what is absent called absent, and log against log."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from recorded_runs import TINY, Recorded, findings_of, record_run, resolved_run

import sweeps
from bench.resolve.resolution import resolve_anywhere
from bench.spec import TrainSpec
from bench.workload import ImportedRun, ImportedStep, Provenance, Workload
from reports.build import write_report
from reports.compare.logs import of_import, side_by_side, step_changes, step_differences, to_data
from reports.compare.published import GLOBAL_BATCH, PUBLISHED_ROWS
from reports.frames import read_frames
from sweeps.definition import load_sweep
from sweeps.matrix import expand

THEIRS = Workload(framework="megatron-lm", ranks=64, global_batch=256, seq_len=4096)
LOG = Provenance(
    kind="imported", source="train.log", importer="megatron 1", absent=("model", "device")
)
STEPS = tuple(ImportedStep(n, milliseconds=800.0 + n, loss=3.0 - n / 10) for n in range(1, 4))


def report(store, tmp_path) -> str:
    return write_report(store, ["quickstart"], tmp_path / "report").markdown.read_text()


def test_a_report_shows_an_imported_run_beside_measured_cells(store, tmp_path) -> None:
    findings_of(store, {"ours": resolved_run()})
    assert "Imported runs" not in report(store, tmp_path)
    one = store.imports.write(ImportedRun("theirs", THEIRS, LOG, STEPS))
    text = report(store, tmp_path)
    row = next(line for line in text.splitlines() if line.startswith(f"| {one.id}"))
    fields = [field.strip() for field in row.strip("|").split("|")]
    assert fields[1:8] == [
        "megatron 1: train.log", "megatron-lm", "absent", "absent", "64", "256", "4,096",
    ]  # fmt: skip
    assert any("| ours " in line and "| measured " in line for line in text.splitlines())
    assert "model, device" in text
    # A damaged one is named and not used.
    file = store.imports.folder / one.id / "steps.jsonl"
    file.write_text(file.read_text().replace("801", "1"))
    text = report(store, tmp_path)
    assert "Damaged imports" in text
    assert "megatron 1: train.log" not in text


def test_numbers_of_a_log_are_its_medians_and_what_it_lacks_stays_none() -> None:
    full = of_import(ImportedRun("theirs", THEIRS, LOG, STEPS))
    # The line of iteration 2 of Megatron-LM is a mean over both of the first.
    assert (full.pace.milliseconds, full.loss) == (803.0, 2.7)
    assert full.pace.tokens_per_second == pytest.approx(256 * 4096 / 0.803)
    titan = THEIRS.model_copy(update={"framework": "torchtitan"})
    assert of_import(ImportedRun("titan", titan, LOG, STEPS)).pace.milliseconds == 802.0
    bare = of_import(ImportedRun("bare", Workload(framework="x"), LOG, (ImportedStep(1),)))
    assert (bare.pace.milliseconds, bare.pace.tokens_per_second, bare.loss) == (None, None, None)
    assert side_by_side([bare]).rows[0].cells[-3:] == ("absent",) * 3
    assert to_data([bare])[0]["tokens_per_second"] is None


def test_imported_runs_are_rows_of_the_frames(store) -> None:
    step = ImportedStep(1, milliseconds=800.0, extra={"num zeros": 3.0}, lines=(7,))
    store.imports.write(ImportedRun("theirs", THEIRS, LOG, (step,)))
    frames = read_frames(store.root)
    (run,) = frames.runs.to_dict("records")
    assert (run["run_id"], run["state"], run["step_milliseconds_median"]) == (
        "theirs", "imported", 800.0,
    )  # fmt: skip
    (row,) = frames.steps.to_dict("records")
    assert (row["step"], row["extra"]) == (1, '{"num zeros": 3.0}')


def log_of(*steps: ImportedStep) -> ImportedRun:
    return ImportedRun("x", Workload(framework="f"), Provenance(kind="imported"), steps)


def losses(*values: float | None, first: int = 1) -> ImportedRun:
    return log_of(*(ImportedStep(first + i, loss=value) for i, value in enumerate(values)))


def test_losses_are_compared_at_the_steps_that_both_logs_tell() -> None:
    found = step_differences(losses(5.0, 4.0, None, 3.0), losses(4.5, 1.0, 3.0, first=2))
    assert [*found] == ["loss"]
    assert (found["loss"].apart, found["loss"].at) == ({2: 0.5, 4: 0.0}, 2)
    assert step_differences(losses(1.0), losses(1.0, first=2)) == {}
    # A side that diverged differs without bound.
    (gap,) = step_differences(losses(2.0, math.nan, 1.5), losses(math.nan, math.nan, 1.0)).values()
    assert gap.apart == {1: math.inf, 2: 0.0, 3: -0.5}


def test_times_are_medians_and_peaks_are_largest() -> None:
    base = log_of(
        *(ImportedStep(i, milliseconds=time) for i, time in enumerate((90.0, 10.0, 11.0))),
        ImportedStep(4, device_peak_bytes=100),
        ImportedStep(5, device_peak_bytes=50),
    )
    head = log_of(ImportedStep(1, milliseconds=5.5), ImportedStep(2, device_peak_bytes=50))
    time, peak = step_changes(base, head)
    assert (time.base, time.head, time.ratio) == (11.0, 5.5, 0.5)
    assert (peak.base, peak.ratio) == (100.0, 0.5)
    assert step_changes(base, losses(1.0)) == []
    zero = log_of(ImportedStep(1, milliseconds=0.0))
    assert [change.ratio for change in step_changes(zero, zero)] == [None]


@pytest.mark.parametrize(("seq_len", "beside"), [(8192, True), (4096, False)])
def test_numbers_that_a_request_published_stand_beside_the_cell_they_are_of(
    store, tmp_path, seq_len, beside
):
    train = TrainSpec(steps=20, global_batch=128, seq_len=seq_len)
    shape = TINY.model_copy(update={"preset": "llama3-8b"})
    run = resolved_run(ranks=8, train=train, shape=shape)
    record_run(store, Recorded(run, cell="fsdp-bf16-ub_on", sweep="pr3067_dtypes"))
    text = write_report(store, ["pr3067_dtypes"], tmp_path / "report").markdown.read_text()
    rows = [line for line in text.splitlines() if "published, another machine" in line]
    assert len(rows) == beside
    assert all("| 10,424 |" in row and "| 59.2 GiB | 1.154608" in row for row in rows)


@pytest.mark.parametrize("row", PUBLISHED_ROWS, ids=str)
def test_a_published_number_is_of_a_cell_of_its_sweep_with_its_work(row):
    definition = load_sweep(Path(sweeps.__file__).parent / f"{row.sweep}.yaml")
    (cell,) = (cell for cell in expand(definition.matrix) if cell.id == row.cell)
    run = resolve_anywhere(cell.spec)
    found = (run.model_name, run.launch.ranks, run.train.seq_len, run.train.global_batch)
    assert found == (row.model, row.ranks, row.seq_len, GLOBAL_BATCH)
