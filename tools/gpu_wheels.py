"""Wheels for a GPU machine without network: `download` them where there is one, `install` there.

    python -m tools.gpu_wheels download --python 3.12     into gpu-wheels/, checked for size
    python3 tools/gpu_wheels.py install                   from there, into .gpu-packages/

`download --nccl 13` fetches an NCCL that lets ranks share a device as well, for CUDA 13 (250 MB);
`install` then unpacks its library, which only `gpu-check` loads.

The GPU machine's own Python and its CUDA build of torch are used as they are. `install` takes only
what that Python lacks, into a folder of its own that goes to the front of PYTHONPATH; it never
installs, replaces or removes torch. This file needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

#: What the check needs beside torch: distribution -> oldest release, as in pyproject.toml.
NEEDED = {
    "numpy": "1.26",
    "pydantic": "2.7",
    "ruamel.yaml": "0.18",
    "typer": "0.19",
    "rich": "13",
    "jinja2": "3.1",
    "junitparser": "3.1",
    "psutil": "5.9",
    "zstandard": "0.22",
    "nvtx": "0.2.10",
    "nvidia-ml-py": "12",
    "pytest": "8",
    "pytest-timeout": "2.3",
}
LARGEST_BYTES = 60 << 20
WHEELS = Path("gpu-wheels")
PACKAGES = Path(".gpu-packages")
#: The first NCCL that lets ranks share a device and comes as a wheel for both; where it lies.
NCCL = "2.30.7"
NCCL_LIBRARY = Path("nccl", "libnccl.so.2")
_NCCL_PLATFORM = "manylinux_2_18_x86_64"
_IN_WHEEL = "nvidia/nccl/lib/libnccl.so.2"
_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64", "any")
_FORBIDDEN = re.compile(r"^(torch|triton|nvidia[_-](?!ml))", re.IGNORECASE)


class WheelsError(Exception):
    """What was expected, what was found, what to change."""


def requirements(names: Sequence[str]) -> list[str]:
    """As pip takes them."""
    return [f"{name}>={NEEDED[name]}" for name in names]


def check_folder(folder: Path) -> int:
    """Bytes of the wheels in `folder`.

    Raises:
        WheelsError: there are none, too many bytes of them, or one of torch or of CUDA.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise WheelsError(f"expected wheels in {folder}, found none: make gpu-wheels makes them")
    wrong = [wheel.name for wheel in wheels if _FORBIDDEN.match(wheel.name)]
    if wrong:
        raise WheelsError(f"{folder} holds {', '.join(wrong)}: the machine's own torch is used")
    size_bytes = sum(wheel.stat().st_size for wheel in wheels)
    if size_bytes > LARGEST_BYTES:
        raise WheelsError(f"{folder} holds {size_bytes >> 20} MiB, at most {LARGEST_BYTES >> 20}")
    return size_bytes


def missing(version: Callable[[str], str] = importlib.metadata.version) -> list[str]:
    """Distributions of NEEDED that this Python does not have, or has too old."""
    return [name for name, oldest in NEEDED.items() if not _is_there(name, oldest, version)]


def _is_there(name: str, oldest: str, version: Callable[[str], str]) -> bool:
    try:
        return _numbers(version(name)) >= _numbers(oldest)
    except importlib.metadata.PackageNotFoundError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def download(python: str, folder: Path, pip: Sequence[str] = (sys.executable, "-m", "pip")) -> int:
    """Fetch wheels for Python `python` on x86_64 Linux; their bytes.

    Raises:
        WheelsError: as `check_folder`, or pip failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tag = "cp" + python.replace(".", "")
    command = [*pip, "download", "--quiet", "--dest", str(folder), "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [part for abi in (tag, "abi3", "none") for part in ("--abi", abi)]
    command += [part for name in _PLATFORMS for part in ("--platform", name)]
    _run([*command, *requirements(list(NEEDED))])
    return check_folder(folder)


def download_nccl(
    cuda: str, folder: Path, pip: Sequence[str] = (sys.executable, "-m", "pip")
) -> Path:
    """Fetch NCCL for CUDA `cuda` on x86_64 Linux, beside the other wheels; the wheel.

    Raises:
        WheelsError: pip failed.
    """
    beside = folder / NCCL_LIBRARY.parent
    beside.mkdir(parents=True, exist_ok=True)
    command = [*pip, "download", "--quiet", "--dest", str(beside), "--only-binary=:all:"]
    _run([*command, "--no-deps", "--platform", _NCCL_PLATFORM, f"nvidia-nccl-cu{cuda}>={NCCL}"])
    return max(beside.glob("*.whl"))


def unpack_nccl(wheels: Path, target: Path) -> str:
    """Unpack the library of the NCCL in `wheels`, if there is one; the name of the wheel."""
    found = sorted((wheels / NCCL_LIBRARY.parent).glob("*.whl"))
    if not found:
        return ""
    library = target / NCCL_LIBRARY
    library.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(found[-1]) as wheel, wheel.open(_IN_WHEEL) as packed:
        if not library.exists() or library.stat().st_size != wheel.getinfo(_IN_WHEEL).file_size:
            with library.open("wb") as file:
                shutil.copyfileobj(packed, file)
    return found[-1].name


def install(wheels: Path, target: Path) -> list[str]:
    """Install what this Python lacks from `wheels` into `target`; the names of what was installed.

    Raises:
        WheelsError: this Python has no torch, or no pip, as `check_folder`, or pip failed.
    """
    if importlib.util.find_spec("torch") is None:
        raise WheelsError(
            f"expected a Python with torch, found none in {sys.executable}: name the one of the "
            "GPU image with GPU_PYTHON=/path/to/python3"
        )
    sys.path.insert(0, str(target))
    names = missing()
    if not names:
        return []
    check_folder(wheels)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
    command += ["--find-links", str(wheels.resolve()), "--target", str(target), "--upgrade"]
    _run([*command, *requirements(names)])
    return names


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise WheelsError(f"{' '.join(command[:5])} ... failed:\n{done.stderr.strip()}")


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("download", "install"))
    parser.add_argument("--python", default="3.12", metavar="X.Y")
    parser.add_argument("--nccl", metavar="CUDA", help="an NCCL for this CUDA as well, as 13")
    parser.add_argument("--wheels", type=Path, default=WHEELS, metavar="FOLDER")
    parser.add_argument("--to", type=Path, default=PACKAGES, metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        if options.verb == "download":
            size_bytes = download(options.python, options.wheels)
            count = len(list(options.wheels.glob("*.whl")))
            said = f"{count} wheels for Python {options.python}, {size_bytes / 2**20:.1f} MiB"
            sys.stdout.write(f"{said}, in {options.wheels}\n")
            if options.nccl:
                wheel = download_nccl(options.nccl, options.wheels)
                sys.stdout.write(f"{wheel.name}, {wheel.stat().st_size / 2**20:.0f} MiB\n")
        else:
            names = install(options.wheels, options.to)
            names += list(filter(None, [unpack_nccl(options.wheels, options.to)]))
            sys.stdout.write(
                f"installed into {options.to}: {', '.join(names) or 'nothing needed'}\n"
            )
    except WheelsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
