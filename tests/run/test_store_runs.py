from __future__ import annotations

import json
import re

from small_runs import LAPTOP
from stand_in_runs import append_samples

from bench.record import RunStatus, RunSummary, StepSample
from bench.resolve import resolve
from bench.spec import MeasureSpec, ResolvedRun, RunSpec, TrainSpec
from bench.store import ResultsStore, RunFolder
from reports.views.cells import make_cell


def resolved(**train: object) -> ResolvedRun:
    return resolve(RunSpec(train=TrainSpec(**train)), LAPTOP)


def new_run(store: ResultsStore, run: ResolvedRun, sweep: str | None = "s") -> RunFolder:
    return store.new_run(run, sweep=sweep, cell="c1", repeat=2, arm="head", code="abc")


def sample(step: int) -> StepSample:
    return StepSample(
        step=step,
        milliseconds=12.5,
        loss=2.0 / step,
        grad_norm=None,
        learning_rate=1e-3,
        tokens=128,
        wire_bytes=None,
        rss_bytes=1_000_000,
    )


def test_a_run_is_named_by_its_cell_its_config_and_its_time(store: ResultsStore) -> None:
    run = resolved()
    with new_run(store, run) as folder:
        cell, name = folder.run_id.split("/")
        assert cell == f"{run.slug}-{run.config_hash}"
        assert re.fullmatch(r"\d{8}T\d{6}\.\d{3}Z-[0-9a-f]{4}", name)
        assert folder.path == store.root / "runs" / cell / name


def test_a_run_with_a_date_to_come_counts_as_older_than_what_is_made_behind_it(store) -> None:
    for state in ("unstable", "ok", "ok"):
        with new_run(store, resolved()) as folder:
            changes = {"state": state}
            if state == "unstable":
                changes["started_utc"] = "2999-01-01T00:00:00.500Z"
            folder.finish(folder.status.model_copy(update=changes))
        if state == "unstable":
            folder.path.rename(folder.path.with_name("29990101T000000.500Z-abcd"))
    ahead, *behind = store.records(sweep="s")
    assert (ahead.status.state, [one.status.state for one in behind]) == ("unstable", ["ok"] * 2)
    assert behind[-1].run_id == folder.run_id
    (counted,) = make_cell("c1", store.records(sweep="s")).runs
    assert counted.record.run_id == folder.run_id


def test_what_is_written_is_read_back(store: ResultsStore) -> None:
    run = resolved()
    with new_run(store, run) as folder:
        for rank in (1, 0):
            append_samples(folder, rank, sample(1), sample(2))
        (folder.path / "memory.json").write_text(
            json.dumps({"rank": 0, "by_category_bytes": {"gradients": 42}})
        )
        folder.write_environment({"hostname": "here"})
        folder.write_summary(RunSummary(formula="f"))
        status = folder.status.model_copy(update={"state": "ok", "ended_utc": "later"})
        folder.finish(status)
    record = store.read(folder.run_id)
    assert record.resolved == run
    assert record.status == status.model_copy(update={"digest": folder.status.digest})
    assert (status.sweep, status.cell, status.repeat, status.arm) == ("s", "c1", 2, "head")
    assert status.code == "abc"
    assert record.steps == {0: [sample(1), sample(2)], 1: [sample(1), sample(2)]}
    assert record.losses == [2.0, 1.0]
    assert record.memory == {"rank": 0, "by_category_bytes": {"gradients": 42}}
    assert record.environment == {"hostname": "here", "runtime": {}}
    assert record.problems == ()


def test_a_profiled_run_is_not_comparable_in_time(store: ResultsStore) -> None:
    run = resolve(RunSpec(measure=MeasureSpec(profile="memory")), LAPTOP)
    with new_run(store, run) as profiled, new_run(store, resolved()) as plain:
        assert not profiled.status.comparable_in_time
        assert plain.status.comparable_in_time


def test_records_come_oldest_first_and_can_be_chosen_by_sweep(store: ResultsStore) -> None:
    names = []
    for steps, sweep in [(30, "a"), (20, "b"), (10, "a"), (5, None)]:
        with new_run(store, resolved(steps=steps), sweep) as folder:
            names.append(folder.run_id)
    assert [record.run_id for record in store.records()] == names
    assert [record.run_id for record in store.records(sweep="a")] == [names[0], names[2]]
    assert list(store.records(sweep="c")) == []


def test_a_run_is_found_by_a_part_of_its_id_that_no_other_has(store: ResultsStore) -> None:
    with new_run(store, resolved(steps=7)) as one, new_run(store, resolved(steps=8)) as two:
        assert store.read(one.run_id.split("/")[1]).run_id == one.run_id
        assert store.read(resolved(steps=8).config_hash).run_id == two.run_id


def test_sweep_and_cell_name_the_newest_run_of_the_cell(store: ResultsStore) -> None:
    for cell in ("first", "second", "first"):
        with store.new_run(resolved(), sweep="s", cell=cell, repeat=0, arm=None, code="c") as one:
            newest = one.run_id
    assert store.find("s:first")[0] == newest
    assert store.find("s:second")[0] != newest


def test_the_status_on_disk_is_readable_json_at_every_moment(store: ResultsStore) -> None:
    with new_run(store, resolved()) as folder:
        file = folder.path / "status.json"
        assert json.loads(file.read_text())["state"] == "running"
        folder.write_status(RunStatus(state="crashed", reason="é\n"))
        assert json.loads(file.read_text())["reason"] == "é\n"
        assert not list(folder.path.glob(".*"))
