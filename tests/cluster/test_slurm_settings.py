"""Settings of jobs, and the scripts that are made of them, without a Slurm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.errors import UsageError
from bench.launch.code import own_code
from bench.launch.protocol import Order
from bench.launch.rendezvous import Rendezvous, node_number
from bench.launch.slurm.controller import ControllerSilentError, why_this_job_ends
from bench.launch.slurm.launcher import StepJob
from bench.launch.slurm.nodes import node_of_cluster
from bench.launch.slurm.queue import QueuedJob, SlurmQueue
from bench.launch.slurm.settings import SlurmSettings, read_profile, slurm_settings
from bench.launch.slurm.submission import JobRequest, _command_line, _executor
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, RunSpec
from sweeps.definition import parse_sweep
from sweeps.document import SweepFileError

SCRIPTS = Callable[[str, str], None]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SCRIPTS:
    """Put a command of this content on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, body: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)

    return write


def script(tmp_path: Path, count: int = 3, launch: LaunchSpec | None = None, **given: Any) -> str:
    launch = launch or LaunchSpec(ranks=4, nodes=2)
    request = JobRequest("s.1", tmp_path / "a b", ["env", "X=$(id)", "run", "it's"], launch, 7)
    executor = _executor(request, SlurmSettings(**given), count)
    return str(executor._make_submission_file_text(_command_line(request), request.name))


def test_layers_of_settings_lie_on_top_of_each_other() -> None:
    found = slurm_settings(
        ("profile", {"partition": "a", "account": "x"}),
        ("sweep", {"partition": "b"}),
        ("--launcher-option", {}),
    )
    assert (found.partition, found.account) == ("b", "x")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"partiton": "a"}, "unknown key 'partiton'; expected one of partition"),
        ({"partition": "a\n#SBATCH --uid=0"}, "one line"),
        ({"account": ""}, "one line"),
        ({"modules": ["cuda; rm -rf /"]}, "no name of an environment module"),
        ({"options": {"array": "1-5"}}, "array is set by the launcher itself"),
        ({"options": {"Bad Name": 1}}, "no long option of sbatch"),
        ({"options": {"reservation": "x\ny"}}, "one line"),
        ({"poll_seconds": 1}, "poll_seconds: Input should be greater than or equal to 5"),
        ({"signal_seconds": 0}, "signal_seconds"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match="the profile: ") as refused:
        slurm_settings(("the profile", given))
    assert says in str(refused.value)


def test_a_sweep_file_names_the_line_of_a_wrong_setting() -> None:
    with pytest.raises(SweepFileError, match=r"sweep.yaml:2: slurm: unknown key 'parttion'"):
        parse_sweep("name: s\nslurm: {parttion: gpu}\n")
    assert parse_sweep("name: s\nslurm: {partition: gpu}\n").slurm == {"partition": "gpu"}


def test_a_profile_comes_from_the_users_configuration(tmp_path: Path) -> None:
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert read_profile(None, variables) == {}
    file = tmp_path / "mfsdp-bench" / "slurm.yaml"
    file.parent.mkdir()
    file.write_text("default: {partition: gpu}\ndebug: {partition: dev}\n")
    assert read_profile(None, variables) == {"partition": "gpu"}
    assert read_profile("debug", variables) == {"partition": "dev"}
    with pytest.raises(UsageError, match=r"profile big: not in .*profiles there: default, debug"):
        read_profile("big", variables)
    file.write_text("default: [")
    with pytest.raises(UsageError, match="cannot be read"):
        read_profile(None, variables)


def test_a_script_asks_for_nodes_and_time_and_a_signal_before_its_end(tmp_path: Path) -> None:
    lines = script(tmp_path, max_jobs=2, partition="gpu", constraint="a&b|c").splitlines()
    assert "#SBATCH --array=0-2%2" in lines
    assert "#SBATCH --nodes=2" in lines
    assert "#SBATCH --ntasks-per-node=1" in lines
    assert "#SBATCH --cpus-per-task=2" in lines
    assert "#SBATCH --time=7" in lines
    assert "#SBATCH --signal=B:USR1@60" in lines
    assert "#SBATCH --requeue" in lines
    assert "#SBATCH --exclusive" in lines
    assert "#SBATCH --constraint='a&b|c'" in lines
    assert not any("gpus" in line for line in lines)


def test_devices_are_asked_for_where_ranks_have_them(tmp_path: Path) -> None:
    text = script(tmp_path, launch=LaunchSpec(ranks=16, nodes=2, device="cuda"), requeue=False)
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "#SBATCH --no-requeue\n" in text
    assert "cpus-per-task" not in text


