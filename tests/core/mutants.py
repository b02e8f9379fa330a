"""Historical bugs of FSDP implementations as small changes to the source of mfsdp_core.

Each mutant puts one bug back into a temporary copy of the core, where its regression test has to
fail. Prints the outcome per mutant and exits with 1 if one survives:

    python tests/core/mutants.py [R1 R8 ...]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TIMEOUT_SECONDS = 180
_TESTS_FAILED = 1


@dataclass(frozen=True)
class Mutant:
    """`changes` are (file under mfsdp_core, text that occurs in it once, its replacement)."""

    bug: str
    test_file: str
    changes: tuple[tuple[str, str, str], ...]

    @property
    def selection(self) -> str:
        """The tests of this bug, as pytest's -k takes them."""
        return f"test_{self.bug.lower()}_"


_GRADIENTS = "runtime/gradient_buffers.py"
_LANDING = "adds = self._axis.landing is Landing.ADD and self._landed"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "R1",
        "test_regression_gradients.py",
        ((_GRADIENTS, _LANDING, "adds = True"),),
    ),
    Mutant(
        "R2",
        "test_regression_gradients.py",
        (
            (
                _GRADIENTS,
                "view, scale = self._open_bucket().tensor(index), self._scale",
                "view, scale = self._open_bucket().tensor(index), 1.0",
            ),
            (_GRADIENTS, _LANDING, f"self.reduced.mul_(self._scale)\n        {_LANDING}"),
        ),
    ),
    Mutant(
        "R3",
        "test_regression_gradients.py",
        (
            (
                _GRADIENTS,
                _LANDING,
                f"{_LANDING}\n        if self._communicator.size == 1:\n"
                "            self.reduced.mul_(2)",
            ),
        ),
    ),
    Mutant(
        "R4",
        "test_regression_optimizer.py",
        (
            (
                "state/optimizer.py",
                "    patched: Any = optimizer\n",
                "    patched: Any = optimizer\n"
                "    for parameter in _parameters(optimizer):\n"
                "        parameter.grad = torch.zeros_like(parameter)\n"
                "    optimizer.step()\n"
                "    optimizer.zero_grad()\n",
            ),
        ),
    ),
    Mutant(
        "R21",
        "test_regression_gradients.py",
        (("runtime/context.py", "self.grads.issue_rest()", "self.grads.land_all()"),),
    ),
    Mutant(
        "R5",
        "test_regression_dtype_change.py",
        (("wrapper.py", "if not self._context.grads.is_idle:", "if self._context.grads.is_idle:"),),
    ),
    Mutant(
        "R8",
        "test_regression_root.py",
        (
            (
                "wrapper.py",
                "return self.module(*args, **kwargs)",
                "return self.module.forward(*args, **kwargs)",
            ),
        ),
    ),
    Mutant(
        "R19",
        "test_regression_padding.py",
        (
            (
                "plan/layout.py",
                "if within_padding_budget(build_layout(shapes, slices)):",
                "if shapes:",
            ),
        ),
    ),
    Mutant(
        "R20",
        "test_regression_deletion.py",
        (
            (
                "runtime/hooks.py",
                "    model = weakref.ref(context)\n",
                "    model: Callable[[], ShardedContext] = lambda: context\n",
            ),
        ),
    ),
)


def is_noticed(mutant: Mutant, folder: Path) -> bool:
    """Whether the regression test fails on a copy of the core with the bug, made in `folder`.

    Raises:
        RuntimeError: the copy could not be tested, which proves nothing.
    """
    shutil.copytree(ROOT / "mfsdp_core", folder / "mfsdp_core")
    shutil.copytree(ROOT / "tests" / "core", folder / "tests" / "core")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for file, old, new in mutant.changes:
        source = folder / "mfsdp_core" / file
        text = source.read_text()
        if text.count(old) != 1:
            raise RuntimeError(f"{mutant.bug}: {old!r} occurs {text.count(old)} times in {file}")
        source.write_text(text.replace(old, new))
    test = [f"tests/core/{mutant.test_file}", "-k", mutant.selection]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if result.returncode not in (0, _TESTS_FAILED):
        raise RuntimeError(f"{mutant.bug}: {result.stdout}{result.stderr}")
    return result.returncode == _TESTS_FAILED


def main(wanted: list[str]) -> int:
    """Try the named mutants, or all."""
    survivors = 0
    for mutant in MUTANTS:
        if wanted and mutant.bug not in wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            noticed = is_noticed(mutant, Path(folder))
        survivors += not noticed
        sys.stdout.write(f"{mutant.bug}: {'noticed' if noticed else 'SURVIVED'}\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
