"""Cases that engines are known to fail: `validate` marks them, docs/upstream has the whole.

A failure that no row describes is new.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from bench.verdict import CheckVerdict

PAGE: Final = "docs/upstream/README.md"


@dataclass(frozen=True)
class KnownFailure:
    """What a user does (as the page has it), and the cases that fail of it.

    cases: shell pattern of their ids, without the engine. check: the check that fails first. most:
    the largest relative difference that this check measures; 0 for any.
    """

    engines: tuple[str, ...]
    does: str
    cases: str
    check: str
    most: float = 0.0


_PLAIN = ("ddp", "examples.engines.ddp_zero:build", "single", "fsdp2")
_DEEPSPEED = ("examples.engines.deepspeed:build",)
_V2 = ("megatron_fsdp_v2",)

KNOWN_FAILURES: Final = (
    KnownFailure(
        ("fsdp2",), "a weight that two units share, torch 2.11", "*/cross_tied/*", "gradients"
    ),
    KnownFailure(
        (*_PLAIN, "examples.engines.simple_fsdp:build"),
        "a state dict with a missing entry is loaded",
        "*/reloaded",
        "computed weights",
    ),
    KnownFailure(
        _DEEPSPEED, "its engine is deleted without `destroy()`", "*", "freed after deletion"
    ),
    KnownFailure(
        _DEEPSPEED, "BF16 in stage 3", "optim_grads_params/*/bf16/*", "gradients", most=0.01
    ),
    KnownFailure(_DEEPSPEED, "a parameter of shape ()", "*/scalar/*", "runs to its end"),
    KnownFailure(
        _V2, "a weight of a unit is not used in the forward pass", "*/unused/*", "gradients"
    ),
    KnownFailure(_V2, "two units or more under `checkpoint`", "*/recomputed/*", "gradients"),
    KnownFailure(
        ("megatron_fsdp", *_V2),
        "its model and optimizer are deleted",
        "*",
        "freed after deletion",
    ),
    *(
        KnownFailure(
            ("megatron_fsdp",), "a unit has rows of unlike sizes", f"*/{model}/*", "runs to its end"
        )
        for model in ("rows", "uneven")
    ),
)


def of_case(engine: str, case: str, failures: Sequence[CheckVerdict]) -> KnownFailure | None:
    """Why `case` (its whole id) of `engine` fails in `failures`; None for one that is new."""
    name = case.removeprefix(f"{engine}/")
    for failure in KNOWN_FAILURES:
        is_meant = engine in failure.engines and fnmatchcase(name, failure.cases)
        if (
            is_meant
            and failures
            and failures[0].check == failure.check
            and _within(failure, failures[0])
        ):
            return failure
    return None


def _within(known: KnownFailure, failure: CheckVerdict) -> bool:
    match = re.match(r"relative difference ([^,\s]+)", failure.measured)
    return not known.most or (match is not None and float(match[1]) <= known.most)
