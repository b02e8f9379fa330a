"""A step that a CUDA graph would repeat is let through, and any other is refused with the reason.

On torch's fake process group and a CPU, which has no graphs: what is checked is what two recorded
steps enqueue. `test_device.py` captures on a GPU.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import sys
import threading
import types
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from mfsdp_core import CapturedStep, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_core.errors import ConfigurationError, LifecycleError, NotReplayableError
from mfsdp_core.replay import Recording, _is_from_pageable, differences
from mfsdp_core.streams import CudaStreams
from oracle.models import TwoLinears
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.usefixtures("fake_group")
FAKE = (1, 4)

BF16 = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
POOLED = {"cuda_graph_mode": True, "fsdp_double_buffer": True, "transport": "native"}


def sharded(**options):
    blocks = nn.Sequential(*(TwoLinears() for _ in range(4)), nn.Linear(8, 8))
    return fully_shard_model(blocks, fsdp_unit_modules=[TwoLinears], **(POOLED | options))


def step_of(model, optimizer, *, microbatches=2, inside=lambda _loss: None):
    def step(*batches):
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            with model.sync() if index == microbatches - 1 else model.no_sync():
                loss = model(batch).square().mean()
                loss.backward()
                inside(loss.detach())
                total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def captured(model, *, optimizer=None, **changes):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    return CapturedStep(model, optimizer, step_of(model, optimizer, **changes))


@pytest.fixture
def trained():
    """A model, its optimizer, and their step."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, captured(model, optimizer=optimizer)


def run(step, calls=5, microbatches=2):
    return [step(*[torch.full((2, 8), 1.0 + i)] * microbatches) for i in range(calls)]


@pytest.mark.sample
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixed_precision_policy": BF16, "allocator": "max_pool"},
        {"enable_fine_grained_param_gather": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_of_every_strategy_can_be_replayed(strategy, options):
    step = captured(sharded(zero_dp_strategy=strategy, **options))
    losses = run(step)
    assert step.is_checked
    assert not step.is_captured  # a CPU has no graphs
    assert len(step._recordings[0].entries) > 100
    assert len({float(loss) for loss in losses}) == 5  # outputs are not overwritten


def test_a_step_is_checked_after_the_orders_are_known_and_not_before():
    step = captured(sharded())
    run(step, 3)
    assert not step.is_checked
    run(step, 1)
    assert step.is_checked


COUNT, KEPT = itertools.count(), [torch.zeros(1 << 12)]


def grow(_loss):
    """New memory in every step, which works on that of the step before."""
    KEPT.append(torch.zeros(1 << 12))
    KEPT[-1].add_(KEPT[-2])


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (lambda loss: loss.item(), "host reads memory.*_local_scalar_dense"),
        (lambda loss: loss.tolist(), "host reads memory.*Tensor.tolist"),
        (lambda loss: loss.numpy(), "host reads memory.*Tensor.numpy"),
        (lambda loss: bool(loss > 0), "host reads memory.*_local_scalar_dense"),
        (lambda loss: torch.ones(2)[(loss > 0).expand(2)], "host reads memory.*aten::index"),
        (lambda loss: loss.nonzero(), "host reads memory.*nonzero"),
        (grow, "another address"),
        (lambda loss: loss.add_(torch.tensor(next(COUNT))), "a tensor of numbers, has"),
        (
            lambda loss: [loss.add_(1) for _ in range(next(COUNT))],
            "in the step before|operations in one step",
        ),
    ],
)
def test_a_step_that_no_replay_repeats_is_refused_with_the_reason(inside, said):
    with pytest.raises(NotReplayableError, match=re.compile(said, re.DOTALL)) as refused:
        run(captured(sharded(), inside=inside))
    assert "host reads" not in said or "test_captured_step.py:" in str(refused.value)


def test_numbers_that_become_a_tensor_in_the_step_may_stay_the_same():
    run(captured(sharded(), inside=lambda loss: loss.add_(torch.tensor(2.0))))


