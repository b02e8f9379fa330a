"""Exports, each read by its own reader or checked against its documented schema."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from recorded_runs import Arm, Recorded, record_arms, record_run, resolved_run, write_plan

from bench.cli.baseline import SaveVerb
from bench.cli.compare import CompareVerb
from bench.cli.export import ExportVerb
from bench.cli.gate import GateVerb
from bench.cli.import_ import ImportVerb
from bench.errors import NothingMeasuredError, UsageError
from bench.workload import ImportedRun, ImportedStep, Provenance, Workload
from reports.compare.logs import refreshed

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GIT = {"git": {"commit": COMMIT, "dirty": False, "dirty_hash": None}}


@pytest.fixture
def measured(store):
    """A cell of eight runs."""
    cells = {"a cell": resolved_run("mfsdp", "optim")}
    record_arms(store, {None: Arm(hardware=GIT)}, sweep="night", blocks=8, cells=cells)
    return store


def files(store, form: str, *sweeps: str) -> dict[str, str]:
    out = store.root.parent / "out"
    answer = ExportVerb(sweeps=sweeps, form=form, out=out, results=store.root).run()
    assert answer.code == 0
    return {
        path.relative_to(out).as_posix(): path.read_text()
        for path in out.rglob("*")
        if path.is_file()
    }


def record_of(store):
    return min(store.records(), key=lambda record: record.status.repeat)


def test_golden_values_are_read_back_as_they_were_measured(measured):
    ((name, text),) = files(measured, "golden").items()
    assert name == "golden_values_night-a-cell.json"
    document = json.loads(text)
    assert document["lm loss"].keys() == {"start_step", "end_step", "step_interval", "values"}
    steps = record_of(measured).steps
    loss = (steps[0][6].loss + steps[1][6].loss) / 2
    assert document["lm loss"]["values"]["7"] == pytest.approx(loss)
    slowest = max(steps[0][6].milliseconds, steps[1][6].milliseconds)
    assert document["iteration-time"]["values"]["7"] == pytest.approx(slowest / 1e3)
    path = measured.root.parent / "out" / name
    ImportVerb(logs=(str(path),), name="back", results=measured.root).run()
    back = measured.imports.read("back")
    assert back.steps[6].loss == document["lm loss"]["values"]["7"]


def test_reference_losses_are_read_back_bit_for_bit(measured):
    ((name, text),) = files(measured, "torchtitan").items()
    assert text.splitlines()[:3] == [
        "# config: night/a cell", "# ngpu: 2", "# step loss grad_norm",
    ]  # fmt: skip
    path = measured.root.parent / "out" / name
    ImportVerb(logs=(str(path),), name="back", results=measured.root).run()
    rows = [line.split() for line in text.splitlines()[3:]]
    back = measured.imports.read("back")
    assert [(s.step, s.loss, s.grad_norm) for s in back.steps] == [
        (int(step), float(loss), float(norm)) for step, loss, norm in rows
    ]


BMF = {  # as https://bencher.dev/bmf.json has it
    "type": "object",
    "patternProperties": {
        ".+": {
            "type": "object",
            "patternProperties": {
                ".+": {
                    "type": "object",
                    "properties": {
                        name: {"type": "number"} for name in ("value", "lower_value", "upper_value")
                    },
                    "required": ["value"],
                }
            },
        }
    },
}
GITHUB = {  # README of github-action-benchmark: name, unit and value; range and extra are texts
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "unit", "value"],
        "properties": {
            "value": {"type": "number"},
            **{name: {"type": "string"} for name in ("name", "unit", "range", "extra")},
        },
        "additionalProperties": False,
    },
}
PYTORCH = {  # wiki of pytorch: how to integrate with the OSS benchmark database
    "type": "array",
    "items": {
        "type": "object",
        "required": ["benchmark", "model", "metric"],
        "properties": {
            "benchmark": {"type": "object", "required": ["name"]},
            "model": {"type": "object", "required": ["name"]},
            "metric": {
                "type": "object",
                "required": ["name", "benchmark_values"],
                "properties": {
                    "benchmark_values": {
                        "type": "array",
                        "items": {"type": "number"},
                        "minItems": 1,
                    }
                },
            },
        },
    },
}


@pytest.mark.needs("jsonschema")
@pytest.mark.parametrize(
    ("form", "names", "schema"),
    [
        ("bencher", {"bencher.json"}, BMF),
        ("github-action-benchmark", {"smaller.json", "bigger.json"}, GITHUB),
        ("pytorch", {"pytorch.json"}, PYTORCH),
    ],
)
def test_documents_keep_to_the_documented_schema(measured, form, names, schema):
    from jsonschema import validate

    found = files(measured, form)
    assert {*found} == names
    for text in found.values():
        document = json.loads(text)
        validate(document, schema)
        if isinstance(document, list):  # each number once
            named = [one.get("name") or one["metric"]["name"] for one in document]
            assert len(named) == len(set(named))


def times(store) -> list[float]:
    medians = []
    for record in store.records():
        both = zip(*record.steps.values(), strict=True)
        slowest = sorted(max(a.milliseconds, b.milliseconds) for a, b in both)
        medians.append(slowest[len(slowest) // 2])
    return medians


def test_the_value_is_the_median_over_runs_and_bounds_are_their_interval(measured):
    document = json.loads(files(measured, "bencher")["bencher.json"])
    time = document["night/a cell"]["step_time"]
    assert min(times(measured)) < time["lower_value"] < time["value"] < time["upper_value"]
    assert time["upper_value"] < max(times(measured))
    records = json.loads(files(measured, "pytorch")["pytorch.json"])
    values = {one["metric"]["name"]: one["metric"]["benchmark_values"] for one in records}
    assert len(values["step_time"]) == 8
    assert sorted(values["step_time"])[3] <= time["value"] <= sorted(values["step_time"])[4]
    smaller, bigger = (json.loads(text) for _, text in sorted(
        files(measured, "github-action-benchmark").items(), reverse=True
    ) if "night/a cell: " in text)  # fmt: skip
    assert "night/a cell: step_time" in {one["name"] for one in smaller}
    assert {one["name"] for one in bigger} == {"night/a cell: throughput"}


def test_few_runs_have_no_bounds(store):
    cells = {"a": resolved_run()}
    record_arms(store, {None: Arm()}, sweep="one", blocks=2, cells=cells)
    document = json.loads(files(store, "bencher", "one")["bencher.json"])
    assert document["one/a"]["step_time"].keys() == {"value"}


@pytest.mark.needs("asv")
def test_asv_reads_results_machines_and_benchmarks(measured):
    from asv.benchmarks import Benchmarks
    from asv.config import Config
    from asv.machine import Machine
    from asv.results import Results, iter_results
    from asv.util import load_json

    files(measured, "asv")
    folder = measured.root.parent / "out" / "results"
    (result,) = iter_results(str(folder))
    assert (result.commit_hash, result.params["machine"]) == (COMMIT, "bench-node")
    name = "night-a-cell.step_time"
    assert name in result.get_all_result_keys()
    ((value,), (samples,)) = result.get_result_value(name, []), result.get_result_samples(name, [])
    assert len(samples) == 8
    assert min(samples) < value < max(samples)
    config = Config()
    config.results_dir = str(folder)
    assert Benchmarks.load(config)[name]["unit"] == "ms"
    machine = load_json(str(folder / "bench-node" / "machine.json"), Machine.api_version)
    assert {name for name, _ in Machine.fields} == {*machine}
    again = Results.load(str(next(folder.glob(f"bench-node/{COMMIT[:8]}-*.json"))), "bench-node")
    assert again.date == result.date


def test_code_that_is_no_commit_has_no_point_in_asv(store):
    dirty = {"git": {"commit": COMMIT, "dirty": True, "dirty_hash": "x"}}
    record_arms(store, {None: Arm(hardware=dirty)}, sweep="s", blocks=1)
    with pytest.raises(NothingMeasuredError, match="a commit without local changes"):
        files(store, "asv")


# --- golden values as a baseline, and their refresh


def imported(store, name: str, **changes) -> ImportedRun:
    told = {"time": 2490.0, "loss": 2.0, "peak": 4_000_000_000} | changes
    steps = tuple(
        ImportedStep(
            n,
            milliseconds=told["time"] * (4 if n == 1 else 1),
            loss=told["loss"] - n / 100,
            device_peak_bytes=told["peak"],
            extra={"num-zeros": 1600.0 + n},
        )
        for n in range(1, 9)
    )
    log = Provenance(kind="imported", source=f"{name}.json", importer="golden")
    run = ImportedRun(name, Workload(framework="megatron-lm"), log, steps)
    return store.imports.write(run)


def judged(store, sweep: str, baseline: str) -> dict:
    data = GateVerb(sweep=sweep, baseline=baseline, results=store.root).run().data
    rows = {row["metric"]: row for row in data["judgements"]}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    return verdicts | {"code": data["exit_code"], "time": rows["step_time"]}


def test_a_run_is_gated_against_a_file_and_against_a_baseline_of_it(store):
    imported(store, "base")
    text = files(store, "golden", "base")["golden_values_base.json"]
    file = store.root.parent / "golden_values_base.json"
    file.write_text(text)
    SaveVerb(name="gold", sweep=str(file), results=store.root).run()
    SaveVerb(name="of_import", sweep="base", results=store.root).run()
    imported(store, "same", time=2497.0)
    imported(store, "worse", peak=4_100_000_000, loss=2.5)
    for baseline in (str(file), "gold", "of_import"):
        found = judged(store, "same", baseline)
        assert (found["loss"], found["memory"], found["code"]) == ("equivalent", "equivalent", 0)
        assert found["step_time"] == "inconclusive"  # one run against one
        found = judged(store, "worse", baseline)
        assert (found["loss"], found["memory"], found["code"]) == ("regressed", "regressed", 1)


def test_two_files_are_gated_without_a_results_folder(store):
    for name, changes in (("base", {}), ("worse", {"loss": 2.5})):
        imported(store, name, **changes)
    files(store, "golden")
    out = store.root.parent / "out"
    base, worse = (str(out / f"golden_values_{name}.json") for name in ("base", "worse"))
    for head, code in ((base, 0), (worse, 1)):
        assert GateVerb(sweep=head, baseline=base, results=store.root / "no").run().code == code
    SaveVerb(name="gold", sweep=base, results=store.root).run()
    assert GateVerb(sweep=worse, baseline="gold", results=store.root).run().code == 1
    with pytest.raises(UsageError, match="compare it alone, with --baseline"):
        GateVerb(sweep=base, results=store.root).run()


def test_a_measured_cell_is_gated_against_golden_values_of_its_own(measured):
    (name,) = files(measured, "golden")
    file = str(measured.root.parent / "out" / name)
    found = judged(measured, "night", file)
    assert (found["loss"], found["code"]) == ("equivalent", 0)
    time, *_ = (
        GateVerb(sweep="night", baseline=file, results=measured.root).run().data["judgements"]
    )
    assert time["throughput_ratio"] == pytest.approx(1 / time["time_ratio"])
    text = json.loads((measured.root.parent / "out" / name).read_text())
    values = text["lm loss"]["values"]
    text["lm loss"]["values"] = {step: value * 1.1 for step, value in values.items()}
    other = measured.root.parent / "other.json"
    other.write_text(json.dumps(text))
    assert judged(measured, "night", str(other))["code"] == 1


def test_a_sweep_of_several_cells_finds_its_own_by_name_in_a_file(store):
    write_plan(store, [(name, resolved_run()) for name in ("a", "b")], sweep="two")
    for name in ("a", "b"):
        record_run(store, Recorded(resolved_run(), cell=name, sweep="two"))
    imported(store, "other")
    answer = GateVerb(sweep="two", against="other", results=store.root).run()
    assert answer.code == 5
    assert "other has no cell of this name: other" in answer.text()


def test_the_refresh_says_per_metric_what_moved_where_and_what_to_look_at(store):
    base = imported(store, "base")
    head = imported(store, "head", time=2500.0, peak=4_100_000_000)
    moved = replace(head.steps[3], loss=head.steps[3].loss * (1 + 1e-6))
    head = replace(head, steps=(*head.steps[:3], moved, *head.steps[4:]))
    found = {one.name: one for one in refreshed(base, head)}
    loss, time, peak = (found[name] for name in ("loss", "step time", "device peak bytes"))
    assert (len(loss.gap.apart), loss.gap.first(), loss.gap.at, loss.flag) == (8, 4, 4, "review")
    assert loss.gap.largest == pytest.approx(1e-6, rel=1e-3)
    assert (len(time.gap.apart), time.stored, time.flag) == (
        6,
        8,
        "within tolerance",
    )  # the first two warm up
    assert time.gap.middle == pytest.approx(10 / 2490)
    assert (peak.flag, peak.gap.largest) == ("review", pytest.approx(0.025))
    assert (found["num-zeros"].gap.first(), found["num-zeros"].flag) == (None, "equal")


def test_the_refresh_is_markdown_of_two_imports(store, capsys):
    imported(store, "base")
    imported(store, "head", loss=2.1)
    ask = CompareVerb(base="base", head="head", form="refresh", results=store.root)
    answer = ask.run()
    answer.show(form="refresh")
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "head (head) against base (base)"
    assert "| loss | 8 of 8 | 1 | +5.208333 % | 8 |" in text.replace("*", "")
    assert {one["name"]: one["flag"] for one in answer.data["metrics"]}["loss"] == "review"
    for base, head in (("base", None), ("base", "night")):
        with pytest.raises(UsageError, match="compares two imported runs"):
            replace(ask, base=base, head=head).run()
