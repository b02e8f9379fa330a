"""Outcomes of `plan`, `fit`, `run`, `validate` and `doctor`. Ranks are stood in for."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from outcome_scenarios import (
    TWO_CELLS,
    Scenarios,
    Step,
    World,
    ask,
    does,
    ends,
    file,
    holds,
    swept,
    wrong,
)

from bench.doctor.checks import torch_findings
from bench.errors import BenchError
from bench.verdict import CaseVerdict, CheckVerdict, Finding

GPUS = file("name: two\nbase: {launch: {device: cuda, ranks: 64}, train.global_batch: 128}\n")
INDIVISIBLE = file("name: a\nbase: {train.global_batch: 7}\n")
TWO = file(TWO_CELLS)


def patch(target: str, value: Any) -> Step:
    return does(lambda world: world.patch.setattr(target, value))


def interrupt(*_: object, **__: object) -> Iterator[Any]:
    os.kill(os.getpid(), signal.SIGINT)
    yield from ()


# -- any ---------------------------------------------------------------------------------------


def fails(error: Exception) -> Step:
    def show_plan(_: object) -> None:
        raise error

    return patch("bench.cli.plan.PlanVerb.run", show_plan)


def traceback_is_kept(world: World) -> bool:
    path = Path(world.err.strip().rpartition(" ")[2])
    return path.parent == world.folder and "in show_plan" in path.read_text()


ANY: Scenarios = {
    "an unknown verb or option": [*wrong("plan quickstart --no-such-option"), ask("plann")],
    "an internal error": [
        fails(BenchError("impossible")),
        ask("plan quickstart", code=6),
        holds(traceback_is_kept),
        fails(ZeroDivisionError("a figure")),
        ask("plan quickstart", "error: internal error: ZeroDivisionError: a figure; the traceback"),
        holds(traceback_is_kept),
    ],
    "Ctrl-C before anything was started": [
        patch("sweeps.selected_sweep.load_sweep", lambda _: list(interrupt())),
        ask("run quickstart"),
    ],
}

# -- plan, fit ---------------------------------------------------------------------------------

PLAN: Scenarios = {
    "cells to run": [TWO, ask("plan sweep.yaml")],
    "all cells pruned": [GPUS, ask("plan sweep.yaml", "needs 64 CUDA devices")],
    "a broken or hostile sweep file": [
        file("name: [\n"),
        ask("plan sweep.yaml", "sweep.yaml:2: not valid YAML", code=2),
        file("a: " + "[" * 10_000 + "\n"),
        ask("plan sweep.yaml"),
    ],
    "an unknown engine": [
        file("name: a\nbase: {engine.name: horovod}\n"),
        ask("plan sweep.yaml", "sweep.yaml:2", "horovod"),
    ],
    "a batch that the ranks do not divide": [
        INDIVISIBLE,
        ask("plan sweep.yaml", "sweep.yaml:2", "cannot be split", "4 or 8"),
    ],
    "a sweep file that does not exist": [
        ask("plan nowhere.yaml", "nowhere.yaml: no file of that name"),
    ],
}

LONG = "--set train.seq_len=8192 --set train.micro_batch=64"
FIT: Scenarios = {
    "it fits, or no device was named": [
        ask(
            "fit --model debug --set train.seq_len=16 --device H100 --gpus 2",
            "fits NVIDIA H100",
        ),
        TWO,
        ask("fit sweep.yaml --json", '"cells"'),
        ask("fit sweep.yaml --device H100 --gpus 8", " cells fit; the largest fits NVIDIA H100"),
    ],
    "it does not fit": [
        ask(f"fit --model tiny --device L40S --gpus 2 {LONG}", "does not fit NVIDIA L40S"),
    ],
    "neither a sweep nor a model, a model without devices, or an unknown model": [
        *wrong("fit", "fit --model debug", "fit quickstart --search"),
        ask("fit --model debgu --device H100 --gpus 8"),
    ],
}

# -- run ---------------------------------------------------------------------------------------

# Runs the command line with ranks stood in for by a run that waits for Ctrl-C and sends it.
INTERRUPTED = """
import os, signal, sys
from sweeps import selected_sweep
def launch(resolved, folder, *, stop, on_step=None, **_):
    for _ in range({count}):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.wait(200)
    status = folder.status.model_copy(update={{"state": "interrupted"}})
    folder.write_status(status)
    return status