def test_an_optimizer_that_counts_steps_on_the_host_is_refused():
    model = sharded()
    step = captured(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(NotReplayableError, match="_local_scalar_dense"):
        run(step)


def test_an_optimizer_that_counts_on_the_device_is_let_through(monkeypatch):
    """Torch has `capturable` for devices with graphs only; here it is told that a CPU is one."""
    adam = sys.modules["torch.optim.adam"]
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    model = sharded()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, foreach=True)
    step = captured(model, optimizer=optimizer)
    run(step)
    rate.fill_(0.05)  # a tensor may change
    run(step, 1)


def test_a_number_that_changes_from_step_to_step_is_refused_with_both_values(trained):
    _, optimizer, step = trained
    run(step, 3)
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(NotReplayableError, match=r"has -0\.05 where the step before had -0\.1"):
        run(step, 1)


def test_a_number_or_a_mode_that_changes_later_is_refused_and_reset_takes_it(trained):
    model, optimizer, step = trained
    run(step)
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(LifecycleError, match=r"param_groups\[0\]\['lr'\] was 0.1 .* found 0.2"):
        run(step, 1)
    step.reset()
    run(step)
    model.eval()
    with pytest.raises(LifecycleError, match=r"model\.training was True"):
        run(step, 1)


def test_buffers_that_are_given_back_are_seen_to_move():
    """What `cuda_graph_mode` refuses by name is what the check finds by itself."""
    model = sharded(cuda_graph_mode=False, fsdp_double_buffer=False, allocator="temporary")
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = step_of(model, optimizer)
    kept, recordings = [], []
    for _ in range(4):
        recording = Recording()
        with model.streams.observed(recording), recording.watching():
            step(torch.ones(2, 8), torch.ones(2, 8))
        recordings.append(recording)
        kept.append(torch.zeros(1 << 10))
    entries = [entry for entry in recordings[-1].entries if entry.name == "all_gather of 1/0"]
    assert entries
    assert all(entry.operands[-1].made is not None for entry in entries)  # new memory each time


def test_other_inputs_and_a_model_without_the_mode_are_refused():
    step = captured(sharded())
    run(step, 1)
    with pytest.raises(ConfigurationError, match=r"\(2, 8\).*found \['\(3, 8\)"):
        step(torch.ones(3, 8), torch.ones(2, 8))
    with pytest.raises(ConfigurationError, match="expected inputs"):
        step(torch.ones(2, 8))
    with pytest.raises(ConfigurationError, match="cuda_graph_mode=True"):
        captured(sharded(cuda_graph_mode=False))


def test_a_step_that_fails_is_no_step_and_the_check_still_comes():
    fails = iter([False] * 4 + [True] + [False] * 100)  # two microbatches each: in the third step

    def fail(_loss):
        if next(fails):
            raise KeyboardInterrupt

    step = captured(sharded(), inside=fail)
    run(step, 2)
    with pytest.raises(KeyboardInterrupt):
        run(step, 1)
    run(step, 3)
    assert not step.is_checked
    run(step, 1)
    assert step.is_checked


def test_loading_optimizer_state_captures_anew(trained):
    _, optimizer, step = trained
    run(step)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not step.is_checked
    run(step)
    assert step.is_checked


def test_a_step_is_gone_with_its_last_reference():
    """Not with the garbage collector: a graph holds NCCL's communicators, see `CapturedStep`."""
    model = sharded()
    step = captured(model)
    run(step)
    gone = weakref.ref(step)
    gc.disable()
    del step
    gc.enable()
    assert gone() is None


def test_what_no_slot_serves_stays_where_it_is():
    """The root has parameters of its own, for which there are no slots."""
    placements = {one["placement"] for one in sharded().pool_plan["units"]}
    assert placements <= {"pool", "persistent"}
    loose = sharded(cuda_graph_mode=False)
    loose.cuda_graph_mode = True  # as if nothing had been seen to
    with pytest.raises(NotReplayableError, match="another address"):
        run(captured(loose))


def test_the_fifth_call_captures_and_events_are_published_again_at_every_replay():
    model = sharded()
    seen = []
    published = []

    class Twin(CudaStreams):
        @contextmanager
        def captured_stream(self):
            yield

        def capture(self, step):
            step()  # a capture issues, and executes nothing
            return lambda: published.append(1), torch.ones(())

    step = captured(model)
    step._streams = Twin(model.streams.device)
    run(step, 4)
    before = model.wire_log.sent_bytes
    run(step, 1)
    captured_bytes = model.wire_log.sent_bytes - before
    assert step.is_captured
    assert len(published) == 1
    model.events.subscribe(seen.append, kinds=("collective",))
    run(step, 3)
    assert len(published) == 4
    assert model.wire_log.sent_bytes == before + 4 * captured_bytes > before
    assert {event.operation for event in seen} == {"all_gather", "reduce_scatter"}


