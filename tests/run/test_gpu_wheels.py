"""Wheels for a machine without network: never torch, never too many, only what is lacking."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools import gpu_wheels
from tools.gpu_wheels import (
    NCCL_LIBRARY,
    NEEDED,
    WheelsError,
    check_folder,
    download_nccl,
    install,
    missing,
    unpack_nccl,
)


def absent(_name: str) -> str:
    raise importlib.metadata.PackageNotFoundError


def wheel(folder: Path, name: str, size_bytes: int = 10) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(size_bytes)


def test_only_what_is_absent_or_too_old_is_missing():
    assert missing(absent) == list(NEEDED)
    assert missing(lambda _name: "2026.1.0+local") == []
    assert missing(lambda name: "2.6.9" if name == "pydantic" else "99") == ["pydantic"]


def test_versions_asked_for_are_those_of_the_project():
    extras = PROJECT["optional-dependencies"].values()
    promised = " ".join([*PROJECT["dependencies"], *(one for extra in extras for one in extra)])
    for name, oldest in NEEDED.items():
        assert f"{name}>={oldest}" in promised


@pytest.mark.parametrize("name", ["torch-2.13.0-cp312.whl", "nvidia_nccl_cu13-2.28.whl"])
def test_a_folder_with_torch_or_cuda_in_it_is_refused(tmp_path, name):
    wheel(tmp_path, "nvidia_ml_py-13-py3-none-any.whl")
    assert check_folder(tmp_path) == 10
    wheel(tmp_path, name)
    with pytest.raises(WheelsError, match="own torch is used"):
        check_folder(tmp_path)


def test_pip_may_use_neither_the_network_nor_the_machines_own_folders(tmp_path, monkeypatch):
    wheel(tmp_path, "pydantic-2.14-py3-none-any.whl")
    monkeypatch.setattr(gpu_wheels, "missing", lambda: ["pydantic"])
    monkeypatch.setattr("sys.path", [*sys.path])
    commands = []
    monkeypatch.setattr(gpu_wheels, "_run", commands.append)
    assert install(tmp_path, tmp_path / "to") == ["pydantic"]
    (command,) = commands
    assert "--no-index" in command
    assert command[command.index("--target") + 1] == str(tmp_path / "to")
    assert not [part for part in command if "torch" in part]


def test_an_nccl_lies_beside_the_other_wheels_and_its_library_is_unpacked(tmp_path, monkeypatch):
    wheels, target = tmp_path / "wheels", tmp_path / "packages"
    commands = []

    def fetched(command):
        commands.append(command)
        with zipfile.ZipFile(wheels / "nccl" / "nvidia_nccl_cu13-2.31.2.whl", "w") as packed:
            packed.writestr("nvidia/nccl/lib/libnccl.so.2", b"library")

    monkeypatch.setattr(gpu_wheels, "_run", fetched)
    assert unpack_nccl(wheels, target) == ""
    name = download_nccl("13", wheels).name
    assert commands[0][-1] == "nvidia-nccl-cu13>=2.30.7"
    assert "--no-deps" in commands[0]
    wheel(wheels, "nvidia_ml_py-13-py3-none-any.whl")
    assert check_folder(wheels) == 10
    for _ in range(2):
        assert unpack_nccl(wheels, target) == name
        assert (target / NCCL_LIBRARY).read_bytes() == b"library"


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
