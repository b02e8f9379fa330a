"""`same_host` under hundreds of steps of several models, with failing passes and dying ranks."""

from __future__ import annotations

import os
import signal
import time
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_core
from bench.testing.workers import ForkServer, WorkersError
from conformance.small_model import (
    WIDTH,
    batch,
    compare_gradients,
    compare_weights,
    pair,
    plain_backward,
)

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

RANKS = 4
#: Rows of five FP64 numbers: a sum reads each quarter in several stretches.
WIDE = 70_000


class DeliberateError(Exception):
    """Raised by a unit on all ranks."""


class Wide(torch.nn.Module):
    """A unit that is read in several stretches."""

    unit_classes = (torch.nn.Linear,)

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(WIDTH, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).square().mean()


def models() -> list[tuple[Any, Any, Any, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    hybrid = {
        "device_mesh": mesh,
        "dp_shard_dim": "inner",
        "dp_outer_dim": "outer",
        "hybrid_fsdp_group": dist.group.WORLD,
    }
    made = []
    for strategy, options in (
        (0, {}),
        (1, {"average_in_collective": True}),
        (2, hybrid | {"outer_dp_sharding_strategy": 1}),
        (3, {}),
        (3, hybrid),
        (3, {"module": Wide}),
    ):
        model, plain = pair(strategy, transport="same_host", **options)
        own, reference = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain))
        made.append((model, mfsdp_core.fully_shard_optimizer(own), plain, reference))
    return made


def cycle(random: Random, entry: tuple[Any, ...], number: int) -> None:
    model, optimizer, plain, reference = entry
    count = random.choice((1, 1, 2, 3))
    for microbatch in range(count - 1):
        with model.no_sync():
            model(batch(number + microbatch)).backward()
    model(batch(number + count - 1)).backward()
    plain_backward(plain, *range(number, number + count))
    compare_gradients(model, plain)
    if random.random() < 0.3:
        model.start_param_sync()  # what was gathered before the step is gathered again after it
    optimizer.step()
    optimizer.zero_grad()
    reference.step()
    reference.zero_grad()


def fail(random: Random, entry: tuple[Any, ...]) -> None:
    """A pass that ends in the middle; what it had gathered ahead, nobody waits for."""
    model = entry[0]
    modules = [m for m in model.module.modules() if isinstance(m, torch.nn.Linear)]
    victim, in_forward = random.choice(modules), random.random() < 0.5

    def raise_it(*_: Any) -> None:
        raise DeliberateError

    register = "register_forward_pre_hook" if in_forward else "register_full_backward_hook"
    handle = getattr(victim, register)(raise_it)
    try:
        with model.no_sync():
            model(batch().requires_grad_()).backward()
    except DeliberateError:
        pass
    finally:
        handle.remove()
    model.zero_grad()


def stress(seed: int, steps: int) -> int:
    """Everything in an order that a seed draws, ranks out of step with each other."""
    random, own = Random(seed), Random(100 * seed + dist.get_rank())
    made, cycles = models(), 0
    for step in range(steps):
        if own.random() < 0.05:
            time.sleep(0.05 * own.random())
        what, entry = random.random(), random.choice(made)
        if what < 0.7:
            cycle(random, entry, 5 * step)
            cycles += 1
        elif what < 0.8:
            fail(random, entry)
        elif what < 0.9:
            with torch.no_grad():
                assert torch.allclose(entry[0](batch()), entry[2](batch()))
        elif what < 0.95:
            # Forward passes of two models, then their backward passes.
            other = random.choice(made)
            both = [entry] if entry is other else [entry, other]
            losses = [one[0](batch(step)) for one in both]
            for loss in losses:
                loss.backward()
            for one in both:
                one[0].zero_grad()
        else:
            dist.barrier()
    for model, _, plain, _ in made:
        compare_weights(model, plain, 1e-9)
    return cycles


def until_killed(seed: int, victim: int, after: int) -> None:
    """Train; rank `victim` is killed in the middle of it."""
    model, plain = pair(3, transport="same_host")
    del plain
    random = Random(seed)
    for step in range(10_000):
        if step == after and dist.get_rank() == victim:
            time.sleep(0.01 * random.random())
            os.kill(os.getpid(), signal.SIGKILL)
        model(batch(step)).backward()
        model.zero_grad()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(8))
def test_hundreds_of_steps_are_those_of_plain_torch(fork_server: ForkServer, seed: int) -> None:
    with fork_server.workers(RANKS) as workers:
        cycles = workers.run(stress, seed, 400, seconds=600)
    assert len(set(cycles)) == 1
    assert cycles[0] > 200


@pytest.mark.parametrize("seed", range(6))
def test_who_waits_for_a_killed_rank_is_told(fork_server: ForkServer, seed: int) -> None:
    with fork_server.workers(RANKS) as workers, pytest.raises(WorkersError) as error:
        workers.run(until_killed, seed, seed % RANKS, 3 + 5 * seed, seconds=120)
    kinds = {failure.rank: failure.kind for failure in error.value.failures}
    others = {kind for rank, kind in kinds.items() if rank != seed % RANKS}
    assert kinds[seed % RANKS] == "died", kinds
    assert others == {"raised"}, error.value
