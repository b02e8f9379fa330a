"""Scenarios of `validate`: the ranks are stood in for by verdicts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from outcome_scenarios import World, scenario

from bench.verdict import BugVerdict, CaseVerdict, CheckVerdict, Finding

FAILED = CheckVerdict(
    check="gradients",
    state="failed",
    finding=Finding(parameter="head.weight", step=2, rank=1, expected="[0.5]", found="[1.0]"),
)
ONE = "mfsdp/optim/2/stack/fp64/k3"


class NoRanks:
    """In the place of `bench.testing.workers.ForkServer`."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> NoRanks:
        return self

    def __exit__(self, *_: object) -> None: ...


def validated(world: World, *arguments: str, state: str = "passed", outcome: str = "caught") -> int:
    def verdicts(
        _fork_server: object, cases: Any, *_: object, **__: object
    ) -> Iterator[CaseVerdict]:
        for case in cases:
            checks = (FAILED,) if state == "failed" else ()
            yield CaseVerdict(case=case.id, engine=case.engine, state=state, checks=checks)

    def inject(_fork_server: object, bugs: Any, *_: object) -> Iterator[BugVerdict]:
        for bug in bugs:
            yield BugVerdict(bug=bug.id, title=bug.title, outcome=outcome)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.testing.workers.ForkServer", NoRanks)
        patch.setattr("bench.validate.session.verdicts", verdicts)
        patch.setattr("bench.validate.injection.inject", inject)
        return world.run("validate", *arguments)


@scenario("validate", "every case that applies passed")
def _(world: World) -> int:
    code = validated(world, "--case", ONE)
    assert "1 passed, 0 failed" in world.out
    return code


@scenario("validate", "a case failed")
def _(world: World) -> int:
    code = validated(world, "--case", ONE, state="failed")
    assert "gradients: head.weight, step 2, rank 1" in world.out
    assert "found     [1.0]" in world.out
    return code


@scenario("validate", "no case applies here")
def _(world: World) -> int:
    return validated(world, "--case", ONE, state="not_applicable")


@scenario("validate", "a historical bug was missed")
def _(world: World) -> int:
    code = validated(world, "--inject", "R1,R2", outcome="missed")
    assert "2 missed" in world.out
    return code


@scenario("validate", "every historical bug caught or not applicable")
def _(world: World) -> int:
    return validated(world, "--inject", "all")


@scenario("validate", "a patch whose core cannot be imported")
def _(world: World) -> int:
    code = validated(world, "--inject", "R1,R2", outcome="broken")
    assert "0 caught, 0 missed, 2 broken" in world.out
    return code


@scenario("validate", "no historical bug can be injected here")
def _(world: World) -> int:
    return validated(world, "--inject", "R16", outcome="not_applicable")


@scenario("validate", "an unknown engine, case or bug, or options that exclude each other")
def _(world: World) -> int:
    assert world.run("validate", "horovod") == 2
    assert world.run("validate", "collective") == 2
    assert world.run("validate", "--case", "no-such-case") == 2
    assert world.run("validate", "--inject", "R99") == 2
    assert world.run("validate", "--inject", "lost.patch") == 2
    assert world.run("validate", "nomodule:f") == 2
    assert "nomodule:f cannot be loaded: no module nomodule in " in world.err
    assert world.run("validate", "bench.errors:nothing", "--fuzz", "3") == 2
    assert "defines no nothing: it has BenchError" in world.err
    assert not (world.folder / "results").exists()
    return world.run("validate", "ddp", "--inject", "R1")


@scenario("validate", "a list of the cases")
def _(world: World) -> int:
    code = world.run("validate", "fsdp2", "--list")
    assert "fsdp2/optim_grads_params/2/stack/fp64/k3" in world.out.split()
    return code


@scenario("validate", "Ctrl-C")
def _(world: World) -> int:
    def interrupted(*_: object, **__: object) -> Iterator[CaseVerdict]:
        os.kill(os.getpid(), signal.SIGINT)
        yield from ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.testing.workers.ForkServer", NoRanks)
        patch.setattr("bench.validate.session.verdicts", interrupted)
        return world.run("validate")


@scenario("show", "a validation")
def _(world: World) -> int:
    validated(world, "--case", ONE, state="failed")
    (name,) = world.store.validations.ids()
    code = world.run("show", name)
    assert "FAILED" in world.out
    return code
