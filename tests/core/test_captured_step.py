"""A step is captured after four calls, and what a graph would not repeat is refused or warned of.

On torch's fake process group and a CPU, which has no graphs: the device's part is a twin.
`test_device.py` captures on a GPU.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from mfsdp_core import CapturedStep, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_core.errors import ConfigurationError, LifecycleError
from mfsdp_core.streams import CudaStreams, Streams
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
def test_memory_of_a_step_of_every_strategy_stays_in_place(strategy, options):
    """A warning is an error here."""
    step = captured(sharded(zero_dp_strategy=strategy, **options))
    losses = run(step)
    assert len(step._addresses) == len(list(step._model.parameters()))
    assert not step.is_captured  # a CPU has no graphs
    assert len({float(loss) for loss in losses}) == 5  # outputs are not overwritten


def test_memory_that_moves_from_step_to_step_gives_a_warning():
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def move(_loss):
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].clone()

    step = captured(model, optimizer=optimizer, inside=move)
    run(step, 3)
    with pytest.warns(UserWarning, match=r"momentum_buffer and \d+ others moved from one step"):
        run(step, 1)


def test_a_learning_rate_that_is_a_tensor_may_change():
    model = sharded()
    rate = torch.tensor(0.1)
    step = captured(model, optimizer=torch.optim.SGD(model.parameters(), lr=rate))
    run(step)
    rate.fill_(0.05)
    run(step, 1)


@pytest.mark.parametrize("calls", [3, 4, 5])  # the fifth captures
def test_a_number_that_changes_is_refused(trained, calls):
    _, optimizer, step = trained
    run(step, calls)
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(LifecycleError, match=r"param_groups\[0\]\['lr'\] was 0.1 .* found 0.05"):
        run(step, 1)


def test_a_number_that_the_step_itself_changes_is_refused():
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def halve(_loss):
        optimizer.param_groups[0]["lr"] /= 2

    with pytest.raises(LifecycleError, match=r"param_groups\[0\]\['lr'\] was"):
        run(captured(model, optimizer=optimizer, inside=halve), 4)


def test_reset_takes_another_number_and_a_mode_that_changes_later_is_refused(trained):
    model, optimizer, step = trained
    run(step)
    optimizer.param_groups[0]["lr"] = 0.2
    step.reset()
    run(step)
    model.eval()
    with pytest.raises(LifecycleError, match=r"model\.training was True"):
        run(step, 1)


def test_other_inputs_and_a_model_without_the_mode_are_refused():
    step = captured(sharded())
    run(step, 1)
    with pytest.raises(ConfigurationError, match=r"\(2, 8\).*found \['\(3, 8\)"):
        step(torch.ones(3, 8), torch.ones(2, 8))
    with pytest.raises(ConfigurationError, match="expected inputs"):
        step(torch.ones(2, 8))
    with pytest.raises(ConfigurationError, match="cuda_graph_mode=True"):
        captured(sharded(cuda_graph_mode=False))


def test_a_step_that_fails_is_no_step_and_the_warm_up_begins_again():
    fails = iter([False] * 4 + [True] + [False] * 100)  # two microbatches each: in the third step

    def fail(_loss):
        if next(fails):
            raise KeyboardInterrupt

    step = captured(sharded(), inside=fail)
    run(step, 2)
    with pytest.raises(KeyboardInterrupt):
        run(step, 1)
    assert step._finished == 0


def test_loading_optimizer_state_captures_anew(trained):
    _, optimizer, step = trained
    run(step)
    optimizer.load_state_dict(optimizer.state_dict())
    assert step._finished == 0


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

    monkeypatch.setattr("torch.cuda.graph", Graph)
    monkeypatch.setattr("torch.cuda.CUDAGraph", type("Twin", (), {"replay": lambda _self: None}))
    monkeypatch.setattr("torch.cuda.synchronize", lambda _device: calls.append("synchronize"))
    replay, outputs = CudaStreams(torch.device("cuda", 0)).capture(lambda: 7)
    assert (replay(), outputs) == (None, 7)
    assert calls == ["synchronize", "thread_local", "begin", "end"]


@pytest.mark.parametrize("graphs", [True, False])
def test_sharding_for_graphs_lets_any_capture_take_old_nodes_or_warns(monkeypatch, graphs):
    """`torch.cuda.graph` around a step of the caller's own too, not `CapturedStep` alone."""
    switched, name = [], "torch.autograd.graph.set_override_stale_capture_stream"
    monkeypatch.setattr(Streams, "expect_captures", CudaStreams.expect_captures)
    monkeypatch.setattr(name, switched.append, raising=False)
    sharded(cuda_graph_mode=graphs)
    assert switched == [True] * graphs
    monkeypatch.delattr(name)
    if graphs:
        with pytest.warns(
            RuntimeWarning, match="has no set_override_stale_capture_stream"
        ) as found:
            sharded()
        assert found[0].filename == __file__


def test_a_captured_step_leaves_every_batch_of_the_caller_alone(trained):
    _, _, step = trained
    batches = [torch.full((2, 8), 1.0 + index) for index in range(3)]
    for batch in batches:
        step(batch, batch)
    assert [float(batch.unique()) for batch in batches] == [1.0, 2.0, 3.0]
