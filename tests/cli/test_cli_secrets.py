"""Credentials in `env.` settings: never printed, never on disk, and still given to the ranks."""

from __future__ import annotations

import pytest

from bench.launch.code import own_code
from bench.launch.command import rank_environment
from bench.launch.protocol import Order
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, ResolvedRun, RunSpec

PASSWORD = "hunter2hunter2"
URL = f"http://me:{PASSWORD}@proxy:3128"
SWEEP = f"""\
name: two
base: {{launch: {{ranks: 1}}}}
matrix:
  product:
    env.NCCL_PROXY: ["{URL}", "http://proxy:3128"]
    engine.name: [ddp, mfsdp]
"""


def test_a_password_in_a_url_is_in_no_plan_record_report_or_message(world) -> None:
    file = world.file(SWEEP)
    printed = []
    for arguments in (
        ["plan", file],
        ["plan", file, "--json"],
        ["plan", file, "--only", f"env.NCCL_PROXY={URL}x"],
        ["run", file, "--report"],
        ["status", "two"],
        ["report", "two", "--format", "md"],
    ):
        world.run(*arguments)
        printed.append(world.out + world.err)
    assert "<redacted>" in printed[0]
    assert PASSWORD not in "".join(printed)
    written = [path for path in (world.folder / "results").rglob("*") if path.is_file()]
    assert len([path for path in written if path.name == "spec.json"]) == 4
    assert len([path for path in written if path.suffix in {".html", ".svg"}]) >= 1
    assert [path for path in written if PASSWORD.encode() in path.read_bytes()] == []


def test_the_ranks_get_the_password_and_the_hash_does_not_know_it(tmp_path) -> None:
    with_password = resolve_anywhere(RunSpec(launch=LaunchSpec(env={"NCCL_PROXY": URL})))
    order = Order(with_password, tmp_path, own_code(), "worker")
    assert rank_environment(order, {})["NCCL_PROXY"] == URL
    read_back = ResolvedRun.model_validate_json(with_password.model_dump_json())
    assert PASSWORD not in read_back.launch.env["NCCL_PROXY"]
    assert read_back.config_hash == with_password.config_hash


@pytest.mark.parametrize(
    ("name", "how"),
    [("NCCL_TOKEN", "axis"), ("TORCH_HUB_CRED", "base"), ("GLOO_PASSWORD", "set"),
     ("NCCL_PWD", "set")],
)  # fmt: skip
def test_refusing_a_setting_named_like_a_secret_does_not_print_it(world, name, how) -> None:
    text = {
        "axis": f"name: two\nmatrix: {{product: {{env.{name}: ['{PASSWORD} x1', x2]}}}}\n",
        "base": f"name: two\nbase: {{launch: {{env: {{{name}: '{PASSWORD} x1'}}}}}}\n",
        "set": "name: two\n",
    }[how]
    options = ["--set", f"env.{name}={PASSWORD}"] if how == "set" else []
    assert world.run("plan", world.file(text), *options) == 2
    assert name in world.err
    assert PASSWORD not in world.out + world.err
    assert "x1" not in world.err
