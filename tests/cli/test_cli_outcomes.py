"""Walks the table of verb, outcome and exit code in docs/exit-codes.md. Runs are stood in for."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import outcomes_of_gates  # noqa: F401 - its scenarios register themselves
import outcomes_of_imports  # noqa: F401 - its scenarios register themselves
import outcomes_of_jobs  # noqa: F401 - its scenarios register themselves
import outcomes_of_other_code  # noqa: F401 - its scenarios register themselves
import outcomes_of_reading  # noqa: F401 - its scenarios register themselves
import outcomes_of_validations  # noqa: F401 - its scenarios register themselves
import outcomes_with_arms  # noqa: F401 - its scenarios register themselves
import pytest
from outcome_scenarios import SCENARIOS, TWO_CELLS, Row, Scenario, World, scenario, scenarios
from recorded_runs import CELLS, Arm, record_arms

from bench.doctor import accelerators

PAGE = Path(__file__).parents[2] / "docs" / "exit-codes.md"
ROW = re.compile(r"^\| (?P<verb>\w+) \| (?P<outcome>[^|]+) \| (?P<code>\d+) \|$", re.MULTILINE)

OTHER_MACHINE = {"cpu_name": "Another CPU", "cpu_count": 64}
ONE_PRUNED = "name: two\nmatrix: {product: {launch.device: [cpu, cuda]}}\n"
ALL_PRUNED = "name: two\nbase: {launch: {device: cuda, ranks: 64}, train.global_batch: 128}\n"

# Runs the command line with ranks stood in for by a run that waits for Ctrl-C and sends it.
INTERRUPTED = """
import os, signal, sys
from bench.cli import chosen_sweep
def launch(resolved, folder, *, stop, on_step=None, **_):
    for _ in range({count}):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.wait(30)
    status = folder.status.model_copy(update={{"state": "interrupted"}})
    folder.write_status(status)
    return status
