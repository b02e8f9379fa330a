"""Random training programs agree with plain torch, and one that does not is shrunk to a script."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench.cli.validate import ValidateVerb
from bench.errors import UsageError
from bench.testing.workers import ForkServer
from bench.validate.drawing import draw
from bench.validate.drivers import outside
from bench.validate.fixed import FIXED
from bench.validate.fuzzing import Tally, fuzz
from bench.validate.outcomes import outcome_of, resident
from bench.validate.program import META, Cycle, Pass, Program, UnitShape
from bench.validate.script import script
from bench.validate.shrinking import shrunk
from tools.bug_in_a_copy import UNLISTED, copy_of_core

pytestmark = pytest.mark.processes

OUTSIDE = "validate_engines:Replicating"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_thousands_of_random_programs_agree_with_plain_torch(fork_server: ForkServer) -> None:
    tally = Tally()
    with resident(fork_server) as workers:
        for _ in fuzz(workers, "mfsdp", 2, range(3000), tally):
            assert not tally.failures, tally.failures[0].script


def test_an_engine_of_ones_own_runs_the_programs(fork_server: ForkServer) -> None:
    passes = tuple(Pass(kind, ("rc",)) for kind in ("micro", "evaluate", "failing", "micro"))
    passes = (*passes[:2], replace(passes[2], fails=("forward", 1)), passes[3])
    program = Program(OUTSIDE, strategy=0, units=(UnitShape(),) * 2, cycles=(Cycle(passes),) * 2)
    with resident(fork_server) as workers:
        assert outcome_of(workers, program).kind == "equal"
        wrong = outcome_of(workers, replace(program, engine="validate_engines:Summing"))
        refused = outcome_of(workers, replace(program, strategy=3))
    assert wrong.kind == "differs"
    assert wrong.text.startswith("cycle 1, pass 4: gradient of ")
    assert refused.kind == "refused"
    assert "in cycle 1, completing the gradients" in wrong.lines


def test_a_failure_names_its_part_of_the_program_and_the_last_events(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    core = copy_of_core(tmp_path)
    source = (core / "runtime/gradient_buffers.py").read_text()
    late = source.replace("into.add_(result)", "pass")
    (core / "runtime/gradient_buffers.py").write_text(late)
    program = Program("mfsdp", strategy=2, cycles=(Cycle((Pass("micro", ("r",)),) * 2),))
    with resident(fork_server, core=tmp_path) as workers:
        lost = outcome_of(workers, program)
        dead = source.replace("into.add_(result)", "__import__('os')._exit(3)")
        (core / "runtime/gradient_buffers.py").write_text(dead)
        workers.end()
        died = outcome_of(workers, program)
    assert lost.kind == "differs"
    assert lost.text.startswith("cycle 1, pass 2: gradient of ")
    text = "\n".join(lost.lines)
    assert "\nin cycle 1, completing the gradients\nlast: " in text
    assert "last: land add of (root)/0, inner" in text
    assert died.lines[0] == "rank 0 died with exit code 3"
    assert died.lines[1].startswith("in cycle 1, pass 2 (rank 0: r)")


@pytest.mark.parametrize("engine", ["mfsdp", "fsdp2", "ddp", OUTSIDE])
def test_a_program_is_the_same_for_ever_and_has_a_source(engine: str) -> None:
    for number in range(10):
        program = draw(engine, 3, number)
        assert program == draw(engine, 3, number)
        compile(script(program), f"{engine}-{number}", "exec")


def test_shapes_are_those_of_the_model_before_an_engine_empties_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ZeRO-3 of DeepSpeed does."""

    def emptying(module: nn.Module, *_: object) -> SimpleNamespace:
        for parameter in module.parameters():
            parameter.data = parameter.data.new_empty(0)
        return SimpleNamespace(optimizer_step=None)

    monkeypatch.setattr(outside, "build_engine", emptying)
    monkeypatch.setattr(outside.dist, "get_world_size", lambda: 2)
    model, _ = outside.Outside(Program("fsdp2")).shard(nn.Linear(3, 2).double())
    assert model.shapes == {"weight": (2, 3), "bias": (2,)}


def test_programs_of_fsdp2_keep_weights_in_parts_between_the_passes() -> None:
    drawn = [draw("fsdp2", 501, number) for number in range(100)]
    parts = [one for one in drawn if "reshard_after_forward=2" in one.features()]
    assert parts
    assert {(one.ranks, one.strategy, one.mode) for one in parts} == {(4, 3, "flat")}
    assert "('reshard_after_forward', 2)" in script(parts[0])


def test_a_bug_is_shrunk_to_a_script_that_fails(fork_server: ForkServer, tmp_path: Path) -> None:
    bug = next(
        bug for bug in UNLISTED if bug.stem == "a-step-adds-to-the-gradient-of-the-step-before"
    )
    copy_of_core(tmp_path, bug)
    plain = Cycle((Pass("micro", ("rr",)),))
    program = Program("mfsdp", ranks=1, units=(UnitShape("Rows"),) * 2, cycles=(plain,) * 3)
    with resident(fork_server, core=tmp_path) as workers:
        outcome = outcome_of(workers, program)
        assert outcome.kind == "differs", outcome
        signature = outcome.signature
        smallest = shrunk(
            program, lambda p: outcome_of(workers, p).signature == signature, seconds=60
        )
    assert (len(smallest.units), len(smallest.cycles)) == (1, 1)  # two plain ones follow
    file = tmp_path / "program.py"
    file.write_text(script(smallest))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    found = subprocess.run(
        [sys.executable, str(file)],
        env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", **alone},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "gradient of" in found.stderr, found.stderr


def default_dtype() -> torch.dtype:
    return torch.get_default_dtype()


def test_a_program_on_the_meta_device_leaves_no_default_dtype_behind(
    fork_server: ForkServer,
) -> None:
    program = next(program for program in FIXED if META in dict(program.options))
    with resident(fork_server) as workers:
        assert outcome_of(workers, program).kind == "equal"
        assert workers.run(default_dtype, seconds=30, ranks=2) == [torch.float32] * 2


def test_a_folder_that_holds_something_else_is_refused_before_a_program_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="not a results folder"):
        ValidateVerb(results=tmp_path).run_fuzz(["mfsdp"], 1)
