"""Communication buffers are registered once, in one order, or it is said why not.

Against a twin of what NCCL's backend offers, which writes down what it is asked.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp_core import (
    CapturedStep,
    Float8Reference,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_core.comm import symmetric, torch_backend
from mfsdp_core.comm.symmetric import Member, UserBuffers
from mfsdp_core.errors import ConfigurationError, LifecycleError
from mfsdp_core.streams import CudaStreams, Streams

FAKE = (1, 4)

CPU = torch.device("cpu")


class Pool:
    """A pool whose segments are the tensors that were allocated while it was in use."""

    def __init__(self, log: list[str], sizes: tuple[int, ...] = (64, 32)) -> None:
        self.raw = self
        self.sizes = list(sizes)
        self.log = log
        self.made: list[torch.UntypedStorage] = []

    @contextmanager
    def use(self) -> Iterator[None]:
        self.log.append("allocate")
        with _Allocations() as made:
            yield
        self.made += made.storages

    def segment_bytes(self) -> list[int]:
        return list(self.sizes)

    def ranges(self) -> list[tuple[int, int]]:
        return [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in self.made]


class _Allocations(TorchDispatchMode):
    """Keeps the storages of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.storages.append(result.untyped_storage())
        return result


class Backend:
    """refuses: levels that raise, as `symm=True` on a torch that does not know it."""

    def __init__(self, name: str, log: list[str], refuses: dict[bool, Exception] | None = None):
        self.name, self.log, self.refuses = name, log, refuses or {}
        self.mem_allocator = object()

    def register_mem_pool(self, _pool: Any, symm: bool = False) -> None:
        if symm in self.refuses:
            raise self.refuses[symm]
        self.log.append(f"{self.name}: register {'symmetric' if symm else 'plain'}")

    def deregister_mem_pool(self, _pool: Any) -> None:
        self.log.append(f"{self.name}: deregister")


