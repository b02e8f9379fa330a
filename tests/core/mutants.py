"""Runs tests on a copy of the core that has a bug.

The bugs are those of `tools.bug_in_a_copy`. Those in `patches` itself change no number, no memory
and no wire of a training loop, so that `validate` cannot see them from outside.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bench.testing.hang_clock import stretched
from tools.bug_in_a_copy import BUGS, OWN_BUGS, copy_of_core

TESTS = Path(__file__).parent
_ROOT = TESTS.parents[1]
_TIMEOUT_SECONDS = 180
_TESTS_FAILED = 1
#: By bug: a file of tests, and a part of the names of those that notice it; of cases, also one of
#: theirs.
SEEN_BY_TESTS = {
    "R1": ("test_cases.py", "that_of_plain_torch and stack"),
    "R2": ("test_cases.py", "that_of_plain_torch and point_to_point"),
    "R3": ("test_cases.py", "that_of_plain_torch and stack"),
    "R4": ("conformance/test_optimizers.py", "elementwise"),
    "R5": ("conformance/test_interface.py", "wire_dtype"),
    "R6": ("conformance/test_plans.py", "gathered_ahead"),
    "R7": ("test_golden_traces.py", "recomputed"),
    "R8": ("test_cases.py", "that_of_plain_torch and stack"),
    "R9": ("test_cases.py", "that_of_plain_torch and stack"),
    "R11": ("test_experts.py", "experts_get_the_mean"),
    "R12": ("conformance/test_memory_accounts.py", "plans_of_pools"),
    "R13": ("test_cases.py", "that_of_plain_torch and stack"),
    "R14": ("test_cases.py", "that_of_plain_torch and 2x2hsdp"),
    "R15": ("test_tensor_parallel.py", "gradients_beside"),
    "R16": ("test_late_bugs.py", "numbers_are_the_oracles"),
    "R17": ("test_late_bugs.py", "numbers_are_the_oracles"),
    "R18": ("conformance/test_checkpoints.py", "refused"),
    "R19": ("test_plan_layout.py", "a_split_is_a_partition"),
    "R20": ("test_cases.py", "that_of_plain_torch and stack"),
    "R21": ("test_cases.py", "that_of_plain_torch and no_overlap"),
    "R22": ("test_cases.py", "that_of_plain_torch and mxfp8"),
    "R23": ("test_cases.py", "that_of_plain_torch and mxfp8"),
    "an-optimizer-steps-while-a-gather-ahead-reads-its-weights": (
        "test_late_bugs.py",
        "no_stream_reads",
    ),
}
#: Those of the table, and every bug that `validate` does not see.
TESTED = (*(bug for bug in BUGS if bug.stem in SEEN_BY_TESTS), *OWN_BUGS)


def is_noticed(bug: Path, folder: Path) -> bool:
    """Whether the tests of the table fail on a copy of the core with the bug, in `folder`."""
    file, names = SEEN_BY_TESTS[bug.stem]
    return is_noticed_by(file, names, bug, folder)


def is_noticed_by(file: str, names: str, bug: Path, folder: Path) -> bool:
    """Whether tests of `file`, chosen by a part of their names, fail on a copy with the bug.

    Raises:
        RuntimeError: the copy could not be tested, which proves nothing.
    """
    copy_of_core(folder, bug)
    shutil.copytree(TESTS, folder / "tests" / "core")
    shutil.copytree(_ROOT / "tools", folder / "tools")
    for name in ("conftest.py", "optional.py"):
        shutil.copy(TESTS.parent / name, folder / "tests")
    shutil.copy(_ROOT / "pyproject.toml", folder)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *(f"tests/core/{file}", "-k", names),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=stretched(_TIMEOUT_SECONDS),
        check=False,
    )
    if result.returncode not in (0, _TESTS_FAILED):
        raise RuntimeError(f"{bug.stem}: {result.stdout}{result.stderr}")
    return result.returncode == _TESTS_FAILED
