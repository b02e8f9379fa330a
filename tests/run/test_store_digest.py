"""A finished record has a digest: a change afterwards makes it damaged, for everybody."""

from __future__ import annotations

import json

import pytest
from stand_in_runs import finished_run

from bench.store import ResultsStore, RunFolder
from bench.store.digest import with_digest


@pytest.fixture
def folder(store: ResultsStore) -> RunFolder:
    folder = finished_run(store, steps=20)
    folder.finish(folder.status)
    return folder


def changed(folder: RunFolder, name: str, old: str, new: str) -> None:
    file = folder.path / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_a_record_that_nobody_touched_is_whole(store: ResultsStore, folder: RunFolder) -> None:
    record = store.read(folder.run_id)
    assert record.is_whole
    assert record.damage == ()


def test_a_change_of_any_byte_is_noticed(store: ResultsStore, folder: RunFolder) -> None:
    for file in (one for one in folder.path.glob("*.json*") if one.name != "spec.json"):
        whole = file.read_bytes()
        for position in range(0, len(whole), 29):
            byte = b"0" if whole[position : position + 1] != b"0" else b"1"
            file.write_bytes(whole[:position] + byte + whole[position + 1 :])
            assert not store.read(folder.run_id).is_whole, (file.name, position, byte)
        file.write_bytes(whole)
    assert store.read(folder.run_id).is_whole


@pytest.mark.parametrize("name", ["spec.json", "env.json", "memory.json", "steps.node0.jsonl"])
def test_every_raw_file_has_a_hash_and_an_overview_says_so_too(
    store: ResultsStore, folder: RunFolder, name: str
) -> None:
    with (folder.path / name).open("a") as stream:
        stream.write("\n")
    record = store.read(folder.run_id)
    assert f"{name} was changed after the run had ended" in record.damage
    (outline,), _ = store.outlines()
    assert (outline.damage, outline.status) == (record.damage, record.status)


@pytest.mark.parametrize(
    ("old", "new"), [('"state": "ok"', '"state": "crashed"'), ('"repeat": 0', '"repeat": 3')]
)
def test_the_status_has_a_hash_of_itself(
    store: ResultsStore, folder: RunFolder, old: str, new: str
) -> None:
    changed(folder, "status.json", old, new)
    assert store.read(folder.run_id).damage == ("status.json was changed after the run had ended",)


def test_an_edited_environment_of_a_failed_run_is_seen(
    store: ResultsStore, folder: RunFolder
) -> None:
    folder.finish(folder.status.model_copy(update={"state": "crashed"}))
    assert store.read(folder.run_id).damage == ()
    (folder.path / "env.json").write_text("{}")
    assert store.read(folder.run_id).damage == ("env.json was changed after the run had ended",)


@pytest.mark.parametrize("left", [{}, {"digest": None}, {"digest": "x"}])
def test_a_status_cannot_lose_its_digest(
    store: ResultsStore, folder: RunFolder, left: dict[str, object]
) -> None:
    folder.finish(folder.status.model_copy(update={"ended_utc": "2026-11-23T00:00:00+00:00"}))
    document = json.loads((folder.path / "status.json").read_text())
    del document["digest"]
    (folder.path / "status.json").write_text(json.dumps(document | left))
    changed = store.read(folder.run_id).changed
    assert changed == ("status.json has lost its digest after the run had ended",)


def test_files_that_are_lost_or_added_damage_the_record(
    store: ResultsStore, folder: RunFolder
) -> None:
    (folder.path / "memory.json").unlink()
    (folder.path / "steps.node2.jsonl").write_text("")
    damage = store.read(folder.run_id).damage
    assert "memory.json was removed after the run had ended" in damage
    assert "steps.node2.jsonl was added after the run had ended" in damage


def test_a_derived_summary_may_be_made_again(store: ResultsStore, folder: RunFolder) -> None:
    (folder.path / "summary.json").write_text("{}")
    assert store.read(folder.run_id).is_whole


def test_a_setting_that_a_later_version_writes_into_the_status_breaks_no_digest(
    store: ResultsStore, folder: RunFolder
) -> None:
    status = json.loads((folder.path / "status.json").read_text())
    del status["attempt"]  # as a version without this field would write it
    kept = with_digest(folder.path / "status.json", status)
    (folder.path / "status.json").write_text(json.dumps(kept))
    assert store.read(folder.run_id).is_whole


def test_an_overview_of_a_record_with_a_digest_reads_no_samples(
    store: ResultsStore, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.store.reading.read_samples", None)
    (outline,), damaged = store.outlines()
    assert (outline.run_id, outline.status.state, outline.damage) == (folder.run_id, "ok", ())
    assert damaged == []


def test_an_overview_of_a_record_without_a_digest_counts_its_samples(store: ResultsStore) -> None:
    finished_run(store, steps=2)
    (outline,), _ = store.outlines()
    assert outline.damage == ("rank 0 has 2 of 20 steps", "rank 1 has 2 of 20 steps")
