"""Each meter by itself: what it counts, and that what it costs is accounted for."""

from __future__ import annotations

import threading
from time import sleep, thread_time

import pytest
import torch
from torch import nn

from bench.engines.ring_bytes import RingBytes
from bench.loop import MeterCost
from bench.meters.cpu_time import CpuMeter, spent
from bench.meters.memory_profile import MemoryProfile
from bench.meters.saved_activations import SavedActivations

CPU = torch.device("cpu")
KIB = 1024


def test_the_cost_of_a_meter_is_the_time_spent_in_it(monkeypatch):
    readings = iter((1.0, 1.25, 7.0, 7.5))
    monkeypatch.setattr("bench.loop.perf_counter", lambda: next(readings))
    cost = MeterCost()
    for _ in range(2):
        with cost.timed("slow"):
            pass
    cost.add_step(2.0)
    cost.add_step(1.0)
    assert cost.seconds == {"slow": 0.75}
    assert cost.fraction == 0.25
    assert cost.steps == 2


@pytest.mark.parametrize(("ranks", "sent"), [(1, 0), (2, 500), (4, 750)])
def test_a_ring_gather_sends_all_parts_but_its_own_and_an_all_reduce_twice_that(ranks, sent):
    ring = RingBytes(ranks)
    ring.gather(1000, torch.bfloat16)
    assert ring.sent_bytes == ring.gathered_bytes["bfloat16"] == sent
    ring.all_reduce(1000)
    ring.reduce_scatter(1000)
    assert ring.sent_bytes == 4 * sent
    assert ring.gathered_bytes == {"bfloat16": sent}


def test_a_memory_profile_tells_the_peak_of_set_up_from_that_of_steps():
    profile = MemoryProfile(CPU)
    del_in_set_up = torch.empty(1000 * KIB, dtype=torch.uint8)
    del del_in_set_up
    lasting = torch.empty(300 * KIB, dtype=torch.uint8)
    profile.watch(nn.Identity())
    in_a_step = torch.empty(200 * KIB, dtype=torch.uint8)
    profile.stop()
    del lasting, in_a_step
    assert profile.allocator_peak_bytes == pytest.approx(1000 * KIB, rel=0.02)
    assert profile.steps_peak_bytes == pytest.approx(500 * KIB, rel=0.02)
    unwatched = MemoryProfile(CPU)
    unwatched.stop()
    assert unwatched.activations is None


def test_a_memory_profile_counts_what_other_threads_free():
    profile = MemoryProfile(CPU)
    for _ in range(3):
        held = [torch.empty(1000 * KIB, dtype=torch.uint8)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    profile.stop()
    assert profile.allocator_peak_bytes == pytest.approx(1000 * KIB, rel=0.02)


def test_saved_activations_count_what_backward_needs_and_no_weights():
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Linear(256, 1, bias=False))
    x = torch.ones(8, 256)
    with SavedActivations(model) as saved:
        loss = model(x).sum()
        # The input of the first layer and the output of tanh, each 8 x 256 FP32; the second
        # linear saves the same storage as tanh, which counts once.
        assert saved.peak_bytes == 2 * 8 * 256 * 4
        loss.backward()
    assert saved.peak_bytes == 2 * 8 * 256 * 4


def test_saved_activations_of_two_microbatches_do_not_add_up_if_the_first_is_done():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh())
    with SavedActivations(model) as saved:
        for _ in range(2):
            model(torch.ones(4, 16)).sum().backward()
        after_one_by_one = saved.peak_bytes
        losses = [model(torch.ones(4, 16)).sum() for _ in range(2)]
    assert len(losses) == 2
    assert saved.peak_bytes == 2 * after_one_by_one


def test_cpu_time_is_that_of_the_thread_that_spent_it():
    """Readings of the thread's own clock, within those of the meter and around them, bound it."""
    meter = CpuMeter()
    outer = thread_time()
    before = meter.read()
    inner = thread_time()
    sum(range(100_000))
    least = thread_time() - inner
    worked = spent(before, meter.read())
    most = thread_time() - outer
    assert 1e3 * least - 0.001 <= worked["main"] <= 1e3 * most + 0.001
    assert spent(None, before) is None


@pytest.mark.usefixtures("world_of_one")
def test_a_thread_is_named_by_what_it_is_for():
    while "transport" not in CpuMeter().read():  # it names itself once it runs
        sleep(0.01)
    assert "main" in CpuMeter().read()