selected_sweep.launch = launch
from bench.cli.main import run_command_line
sys.exit(run_command_line(sys.argv[1:]))
"""


def interrupted(count: int) -> Step:
    def act(world: World) -> int:
        done = subprocess.run(
            [sys.executable, "-c", INTERRUPTED.format(count=count), "run", "sweep.yaml"],
            cwd=world.folder,
            env=world.cli.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert "once more to end at once" in done.stderr
        assert "0 failed, 1 interrupted, 1 not started" in done.stderr
        assert "the same command goes on from here" in done.stderr
        assert world.cli.runs() == [("ddp", "interrupted")]
        return done.returncode

    return act


def disk_is_full(world: World) -> int:
    # Compiled files that are cut off would stay, and break whoever comes next.
    done = world.cli.run(
        "run",
        "sweep.yaml",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)),
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert "error: cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    return int(done.returncode)


def another_runner(world: World) -> int:
    with world.store.lock():
        code = world.run("run", "sweep.yaml")
    using = f"another runner is using {world.folder / 'results'} (pid {os.getpid()}"
    assert using in world.err
    assert world.records == []
    return int(code)


def photos(world: World) -> None:
    (world.folder / "photos").mkdir()
    (world.folder / "photos" / "cat.jpg").touch()


def no_allocation(world: World) -> None:
    world.patch.delenv("SLURM_JOB_ID", raising=False)


def launcher_options(says: str, *options: str) -> Step:
    given = " ".join(f"--launcher-option '{one}'" for one in options)
    return ask(f"run sweep.yaml --launcher command {given}", says, code=2)


RUN: Scenarios = {
    "all runs ok": [TWO, ask("run sweep.yaml")],
    "everything done before": [
        swept(ddp="crashed"),
        ends(),
        ask("run sweep.yaml --retry-failed", "(1 now, 1 before)"),
        ends(ddp="crashed", mfsdp="crashed"),
        ask("run sweep.yaml", "(0 now, 2 before)"),
    ],
    "some cells pruned, the others ok": [
        file("name: two\nmatrix: {product: {launch.device: [cpu, cuda]}}\n"),
        ask("run sweep.yaml", "too-few-devices"),
    ],
    "some runs unstable, the others ok": [
        ends(ddp="unstable"),
        TWO,
        ask("run sweep.yaml", "no time is reported: as the test wants"),
    ],
    "all runs unstable": [ends(ddp="unstable", mfsdp="unstable"), TWO, ask("run sweep.yaml")],
    "a run out of memory": [
        ends(ddp="out_of_memory"),
        TWO,
        ask("run sweep.yaml", "out_of_memory: as the test wants"),
    ],
    "a run crashed, hung, timed out or diverged": [
        file(
            "name: a\nmatrix: {product: {case: [{label: a, train.seed: 1}, "
            "{label: b, train.seed: 2}, "
            "{label: c, train.seed: 3}, {label: d, train.seed: 4}, {label: e, train.seed: 5}]}}\n"
        ),
        ends(a="hang", b="timeout", c="nan", d="unsupported", e="crashed"),
        ask("run sweep.yaml", "5 failed"),
    ],
    "a run failed before and was not retried": [
        swept(ddp="crashed"),
        ends(),
        ask("run sweep.yaml", "--retry-failed"),
    ],
    "all cells pruned": [GPUS, ask("run sweep.yaml", "needs 64 CUDA devices")],
    "the disk is full": [TWO, disk_is_full],
    "a broken or hostile sweep file": [file("a: &a [*a]\n"), ask("run sweep.yaml")],
    "a batch that the ranks do not divide": [INDIVISIBLE, ask("run sweep.yaml", "cannot be split")],
    "a folder that is not a results folder": [
        TWO,
        does(photos),
        ask("run sweep.yaml --results photos", "not a results folder"),
        holds(
            lambda world: [one.name for one in (world.folder / "photos").iterdir()] == ["cat.jpg"]
        ),
    ],
    "a results folder of a newer version": [
        does(lambda world: (world.store.root / "SCHEMA").write_text("999\n")),
        TWO,
        ask("run sweep.yaml"),
    ],
    "another runner on the results folder": [TWO, another_runner],
    "Ctrl-C once": [TWO, interrupted(1)],
    "Ctrl-C twice": [TWO, interrupted(2)],
    "`--launcher slurm` outside of an allocation": [
        does(no_allocation),
        TWO,
        ask("run sweep.yaml --launcher slurm", "sbatch --nodes=2 --exclusive --wrap 'exec"),
    ],
    "launcher options that it does not have": [
        TWO,
        *wrong("run sweep.yaml --launcher slrm", "run sweep.yaml --launcher-option max_jobs=3"),
        launcher_options("expected KEY=VALUE", "hosts"),
        launcher_options("expected hosts to be a section, found 1", "hosts=1", "hosts.x=2"),
        ask("run sweep.yaml --launcher slurm --launcher-option partition=gpu"),
    ],
}

# -- validate ----------------------------------------------------------------------------------

FAILED = CheckVerdict(
    check="gradients",
    state="failed",
    finding=Finding(parameter="head.weight", step=2, rank=1, expected="[0.5]", found="[1.0]"),
)
ONE = "--case mfsdp/optim/2/stack/fp64/k3"


class NoRanks:
    """In the place of `bench.testing.workers.ForkServer`."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> NoRanks:
        return self

    def __exit__(self, *_: object) -> None: ...