def test_graphs_are_asked_for_as_torch_has_them(monkeypatch):
    """No CUDA here: the calls are bound to the signatures of torch's own classes."""
    calls = []
    real = torch.cuda.graph

    class Graph:
        def __init__(self, *args, **kwargs):
            inspect.signature(real.__init__).bind(self, *args, **kwargs)
            calls.append(kwargs["capture_error_mode"])

        def __enter__(self):
            calls.append("begin")

        def __exit__(self, *_):
            calls.append("end")

    switched = []
    monkeypatch.setattr("torch.cuda.graph", Graph)
    monkeypatch.setattr("torch.cuda.CUDAGraph", type("Twin", (), {"replay": lambda _self: None}))
    monkeypatch.setattr("torch.cuda.synchronize", lambda _device: calls.append("synchronize"))
    monkeypatch.setattr(
        "torch.autograd.graph.set_override_stale_capture_stream", switched.append, raising=False
    )
    replay, outputs = CudaStreams(torch.device("cuda", 0)).capture(lambda: 7)
    assert (replay(), outputs) == (None, 7)
    assert calls == ["synchronize", "thread_local", "begin", "end"]
    assert switched == [True, False]


def test_a_read_in_another_thread_is_seen():
    """As one of autograd's, in which a hook runs on a device."""
    recording = Recording()

    def read() -> None:
        # Threads get no dispatch mode; those of autograd have that of the pass.
        recording.__torch_dispatch__(torch.ops.aten.neg.default, (), (torch.ones(2),))
        torch.ones(2).tolist()

    with recording.watching():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert ["Tensor.tolist" in one for one in recording.host_reads] == [True]


@pytest.mark.parametrize(("pinned", "refused"), [(False, True), (True, False)])
def test_a_copy_from_memory_that_is_not_pinned_waits_for_it(pinned, refused):
    source = types.SimpleNamespace(
        device=torch.device("cpu"), ndim=1, is_pinned=lambda: pinned, is_cuda=False
    )
    on_device = types.SimpleNamespace(is_cuda=True)
    assert _is_from_pageable([source], on_device) is refused
    assert not _is_from_pageable([source], source)


def test_recordings_are_compared_operation_by_operation():
    """Names, operands, constants, lengths; not what a backend does in a wait."""

    def recorded(what):
        recording = Recording()
        with recording.watching():
            what(recording)
        return recording

    x = torch.ones(4, 2)
    one = recorded(lambda _: x.add(1))
    assert differences(one, recorded(lambda _: x.add(1))) == []
    for words, what in (
        ("was aten::add", lambda _: x.mul(1)),
        ("has 2 where the step before had 1", lambda _: x.add(2)),
        ("works on (2, 2) where the step before had (4, 2)", lambda _: x[:2].add(1)),
        ("1 operations in one step and 2", lambda _: (x.add(1), x.add(1))),
    ):
        found = differences(one, recorded(what))
        assert any(words in text for text in found), (words, found)
    moved = differences(recorded(lambda _: x[:2].add(1)), recorded(lambda _: x[2:].add(1)))
    assert "another address" in moved[0], moved

    def two(recording, *, turned):
        numbers = [recording.issued("gather", None, (x,), (x,)) for _ in range(2)]
        for number in reversed(numbers) if turned else numbers:
            recording.waited(number)

    orders = [recorded(lambda r, t=turned: two(r, turned=t)) for turned in (False, True)]
    assert "has 2 where the step before had 1" in differences(*orders)[0], differences(*orders)

    def backend(recording):
        number = recording.issued("gather", None, (x,), (x,))
        recording.waiting(number)
        torch.ones(2)
        recording.waited(number)
        recording.released(x, "it")

    names = [entry.name for entry in recorded(backend).entries]
    assert names == ["gather", "wait", "release of it"]