chosen_sweep.launch = launch
from bench.cli.main import run_command_line
sys.exit(run_command_line(sys.argv[1:]))
"""


def table() -> list[Any]:
    rows = [
        (m["verb"], m["outcome"].strip(), int(m["code"])) for m in ROW.finditer(PAGE.read_text())
    ]
    return [pytest.param(*row, id=f"{row[0]}: {row[1]}") for row in rows]


#: Some scenarios ask two verbs for the same, and are the outcome of both: each runs once.
_ENDED: dict[Scenario, int] = {}


@pytest.mark.parametrize(("verb", "outcome", "code"), table())
def test_the_outcome_has_the_exit_code_of_the_table(world: World, verb, outcome, code):
    assert (verb, outcome) in SCENARIOS, "this row of docs/exit-codes.md has no scenario here"
    asked = SCENARIOS[verb, outcome]
    if asked not in _ENDED:
        _ENDED[asked] = asked(world)
    assert _ENDED[asked] == code, world.err
    if code == 2:
        assert "Traceback" not in world.err


def test_every_scenario_is_a_row_of_the_table():
    rows = {(row.values[0], row.values[1]) for row in table()}
    assert set(SCENARIOS) - rows == set()


def test_every_verb_is_in_the_table(in_process):
    listed = in_process("--help")[1].partition("Commands:\n")[2]
    verbs = set(re.findall(r"^  (\w+)  ", listed, re.MULTILINE))
    assert verbs
    without_outcome = {"schema"}  # prints a constant
    assert verbs - without_outcome <= {row.values[0] for row in table()}


# -- any ---------------------------------------------------------------------------------------


@scenario("any", "an unknown verb or option")
def _(world: World) -> int:
    assert world.run("plan", "quickstart", "--no-such-option") == 2
    return world.run("plann")


@scenario("any", "an internal error")
def _(world: World) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.cli.planning.plan_text", lambda _: 1 / 0)
        code = world.run("plan", "quickstart")
    said = "error: internal error: ZeroDivisionError: division by zero; the traceback is in "
    assert world.err.startswith(said)
    kept = Path(world.err.strip().rpartition(" ")[2])
    assert "planning.py" in kept.read_text()
    kept.unlink()
    return code


@scenario("any", "Ctrl-C before anything was started")
def _(world: World) -> int:
    def interrupt(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.cli.chosen_sweep.load_sweep", interrupt)
        return world.run("run", "quickstart")


# -- plan --------------------------------------------------------------------------------------

scenarios(
    "plan",
    {
        "cells to run": (Row((TWO_CELLS,)),),
        "all cells pruned": (Row((ALL_PRUNED,), ("needs 64 CUDA devices",)),),
        "a broken or hostile sweep file": (
            Row(("name: [\n",), ("sweep.yaml:2: not valid YAML",)),
            Row(("a: " + "[" * 10_000 + "\n",)),
        ),
        "an unknown engine": (
            Row(("name: a\nbase: {engine.name: horovod}\n",), ("sweep.yaml:2", "horovod")),
        ),
        "a batch that the ranks do not divide": (
            Row(
                ("name: a\nbase: {train.global_batch: 7}\n",),
                ("sweep.yaml:2", "cannot be split", "4 or 8"),
            ),
        ),
        "a sweep file that does not exist": (
            Row(("nowhere.yaml",), ("nowhere.yaml: no file of that name",)),
        ),
    },
)


@scenario("fit", "it fits, or no device was named")
def _(world: World) -> int:
    model = ("--model", "debug", "--set", "train.seq_len=16")
    assert world.run("fit", *model, "--device", "H100", "--gpus", "2", "--plot", "fit.svg") == 0
    assert "fits NVIDIA H100" in world.out
    assert (world.folder / "fit.svg").stat().st_size > 0
    code = world.run("fit", world.file(TWO_CELLS), "--json")
    assert json.loads(world.out)["cells"]
    return code


@scenario("fit", "it does not fit")
def _(world: World) -> int:
    long = ("--set", "train.seq_len=8192", "--set", "train.micro_batch=64")
    code = world.run("fit", "--model", "tiny", "--device", "L40S", "--gpus", "2", *long)
    assert "does not fit NVIDIA L40S" in world.out
    return code


@scenario("fit", "neither a sweep nor a model, a model without devices, or an unknown model")
def _(world: World) -> int:
    assert world.run("fit") == 2
    assert world.run("fit", "--model", "debug") == 2
    assert world.run("fit", "quickstart", "--search") == 2
    return world.run("fit", "--model", "debgu", "--device", "H100", "--gpus", "8")


# -- run ---------------------------------------------------------------------------------------

scenarios(
    "run",
    {
        "all runs ok": (Row((TWO_CELLS,)),),
        "some cells pruned, the others ok": (Row((ONE_PRUNED,), ("too-few-devices",)),),
        "some runs unstable, the others ok": (
            Row((TWO_CELLS,), ("no time is reported: as the test wants",), ran={"ddp": "unstable"}),
        ),
        "all runs unstable": (Row((TWO_CELLS,), ran={"ddp": "unstable", "mfsdp": "unstable"}),),
        "a run out of memory": (
            Row((TWO_CELLS,), ("out_of_memory: as the test wants",), ran={"ddp": "out_of_memory"}),
        ),
        "all cells pruned": (Row((ALL_PRUNED,), ("needs 64 CUDA devices",)),),
        "a broken or hostile sweep file": (Row(("a: &a [*a]\n",)),),
        "a batch that the ranks do not divide": (
            Row(("name: a\nbase: {train.global_batch: 7}\n",), ("cannot be split",)),
        ),
    },
)


@scenario("run", "everything done before")
def _(world: World) -> int:
    world.sweep()
    code = world.sweep(ddp="crashed", mfsdp="crashed")
    assert "(0 now, 2 before)" in world.err
    return code


@scenario("run", "a run crashed, hung, timed out or diverged")
def _(world: World) -> int:
    codes = {
        world.sweep(TWO_CELLS.replace("two", state), ddp=state)
        for state in ("crashed", "hang", "timeout", "nan", "unsupported")
    }
    (code,) = codes
    return code


@scenario("run", "a run failed before and was not retried")
def _(world: World) -> int:
    world.sweep(ddp="crashed")
    code = world.sweep()
    assert "--retry-failed" in world.err
    assert world.run("run", world.file(TWO_CELLS), "--retry-failed") == 0
    return code


@scenario("run", "the disk is full")
def _(world: World) -> int:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))

    # Compiled files that are cut off would stay, and break whoever comes next.
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    done = world.cli.run("run", world.file(TWO_CELLS), preexec_fn=small_files, env=env)
    world.err = done.stderr
    assert "error: cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    return done.returncode


@scenario("run", "a folder that is not a results folder")
def _(world: World) -> int:
    (world.folder / "photos").mkdir()
    (world.folder / "photos" / "cat.jpg").touch()
    code = world.run("run", world.file(TWO_CELLS), "--results", "photos")
    assert "not a results folder" in world.err
    assert [path.name for path in (world.folder / "photos").iterdir()] == ["cat.jpg"]
    return code


@scenario("run", "a results folder of a newer version")
def _(world: World) -> int:
    (world.store.root / "SCHEMA").write_text("999\n")
    return world.run("run", world.file(TWO_CELLS))


@scenario("run", "another runner on the results folder")
def _(world: World) -> int:
    with world.store.lock():
        code = world.run("run", world.file(TWO_CELLS))
    using = f"another runner is using {world.folder / 'results'} (pid {os.getpid()}"
    assert using in world.err
    assert list(world.store.records()) == []
    return code


def interrupted(world: World, count: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(count=count), "run", world.file(TWO_CELLS)],
        cwd=world.folder,
        env=world.cli.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    world.err = done.stderr
    assert "once more to end at once" in done.stderr
    assert "0 failed, 1 interrupted, 1 not started" in done.stderr
    assert "the same command goes on from here" in done.stderr
    assert world.cli.runs("two") == [("ddp", "interrupted")]
    return done.returncode


@scenario("run", "Ctrl-C once")
def _(world: World) -> int:
    return interrupted(world, 1)


@scenario("run", "Ctrl-C twice")
def _(world: World) -> int:
    return interrupted(world, 2)


# -- compare, report, doctor -------------------------------------------------------------------

scenarios(
    "compare",
    {
        "an unknown sweep": (Row(("two", "tow"), ("tow",), ran={}),),
    },
)


scenarios(
    "report",
    {
        "an unknown sweep": (Row(("tow",), ("tow",), ran={}),),
    },
)


scenarios(
    "nccl",
    {
        "a path that does not exist": (Row(("missing.log",)),),
        "a device instead of a log": (Row(("/dev/zero",)),),
    },
)


@scenario("compare", "two sides with runs in common")
def _(world: World) -> int:
    world.sweep()
    world.sweep(TWO_CELLS.replace("two", "other"))
    return world.run("compare", "two", "other")


@scenario("compare", "nothing that can be compared")
def _(world: World) -> int:
    world.sweep()
    three = "name: three\nmatrix: {product: {train.seq_len: [32, 128]}}\n"
    world.sweep(three)
    assert world.run("compare", "two", "three", "--ignore", "engine.name") == 5
    # A crashed repeat among good ones takes nothing away: neither side lacks a number.
    lost = {0: "crashed"}
    one = {"zero3": CELLS["zero3"]}
    record_arms(world.store, {None: Arm(hardware=OTHER_MACHINE)}, sweep="there", cells=one)
    record_arms(world.store, {None: Arm(states=lost)}, sweep="here", cells=one)
    assert world.run("compare", "there", "here") == 5
    assert "hardware differs" in world.err
    assert world.run("compare", "two", "here", "--ignore", "env") == 5
    assert "no cell of equal configuration" in world.err
    arms = {"base": Arm(), "head": Arm(hardware=OTHER_MACHINE, states=lost)}
    record_arms(world.store, arms, sweep="arms", cells=one)
    code = world.run("compare", "arms")
    assert "hardware differs" in world.err
    return code


@scenario("compare", "a side without a finished run")
def _(world: World) -> int:
    world.sweep()
    crashed = dict.fromkeys(("ddp", "mfsdp"), "crashed")
    world.sweep(TWO_CELLS.replace("two", "bad"), **crashed)
    world.sweep(TWO_CELLS.replace("two", "planned"))
    for record in list(world.store.records(sweep="planned")):
        shutil.rmtree(world.store.root / "runs" / record.run_id)
    for sides in (("two", "bad"), ("bad", "two")):
        assert world.run("compare", *sides) == 3
        assert "bad has no finished run: ddp: crashed: as the test wants" in world.err
    for sides in (("two", "planned"), ("planned", "two")):
        assert world.run("compare", *sides) == 3
        assert "planned has no finished run: planned: it was planned and has not run" in world.err
    assert world.run("compare", "bad", "bad") == 3
    return world.run("compare", "planned", "bad")


@scenario("report", "at least one measured cell")
def _(world: World) -> int:
    world.sweep(ddp="crashed")
    code = world.run("report", "two")
    assert Path(world.out.strip()).read_text().startswith("<!")
    return code


@scenario("report", "nothing was measured")
def _(world: World) -> int:
    world.sweep(ddp="crashed", mfsdp="crashed")
    code = world.run("report", "two")
    assert Path(world.out.strip()).is_file()
    return code


@scenario("report", "no sweep in the results folder")
def _(world: World) -> int:
    assert world.store.sweeps() == []
    code = world.run("report")
    assert "holds no sweep yet" in world.err
    return code


NCCL = "n1:1:2 [0] NCCL INFO "
SYMMETRIC = (
    NCCL + "AllGather [Symmetric]: 64 Bytes -> Kernel AllGather_ST nchannels 9 nthreads 512\n"
)
REGULAR = NCCL + "AllGather: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}\n"


def audited(world: World, text: str, *options: str) -> int:
    log = world.folder / "nccl.log"
    log.write_text(text)
    return world.run("nccl", log, *options)


NCCL_LOGS = {
    "rows and no requirement": (SYMMETRIC + REGULAR, (), "MIXED"),
    "requirements met": (SYMMETRIC, ("--require", "AG=sym"), "MET"),
    "a requirement not met": (REGULAR, ("--require", "AG=sym"), "requirement not met: AG=sym"),
    "a requirement without evidence": (SYMMETRIC, ("--profile", "fsdp"), "without evidence: RS"),
    "a log without NCCL evidence": ("nothing here\n", (), "nothing to judge"),
    "an unknown profile or requirement": (SYMMETRIC, ("--profile", "fspd"), "unknown profile"),
}
for _outcome, (_text, _options, _said) in NCCL_LOGS.items():

    @scenario("nccl", _outcome)
    def _(world: World, text=_text, options=_options, said=_said) -> int:
        code = audited(world, text, *options)
        assert said in world.out + world.err
        return code


@scenario("nccl", "a run on CPU")
def _(world: World) -> int:
    world.sweep()
    code = world.run("nccl", world.run_folder("ddp"))
    assert "there is no NCCL in this run" in world.err
    return code


_probe = cache(accelerators._probe)


def doctor(world: World, *arguments: str) -> int:
    """`doctor` in this process, which asks another what torch says here only the first time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerators, "_probe", _probe)
        return world.run("doctor", *arguments)


@scenario("doctor", "runs can start here")
def _(world: World) -> int:
    return doctor(world)


@scenario("doctor", "a package is missing")
def _(world: World) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.doctor.packages._NEEDED", ("torch", "no-such-package"))
        code = doctor(world)
    assert "no-such-package" in world.out
    return code


@scenario("doctor", "a results folder that cannot be written")
def _(world: World) -> int:
    code = doctor(world, "--results", "/proc/results")
    assert "cannot be written" in world.out
    return code
