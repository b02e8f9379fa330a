"""What CUDA's streams are told to wait for, by a stand-in that knows what is behind what.

That the core asks for enough of it is test_stream_order.py's.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mfsdp_core import CapturedStep, fully_shard_model, fully_shard_optimizer
from mfsdp_core.observer import Observer
from mfsdp_core.streams import CudaStreams, Streams
from oracle.models import TwoLinears

FAKE = (0, 1)


class Stream:
    """knows: operations that everything enqueued from now on comes behind."""

    def __init__(self, *_, **__):
        self.knows = set()

    def wait_stream(self, other):
        self.knows |= other.knows

    def record_event(self):
        known = set(self.knows)
        return SimpleNamespace(wait=lambda: Cuda.current.knows.update(known))


class Cuda:
    """`torch.cuda`, of which one stream is current. ends: what a capture has ended behind."""

    current = Stream()
    ends = None

    @classmethod
    def run(cls, name):
        """Enqueue an operation; those that it comes behind."""
        before = set(cls.current.knows)
        cls.current.knows.add(name)
        return before

    @classmethod
    @contextmanager
    def on(cls, stream):
        before, cls.current = cls.current, stream
        try:
            yield
        finally:
            cls.current = before

    @classmethod
    @contextmanager
    def graph(cls, _graph, *, stream, **_):
        with cls.on(stream):
            yield
            cls.ends = set(stream.knows)


@pytest.fixture
def streams(monkeypatch):
    """Those of the core, on the stand-in."""
    Cuda.current = Stream()
    for name, twin in (
        ("Stream", Stream),
        ("stream", Cuda.on),
        ("current_stream", lambda _: Cuda.current),
        ("synchronize", lambda _: None),
        ("graph", Cuda.graph),
        ("CUDAGraph", lambda: SimpleNamespace(replay=None)),
    ):
        monkeypatch.setattr(torch.cuda, name, twin)
    return CudaStreams(torch.device("cuda", 0))


def test_a_step_that_is_captured_is_behind_its_inputs_and_what_follows_is_behind_it(streams):
    Cuda.run("inputs")
    with streams.captured_stream():
        assert Cuda.run("step") == {"inputs"}
    assert Cuda.run("next step's inputs") == {"inputs", "step"}


def test_gathers_run_beside_the_current_stream_until_somebody_waits(streams):
    """And an observer is told what they come behind."""
    streams.observer, told = Observer(), []
    streams.observer.followed = lambda: told.append("followed")
    Cuda.run("step")
    with streams.copy_in.running():
        assert Cuda.run("cast beside") == set()
    with streams.copy_in.behind():
        assert Cuda.run("cast behind") == {"step", "cast beside"}
        casts = streams.copy_in.mark("casts")
    assert told == ["followed"]
    assert Cuda.run("layer") == {"step"}
    casts.wait()
    assert Cuda.run("next layer") >= {"cast beside", "cast behind"}


def test_a_capture_ends_behind_the_copy_in_stream(streams):
    with streams.captured_stream():
        pass

    def step():
        with streams.copy_in.behind():
            Cuda.run("cast")

    streams.capture(step)
    assert Cuda.ends == {"cast"}


def test_a_wait_is_for_every_message_and_holds_tensors_until_then():
    waited, memory = [], torch.ones(2)
    works = [SimpleNamespace(wait=lambda n=n: waited.append(n)) for n in range(3)]
    flight = Streams(torch.device("cpu")).track(works, "it", None, reads=(memory,), writes=())
    held = weakref.ref(memory)
    del memory
    assert held() is not None
    flight.wait()
    assert waited == [0, 1, 2]
    assert held() is None


class Repeats(Streams):
    """What stands for a graph runs at every replay alone, with the memory of its capture."""

    has_graphs = True

    def capture(self, step):
        loss = torch.empty(())
        return lambda: loss.copy_(step()), loss


def losses(replays):
    torch.manual_seed(0)
    options = {"zero_dp_strategy": "no_shard", "cuda_graph_mode": True, "fsdp_double_buffer": True}
    model = fully_shard_model(TwoLinears(), fsdp_unit_modules=[TwoLinears], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = CapturedStep(model, optimizer, step)
    if replays:
        run._streams = Repeats(model.streams.device)
    found = [float(run(torch.full((2, 8), 1.0 + number))) for number in range(8)]
    assert run.is_captured is replays
    return found


@pytest.mark.usefixtures("fake_group")
def test_a_replay_computes_on_the_batch_that_it_is_given():
    assert losses(replays=True) == losses(replays=False)
