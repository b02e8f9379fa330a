"""Which environment variables a run may set, and which ones a record may show."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from bench.errors import ConfigError
from bench.redaction import looks_secret
from bench.spec import RunSpec

SETTABLE_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "CUDA_", "GLOO_", "MFSDP_")

# The harness sets these itself; two sources for one value would make the record ambiguous.
_OWNED = {
    "CUDA_VISIBLE_DEVICES": "set it in the shell that starts mfsdp-bench, so that the device count"
    " is checked against it",
    "OMP_NUM_THREADS": "use launch.threads_per_rank",
    "MKL_NUM_THREADS": "use launch.threads_per_rank",
}
# They would take the logs of an evidence run elsewhere.
_OF_EVIDENCE = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
_OWNED_PREFIX = "MFSDP_BENCH_"
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_MAX_VALUE_CHARACTERS = 4096


def check_environment(spec: RunSpec) -> None:
    """Refuse what a run may not set, and two sources for one setting.

    Raises:
        ConfigError: a name outside the families, one that the harness or another setting of the run
            owns or that looks like a secret, or a value that no process environment can hold.
    """
    env = spec.launch.env
    for name, value in env.items():
        for holds, message in _refusals(name, value):
            if holds:
                raise ConfigError(f"launch.env: {message}")
    for name, value in spec.launch.nccl_variables.items():
        if name in env:
            raise ConfigError(
                f"launch.env: {name} is {env[name]!r} there, and {value!r} by launch.copy_engine,"
                " launch.nvls or launch.collnet; remove one of the two"
            )
    for name in _OF_EVIDENCE if spec.measure.nccl != "none" else ():
        if name in env:
            raise ConfigError(
                f"launch.env: measure.nccl=evidence sets {name} itself, found {env[name]!r}; remove"
                " one of the two"
            )


def _refusals(name: str, value: str) -> Iterator[tuple[object, str]]:
    """Whether something is wrong with a variable, and what then is said."""
    shown = repr(name[:80])
    yield (
        not _NAME.fullmatch(name),
        f"{shown} is not a variable name; expected capital letters, digits and '_'",
    )
    yield name in _OWNED, f"{name} is set by the harness; {_OWNED.get(name)}"
    yield name.startswith(_OWNED_PREFIX), f"{name} is one of the harness's own; remove it"
    family = name.split("_", maxsplit=1)[0] + "_"
    close = difflib.get_close_matches(family, SETTABLE_PREFIXES, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}...?" if close else ""
    yield (
        not name.startswith(SETTABLE_PREFIXES),
        f"{shown} cannot be set by a run; expected a name that starts with one of"
        f" {', '.join(SETTABLE_PREFIXES)}{hint}",
    )
    yield (
        looks_secret(name),
        f"{name} looks like a secret, and what a run sets is stored in its record; set it in the"
        " shell instead",
    )
    yield (
        any(character in value for character in "\0\n\r"),
        f"the value of {name} holds a line break or a NUL character; expected one line of text",
    )
    yield (
        len(value) > _MAX_VALUE_CHARACTERS,
        f"the value of {name} has {len(value)} characters; expected at most"
        f" {_MAX_VALUE_CHARACTERS}",
    )
