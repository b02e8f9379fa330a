"""Files of other projects' CI: golden values, event files of TensorBoard."""

from __future__ import annotations

import json
import warnings
from dataclasses import fields

import pytest

from bench.cli.import_ import ImportVerb, read_logs
from bench.errors import NothingMeasuredError, UsageError

GOLDEN = {
    "lm loss": {1: 10.85, 2: 10.84, 3: 10.79, 4: 10.68},
    "num-zeros": {1: 1632, 2: 1700, 3: 1702, 4: 1688},
    "mem-max-allocated-bytes": dict.fromkeys((1, 2, 3, 4), 4.1e9),
    "iteration-time": {1: 9.37, 2: 2.51, 3: "nan", 4: 2.5},
}


def golden(values: dict = GOLDEN) -> str:
    document = {}
    for name, told in values.items():
        span = {"start_step": min(told), "end_step": max(told), "step_interval": 1}
        document[name] = {**span, "values": {str(step): value for step, value in told.items()}}
    return json.dumps(document, indent=4)


def read(tmp_path, name: str, text: str):
    path = tmp_path / name
    path.write_text(text)
    ((stem, (run,)),) = read_logs((str(path),))
    assert stem == path.name.removesuffix(path.suffix)
    return run


def test_golden_values_are_a_run_in_our_units(tmp_path):
    run = read(tmp_path, "golden_values.json", golden())
    assert (run.workload.framework, run.provenance.importer) == ("megatron-lm", "golden")
    assert [step.loss for step in run.steps] == [10.85, 10.84, 10.79, 10.68]
    assert [step.milliseconds for step in run.steps] == [9370.0, 2510.0, None, 2500.0]
    assert {step.device_peak_bytes for step in run.steps} == {4_100_000_000}
    assert run.steps[1].extra == {"num-zeros": 1700.0}
    assert run.provenance.remarks == (
        "1 values that cannot be were dropped: milliseconds nan (step 3)",
    )


def test_every_name_of_a_format_is_taken_and_listed(tmp_path):
    path = tmp_path / "golden_values.json"
    path.write_text(golden())
    (tmp_path / "x.csv").write_text("step,loss\n1,2.5\n2,2.4\n")
    ((_, (run,)),) = read_logs((str(path),), "golden")
    assert run.provenance.importer == "golden"
    with pytest.raises(NothingMeasuredError, match="no training step that golden prints"):
        read_logs((str(tmp_path / "x.csv"),), "golden")
    (form,) = (field for field in fields(ImportVerb) if field.name == "form")
    with pytest.raises(UsageError) as refused:
        read_logs((str(path),), "nccl")
    listed = str(refused.value).partition("expected ")[2].partition(" or FILE.yaml")[0]
    assert f": {listed}, or FILE.yaml" in form.metadata["typer"].help
    assert {"golden", "tensorboard", "table", "megatron"} < {*listed.split(", ")}


def test_metrics_of_other_intervals_are_steps_of_their_own(tmp_path):
    told = {"lm loss": {1: 3.0, 6: 2.0, 11: 1.0}, "batch-size": {1: 16, 6: 16, 11: 16}}
    run = read(tmp_path, "g.json", golden(told))
    assert [(step.step, step.loss) for step in run.steps] == [(1, 3.0), (6, 2.0), (11, 1.0)]
    assert run.workload.global_batch == 16


def test_golden_values_in_lists_stand_from_the_first_step_on(tmp_path):
    loss = {"start_step": 0, "end_step": 15, "step_interval": 5, "values": [10.8, "nan", 10.5]}
    text = json.dumps({"lm loss": loss, "iteration_timing_avg": 0.06})
    run = read(tmp_path, "golden_values.json", text)
    losses = [(step.step, str(step.loss)) for step in run.steps]
    assert losses == [(0, "10.8"), (5, "nan"), (10, "10.5")]
    assert run.steps[-1].extra == {"iteration_timing_avg": 0.06}


@pytest.mark.parametrize(
    "text",
    [
        '{"lm loss": {"values": {"1": 2.0}}}',  # without its span it may be anything
        '{"lm loss": 3}',
        "{",
        "[" * 5000,
        json.dumps({"lm loss": {"start_step": 1, "end_step": 1, "values": {}}}),
        json.dumps({"x": {"start_step": 1, "end_step": 1, "values": {"one": 1, "2": "?"}}}),
    ],
)
def test_other_json_is_no_golden_file(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(NothingMeasuredError):
        read_logs((str(path),))


@pytest.mark.needs("tensorboard")
def test_event_files_are_read_by_the_tags_of_their_trainers(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as writer:
            for step in (1, 2):
                writer.add_scalar("loss_metrics/global_avg_loss", 8.0 / step, step)
                writer.add_scalar("time_metrics/end_to_end(s)", 0.5, step)
                writer.add_scalar("memory/max_reserved(GiB)", 2.0, step)
                writer.add_scalar("anything/else", 7.0, step)
            writer.add_text("config", "{}", 0)
        (path,) = tmp_path.glob("*tfevents*")
        ((_, (run,)),) = read_logs((str(path),))
    assert run.provenance.importer == "tensorboard"
    assert [
        (s.step, s.loss, s.milliseconds, s.device_reserved_peak_bytes, s.extra) for s in run.steps
    ] == [
        (1, 8.0, 500.0, 2**31, {"anything/else": 7.0}),
        (2, 4.0, 500.0, 2**31, {"anything/else": 7.0}),
    ]


def test_without_its_package_an_event_file_is_refused_with_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(b"")
    monkeypatch.setattr("bench.importers.table.importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"mfsdp-bench\[tensorboard\]"):
        read_logs((str(path),))
