"""The loop's own arithmetic, on an engine that only writes down how it was called."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from small_runs import small_run

from bench.data.batches import Batches, token_batches
from bench.engines.mfsdp import MfsdpEngine
from bench.loop import NonFiniteLossError, TrainingLoop, learning_rate
from bench.meters.sample_sink import SampleSink
from bench.record import StepSample
from bench.spec import TrainSpec
from bench.store.samples import read_samples

CPU = torch.device("cpu")


class RecordingEngine:
    """Losses count up from 1 by 1; the gradient norm is `norm`."""

    def __init__(self, norm: float = 2.5, bad_at: int | None = None, bad: float = math.nan) -> None:
        self.calls: list[object] = []
        self.losses = 0
        self.norm = norm
        self.bad_at = bad_at
        self.bad = bad
        self.sent = 0

    def forward_backward(self, _tokens, _targets, scale, is_last):
        self.losses += 1
        self.sent += 7
        self.calls.append(("microbatch", scale, is_last))
        value = self.bad if self.losses == self.bad_at else float(self.losses)
        return torch.tensor(value)

    def clip_grad_norm(self, max_norm):
        self.calls.append(("clip", max_norm))
        return torch.tensor(self.norm)

    def optimizer_step(self):
        self.calls.append("step")

    def zero_grad(self):
        self.calls.append("zero")

    def set_learning_rate(self, lr):
        self.calls.append(("lr", lr))

    def memory_by_category(self):
        return {}

    def pool_plan(self):
        return None

    def wire_bytes(self):
        return self.sent

    def code_path(self):
        return __file__


def train(tmp_path, engine, engine_settings="single", ranks=1, **settings) -> TrainingLoop:
    fields = {"steps": 2, "global_batch": 6, "micro_batch": 2, "seq_len": 4, "lr": 0.1}
    run = small_run(engine_settings, train=fields | settings, launch={"ranks": ranks})

    class Zeros:
        def sample(self, _index):
            return torch.zeros(run.train.seq_len + 1, dtype=torch.int64).numpy()

    batches = Batches(
        token_batches(Zeros()),
        global_batch=run.train.global_batch,
        micro_batch=run.train.micro_batch,
        rank=0,
        ranks=1,
        device=CPU,
    )
    with SampleSink(tmp_path / "steps.node0.jsonl", 0) as sink:
        loop = TrainingLoop(engine, batches, run, device=CPU, sink=sink)
        loop.run()
    return loop


def samples(tmp_path) -> list[StepSample]:
    return read_samples(tmp_path, [])[0]


@pytest.mark.parametrize("size", [1, 2])
def test_tokens_of_a_tensor_parallel_group_are_counted_once(tmp_path, size):
    cut = {"name": "mfsdp", "tensor_parallel": size}
    train(tmp_path, RecordingEngine(), cut, ranks=4, steps=1, global_batch=8)
    assert [4 * sample.tokens for sample in samples(tmp_path)] == [8 * 4]


def test_a_step_sets_the_rate_accumulates_clips_updates_and_forgets_in_this_order(tmp_path):
    engine = RecordingEngine()
    train(tmp_path, engine, steps=1)
    assert engine.calls == [
        ("lr", 0.1),
        ("microbatch", 1 / 3, False),
        ("microbatch", 1 / 3, False),
        ("microbatch", 1 / 3, True),
        ("clip", 1.0),
        "step",
        "zero",
    ]
    phases = samples(tmp_path)[0].phase_milliseconds
    assert set(phases) == {"data", "microbatch", "clip", "update"}
    assert sum(phases.values()) <= samples(tmp_path)[0].milliseconds


def test_a_sample_has_the_mean_loss_of_its_microbatches_and_bytes_and_tokens_of_its_rank(tmp_path):
    train(tmp_path, RecordingEngine())
    found = samples(tmp_path)
    assert [sample.loss for sample in found] == [2.0, 5.0]
    assert [sample.wire_bytes for sample in found] == [21, 21]
    assert [sample.tokens for sample in found] == [24, 24]
    assert all(sample.rss_bytes > 50 * 2**20 for sample in found)
    assert all(sample.device_peak_bytes is None for sample in found)


def test_without_clipping_the_norm_is_measured_in_steps_whose_times_never_count(tmp_path):
    engine = RecordingEngine()
    train(tmp_path, engine, clip_norm=None, steps=4)
    assert [call[1] for call in engine.calls if call[0] == "clip"] == [math.inf] * 2
    assert [sample.grad_norm for sample in samples(tmp_path)] == [2.5, 2.5, None, None]
    assert "clip" not in samples(tmp_path)[0].phase_milliseconds


@pytest.mark.parametrize(
    ("engine", "said", "kept"),
    [
        ({"bad_at": 5, "bad": math.nan}, "step 2: the loss is nan", {0: [1]}),
        ({"bad_at": 5, "bad": math.inf}, "step 2: the loss is inf", {0: [1]}),
        ({"norm": math.inf}, "step 1: the gradient norm is inf", {}),
    ],
)
def test_what_is_not_finite_ends_the_run_and_earlier_samples_stay(tmp_path, engine, said, kept):
    with pytest.raises(NonFiniteLossError, match=said):
        train(tmp_path, RecordingEngine(**engine))
    found = read_samples(tmp_path, [])
    assert {rank: [sample.step for sample in of_rank] for rank, of_rank in found.items()} == kept


@pytest.mark.parametrize(
    ("warmup", "rates"), [(4, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]), (0, [1.0] * 6)]
)
def test_warm_up_rises_linearly_to_the_full_rate_and_stays(warmup, rates):
    spec = TrainSpec(lr=1.0, warmup_steps=warmup, steps=6)
    assert [learning_rate(spec, step) for step in range(1, 7)] == rates


def test_the_time_of_a_step_contains_its_work_and_not_its_meters(tmp_path):
    loop = train(tmp_path, RecordingEngine(), steps=20)
    recorded = sum(sample.milliseconds for sample in samples(tmp_path))
    assert loop.cost.step_seconds * 1e3 == pytest.approx(recorded)
    assert set(loop.cost.seconds) == {"cpu", "device", "wire", "memory", "samples"}


def test_every_sample_is_on_disk_before_the_next_step(tmp_path):
    seen = []

    class Peeking(RecordingEngine):
        def zero_grad(self):
            (file,) = tmp_path.glob("steps*.jsonl")
            seen.append(file.read_text().count("\n"))

    train(tmp_path, Peeking(), steps=3)
    assert seen == [0, 1, 2]


def test_gradients_are_divided_by_tokens_once_in_a_step_with_a_norm_and_without(monkeypatch):
    divided = []
    engine = object.__new__(MfsdpEngine)
    engine.model = SimpleNamespace(scale_gradients=divided.append)
    engine.optimizer = SimpleNamespace(step=lambda: divided.append("step"))
    engine._registers = False
    monkeypatch.setattr("mfsdp_core.clip_grad_norm_", lambda _model, _bound: torch.ones(()))
    for measures in (True, False):
        engine._tokens = 8
        if measures:
            engine.clip_grad_norm(math.inf)
        engine.optimizer_step()
    assert divided == [1 / 8, "step"] * 2
