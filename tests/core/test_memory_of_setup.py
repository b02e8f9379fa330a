"""What lives on a device when an engine is built; and peaks of steps have no set-up in them.

torch.cuda's counters of allocated bytes are those of live storage on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live_peak import LivePeak

from bench.data.batches import build_batches
from bench.engines.registry import build_engine
from bench.loop import TrainingLoop
from bench.meters.memory import MemoryMeter
from bench.models.build import run_model
from bench.resolve.resolution import resolve_anywhere
from bench.spec import DtypeSpec, EngineSpec, LaunchSpec, ModelSpec, RunSpec, TrainSpec
from oracle import transformer_engine

FAKE = (0, 1)
CPU = torch.device("cpu")
LARGE = 2**26
TE = {"linear": "transformer_engine", "linear_recipe": "current"}


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePeak]:
    twin = LivePeak()
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda _device: twin.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", twin.reset)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(MemoryMeter, "device_allocator", lambda _meter: None)
    with transformer_engine.installed(), twin:
        yield twin


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    "layers", [{}, TE, TE | {"quantised_weights": True}], ids=["torch", "cast", "codes"]
)
def test_after_set_up_the_plan_is_alive_and_peaks_begin_anew(
    counters: LivePeak, layers: dict[str, Any]
) -> None:
    run = resolve_anywhere(
        RunSpec(
            model=ModelSpec(layers=2, **layers),
            engine=EngineSpec(name="mfsdp", strategy="optim_grads_params"),
            dtypes=DtypeSpec(compute="bf16", main_grads="fp32", grad_comm="bf16"),
            train=TrainSpec(steps=2, global_batch=1, micro_batch=1, seq_len=16),
            launch=LaunchSpec(ranks=1),
        )
    )
    module, _ = run_model(run, CPU)
    weights = sum(parameter.numel() for parameter in module.parameters())
    engine: Any = build_engine(module, run, CPU)
    planned = sum(engine.ledger().bytes_by_category().values())
    # Scales of codes are in no plan.
    assert planned <= counters.alive() < planned + weights / 100
    torch.empty(LARGE, dtype=torch.uint8)
    samples: Any = []
    loop = TrainingLoop(engine, build_batches(run, 0, CPU), run, device=CPU, sink=samples)
    loop._memory = MemoryMeter(torch.device("cuda"))
    loop.run()
    setup = {"device_setup_peak_bytes", "device_setup_peak_reserved_bytes"}
    assert loop.setup_peaks is not None
    assert loop.setup_peaks.keys() == setup
    assert min(loop.setup_peaks.values()) >= LARGE
    assert all(planned < sample.device_peak_bytes < LARGE for sample in samples)
