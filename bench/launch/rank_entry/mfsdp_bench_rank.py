"""What every rank runs first: it shows which code it imports, and goes on only if that is right.

Standard library only, and found by its own folder on PYTHONPATH: it belongs to the harness that
started the run, while `bench` in this process may be that of another commit. As
`python -m mfsdp_bench_rank --probe` it says the same of an interpreter before anything is started.

The launcher leaves `logs/expected_code.json` in the run folder:
    arm        name of the arm, or null
    import     modules to load before looking (what the worker would load anyway)
    packages   name -> patterns, and, where known, root (folder that holds it) and files
    distributions   name -> version, and folder it must come from (packages installed for an arm)
    torch, python   versions, or null
The answer is a line of `logs/code_proof.node<K>.jsonl`, the file of all ranks of a node. Of several
by one rank the last counts: the worker may import more.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import socket
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORKER_VARIABLE = "MFSDP_BENCH_WORKER"
EXPECTED = "logs/expected_code.json"
PROOFS_GLOB = "logs/code_proof.node*.jsonl"
_INSTALLED = frozenset({"site-packages", "dist-packages"})


class WrongCodeError(Exception):
    """This rank imports other code than its arm's."""


def main() -> None:
    """Prove the code of this rank, then run the worker as `python -m` would."""
    run_dir = sys.argv[1]
    proof = prove(Path(run_dir))
    worker = os.environ[WORKER_VARIABLE]
    sys.argv = [worker, run_dir]
    try:
        runpy.run_module(worker, run_name="__main__", alter_sys=True)
    finally:
        # A module that was looked at before is not read again: its file may have changed meanwhile.
        later = outside_files(proof["packages"], proof["distributions"]) | proof["imported"]
        if later != proof["imported"]:
            with contextlib.suppress(OSError):  # a full disk, which may be what ended the worker
                keep(Path(run_dir), proof | {"imported": later})


def prove(run_dir: Path) -> dict[str, Any]:
    """Write the proof of this rank, and return it.

    Raises:
        WrongCodeError: what is imported is not what the launcher expects.
    """
    expected = json.loads((run_dir / EXPECTED).read_text(encoding="utf-8"))
    # Once before anything is loaded, so that the wrong code does not run at all; once afterwards,
    # about what was loaded.
    _judge(run_dir, expected)
    for module in expected["import"]:
        importlib.import_module(module)
    return _judge(run_dir, expected)


def _judge(run_dir: Path, expected: dict[str, Any]) -> dict[str, Any]:
    proof = collect(expected)
    problems = differences(expected, proof)
    proof["problems"] = problems
    for package in proof["packages"].values():
        package.pop("files", None)  # the hash over all of them stays
    proof["imported"] = outside_files(proof["packages"], proof["distributions"])
    keep(run_dir, proof)
    if problems:
        side = f"arm {expected['arm']}" if expected["arm"] else "this run"
        raise WrongCodeError(f"the code of this rank is not that of {side}: {'; '.join(problems)}")
    return proof


