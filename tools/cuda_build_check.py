"""What a CUDA build of torch shows without a GPU. Run by its Python: `make cuda-build-check`.

imports     every module of this project
names       every name of torch that our source reaches through a module, and every keyword that it
            gives to a function or class whose signature torch tells; from the source, by its syntax
methods     what is called on objects of CUDA alone, which no syntax tells the class of
forks       what forks ranks has not touched CUDA, which they could not use then
runs        two CPU ranks train under every strategy

Importing everything initialises nothing. Names that a file asks for with `getattr` may be absent.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("mfsdp_core", "bench", "tools")
#: Method -> class, keywords. The source calls them on objects that it was given.
_METHODS = {
    "register_mem_pool": ("torch.distributed.ProcessGroupNCCL", {"symm"}),
    "deregister_mem_pool": ("torch.distributed.ProcessGroupNCCL", set()),
    "mem_allocator": ("torch.distributed.ProcessGroupNCCL", set()),
    "_get_backend": ("torch.distributed.ProcessGroup", set()),
    "snapshot": ("torch.cuda.MemPool", set()),
    "replay": ("torch.cuda.CUDAGraph", set()),
    "wait_stream": ("torch.cuda.Stream", set()),
    "elapsed_time": ("torch.cuda.Event", set()),
}
_MISSING = object()


def sources() -> list[Path]:
    """Files of ours that run on a GPU."""
    return [file for name in _PACKAGES for file in sorted((_ROOT / name).rglob("*.py"))]


class Uses(ast.NodeVisitor):
    """Names of torch in one file. names: dotted, with a line. calls: the same, and keywords."""

    def __init__(self, tree: ast.AST) -> None:
        self._roots: dict[str, str] = {}
        self.optional: set[str] = set()
        self.names: dict[str, int] = {}
        self.calls: list[tuple[str, set[str], int]] = []
        self.attributes: set[str] = set()
        for node in ast.walk(tree):
            self._import(node)
        self.visit(tree)

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.partition(".")[0] == "torch":
                    self._roots[one.asname or "torch"] = one.name if one.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for one in node.names:
                self._roots[one.asname or one.name] = f"{node.module}.{one.name}"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A chain that begins with an imported name."""
        self.attributes.add(node.attr)
        name = self._dotted(node)
        if name is None:
            self.generic_visit(node)
        else:
            self.names.setdefault(name, node.lineno)

    def visit_Name(self, node: ast.Name) -> None:
        """What was imported itself."""
        if node.id in self._roots:
            self.names.setdefault(self._roots[node.id], node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        """Keywords, and names that may be absent."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            owner, asked = self._dotted(node.args[0]), node.args[1]
            if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
                self.optional.add(f"{owner}.{asked.value}")
                self.attributes.add(asked.value)
        name = self._dotted(node.func)
        if name is not None:
            keywords = {one.arg for one in node.keywords if one.arg is not None}
            self.calls.append((name, keywords, node.lineno))

    def _dotted(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._roots.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None


def resolve(name: str) -> Any:
    """What torch has under a dotted name, or `_MISSING`."""
    found: Any = importlib.import_module("torch")
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        owner, found = found, getattr(found, part, _MISSING)
        if found is _MISSING and inspect.ismodule(owner):
            # torch imports what torch deprecates.
            with contextlib.suppress(ImportError), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                found = importlib.import_module(path)
        if found is _MISSING:
            return _MISSING
        if not inspect.ismodule(found) and not inspect.isclass(found):
            return found  # attributes of values are not torch's to tell
    return found


def keywords_of(function: Any) -> set[str] | None:
    """Keywords that it takes; None where torch does not tell, or takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _of_docstring(getattr(function, "__doc__", None) or "")
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return {one.name for one in parameters}


def _of_docstring(text: str) -> set[str] | None:
    """Pybind writes the signature first: `name(self: T, pool: U, symm: bool = False) -> None`."""
    first = re.match(r"\w+\((.*)\) -> ", text)
    return set(re.findall(r"(\w+): ", first[1])) if first else None


def missing_names() -> Iterator[str]:
    """Names and keywords of our source that this torch has not."""
    seen = 0
    for file in sources():
        uses = Uses(ast.parse(file.read_text()))
        where = file.relative_to(_ROOT)
        for name, line in uses.names.items():
            seen += 1
            may_lack = any(name == one or name.startswith(f"{one}.") for one in uses.optional)
            if resolve(name) is _MISSING and not may_lack:
                yield f"{where}:{line} uses {name}, which this torch has not"
        for name, keywords, line in uses.calls:
            taken = keywords_of(resolve(name)) if keywords else None
            if taken is not None and keywords - taken:
                yield f"{where}:{line} gives {name} {sorted(keywords - taken)}, which it takes not"
    if not seen:
        yield "no use of torch was found in our source"


def missing_methods() -> Iterator[str]:
    """Methods that are called on objects, and that their classes have not."""
    used = set().union(*(Uses(ast.parse(file.read_text())).attributes for file in sources()))
    for method, (owner, keywords) in _METHODS.items():
        if method not in used:
            yield f"{method} is in the list of methods, and our source does not use it"
        found = getattr(resolve(owner), method, _MISSING)
        taken = None if found is _MISSING else _of_docstring(found.__doc__ or "")
        if found is _MISSING:
            yield f"{owner} has no {method}"
        elif keywords and (taken is None or keywords - taken):
            yield f"{owner}.{method} takes {taken}, expected {keywords}"


def failed_imports() -> Iterator[str]:
    """Modules that cannot be imported."""
    for package in _PACKAGES:
        for module in pkgutil.walk_packages([str(_ROOT / package)], f"{package}."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except Exception as error:
                yield f"{module.name}: {type(error).__name__}: {error}"
    if importlib.import_module("torch").cuda.is_initialized():
        yield "CUDA is initialised by imports"


def cuda_in_forks() -> Iterator[str]:
    """Ranks of `validate` are forks, on a GPU as well: what forks them must not have touched it."""
    workers = importlib.import_module("bench.testing.workers")
    modules = importlib.import_module("bench.validate.session").MODULES
    asked = importlib.import_module("tools.cuda_build_check").is_in_bad_fork
    with workers.ForkServer(modules=modules) as server, server.workers(2) as ranks:
        if any(ranks.run(asked, seconds=60.0)):
            yield "a rank that is forked cannot use CUDA: what forked it has asked for the device"


def is_in_bad_fork() -> bool:
    """In a rank: whether torch would refuse CUDA."""
    refuses: bool = importlib.import_module("torch").cuda._is_in_bad_fork()
    return refuses


def failed_runs() -> Iterator[str]:
    """Two ranks train under each strategy, on the CPU, started as they always are."""
    command = [sys.executable, "-m", "bench", "run", "quickstart", "--only"]
    command += ["engine=mfsdp-*,policy=fp32", "--set", "train.steps=12"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--results", folder], cwd=_ROOT, capture_output=True, text=True, check=False
        )
    if done.returncode:
        yield f"exit code {done.returncode} of {' '.join(command[1:])}\n{done.stderr[-2000:]}"


CHECKS: dict[str, Callable[[], Iterator[str]]] = {
    "imports": failed_imports,
    "names": missing_names,
    "methods": missing_methods,
    "forks": cuda_in_forks,
    "runs": failed_runs,
}


def main() -> int:
    """Run all of them; 1 where one has found something."""
    import torch

    if torch.version.cuda is None:
        sys.stderr.write(f"expected a CUDA build of torch, found {torch.__version__}\n")
        return 2
    found = 0
    for name, check in CHECKS.items():
        findings = list(check())
        found += len(findings)
        sys.stdout.write(f"torch {torch.__version__}: {name}: {len(findings) or 'passed'}\n")
        sys.stdout.writelines(f"    {finding}\n" for finding in findings)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
