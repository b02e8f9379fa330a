"""What `fit` foretells is what ranks hold and send."""

from __future__ import annotations

import pytest
import torch
from setup_rank import peak_of_setup
from small_runs import BF16, HFSDP, MAIN16, SENT16, SET_UPS, ZERO3, small_run
from small_runs import accumulating_run as run

from bench.fit.prediction import predict
from bench.spec import ResolvedRun

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
RUNS = SET_UPS | {
    "fsdp2-tp": run({"name": "fsdp2", "tensor_parallel": 2}, BF16),
    "ddp": run({"name": "ddp"}, BF16),
}


@pytest.mark.parametrize("name", [name for name in RUNS if "codes" not in name])
def test_the_peak_of_set_up_is_the_one_foretold(workers, name):
    measured = workers(peak_of_setup, RUNS[name])[0]
    assert abs(predict(RUNS[name], every_layer=True).setup_bytes - measured) <= 2048


def profiled(engine: dict, dtypes: dict, recompute: str, count: int) -> ResolvedRun:
    return small_run(
        engine,
        model={"preset": "debug", "layers": 5, "recompute": recompute},
        dtypes=dtypes,
        train={"global_batch": 4 * count, "micro_batch": 2, "seq_len": 128},
        measure={"profile": "memory"},
    )


PROFILED = {
    "fsdp2": profiled({"name": "fsdp2", "strategy": "optim_grads_params"}, BF16, "selective", 1),
    "ddp": profiled({"name": "ddp"}, SENT16, "full", 1),
    "resize": profiled(ZERO3, MAIN16, "full", 3),
    "hfsdp": profiled(ZERO3 | HFSDP | {"allocator": "max_pool"}, SENT16, "selective", 1),
    "zero1": profiled(ZERO3 | {"strategy": "optim", "allocator": "temporary"}, BF16, "none", 3),
}
#: FSDP2's gathered layers are let go by a thread of gloo's, at a time of its own; at most two of
#: them, of 984,064 bytes in BF16 with what they were copied from.
LATE_BYTES = {"fsdp2": 2 * 984_064, "ddp": 65_536}


NIGHTLY_CELLS = {"ddp", "resize", "zero1"}


@pytest.fixture(scope="module")
def cells(run_cells, wanted_cells, tmp_path_factory):
    return run_cells(tmp_path_factory.mktemp("fit"), wanted_cells(PROFILED))


@pytest.mark.parametrize("name", PROFILED)
def test_peak_and_bytes_sent_are_those_of_ranks(cells, name):
    """From few layers; test_fit.py has all of them."""
    memory = cells[name].document("memory.json")
    found = predict(PROFILED[name], check=False)
    assert found.wire_bytes == cells[name].samples()[-1].wire_bytes
    late = memory["cpu_allocator_steps_peak_bytes"] - found.peak_bytes
    assert -1024 <= late <= LATE_BYTES.get(name, 1024)
    state = "optimizer_state"
    assert found.by_category[state] == memory["by_category_bytes"][state]
