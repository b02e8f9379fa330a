"""Parts of a step: what they take on the device, and their names in NVTX."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

import nvtx
import pytest
import torch
from small_runs import LAPTOP
from torch import nn

from bench.meters.phases import PhaseMeter, cuda_event
from bench.meters.torch_trace import Ranges, TorchTrace
from bench.resolve import resolve
from bench.spec import MeasureSpec, RunSpec, TrainSpec


class Device:
    """Enqueued work takes the time it says; a point is known once the device has come to it."""

    def __init__(self) -> None:
        self.queued = 0.0
        self.waits = 0

    def work(self, milliseconds):
        self.queued += milliseconds

    def event(self):
        return Point(self, self.queued)


class Point:
    def __init__(self, device, at) -> None:
        self.device, self.at = device, at

    def elapsed_time(self, later):
        self.device.waits += 1
        return later.at - self.at


def test_parts_of_the_same_name_add_up_and_nothing_is_read_inside_of_the_step():
    device = Device()
    meter = PhaseMeter(device.event)
    for _ in range(2):  # the second step forgets the first
        meter.begin()
        for name, milliseconds in (("microbatch", 5), ("microbatch", 7), ("update", 2)):
            meter.mark(name)
            device.work(milliseconds)
        meter.end()
        assert device.waits % 3 == 0
    assert device.waits == 0
    assert meter.milliseconds() == {"microbatch": 12.0, "update": 2.0}
    assert meter.host_milliseconds > 0


def test_a_watched_model_tells_its_forward_from_its_backward_pass():
    device = Device()
    meter = PhaseMeter(device.event)
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda *_: device.work(10))  # as an engine gathers
    model.register_forward_hook(lambda *_: device.work(20))
    meter.watch(model)
    model(torch.ones(1, 4))  # outside of a step nothing is noted
    meter.begin()
    meter.mark("microbatch")
    model(torch.ones(1, 4))
    device.work(40)
    meter.mark("update")
    meter.end()
    assert meter.milliseconds() == {
        "microbatch": 0.0,
        "forward": 30.0,
        "backward": 40.0,
        "update": 0.0,
    }


def test_events_are_asked_as_torch_has_them(monkeypatch):
    """No CUDA here: the calls are bound to the signatures of torch's own class."""
    real = torch.cuda.Event
    seen = []

    class Event:
        def __init__(self, *args, **kwargs):
            inspect.signature(real.__new__).bind(real, *args, **kwargs)
            seen.append(kwargs)

        def record(self, *args, **kwargs):
            inspect.signature(real.record).bind(self, *args, **kwargs)

        def elapsed_time(self, *args, **kwargs):
            inspect.signature(real.elapsed_time).bind(self, *args, **kwargs)
            return 1.5

    monkeypatch.setattr("torch.cuda.Event", Event)
    assert cuda_event().elapsed_time(cuda_event()) == 1.5
    assert seen == [{"enable_timing": True}] * 2


@pytest.mark.gpu
def test_a_part_takes_as_long_as_its_kernels_though_the_host_has_gone_on():
    meter = PhaseMeter.of(torch.device("cuda", 0))
    meter.begin()
    meter.mark("slow")
    torch.cuda._sleep(200_000_000)
    meter.mark("quick")
    meter.end()
    behind = torch.cuda.Event()
    behind.record()
    assert not behind.query()
    torch.cuda.synchronize()
    found = meter.milliseconds()
    assert found["slow"] > found["quick"]


def calls_of_nvtx(monkeypatch):
    """What the real package is asked, which is asked."""
    calls = []
    start, end = nvtx.start_range, nvtx.end_range

    def started(message, domain):
        calls.append((message, domain))
        return message, start(message=message, domain=domain)

    def ended(handle):
        calls.append(("end", handle[0]))
        end(handle[1])

    monkeypatch.setattr(nvtx, "start_range", started)
    monkeypatch.setattr(nvtx, "end_range", ended)
    return calls


def test_ranges_follow_one_another_in_nvtx_too(monkeypatch):
    calls = calls_of_nvtx(monkeypatch)
    ranges = Ranges()
    ranges.end()
    ranges.mark("microbatch 1")
    ranges.mark("update")
    ranges.close()
    assert calls == [
        ("microbatch 1", "mfsdp-bench"),
        ("end", "microbatch 1"),
        ("update", "mfsdp-bench"),
        ("end", "update"),
    ]


def test_an_engine_that_tells_of_its_units_is_listened_to_until_the_end(monkeypatch):
    calls = calls_of_nvtx(monkeypatch)
    heard = []

    class Engine:
        @contextmanager
        def annotated(self, begin, end):
            end(begin("forward layers.0"))
            end(begin("all_gather of layers.0/0"))
            yield
            heard.append("over")

    ranges = Ranges(Engine())
    ranges.begin()
    assert [name for name, _ in calls] == [
        "forward layers.0",
        "end",
        "all_gather of layers.0/0",
        "end",
    ]
    ranges.close()
    assert heard == ["over"]


@pytest.mark.parametrize("nvtx_wanted", [False, True])
def test_ranges_of_all_steps_come_without_torchs_profiler(monkeypatch, tmp_path, nvtx_wanted):
    def refused(**_):
        raise AssertionError("the profiler takes CUPTI")

    monkeypatch.setattr("bench.meters.torch_trace.profile", refused)
    calls = calls_of_nvtx(monkeypatch)
    spec = RunSpec(measure=MeasureSpec(nvtx=nvtx_wanted), train=TrainSpec(steps=2, warmup_steps=0))
    run = resolve(spec, LAPTOP)
    assert run.comparable_in_time is not nvtx_wanted
    trace = TorchTrace.of(run, tmp_path / "trace.json", torch.device("cpu"), object())
    for step in (1, 2) if nvtx_wanted else ():
        trace.on_phase("update")
        trace.after_step(step)
    assert [name for name, _ in calls] == ["update", "end"] * 2 * nvtx_wanted
    assert list(tmp_path.iterdir()) == []
