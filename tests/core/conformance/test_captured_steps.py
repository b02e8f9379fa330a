"""Steps that a CUDA graph would repeat are let through, and others refused; on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mfsdp_core
from conformance.judging import close, refuses, same
from conformance.small_model import batch, compare_weights, pair
from mfsdp_core.comm.symmetric import Member, UserBuffers, user_buffers
from mfsdp_core.errors import ConfigurationError, LifecycleError
from mfsdp_core.replay import Recording, differences
from mfsdp_core.streams import Streams

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_POOLED = {"cuda_graph_mode": True, "fsdp_double_buffer": True, "transport": "native"}


def _captured(strategy: int) -> tuple[Any, Any, Any]:
    model, plain = pair(strategy, **_POOLED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mfsdp_core.fully_shard_optimizer(optimizer)

    def step(*batches: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for index, x in enumerate(batches):
            with model.sync() if index == len(batches) - 1 else model.no_sync():
                loss = model(x)
                loss.backward()
                total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return mfsdp_core.CapturedStep(model, optimizer, step), model, plain


def test_steps_that_repeat_are_let_through() -> None:
    """And train as plain torch does; outputs are not overwritten."""
    for strategy in (0, 3):
        step, model, plain = _captured(strategy)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        found = [step(batch(2 * n), batch(2 * n + 1)) for n in range(3)]
        same("not yet", (step.is_checked, step.is_captured), (False, False))
        found += [step(batch(6), batch(7)), step(batch(8), batch(9))]
        same("checked", (step.is_checked, step.is_captured), (True, False))
        for n in range(5):
            own = torch.zeros((), dtype=torch.float64)
            for number in (2 * n, 2 * n + 1):
                own = own + plain(batch(number)).detach()
                for rank in range(torch.distributed.get_world_size()):
                    (plain(batch(number, rank)) / torch.distributed.get_world_size()).backward()
            reference.step()
            reference.zero_grad()
            close(f"loss {n}", found[n], own)
        compare_weights(model, plain)


def test_recordings_are_compared_operation_by_operation() -> None:
    """Names, operands, constants, lengths; not what a backend does in a wait."""

    def recorded(what: Callable[[Recording], Any]) -> Recording:
        recording = Recording()
        with recording.watching():
            what(recording)
        return recording

    x = torch.ones(4, 2)
    one = recorded(lambda _: x.add(1))
    same("itself", differences(one, recorded(lambda _: x.add(1))), [])
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

    def two(recording: Recording, *, turned: bool) -> None:
        numbers = [recording.issued("gather", None, (x,), (x,)) for _ in range(2)]
        for number in reversed(numbers) if turned else numbers:
            recording.waited(number)

    orders = [recorded(lambda r, t=turned: two(r, turned=t)) for turned in (False, True)]
    assert "has 2 where the step before had 1" in differences(*orders)[0], differences(*orders)

    def backend(recording: Recording) -> None:
        number = recording.issued("gather", None, (x,), (x,))
        recording.waiting(number)
        torch.ones(2)
        recording.waited(number)
        recording.released(x, "it")

    names = [entry.name for entry in recorded(backend).entries]
    same("entries", names, ["gather", "wait", "release of it"])


def test_accesses_that_nothing_orders_are_races() -> None:
    """A collective that reads or writes what the stream touches before it is waited for."""
    memory, streams = torch.zeros(8), Streams(torch.device("cpu"))
    low, high = memory[:4], memory[4:]
    for reads, writes, touch, is_race in (
        ((), (low,), lambda: low.add_(1), True),
        ((low,), (), lambda: low.add_(1), True),
        ((low,), (), low.sum, False),
        ((), (low,), low.sum, True),
        ((), (high,), lambda: low.add_(1), False),
        ((), (memory[3:5],), lambda: low.add_(1), True),
    ):
        with streams.recording() as order:
            low.mul_(1)
            work = streams.track(
                [SimpleNamespace(wait=int)], "gather", "g", reads=reads, writes=writes
            )
            same("open", order.unwaited, ["gather"])
            touch()
            same(f"{len(reads)} reads, {len(writes)} writes", bool(order.races), is_race)
            work.wait()
            same("closed", order.unwaited, [])
            before = len(order.races)
            memory.add_(1)
            order.released(memory, "it")
            same("behind the wait", len(order.races), before)
        for race in order.races:
            assert "does not wait for gather" in str(race), str(race)
        assert order.operations >= 4, order.operations
    refuses(ConfigurationError, "nccl_ub registers memory", lambda: streams.registrar(None))


class _Pool:
    """sizes: of segments."""

    def __init__(self, sizes: list[int]) -> None:
        self.raw = self
        self.sizes = sizes

    def segment_bytes(self) -> list[int]:
        return list(self.sizes)


class _Backend:
    def __init__(self, name: str, log: list[str], refused: tuple[bool, ...] = ()) -> None:
        self.name, self.log, self.refused = name, log, refused

    def register_mem_pool(self, _pool: Any, symm: bool = False) -> None:
        if symm in self.refused:
            raise RuntimeError(f"no {symm}\nsecond line")
        self.log.append(f"{self.name} {'symmetric' if symm else 'plain'}")

    def deregister_mem_pool(self, _pool: Any) -> None:
        self.log.append(f"{self.name} off")


def test_user_buffers_are_registered_group_by_group() -> None:
    """In order, once, at the level that all ranks of the group reach; undone in reverse."""
    import warnings

    def alone(value: object) -> list[object]:
        return [value]

    def made(
        *refused: tuple[bool, ...],
        agree: Any = alone,
        symmetric: bool = True,
        sizes: Any = (64, 32),
    ) -> tuple[UserBuffers, list[str], list[str]]:
        log: list[str] = []
        members = [
            Member(name, _Backend(name, log, r), agree)
            for name, r in zip("ab", refused, strict=False)
        ]
        streams = SimpleNamespace(synchronize=lambda: log.append("wait"))
        buffers = UserBuffers(members, _Pool(list(sizes)), streams, symmetric)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            buffers.register()
        return buffers, log, [str(w.message) for w in said]

    buffers, log, said = made((), ())
    same("calls", [line for line in log if line != "wait"], ["a symmetric", "b symmetric"])
    same("waits first", (log[0], said), ("wait", []))
    report = buffers.report()
    levels = [report["groups"][n]["got"] for n in "ab"]
    facts = (report["wanted"], levels, report["bytes"], report["segments"], report["registered"])
    same("report", facts, ("symmetric", ["symmetric"] * 2, 96, 2, True))
    same("grown", report["grown"], False)
    buffers.pool.sizes.append(1)  # type: ignore[attr-defined]
    same("grown", buffers.report()["grown"], True)
    refuses(LifecycleError, "registered already", buffers.register)
    buffers.close()
    buffers.close()
    same("undone", [line for line in log if "off" in line], ["b off", "a off"])
    same("none", buffers.report()["groups"]["a"]["got"], "none")

    for refused, symmetric, wanted, told in (
        (
            (True,),
            True,
            "plain",
            "got plain registration instead of symmetric: symmetric: RuntimeError: no True",
        ),
        ((True, False), True, "none", "got none registration"),
        ((), False, "plain", ""),
        ((False,), False, "none", "plain: RuntimeError: no False"),
    ):
        buffers, log, said = made(refused, symmetric=symmetric)
        same("reached", buffers.report()["groups"]["a"]["got"], wanted)
        assert told in " ".join(said), said
        same("said", bool(said), bool(told))
    same("warned without the second line", "second line" in " ".join(said), False)

    oks = count()

    def elsewhere(value: object) -> list[object]:
        # The first question is whether anybody lacks what registers; the others how it went.
        refused = value is None and next(oks) > 0
        return [value, "refused there" if refused else value]

    buffers, log, said = made((), agree=elsewhere)
    same("taken back", log.count("a off"), 2)
    assert "refused there" in said[0], said
    buffers, _, said = made((), agree=lambda value: [value, [1]])
    assert "segments differ between ranks" in said[0], said
    buffers, _, said = made((), sizes=())
    assert "no buffer was allocated" in said[0], said
    same("nothing", buffers.report()["bytes"], 0)


def test_groups_are_members_once() -> None:
    """Those of several ranks, whose agreement reaches all of them."""
    world: Any = torch.distributed.group.WORLD
    backend: Any = _Backend("one", [])
    backend.mem_allocator = None
    streams: Any = Streams(torch.device("cpu"))
    streams.registrar = lambda _group: backend
    streams.new_pool = lambda _allocator: _Pool([64])
    both = user_buffers([("inner", world), ("gather", world)], streams, symmetric=True)
    same("each once", [member.name for member in both.members], ["inner"])
    rank = torch.distributed.get_rank()
    same("of all ranks", both.members[0].agree(rank), [0, 1])
    both.register()
    same("registered", both.report()["groups"]["inner"]["got"], "symmetric")
