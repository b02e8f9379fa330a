"""History: starts become points, points become levels, and a level changes for a reason."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import asdict, replace

import pytest
from recorded_runs import Recorded, record_run, resolved_run

from bench.cli.histories import show_history
from bench.cli.verbs.read import HistoryRequest
from bench.derive.metrics import LEDGER_PEAK, LOSS, MEMORY, STEP_TIME, WIRE_BYTES
from bench.errors import UsageError
from bench.store import ResultsStore
from bench.workload import ImportedRun, ImportedStep, Provenance, Workload
from reports.build import HTML_NAME, write_document
from reports.history import change_points
from reports.history.change_points import levels
from reports.history.page import History, document, to_data
from reports.history.series import Series, series_of
from reports.history.starts import Start, read_archive, starts_of, to_lines


def start(night: int, number: int = 0, *, value: float = 100.0, **changes) -> Start:
    given_ = {
        "id": f"runs/{night}-{number}",
        "cell": "zero3",
        "config": "abc",
        "hardware": "cpu-x",
        "machine": "a machine",
        "commit": f"commit-{night}",
        "code": f"code-{night}",
        "utc": f"2026-03-{night + 1:02d}T03:0{number}:00.000Z",
        "values": {"step_time": value},
        "loss_bound": 1e-5,
    }
    return Start(**(given_ | changes))


def nights(means: list[float], *, starts: int = 4, noise: float = 0.002, **changes) -> list[Start]:
    """Some starts a night around its mean, the same for the same arguments."""
    draw = random.Random(7)
    return [
        start(night, number, value=mean * math.exp(draw.gauss(0, noise)), **changes)
        for night, mean in enumerate(means)
        for number in range(starts)
    ]


def one(starts, metric=STEP_TIME) -> Series:
    (found,) = series_of(starts, metric)
    return found


def times(means: list[float], **changes):
    return levels(one(nights(means, **changes)), STEP_TIME.rule, alpha=0.05)


# -- starts and series -------------------------------------------------------------------------


def test_a_start_survives_its_line_and_damage_is_named(tmp_path):
    kept = [start(0), start(1)]
    path = tmp_path / "history.jsonl"
    later = json.dumps(asdict(start(2)) | {"history_version": 2})
    nan = json.dumps(asdict(start(2, value=1.0))).replace("1.0}", "NaN}")
    path.write_text("".join(to_lines(kept)) + f"{later}\n{nan}\n" + '{"id": "cut o')
    found, problems = read_archive(path)
    assert found == kept
    assert [text.partition(" ")[0] for text in problems] == [f"{path}:{n}" for n in (3, 4, 5)]
    assert "history_version" in problems[0]
    assert "finite" in problems[1]


def test_a_results_folder_is_an_archive_without_runs_that_did_not_finish(store, tmp_path):
    for state in ("ok", "crashed", "out_of_memory"):
        record_run(store, Recorded(resolved_run(), cell=state, state=state))
    (found,), problems = starts_of(store)
    assert problems == []
    assert read_archive(store.root) == ([found], [])
    with pytest.raises(UsageError, match="history --append"):
        read_archive(tmp_path / "nothing.jsonl")
    assert found.cell == "ok"
    assert found.values.keys() >= {"step_time", "throughput", "loss", "ledger_peak", "wire_bytes"}
    assert (found.commit, found.day) == ("0123456789ab", "2026-03-01")


def appended(store, file) -> list[Start]:
    show_history(HistoryRequest(metric="step_time", results=store.root, append=file))
    kept, problems = read_archive(file)
    assert problems == []
    return kept


def test_an_archive_whose_last_line_has_no_end_loses_no_start(store, tmp_path):
    file = tmp_path / "history.jsonl"
    file.write_text("".join(to_lines([start(1)])).rstrip("\n"))
    record_run(store, Recorded(resolved_run(), cell="a"))
    assert len(appended(store, file)) == 2


def test_two_commands_that_append_at_once_lose_no_start(store, tmp_path, monkeypatch):
    file = tmp_path / "history.jsonl"
    record_run(store, Recorded(resolved_run(), cell="a"))

    def lines(starts):
        if not file.exists():  # as another command does between reading and writing
            file.write_text("".join(to_lines([start(1)])))
        return to_lines(starts)

    monkeypatch.setattr("bench.cli.histories.to_lines", lines)
    assert len(appended(store, file)) == 2


def test_damaged_runs_and_imports_are_named(store, capsys):
    for cell in ("a", "b", "c"):
        folder = record_run(store, Recorded(resolved_run(), cell=cell))
        if cell != "a":
            (folder.path / ("spec.json" if cell == "b" else "steps.node0.jsonl")).write_text("{}")
    log = Provenance(kind="imported", imported_utc="2026-03-01T10:00:00+00:00")
    store.imports.write(ImportedRun("theirs", Workload(framework="x"), log, ()))
    (store.root / "imports" / "theirs" / "steps.jsonl").write_text("{}\n")
    answer = show_history(HistoryRequest(metric="step_time", results=store.root))
    problems = answer.document()["problems"]
    said = capsys.readouterr().err
    assert len(problems) == 3
    assert all(f"warning: {problem}" in said for problem in problems)
    for words in ("imports/theirs", "rank 0 has", "spec.json"):
        assert sum(words in problem for problem in problems) == 1


def test_a_log_of_every_night_under_one_name_is_a_start_of_every_night(tmp_path):
    file = tmp_path / "history.jsonl"
    for night in range(1, 4):
        fresh = ResultsStore.open(tmp_path / str(night), create=True)
        log = Provenance(kind="imported", imported_utc=f"2026-03-0{night}T10:00:00+00:00")
        step = ImportedStep(1, milliseconds=800.0)
        fresh.imports.write(ImportedRun("nightly", Workload(framework="x"), log, (step,)))
        assert len(appended(fresh, file)) == len(appended(fresh, file)) == night


def test_imported_runs_are_starts_under_their_labels(store):
    for name, label in (("x.one", "main"), ("x.two", "pull request")):
        run = ImportedRun(
            name,
            Workload(framework="torchtitan", model="llama", ranks=8, seq_len=8192),
            Provenance(kind="imported", label=label, imported_utc="2026-03-01T00:00:00Z"),
            (ImportedStep(3, milliseconds=250.0, loss=2.0),),
        )
        store.imports.write(run)
    (series,) = series_of(starts_of(store)[0], STEP_TIME)
    assert [point.commit for point in series.points] == ["main", "pull request"]
    assert series.name == "imported: torchtitan llama"


def test_a_point_is_one_code_on_one_day_of_one_configuration_and_machine():
    again = start(0, 1, id="runs/again", utc="2026-03-02T03:00:00.000Z")
    other = start(0, 2, code="other", commit="other")
    apart = [start(1, config="def"), start(2, hardware="cpu-y")]
    first, *others = series_of([*apart, start(0), again, other, start(0)], STEP_TIME)
    assert [len(series.points) for series in others] == [1, 1]
    assert len({series.name for series in (first, *others)}) >= 2
    assert [(p.day, p.commit, len(p.values)) for p in first.points] == [
        ("2026-03-01", "commit-0", 1),
        ("2026-03-01", "other", 1),
        ("2026-03-02", "commit-0", 1),
    ]


def test_memory_is_the_first_kind_that_all_starts_have():
    starts = [start(n, values={"ledger_peak": 10.0, "rss": 20.0}) for n in range(2)]
    assert one(starts, MEMORY).metric is LEDGER_PEAK
    assert one([*starts, start(3, values={"rss": 20.0})], MEMORY).metric.name == "rss"


# -- levels of exact numbers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "name", "values", "bound", "after"),
    [
        (WIRE_BYTES, "wire_bytes", (1000, 1000, 1001, 1001), 1e-5, [2]),
        # Within its tolerance memory does not change, but a drift beyond it is a change.
        (LEDGER_PEAK, "ledger_peak", (1000, 1004, 1001), 1e-5, []),
        (LEDGER_PEAK, "ledger_peak", (1000, 1004, 1008, 1009), 1e-5, [2]),
        # A loss is judged by the bound of its dtypes.
        (LOSS, "loss", (2.0, 2.0, 2.0, 2.001, 2.001), 1e-5, [3]),
        (LOSS, "loss", (2.0, 2.0, 2.0, 2.001, 2.001), 4e-3, []),
    ],
)
def test_an_exact_number_changes_at_its_commit(metric, name, values, bound, after):
    starts = [start(n, values={name: one}, loss_bound=bound) for n, one in enumerate(values)]
    found = levels(one(starts, metric), metric.rule, alpha=0.05).changes
    assert [(c.before, c.after) for c in found] == [(n - 1, n) for n in after]
    assert {c.judgement.verdict for c in found} <= {"regressed"}


# -- levels of times ---------------------------------------------------------------------------


@pytest.mark.needs("ruptures")
@pytest.mark.parametrize(
    ("means", "same", "expected"),
    [
        (
            [100.0, 100.3] * 3 + [110.0, 110.2] * 3 + [95.0, 95.3] * 3,
            None,
            [(6, "regressed", False), (12, "improved", False)],
        ),
        # One odd night is no level.
        ([100, 100.4, 99.8, 120, 100.1, 99.9, 100.3], None, []),
        ([100, 100.4, 99.8, 100.1, 99.9, 120], None, []),
        # A change without a change of code is one of the machine.
        ([100, 100.4, 99.8, 106, 106.3, 105.9], "same", [(3, "regressed", True)]),
        ([100, 100.4, 99.8, 106, 106.3, 105.9], "", [(3, "regressed", False)]),
        # Nights that differ widen the least change.
        ([100, 106, 95, 103, 98, 107, 94, 101, 105, 96, 99, 104], None, []),
    ],
)
def test_levels_are_told_apart(means, same, expected):
    found = times(means, **({} if same is None else {"code": same}))
    assert [(c.after, c.judgement.verdict, c.same_code) for c in found.changes] == expected
    assert (found.tolerance > 0.04) == (106 in means and 95 in means)


@pytest.mark.needs("ruptures")
def test_a_slower_commit_is_found_with_its_size_and_interval():
    found = times([100, 100.4, 99.8, 100.1, 106, 106.3, 105.9, 106.2])
    (change,) = found.changes
    assert (change.before, change.after, change.judgement.verdict) == (3, 4, "regressed")
    assert change.judgement.change == pytest.approx(0.06, abs=0.005)
    low, high = change.judgement.interval
    assert 1.02 < low < 1.06 < high
    assert (change.judgement.n_base, change.judgement.n_head) == (16, 16)


@pytest.mark.needs("ruptures")
def test_a_change_below_the_tolerance_of_the_policy_or_the_noise_floor_is_none():
    means = [100, 100.4, 99.8, 100.1, 106, 106.3, 105.9, 106.2]
    series = one(nights(means))
    wide = replace(STEP_TIME.rule, tolerance=0.10)
    assert levels(series, wide, alpha=0.05).changes == ()
    floored = levels(series, STEP_TIME.rule, alpha=0.05, floor=0.08)
    assert (floored.changes, floored.tolerance) == ((), 0.08)


def test_points_of_few_starts_decide_nothing():
    found = times([100, 100, 100, 200, 200, 200], starts=2)
    assert found.changes == ()
    assert found.remark == "0 of 6 points have 3 starts; 4 are needed to tell two levels apart"


def test_without_ruptures_that_is_said(monkeypatch):
    monkeypatch.setattr(change_points, "can_find", lambda: False)
    found = times([100, 100, 100, 200, 200, 200])
    assert found.changes == ()
    assert "mfsdp-bench[history]" in found.remark


# -- the page ----------------------------------------------------------------------------------


@pytest.fixture
def history() -> History:
    starts = [start(n, values={"wire_bytes": 2.0**20 * (1 + (n >= 2))}) for n in range(4)]
    starts += [
        start(n, id=f"z{n}", config="b", cell="<b>&", values={"wire_bytes": 5.0}) for n in (0, 1)
    ]
    series = tuple(
        (one, levels(one, WIRE_BYTES.rule, alpha=0.05)) for one in series_of(starts, WIRE_BYTES)
    )
    return History("wire_bytes", series, ("line 7 is left out",))


def test_the_page_opens_from_its_file_and_asks_nobody(history, tmp_path):
    folder, figures = write_document(document(history), tmp_path)
    page = (folder / HTML_NAME).read_text()
    assert page.count("<svg") == len(figures) == 2
    assert not re.search(r"<script|<link|(?:src|href)=[\"'](?!#)", page.replace("xlink:href", ""))
    assert "<b>&" not in page
    assert "line 7 is left out" in page
    text = (folder / "report.md").read_text()
    assert (
        "1 change point; the newest: zero3, regressed between commit-1 (2026-03-02) and commit-2 "
        "(2026-03-03): +100.00 %, 1 start against 1."
    ) in text


def test_the_data_is_plain_json(history):
    data = json.loads(json.dumps(to_data(history)))
    (change,) = data["series"][0]["change_points"]
    assert (change["verdict"], change["change"], change["day"]) == ("regressed", 1.0, "2026-03-03")
    assert (change["commit_before"], change["commit_after"]) == ("commit-1", "commit-2")
    assert data["series"][1]["change_points"] == []
