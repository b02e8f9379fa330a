"""On CUDA devices without memory: whole steps run there, and what the host does to them is named.

No GPU is needed, but a compiler, since torch's CPU build has to believe in devices.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fake_device.library import build
from fake_device.loops import STEPS
from fake_device.steps import CAPTURES, CROSSINGS, RUNS, TRAINING

pytestmark = pytest.mark.needs("g++", "cpu_torch")

READ, HOST = "read by the host: _local_scalar_dense", "in a test"
NOTICED = {
    "item": f"{READ} {HOST}",
    "item_in_backward": f"{READ} {HOST}",
    "list": f"{READ} {HOST}",
    "nonzero": f"read by the host: nonzero {HOST}",
    "mask": f"read by the host: index {HOST}",
    "to_host": f"to the host: _to_copy {HOST}",
    "copy_to_host": f"to the host: copy_ {HOST}",
    "from_host": f"from pageable memory: _to_copy {HOST}",
    "new_tensor": f"from pageable memory: _to_copy {HOST}",
    "pinned": f"from pinned memory: _to_copy {HOST}",
    "host_index": f"from pageable memory: index {HOST}",
    "two_devices": f"from pageable memory: add {HOST}",
}
WAITS = "waited for by the host: synchronize in mfsdp_core/streams.py: CudaStreams.synchronize"
OFFLOADED = {
    "to the host: copy_ in mfsdp_core/runtime/weight_buffers.py: WeightBuffers.adopt",
    "to the host: copy_ in mfsdp_core/runtime/gradient_buffers.py: GradientBuffers._leave",
}
ENCODED = "in mfsdp_core/precision/codec.py: Plain.encode"
#: All that the host may do, by the way of a program: in set-up, and where it is asked for.
NAMED: dict[str, set[str]] = {
    "nan_guard": {f"{READ} in mfsdp_core/runtime/nan_guard.py: all_finite"},
    "leaves_out": {
        "from pinned memory: _to_copy in mfsdp_core/streams.py: Streams.ones_but",
        f"{READ} in mfsdp_core/comm/usage.py: unused_by_all",
    },
    "offloaded": {*OFFLOADED, f"from pinned memory: copy_ {ENCODED}"},
    "offloaded_bf16": {*OFFLOADED, f"from pinned memory: _to_copy {ENCODED}"},
    "from_host": {
        "from pageable memory: _to_copy in "
        "mfsdp_core/runtime/meta_init.py: move_real_tensors.<locals>.<lambda>"
    },
    "user_buffers": {WAITS},
    "registered_pools": {WAITS},
    "captured": {WAITS, f"{READ} {HOST}"},  # AdamW reads the first learning rate
}
#: What the loop of a run does as well, outside of a capture.
OF_A_LOOP = {
    WAITS,
    f"{READ} in bench/loop.py: _to_host",
    f"{READ} in bench/engines/optimizer.py: build_optimizer",
    "from pageable memory: _to_copy in bench/engines/optimizer.py: build_optimizer",
    "from pageable memory: _to_copy in bench/models/llama.py: RotaryCache._compute",
    "from pageable memory: copy_ in bench/models/initial_values.py: InitialValues._fill",
    "from pinned memory: _to_copy in bench/data/batches.py: Batches.microbatch",
}
OWN_MEMORY = "replay with its own memory"
DAILY = {
    *(name for name in TRAINING if name.startswith("optim_grads_params ") and " in " not in name),
    *(name for name in TRAINING if name.endswith(" bf16_wire")),
    "fsdp2 1 None None", "fsdp2 2 torch.bfloat16 True",
}  # fmt: skip


class Outcome(NamedTuple):
    """threads: operations of each."""

    error: str | None
    traffic: dict[str, int]
    threads: list[int]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """Of the programs that selected tests name."""
    items = [item for item in request.session.items if item.path == request.path]
    params: list[dict[str, Any]] = [
        item.callspec.params for item in items if hasattr(item, "callspec")
    ]
    names = [OWN_MEMORY, *dict.fromkeys(one["program"] for one in params)]
    library = build(tmp_path_factory.mktemp("cuda"), Path(torch.__file__).parent)
    program = Path(__file__).parent / "fake_device" / "programs.py"
    command = [sys.executable, "-W", "ignore", program, library, torch.__file__]
    done = subprocess.run(
        command, check=False, input=json.dumps(names), capture_output=True, text=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [one[0] for one in found] == names, done.stderr[-4000:]
    return {name: Outcome(*rest) for name, *rest in found}


@pytest.mark.parametrize("program", CROSSINGS)
def test_what_crosses_between_host_and_device_is_noticed(
    program: str, outcomes: dict[str, Outcome]
) -> None:
    assert set(outcomes[program].traffic) == {NOTICED[program]}


@pytest.mark.parametrize("program", CAPTURES)
def test_what_no_graph_can_hold_is_refused_during_a_capture(
    program: str, outcomes: dict[str, Outcome]
) -> None:
    assert "device.CaptureError: " in (outcomes[program].error or "")


def test_a_replay_keeps_memory_of_its_capture(outcomes: dict[str, Outcome]) -> None:
    assert outcomes[OWN_MEMORY].error is None


@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in TRAINING],
)
def test_the_host_reads_and_copies_what_is_named_and_nothing_else(
    program: str, outcomes: dict[str, Outcome]
) -> None:
    """Nor does an operation meet tensors of two devices. The backward pass has its own thread."""
    outcome = outcomes[program]
    assert outcome.error is None
    assert set(outcome.traffic) == NAMED.get(program.rpartition(" ")[2], set())
    assert len(outcome.threads) == 2


@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=() if "experts" in name else pytest.mark.nightly) for name in RUNS],
)
def test_in_a_run_the_host_reads_the_loss_of_a_step_and_sends_its_batches(
    program: str, outcomes: dict[str, Outcome]
) -> None:
    """Of shipped models under FSDP2 and the core, whose captured steps are replayed."""
    outcome = outcomes[program]
    assert outcome.error is None
    assert set(outcome.traffic) <= OF_A_LOOP
    assert outcome.traffic[f"{READ} in bench/loop.py: _to_host"] == 2 * STEPS["steps"]