def verdicts(state: str = "passed") -> Step:
    """Cases that end so."""

    def cases(_server: object, cases: Any, *_: object, **__: object) -> Iterator[CaseVerdict]:
        for case in cases:
            checks = (FAILED,) if state == "failed" else ()
            yield CaseVerdict(case=case.id, engine=case.engine, state=state, checks=checks)

    def act(world: World) -> None:
        world.patch.setattr("bench.testing.workers.ForkServer", NoRanks)
        world.patch.setattr("bench.validate.session.verdicts", cases)

    return act


def show_validation(world: World) -> int:
    (name,) = world.store.validations.ids()
    return int(ask(f"status {name}", "FAILED")(world))


VALIDATE: Scenarios = {
    "every case that applies passed": [
        verdicts(),
        ask(f"validate {ONE}", "1 passed, 0 failed"),
    ],
    "a case failed": [
        verdicts("failed"),
        ask(f"validate {ONE}", "gradients: head.weight, step 2, rank 1", "found     [1.0]"),
    ],
    "no case applies here": [verdicts("not_applicable"), ask(f"validate {ONE}")],
    "an unknown engine or case, or options that exclude each other": [
        *wrong("validate horovod", "validate --case no-such-case"),
        ask("validate nomodule:f", "cannot be loaded: no module nomodule in ", code=2),
        ask("validate bench.errors:nothing --fuzz 3", "defines no nothing: it has", code=2),
        holds(lambda world: not (world.folder / "results").exists()),
        ask("validate --fuzz 3 --full"),
    ],
    "a list of the cases": [
        ask("validate fsdp2 --list", "fsdp2/optim_grads_params/2/stack/fp64/k3"),
    ],
    "Ctrl-C": [
        verdicts(),
        patch("bench.validate.session.verdicts", interrupt),
        ask("validate"),
    ],
}
STATUS: Scenarios = {
    "a validation": [verdicts("failed"), ask(f"validate {ONE}", code=1), show_validation]
}

# -- doctor ------------------------------------------------------------------------------------

#: What torch says here is asked in another process only the first time.
PROBED = patch("bench.doctor.checks.torch_findings", cache(torch_findings))
DOCTOR: Scenarios = {
    "runs can start here": [PROBED, ask("doctor")],
    "a package is missing": [
        PROBED,
        patch("bench.doctor.checks._NEEDED", ("torch", "no-such-package")),
        ask("doctor", "no-such-package"),
    ],
    "a results folder that cannot be written": [
        PROBED,
        ask("doctor --results /proc/results", "cannot be written"),
    ],
}
