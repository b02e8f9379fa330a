from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from git_repository import git

from bench.launch import command
from bench.launch.code import own_code
from bench.launch.command import WORKER_MODULE, agent_command
from bench.launch.environment import collect_environment, shown_variables
from bench.launch.git import git_state
from bench.launch.protocol import Order
from bench.launch.watch import Heartbeat
from bench.meters.sample_sink import SetupBeat
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, ResolvedRun, RunSpec
from bench.worker.rank_process import RankProcess

ROOT = Path(__file__).resolve().parents[2]
RUN = resolve_anywhere(RunSpec(launch=LaunchSpec(threads_per_rank=3, env={"NCCL_ALGO": "Ring"})))


def order(run: ResolvedRun = RUN) -> Order:
    return Order(run, Path("/somewhere/runs/x"), own_code(), WORKER_MODULE)


def rank_environment(inherited: Mapping[str, str], run: ResolvedRun = RUN) -> dict[str, str]:
    return command.rank_environment(order(run), inherited)


ON_CUDA = resolve_anywhere(RunSpec(launch=LaunchSpec(device="cuda")))
GROUP = ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@pytest.mark.parametrize(
    ("inherited", "run", "wanted"),
    [
        (
            {"HOME": "anywhere", "NCCL_ALGO": "Tree"},
            RUN,
            {
                "HOME": "anywhere",
                "OMP_NUM_THREADS": "3",
                "MKL_NUM_THREADS": "3",
                "NCCL_ALGO": "Ring",
            },
        ),
        # Not the group of the process that starts it.
        (dict.fromkeys(GROUP, "3"), RUN, dict.fromkeys(GROUP)),
        # A CPU rank sees no GPU and talks over loopback.
        (
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            RUN,
            {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
        ),
        # The devices that the shell chose.
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ON_CUDA, {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ],
)
def test_a_rank_gets_inherited_variables_the_launchers_and_the_runs_own(
    inherited: dict[str, str], run: ResolvedRun, wanted: dict[str, str | None]
) -> None:
    found = rank_environment(inherited, run)
    assert {name: found.get(name) for name in wanted} == wanted


def sharing(ranks: int = 4, **changes: object) -> ResolvedRun:
    launch = {"ranks": ranks, "device": "cuda", "ranks_per_device": 2} | changes
    train = {"global_batch": 12, "micro_batch": 1}
    return resolve_anywhere(RunSpec.model_validate({"launch": launch, "train": train}))


def test_ranks_that_share_a_device_ask_nccl_for_it_and_are_not_comparable_in_time() -> None:
    found = rank_environment({"NCCL_LIB": "/new/libnccl.so.2"}, sharing())
    assert found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert found["LD_PRELOAD"] == "/new/libnccl.so.2"
    assert not sharing().comparable_in_time
    alone = sharing(ranks_per_device=1)
    assert alone.comparable_in_time
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in rank_environment({}, alone)
    assert "LD_PRELOAD" not in rank_environment({"NCCL_LIB": "/new/libnccl.so.2"})


@pytest.mark.parametrize(
    ("ranks", "per_device", "devices", "wanted"),
    [(4, 2, 2, [0, 1, 0, 1]), (4, 2, 8, [0, 1, 0, 1]), (3, 3, 1, [0, 0, 0]), (2, 1, 2, [0, 1])],
)
def test_local_ranks_go_round_the_devices_of_the_launch(
    monkeypatch: pytest.MonkeyPatch, ranks: int, per_device: int, devices: int, wanted: list[int]
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: chosen.append(device.index))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    run = sharing(ranks, ranks_per_device=per_device)
    run = run.model_copy(update={"launch": run.launch.model_copy(update={"ranks": ranks})})
    for local in range(ranks):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        RankProcess.from_environment(run)
    assert chosen == wanted


def test_the_agent_is_told_its_parent_its_ranks_its_worker_and_its_folder() -> None:
    words = agent_command(order())
    assert words[:3] == [sys.executable, "-m", "bench.launch.agent"]
    assert words[3:] == [str(os.getpid()), "2", "mfsdp_bench_rank", "/somewhere/runs/x"]
    assert rank_environment({})["MFSDP_BENCH_WORKER"] == "bench.worker"


def test_only_the_variables_of_the_allow_list_are_shown_and_no_secret() -> None:
    shown = shown_variables(
        {
            "NCCL_DEBUG": "INFO",
            "SLURM_JOB_ID": "17",
            "HOME": "anywhere",
            "AWS_SECRET_ACCESS_KEY": "s3cr3t",
            "TORCH_AUTH_TOKEN": "s3cr3t",
            "NCCL_COMMENT": "hf_abcdefghijklmnop",
        }
    )
    assert set(shown) == {"NCCL_DEBUG", "SLURM_JOB_ID", "TORCH_AUTH_TOKEN", "NCCL_COMMENT"}
    assert "s3cr3t" not in str(shown)
    assert "hf_abc" not in str(shown)


def test_the_environment_is_plain_json_with_the_facts_of_the_design(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    found = json.loads(json.dumps(collect_environment(order())))
    assert found["hostname"]
    assert found["cpu_name"]
    assert found["cpu_count"] >= 1
    assert found["packages"]["torch"]
    assert set(found["git"]) == {"commit", "dirty", "dirty_hash"}
    assert found["variables"]["SLURM_JOB_ID"] == "4711"
    assert found["set_by_launch"]["NCCL_ALGO"] == "Ring"


def test_the_state_of_a_repository_names_commit_and_changes(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert (clean["dirty"], clean["dirty_hash"]) == (False, None)
    (tmp_path / "first.yaml").write_text("name: first\n")
    assert git_state(tmp_path) == clean

    (tmp_path / "a.py").write_text("2\n")
    changed = git_state(tmp_path)
    assert changed["commit"] == clean["commit"]
    assert changed["dirty"]
    git(tmp_path, "config", "diff.external", "false")
    assert git_state(tmp_path) == changed, "whatever viewer of differences the user has set"
    (tmp_path / "new.py").write_text("3\n")
    untracked = git_state(tmp_path)
    (tmp_path / "new.py").write_text("4\n")
    hashes = {changed["dirty_hash"], untracked["dirty_hash"], git_state(tmp_path)["dirty_hash"]}
    assert len(hashes) == 3
    (tmp_path / "a.py").write_text("1\n")
    (tmp_path / "new.py").unlink()
    assert git_state(tmp_path) == clean


def test_a_git_hook_of_another_repository_does_not_answer_for_this_one(tmp_path, monkeypatch):
    hooked, own = tmp_path / "hooked", tmp_path / "own"
    for folder in (hooked, own):
        folder.mkdir()
        git(folder, "init", "--quiet")
        git(folder, "commit", "--quiet", "--allow-empty", "-m", folder.name)
    expected = git_state(own)
    monkeypatch.setenv("GIT_DIR", str(hooked / ".git"))
    assert git_state(own) == expected
    assert expected["commit"] is not None


def test_a_folder_without_a_repository_has_no_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"commit": None, "dirty": None, "dirty_hash": None}


def test_a_heartbeat_counts_whole_lines_as_they_grow(tmp_path: Path) -> None:
    paths = [tmp_path / "steps.node0.jsonl", tmp_path / "steps.node1.jsonl"]
    beat = Heartbeat(tmp_path, 2, 0.0)
    beat.poll(1.0)
    assert (beat.steps, beat.last_growth_seconds) == ([0, 0], 0.0)
    line = '{"rank": 0, "step": 1}\n'
    paths[0].write_text(line * 2 + line[:12])
    beat.poll(2.0)
    assert (beat.steps, beat.rank_behind()) == ([2, 0], 1)
    with paths[0].open("a") as stream:
        stream.write(line[12:])
    paths[1].write_text(line.replace("0", "1") * 3)
    beat.poll(3.0)
    assert (beat.steps, beat.rank_behind(), beat.last_growth_seconds) == ([3, 3], None, 3.0)
    beat.poll(4.0)
    assert beat.last_growth_seconds == 3.0


def test_a_touched_file_is_a_sign_of_life_until_the_first_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.node0.jsonl"
    beat, touch = Heartbeat(tmp_path, 1, 0.0), SetupBeat(path)
    touch()
    beat.poll(1.0)
    assert (beat.steps, beat.last_growth_seconds) == ([0], 1.0)
    touch()  # within a second of the first: nothing is written
    beat.poll(2.0)
    assert beat.last_growth_seconds == 1.0
    os.utime(path, ns=(0, 0))
    beat.poll(3.0)
    assert beat.last_growth_seconds == 3.0
    path.write_text('{"rank": 0, "step": 1}\n')
    beat.poll(4.0)
    os.utime(path, ns=(1, 1))
    beat.poll(5.0)
    assert beat.last_growth_seconds == 4.0
