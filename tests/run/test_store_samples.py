"""Samples of many ranks: one file per node, read as fast as they are whole."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path

import pytest

from bench.meters.sample_sink import SampleSink
from bench.record import StepSample
from bench.store.samples import last_samples, node_file, read_samples


def sample(step: int, loss: float = 1.0) -> StepSample:
    return StepSample(step, 1.0, loss, 1.0, 0.1, 8, 0, 1)


def append(path: Path, rank: int, steps: int) -> None:
    with SampleSink(path, rank) as sink:
        for step in range(1, steps + 1):
            sink.append(sample(step, float(rank)))


def test_ranks_of_a_node_append_to_one_file_without_mixing_lines(tmp_path: Path) -> None:
    path = tmp_path / node_file(0)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append, args=(path, rank, 400)) for rank in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    problems: list[str] = []
    steps = read_samples(tmp_path, problems)
    assert problems == []
    assert {rank: [one.step for one in steps[rank]] for rank in steps} == {
        rank: list(range(1, 401)) for rank in range(4)
    }
    assert all(one.loss == rank for rank in steps for one in steps[rank])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("milliseconds", 5e-324),
        ("milliseconds", 1e308),
        ("cpu_milliseconds", {"main": -3.0}),
        ("wire_bytes", -5),
        ("tokens", -1),
        ("rss_bytes", -7),
    ],
)
def test_a_line_with_a_number_that_no_step_has_is_left_out_and_named(tmp_path, name, value) -> None:
    line = {"rank": 0, **dataclasses.asdict(sample(1)), name: value}
    (tmp_path / node_file(0)).write_text(json.dumps(line) + "\n")
    problems: list[str] = []
    assert read_samples(tmp_path, problems) == {}
    assert problems[0].startswith(f"steps.node0.jsonl:1 was left out: {name}")


def test_the_end_of_a_growing_file_is_read_without_what_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / node_file(0)
    append(path, 7, 50)
    three = sum(map(len, path.read_text().splitlines()[-3:]))
    with path.open("a") as stream:
        stream.write('{"rank": 7, "st')
    found = last_samples(path, three + 30)
    assert list(found) == [7]
    assert list(found[7]) == [48, 49, 50]