class Twin(Streams):
    """Streams of a device whose backends are those above."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.log: list[str] = []
        self.outside: set[str] = set()
        self.backends: dict[int, Backend] = {}

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def track(self, works: Any, name: str, *tensors: Any) -> Any:
        """Write down which collectives have memory outside of the pool."""
        for tensor in tensors:
            start, size = tensor.data_ptr(), tensor.nbytes
            if not any(a <= start and start + size <= b for a, b in self._pool.ranges()):
                self.outside.add(name)
        return super().track(works, name, *tensors)

    def registrar(self, group: Any) -> Backend:
        name = f"group {len(self.backends)}"
        return self.backends.setdefault(id(group), Backend(name, self.log))

    def new_pool(self, allocator: Any) -> Pool:
        assert allocator is not None
        return Pool(self.log)


def alone(value: object) -> list[object]:
    return [value]


def buffers(*refuses: dict[bool, Exception], agree=alone, symmetric=True, sizes=(64, 32)):
    """Of groups a, b, ..., with what the backend of each refuses."""
    streams = Twin(CPU)
    members = [
        Member(name, Backend(name, streams.log, refused), agree)
        for name, refused in zip("abc", refuses, strict=False)
    ]
    return UserBuffers(members, Pool(streams.log, sizes), streams, symmetric), streams.log


def got(made: UserBuffers) -> dict[str, str]:
    return {name: found["got"] for name, found in made.report()["groups"].items()}


def test_every_group_is_registered_once_in_order_and_deregistered_in_reverse():
    made, log = buffers({}, {})
    made.register()
    with pytest.raises(LifecycleError, match="already"):
        made.register()
    wanted = ["a: register symmetric", "b: register symmetric"]
    assert [line for line in log if "register" in line] == wanted
    assert log[0] == "synchronize"
    assert got(made) == {"a": "symmetric", "b": "symmetric"}
    made.close()
    made.close()
    assert [line for line in log if "dereg" in line] == ["b: deregister", "a: deregister"]


@pytest.mark.parametrize(
    ("refused", "level", "said"),
    [
        ({True: TypeError("unexpected keyword 'symm'")}, "plain", "symmetric: TypeError"),
        ({True: RuntimeError("no"), False: RuntimeError("nor")}, "none", "plain: RuntimeError"),
    ],
)
def test_a_group_that_cannot_falls_back_and_says_so(refused, level, said):
    made, log = buffers(refused, {})
    with pytest.warns(RuntimeWarning, match=f"group a got {level} registration instead of symm"):
        made.register()
    assert got(made) == {"a": level, "b": "symmetric"}
    assert said in made.report()["groups"]["a"]["reason"]
    made.close()
    assert log.count("a: deregister") == (level != "none")


def test_plain_registration_can_be_asked_for_and_is_then_no_fallback(recwarn):
    made, log = buffers({}, symmetric=False)
    made.register()
    assert "a: register plain" in log
    assert made.report()["wanted"] == "plain"
    assert not recwarn


def test_a_rank_takes_back_what_another_one_could_not_do():
    """The other rank refuses symmetric windows: this one must not keep its own."""

    def agree(value: object) -> list[object]:
        other = value
        if not isinstance(value, list):
            asked.append(value)
            other = "RuntimeError: not here" if len(asked) == 1 else None
        return [value, other]

    asked: list[object] = []
    made, log = buffers({}, agree=agree)
    with pytest.warns(RuntimeWarning, match="not here"):
        made.register()
    found = [line for line in log if line.startswith("a:")]
    assert found == ["a: register symmetric", "a: deregister", "a: register plain"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"agree": lambda value: [value, [64]]},
            r"differ between ranks: \[64, 32\] and \[64\] bytes",
        ),
        ({"sizes": ()}, "no buffer"),
    ],
)
def test_what_not_all_ranks_can_register_is_not_registered(options, said):
    made, log = buffers({}, **options)
    with pytest.warns(RuntimeWarning, match=said):
        made.register()
    assert not [line for line in log if "register" in line]
    assert got(made) == {"a": "none"}


def test_a_backend_that_cannot_register_is_named():
    own, _ = buffers({})
    own.members[0].backend = object()
    with pytest.warns(RuntimeWarning, match="no attribute 'register_mem_pool'"):
        own.register()


def test_a_rank_that_fails_ends_all_of_them_in_words():
    """Registering with an error that nobody foresaw is taken back everywhere; no rank waits."""
    own, _ = buffers({True: LookupError("odd"), False: OSError("odder")})
    with pytest.warns(RuntimeWarning, match="symmetric: LookupError: odd; plain: OSError: odder"):
        own.register()
    for everywhere in (alone, lambda value: [value, "RuntimeError: device lost"]):
        broken, _ = buffers({}, agree=everywhere)
        if everywhere is alone:
            broken.pool.ranges = lambda: {}["device lost"]
        with pytest.raises(LifecycleError, match=r"registering failed on a rank: .*device lost"):
            broken.register()


def test_segments_are_compared_whatever_order_the_allocator_lists_them_in(monkeypatch):
    listed = [{"total_size": 8, "address": 3}, {"total_size": 2, "address": 1}]
    twin = types.SimpleNamespace(snapshot=lambda: listed)
    monkeypatch.setattr("torch.cuda.MemPool", lambda *_args, **_options: twin)
    pool = CudaStreams(torch.device("cuda", 0)).new_pool(None)
    first = pool.segment_bytes()
    listed.reverse()
    assert pool.segment_bytes() == first == [2, 8]


def test_memory_that_came_after_the_registration_is_reported():
    made, _ = buffers({})
    made.register()
    assert made.report()["grown"] is False
    made.pool.sizes.append(8)
    assert made.report()["grown"] is True


# -- in a model --------------------------------------------------------------------------------


@pytest.fixture
def twin(fake_group: None, monkeypatch: pytest.MonkeyPatch) -> list[Twin]:
    """The streams of every model that is sharded."""
    made: list[Twin] = []

    def of(device: torch.device) -> Twin:
        made.append(Twin(device))
        return made[-1]

    monkeypatch.setattr(Streams, "of", staticmethod(of))
    monkeypatch.setattr(symmetric, "from_all", lambda _group, value: alone(value))
    return made


class WithRoot(nn.Module):
    """Two units, parameters of the root, and a unit of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(2, 8))
        self.units = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.units(x * self.embedding)


BF16 = MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16)
SAME = MixedPrecisionPolicy(None, None, None)
FP8 = MixedPrecisionPolicy(
    torch.float32, torch.float32, torch.bfloat16, weight_codec=Float8Reference("current")
)
MAXIMA = {
    f"all_reduce of maxima of {name}/0" for name in ("(root)", "units.0", "units.1", "units.2")
}
UNSERVED = {"reduce_scatter of (root)/0", "all_gather of units.2/0", "reduce_scatter of units.2/0"}
PERSISTENT = {"fsdp_db_use_persist_buf_on_alloc_fail": True}


