"""A launcher of somebody's own: one file beside the sweep, nothing here."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cli import launchers
from bench.cli.launchers import LAUNCHERS, LauncherKind
from bench.record import FINISHED_GOOD

SCRIPTED = Path(__file__).parents[1] / "run" / "faults" / "workers"
OWN = """
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from bench.cli.launchers import LauncherKind
from bench.launch.local.launcher import LocalJob
from bench.resolve.machine import Machine


class Settings(BaseModel, extra="forbid"):
    note: str = "nothing"
    cpus: int = 2


@dataclass
class Noting:
    note: str

    def start(self, order):
        with Path("started").open("a") as stream:
            stream.write(f"{self.note} {order.resolved.launch.ranks}\\n")
        order = replace(order, worker_module="scripted_worker")  # a rank without torch
        return LocalJob(order)


KIND = LauncherKind(
    Settings,
    machine=lambda settings: replace(Machine.detect(), cpu_count=settings.cpus),
    start=lambda settings: Noting(settings.note),
)
NO_KIND = 3
"""


def test_a_launcher_is_one_file_with_name_options_machine_and_start(
    cli, in_process, fast, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTED))
    (cli.folder / "mine.py").write_text(OWN)
    # Nine ranks are too many for two cores.
    sweep = cli.sweep(
        f"{fast}matrix: {{product: {{launch.ranks: [1, 9], train.global_batch: [9]}}}}\n"
    )
    own = ("--launcher", "mine:KIND", "--launcher-option", "note=hello")
    _, _, err = in_process("run", sweep, *own)
    assert (cli.folder / "started").read_text() == "hello 1\n", err
    ((cell, state),) = cli.runs()
    assert (cell, state in FINISHED_GOOD) == ("ranks=1", True), err
    _, planned, _ = in_process("plan", sweep, *own, "--launcher-option", "cpus=1000")
    assert "to run 2, pruned 0" in planned, planned
    refused = [
        (
            ("--launcher-option", "nite=hello"),
            "there is no such option; options of this launcher: note, cpus; did you mean 'note'",
        ),
        (("--launcher-option", "note"), "expected KEY=VALUE"),
        (("--launcher", "mine:KIN"), "defines no KIN"),
        (("--launcher", "mine:NO_KIND"), "expected a LauncherKind there, found 3"),
        (("--launcher", "nobody:KIND"), "no module nobody"),
    ]
    for more, why in refused:
        code, _, error = in_process("plan", sweep, *own, *more)
        assert code == 2
        assert why in error


def test_a_launcher_of_the_repository_is_a_row_of_one_table(in_process, monkeypatch):
    monkeypatch.setitem(LAUNCHERS, "mine", LauncherKind())
    assert in_process("plan", "quickstart", "--launcher", "mine")[0] == 0
    code, _, error = in_process("plan", "quickstart", "--launcher", "mien")
    assert code == 2
    assert "local, slurm, command, mine, or package.module:NAME" in error
    assert "did you mean 'mine'" in error


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_help_names_the_launchers_that_there_are(in_process, verb):
    shown = in_process(verb, "--help")[1].partition("--launcher ")[2].partition("--launcher-")[0]
    assert [name for name in launchers.LAUNCHERS if name not in shown] == []
