"""Writes that fail half way, and secrets that must not be written at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from small_runs import RUN

from bench.errors import StoreFullError, UsageError
from bench.redaction import REDACTED, looks_secret, redact
from bench.store import ResultsStore
from bench.store.atomic import write_json_atomically


@pytest.fixture
def failing_writes(monkeypatch: pytest.MonkeyPatch):
    """Make the kernel's answer to every further write an error; half of the bytes get through."""
    real = os.write

    def fail_with(number: int) -> None:
        seen: dict[int, bool] = {}

        def write(descriptor: int, data: bytes) -> int:
            if not seen.setdefault(descriptor, False) and len(data) > 1:
                seen[descriptor] = True
                return real(descriptor, data[: len(data) // 2])
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "write", write)

    return fail_with


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_keeps_the_old_file_and_leaves_no_half_one(
    tmp_path: Path, failing_writes, number: int
) -> None:
    file = tmp_path / "status.json"
    write_json_atomically(file, {"state": "ok"})
    failing_writes(number)
    with pytest.raises(StoreFullError):
        write_json_atomically(file, {"state": "crashed"})
    assert json.loads(file.read_text()) == {"state": "ok"}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_run_on_a_full_disk_is_refused_and_the_finished_ones_stay(
    store: ResultsStore, failing_writes
) -> None:
    with store.new_run(RUN, sweep=None, cell=None, repeat=0, arm=None, code="x") as folder:
        folder.write_status(folder.status.model_copy(update={"state": "ok"}))
    failing_writes(errno.ENOSPC)
    with pytest.raises(StoreFullError):
        store.new_run(RUN, sweep=None, cell=None, repeat=0, arm=None, code="x")
    assert [record.status.state for record in store.records()] == ["ok"]


def test_a_folder_that_may_not_be_written_is_a_usage_error(tmp_path: Path, failing_writes) -> None:
    failing_writes(errno.EACCES)
    with pytest.raises(UsageError, match="Permission denied; choose a results folder"):
        write_json_atomically(tmp_path / "env.json", {})


def test_an_error_of_another_kind_is_not_disguised(tmp_path: Path, failing_writes) -> None:
    failing_writes(errno.EIO)
    with pytest.raises(OSError, match="Input/output error") as caught:
        write_json_atomically(tmp_path / "env.json", {})
    assert caught.value.errno == errno.EIO


SECRET = """
HF_TOKEN NCCL_API_KEY AWS_SECRET_ACCESS_KEY TORCH_PASSWORD DB_PASS MFSDP_AUTH WANDB_API_KEY
SLURM_JWT_TOKEN APIKEY GITHUB_PAT TORCH_WANDB_CRED NCCL_CREDS
"""
ORDINARY = """
NCCL_DEBUG NCCL_ALGO PYTORCH_CUDA_ALLOC_CONF TORCH_COMPILE_DISABLE SLURM_JOB_ID
TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_PROC_BIND MFSDP_PATH
"""


def test_values_of_names_that_sound_like_a_secret_are_redacted_and_no_others() -> None:
    names = SECRET.split()
    assert redact(dict.fromkeys(names, "hunter2")) == dict.fromkeys(names, REDACTED)
    assert not [name for name in ORDINARY.split() if looks_secret(name)]


@pytest.mark.parametrize(
    "value",
    [
        "hf_abcdefghijklmnop",
        "ghp_0123456789abcdef",
        "sk-proj-0123456789abcdef",
        "AKIAIOSFODNN7EXAMPLE",
        "Authorization: Bearer abcdef123456",
        "https://user:hunter22@example.org/x",
        "/x/https:/user:hunter22@example.org/x",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    ],
)
def test_a_value_with_the_form_of_a_secret_is_redacted_wherever_it_stands(
    store: ResultsStore, value: str
) -> None:
    with store.new_run(RUN, sweep=None, cell=None, repeat=0, arm=None, code="x") as folder:
        folder.write_environment({"argv": ["run", f"--set=x={value}"], "deep": {"list": [value]}})
    text = (folder.path / "env.json").read_text()
    secret = value.rsplit(" ", maxsplit=1)[-1].rpartition("/user:")[2].split("@")[0]
    assert secret not in text
    assert REDACTED in text