@pytest.mark.parametrize(
    ("policy", "options", "outside"),
    [
        (BF16, PERSISTENT, set()),
        (SAME, PERSISTENT, set()),
        (BF16, {}, UNSERVED),
        (FP8, PERSISTENT, MAXIMA),
        (
            FP8,
            {},
            MAXIMA
            | UNSERVED
            | {"all_gather of (root)/0", "all_gather of units.2/1", "reduce_scatter of units.2/1"},
        ),
    ],
)
def test_the_record_names_every_collective_whose_memory_is_not_in_the_pool(
    twin: list[Twin], policy: MixedPrecisionPolicy, options: dict[str, Any], outside: set[str]
) -> None:
    model = fully_shard_model(
        WithRoot().bfloat16(),
        fsdp_unit_modules=[nn.Linear],
        mixed_precision_policy=policy,
        nccl_ub=True,
        **options,
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        twin[0].outside.clear()
        model(torch.ones(2, 8).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert twin[0].outside == outside | {"all_reduce of flags"}
    assert model.buffer_registration["outside"].keys() == twin[0].outside
    assert not model.buffer_registration["grown"]


def sharded(**options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return fully_shard_model(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))),
        device_mesh=mesh,
        dp_shard_dim="inner",
        dp_outer_dim="outer",
        hybrid_fsdp_group=dist.group.WORLD,
        fsdp_unit_modules=[nn.Linear],
        mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
        **options,
    )


def test_slots_and_lasting_buffers_are_allocated_in_the_pool_before_one_registration(twin):
    model = sharded(nccl_ub=True)
    log = twin[0].log
    registrations = [index for index, line in enumerate(log) if "register" in line]
    allocations = [index for index, line in enumerate(log) if line == "allocate"]
    # Pools of weights, gradients and the outer stage; accumulators and main weights of six buckets.
    assert len(allocations) == 3 + 2
    assert max(allocations) < min(registrations)
    assert [log[index] for index in registrations] == [
        "group 0: register symmetric",
        "group 1: register symmetric",
    ]
    assert model.pool_plan["allocator"] == "fixed_pool"
    assert set(model.buffer_registration["groups"]) == {"inner", "outer"}
    allocated = len(allocations)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad_buffer()
    assert log.count("allocate") == allocated
    gone = weakref.ref(model)
    end = model.param_and_grad_buffer.close
    end()
    assert log[-2:] == ["group 1: deregister", "group 0: deregister"]
    del model, end
    gc.collect()
    assert gone() is None


def test_what_a_forgotten_model_has_registered_is_closed_when_the_next_one_is_made(twin):
    """Not by a garbage collector, which comes at any time and on any thread."""
    model = sharded(nccl_ub=True)
    log = twin[0].log
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
    assert not [line for line in log if "deregister" in line]
    sharded(nccl_ub=True)
    assert log[-2:] == ["group 1: deregister", "group 0: deregister"]


def test_a_captured_step_is_forgotten_before_its_memory_is_deregistered(twin):
    plain = {"disable_symmetric_registration": True}
    model = sharded(nccl_ub=True, cuda_graph_mode=True, **plain)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = CapturedStep(model, optimizer, lambda x: x)
    step._replay = lambda: None
    log, is_captured = twin[0].log, []
    take_back = model._context.user_buffers.members[0].backend.deregister_mem_pool
    model._context.user_buffers.members[0].backend.deregister_mem_pool = lambda pool: (
        is_captured.append(step.is_captured),
        take_back(pool),
    )
    model.param_and_grad_buffer.close()
    assert is_captured == [False]
    assert "group 0: deregister" in log


def test_manual_registration_is_left_to_the_caller_and_works_once(twin):
    model = sharded(nccl_ub=True, manual_registration=True)
    log = twin[0].log
    assert not [line for line in log if "register" in line]
    model(torch.ones(2, 8)).sum().backward()
    model.param_and_grad_buffer.manual_buffer_registration()
    assert log.count("group 0: register symmetric") == 1
    with pytest.raises(LifecycleError, match="already"):
        model.param_and_grad_buffer.manual_buffer_registration()


def test_symmetric_buffers_are_summed_where_an_average_was_asked_for(twin, monkeypatch):
    asked = []
    of_torch = torch_backend._scatter_flat

    def reduce(*arguments: Any, op: Any, **options: Any) -> Any:
        asked.append(op)
        return of_torch(*arguments, op=op, **options)

    monkeypatch.setattr(torch_backend, "_scatter_flat", reduce)
    for options in ({}, {"disable_symmetric_registration": True}):
        model = sharded(nccl_ub=True, average_in_collective=True, **options)
        model(torch.ones(2, 8)).sum().backward()
    ops = list(dict.fromkeys(map(str, asked)))
    assert len(ops) == 2
    assert "SUM" in ops[0]
    assert "AVG" in ops[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "found device cpu"),
        ({"transport": "point_to_point"}, "transport='native'"),
        ({"allocator": "storage_resize"}, "nccl_ub"),
    ],
)
def test_what_cannot_be_registered_is_refused(fake_group, options, said):
    with pytest.raises(ConfigurationError, match=said):
        sharded(nccl_ub=True, **options)