def outside_files(packages: dict[str, Any], distributions: dict[str, Any]) -> dict[str, str]:
    """Path -> SHA-256 of the loaded modules that neither the environment nor a proof covers.

    The environment: the standard library and what is installed. packages, distributions: of the
    proof, which has its own hash or version for each.
    """
    named = {"__main__", "__mp_main__", "bench", "mfsdp_core", *packages}
    installed = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")]
    installed += [Path(hashes["folder"]) for hashes in distributions.values() if hashes["folder"]]
    known = tuple(f"{folder.resolve()}{os.sep}" for folder in (*installed, Path(__file__).parent))
    hashes: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in named:
            continue
        path = Path(file).resolve()
        inside = str(path).startswith(known) or not _INSTALLED.isdisjoint(path.parts)
        if not inside and path.is_file():
            hashes[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def keep(run_dir: Path, proof: dict[str, Any]) -> None:
    """Append the proof to the file of this node, as one line by one write: ranks share the file.

    A node goes by the name that Slurm gives it, or the file of hosts.
    """
    names = (os.environ.get(name) for name in ("SLURMD_NODENAME", "MFSDP_BENCH_NODE_NAME"))
    place = {
        "rank": int(os.environ.get("RANK", "0")),
        "host": next(filter(None, names), socket.gethostname()),
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
    }
    name = PROOFS_GLOB.replace("*", os.environ.get("GROUP_RANK", "0"))
    descriptor = os.open(run_dir / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{json.dumps({**place, **proof})}\n".encode())
    finally:
        os.close(descriptor)


def collect(expected: dict[str, Any]) -> dict[str, Any]:
    """What this process imports, as plain data."""
    return {
        "arm": expected["arm"],
        "python": platform.python_version(),
        "torch": torch_version(),
        "packages": {
            name: located(name, package) for name, package in expected["packages"].items()
        },
        "distributions": {name: distribution(name) for name in expected["distributions"]},
    }


def located(package: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Where `package` is imported from, and the files there that match the patterns of `wanted`.

    elsewhere: modules of it from outside of that folder, where it has to be in one. Of torch there
    are a thousand, and no such folder.
    """
    place = origin(package)
    if place is None:
        return {"root": None, "sha256": None, "elsewhere": [], "files": {}}
    root = place.parent.parent if place.name == "__init__.py" else place.parent
    files = file_hashes(root, wanted["patterns"])
    names = [name for name in sorted(sys.modules) if name.partition(".")[0] == package]
    loaded = [getattr(sys.modules[name], "__file__", None) for name in names]
    modules = [Path(file).resolve() for file in loaded if file is not None and "root" in wanted]
    return {
        "root": str(root),
        "sha256": combined(files),
        "elsewhere": [str(file) for file in modules if not file.is_relative_to(root)],
        "files": files,
    }


def origin(package: str) -> Path | None:
    """File of a package: as loaded, or as it would be."""
    loaded = getattr(sys.modules.get(package), "__file__", None)
    if loaded is None:
        spec = importlib.util.find_spec(package)
        loaded = spec.origin if spec is not None else None
    return Path(loaded).resolve() if loaded is not None else None


def file_hashes(root: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Path below `root` -> SHA-256, of the files that match one of `patterns`."""
    files = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }


def combined(files: dict[str, str]) -> str:
    """One hash, of 16 hex digits, over names and contents."""
    digest = hashlib.sha256()
    for file, content in sorted(files.items()):
        digest.update(f"{file}\0{content}\0".encode())
    return digest.hexdigest()[:16]


def torch_version() -> str | None:
    """Version as torch says it itself, without loading it."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    place = origin("torch")
    if place is None:
        return None
    try:
        return str(runpy.run_path(str(place.with_name("version.py")))["__version__"])
    except (OSError, KeyError):
        return distribution("torch")["version"]


def distribution(name: str) -> dict[str, str | None]:
    """Version of an installed package and the folder it is in."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return {"version": None, "folder": None}
    return {
        "version": distribution.version,
        "folder": str(Path(str(distribution.locate_file(""))).resolve()),
    }


def differences(expected: dict[str, Any], proof: dict[str, Any]) -> list[str]:
    """What is not as expected, in words."""
    problems = [
        _package_difference(name, wanted, proof["packages"][name])
        for name, wanted in expected["packages"].items()
    ]
    for name, wanted in expected["distributions"].items():
        there = proof["distributions"][name]
        problems += [_difference(f"{key} of {name}", wanted, there, key) for key in wanted]
    problems += [_difference(name, expected, proof, name) for name in ("torch", "python")]
    return [problem for problem in problems if problem is not None]


def _difference(what: str, wanted: dict[str, Any], there: dict[str, Any], key: str) -> str | None:
    if wanted.get(key) in (None, there[key]):
        return None
    return f"{what} is {there[key]}, expected {wanted[key]}"


def _package_difference(name: str, wanted: dict[str, Any], there: dict[str, Any]) -> str | None:
    root, files = wanted.get("root"), wanted.get("files")
    if root not in (None, there["root"]):
        return f"{name} is imported from {there['root'] or 'nowhere'}, expected {root}"
    if root is not None and there["elsewhere"]:
        return f"{name} has loaded {there['elsewhere'][0]}, expected all below {root}"
    if files in (None, there["files"]):
        return None
    names = sorted({*files, *there["files"]})
    changed = [file for file in names if files.get(file) != there["files"].get(file)]
    hashes = f"has hash {there['sha256']}, expected {combined(files)}"
    return f"{name} {hashes} ({', '.join(changed[:3])} changed)"


def probe() -> None:
    """Answer the questions on stdin about this interpreter, as JSON on stdout."""
    questions = json.load(sys.stdin)
    missing = [name for name in questions["needed"] if origin(name) is None]
    answer = {
        **collect(questions),
        "missing": missing,
        "versions": {
            name: version
            for name in questions["versions"]
            if (version := distribution(name)["version"])
        },
        "schema_version": None,
        "unreadable": {},
        "error": None,
    }
    if not missing:
        try:
            answer |= _read_specs(questions["specs"])
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
    json.dump(answer, sys.stdout)


def _read_specs(specs: dict[str, str]) -> dict[str, Any]:
    """Which specs the `bench` of this interpreter cannot read: name -> [place, kind, message]."""
    from pydantic import ValidationError

    from bench.record import SCHEMA_VERSION
    from bench.spec import ResolvedRun

    unreadable: dict[str, list[list[Any]]] = {}
    for name, text in specs.items():
        try:
            ResolvedRun.model_validate_json(text)
        except ValidationError as error:
            unreadable[name] = [[list(e["loc"]), e["type"], e["msg"]] for e in error.errors()]
    return {"schema_version": SCHEMA_VERSION, "unreadable": unreadable}


if __name__ == "__main__":
    if sys.argv[1:] == ["--probe"]:
        probe()
    else:
        main()
