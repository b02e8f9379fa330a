"""Runs of other frameworks: kept with what their log says, and nothing made up."""

from __future__ import annotations

import json
import math

import pytest
from small_runs import RUN
from stand_in_runs import finished_run

from bench.cli.import_ import ImportVerb
from bench.errors import DamagedRecordError, UsageError
from bench.store import ResultsStore
from bench.store.file_lock import FileLock
from bench.workload import ImportedRun, ImportedStep, Provenance, Workload

THEIRS = Workload(framework="megatron-lm", engine="megatron-fsdp", ranks=64, global_batch=256)
LOG = Provenance(kind="imported", source="train.log", importer="megatron 1", absent=("loss",))
STEPS = (ImportedStep(1, milliseconds=812.5), ImportedStep(2, milliseconds=799.0, tokens=4096))


def test_an_imported_run_is_read_back_with_its_absent_fields_absent(store: ResultsStore) -> None:
    written = store.imports.write(ImportedRun("theirs", THEIRS, LOG, STEPS))
    (found,) = store.imports.all()
    assert found == written
    assert (found.workload.seq_len, found.workload.tokens_per_step) == (None, None)
    assert found.steps[0].loss is None


def test_imported_runs_are_never_among_the_measured_ones(store: ResultsStore) -> None:
    measured = finished_run(store, steps=20)
    store.imports.write(ImportedRun("theirs", THEIRS, LOG, STEPS))
    (record,) = store.records()
    assert record.run_id == measured.run_id
    assert record.provenance.kind == "measured"
    assert store.outlines()[1] == []


def test_a_measured_run_says_its_workload_in_the_same_terms(store: ResultsStore) -> None:
    record = store.read(finished_run(store, steps=20).run_id)
    workload = record.workload
    assert (workload.framework, workload.engine) == ("mfsdp-bench", "mfsdp")
    assert workload.parameters == RUN.shape.parameters
    assert workload.tokens_per_step == RUN.tokens_per_step
    assert workload.settings["allocator"] == "storage_resize"


def test_what_was_measured_here_cannot_be_imported(store: ResultsStore) -> None:
    with pytest.raises(UsageError, match=r"provenance\.kind: expected imported, found measured"):
        store.imports.write(ImportedRun("theirs", THEIRS, Provenance(), STEPS))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("steps.jsonl", "812.5", "12.5"),
        ("workload.json", '"global_batch": 256', '"global_batch": 512'),
        ("nccl.log", "a line", "edited"),
    ],
)
def test_an_import_that_was_edited_is_damaged_and_named(store, capsys, name, old, new) -> None:
    lines = ("a line\r", "an\x0cother")
    run = store.imports.write(ImportedRun("theirs", THEIRS, LOG, STEPS, lines))
    assert store.imports.read("theirs").nccl == lines
    file = store.root / "imports" / run.id / name
    whole = file.read_bytes()
    assert old.encode() in whole
    file.write_bytes(whole.replace(old.encode(), new.encode()))
    with pytest.raises(DamagedRecordError, match=f"{name} was changed after it was imported"):
        store.imports.read(run.id)
    damaged: list[str] = []
    assert list(store.imports.all(damaged)) == []
    assert damaged == [
        f"{file} was changed after it was imported; delete that folder, and import its log again"
    ]
    ImportVerb(results=store.root).run()
    assert f"left out: {damaged[0]}" in capsys.readouterr().err


def test_a_log_that_is_read_otherwise_than_before_does_not_keep_its_old_numbers(store) -> None:
    before = ImportedRun("theirs", THEIRS, LOG, STEPS)
    assert store.imports.write(before) == store.imports.write(before)
    with pytest.raises(UsageError, match="whose numbers this version reads otherwise"):
        store.imports.write(ImportedRun("theirs", THEIRS, LOG, (ImportedStep(1, loss=2.0),)))
    other = LOG.model_copy(update={"sha256": "0"})
    with pytest.raises(UsageError, match=r"of train\.log; choose"):
        store.imports.write(ImportedRun("theirs", THEIRS, other, STEPS))


def test_two_commands_do_not_write_one_import_at_once(store: ResultsStore) -> None:
    run = ImportedRun("theirs", THEIRS, LOG, STEPS)
    folder = store.imports.folder / run.id
    folder.mkdir(parents=True)
    other = FileLock(folder / "import.lock")
    assert other.acquire()
    with pytest.raises(UsageError, match="another command is writing"):
        store.imports.write(run)
    other.release()
    (folder / "nccl.log").write_text("of a log whose import was interrupted\n")
    assert store.imports.write(run) == store.imports.read(run.id)


def test_no_file_holds_a_number_that_json_has_not(store: ResultsStore) -> None:
    step = ImportedStep(1, loss=math.nan, extra={"eval_loss": -math.inf, "words": "none"})
    store.imports.write(ImportedRun("theirs", THEIRS, LOG, (step,)))
    text = (store.imports.folder / "theirs" / "steps.jsonl").read_text()
    assert (json.loads(text)["loss"], "NaN" in text, "Infinity" in text) == ("nan", False, False)
    (read,) = store.imports.read("theirs").steps
    assert str(read) == str(step)