def test_no_setting_reaches_a_shell_as_code(tmp_path: Path) -> None:
    evil = "x'; touch pwned; '"
    text = script(tmp_path, partition=evil, account="$(touch pwned)", options={"comment": evil})
    file = tmp_path / "job.sh"
    file.write_text(text.replace("exec env", "echo env"))
    done = subprocess.run(
        ["bash", str(file)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert not (tmp_path / "pwned").exists()
    assert done.stdout.strip() == "env X=$(id) run it's"


def test_the_container_is_given_to_srun() -> None:
    given = SlurmSettings(container_image="/i.sqsh", container_mounts=("/a:/a", "/b:/b"))
    assert given.container_arguments == [
        "--container-image=/i.sqsh",
        "--container-mounts=/a:/a,/b:/b",
    ]
    assert SlurmSettings().container_arguments == []


def test_states_and_reasons_are_read_from_one_call(command: SCRIPTS, tmp_path: Path) -> None:
    states = {
        "7_0": ("RUNNING|None|n[1-2]", QueuedJob("running", nodes="n[1-2]")),
        "7_1": ("PENDING|Resources|", QueuedJob("queued", "Resources")),
        "7_2": ("CANCELLED|None|n1", ("ended", "interrupted", "was cancelled")),
        "7_3": ("TIMEOUT|TimeLimit|n1", ("ended", "timeout", "time limit")),
        "7_4": ("PREEMPTED|None|n1", ("ended", "preempted", "preempted")),
        "7_5": (
            "NODE_FAIL|NodeDown|n[1-2]",
            ("ended", "interrupted", "lost node n2 (nodes n[1-2])"),
        ),
        "7_6": ("OUT_OF_MEMORY|None|n1", ("ended", "out_of_memory", "lack of memory")),
        "7_7": ("FAILED|NonZeroExitCode|n1", ("ended", "interrupted", "ended as FAILED")),
        "7_8": ("REQUEUE_HOLD|JobHeldUser|", QueuedJob("queued", "JobHeldUser")),
    }
    lines = "\n".join(f"{job}|{text}" for job, (text, _) in states.items())
    command("squeue", f"echo called >> {tmp_path}/calls\ncat <<'END'\n{lines}\nEND")
    command("sinfo", "echo 'n1 alloc'; echo 'n2 down*'")
    found = SlurmQueue().look([*states, "9_0"])
    for job, (_, expected) in states.items():
        if isinstance(expected, QueuedJob):
            assert found[job] == expected
        else:
            phase, state, says = expected
            assert (found[job].phase, found[job].state) == (phase, state)
            assert says in found[job].detail
    assert found["9_0"].phase == "ended"
    assert "is gone" in found["9_0"].detail
    assert (tmp_path / "calls").read_text().splitlines() == ["called"]


def test_a_controller_that_does_not_answer_is_no_end_of_jobs(command: SCRIPTS) -> None:
    command("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(ControllerSilentError, match="Unable to contact"):
        SlurmQueue().look(["7_0"])


@pytest.mark.parametrize(
    ("fields", "nodes", "expected"),
    [
        ("JobState=RUNNING Restarts=0", "n1 alloc", None),
        ("JobState=COMPLETING Restarts=0 PreemptTime=None", "n1 comp", "interrupted"),
        ("JobState=COMPLETING Restarts=1", "n1 comp", "preempted"),
        ("JobState=COMPLETING Restarts=0 PreemptTime=2026-01-01T00:00:00", "n1 comp", "preempted"),
        ("JobState=COMPLETING Restarts=1", "n1 down*", "interrupted"),
        ("JobState=TIMEOUT Restarts=0", "n1 comp", "timeout"),
    ],
)
def test_why_a_job_ends(command: SCRIPTS, fields: str, nodes: str, expected: str | None) -> None:
    command("scontrol", f"echo JobId=7 {fields}")
    command("sinfo", f"echo '{nodes}'")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    found = why_this_job_ends(variables)
    assert (found and found[0]) == expected
    if "down" in nodes:
        assert found is not None
        assert "lost node n1" in found[1]


def test_a_plan_is_made_for_a_node_of_the_partition(command: SCRIPTS) -> None:
    command("sinfo", "echo 'gpu*|4|64|515000+|gpu:h100:8(S:0-1)'\necho 'cpu|9|128|1000|(null)'")
    machine = node_of_cluster(SlurmSettings())
    assert (machine.nodes, machine.cpu_count, len(machine.cuda_devices)) == (4, 64, 8)
    assert machine.cuda_device_names[0] == "h100"
    assert machine.memory_bytes == 515000 * 2**20


def test_a_partition_that_is_not_there_is_refused_with_those_that_are(command: SCRIPTS) -> None:
    command("sinfo", 'test "$2" = -p || printf "main\\nurgent\\nmain\\n"')
    with pytest.raises(UsageError, match=r"partition gpuu: .* it has main, urgent"):
        node_of_cluster(SlurmSettings(partition="gpuu"))


def test_agents_meet_on_the_first_node_also_when_started_from_a_login_node(
    command: SCRIPTS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("scontrol", 'test "$4" = n1 && echo "NodeName=n1 NodeAddr=10.0.0.7 Port=6818"')
    command("srun", f'echo "$MFSDP_BENCH_RENDEZVOUS" > {tmp_path}/rendezvous')
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    (tmp_path / "logs").mkdir()
    run = resolve_anywhere(RunSpec(launch=LaunchSpec(ranks=2, nodes=2)))
    job = StepJob(Order(run, tmp_path, own_code(), "worker"), SlurmSettings(), ["n1", "n2"])
    assert job.wait(20.0).exit_code == 0
    assert (tmp_path / "rendezvous").read_text().startswith("10.0.0.7:")


def test_agents_meet_where_their_environment_says() -> None:
    rendezvous = Rendezvous("fe80::1", 29500, 3)
    assert Rendezvous.from_environment(rendezvous.variables()) == rendezvous
    assert Rendezvous.from_environment({}) is None
    assert "--node-rank=2" in rendezvous.torchrun_arguments(2)
    assert node_number({"SLURM_PROCID": "5"}) == 5
    assert node_number({"MFSDP_BENCH_NODE": "1", "SLURM_PROCID": "5"}) == 1
    assert Rendezvous("127.0.0.1", 1, 2).interface() == "lo"
