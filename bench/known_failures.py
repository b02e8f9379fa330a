"""What each engine is known to fail: one table, for `validate`, for reports and for the page.

docs/known-limits.md has a row for each, and a test compares the two. A failure that no row
describes is new.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from bench.verdict import CheckVerdict

#: The page that has the rows.
PAGE: Final = "docs/known-limits.md"
_TORCH: Final = "torch 2.13.0"
_V2: Final = "megatron-fsdp 0.6.1, on CPU ranks with streams that do nothing"
_DEEPSPEED: Final = "DeepSpeed 0.19.8"
_OF_DEEPSPEED: Final = "examples.engines.deepspeed:build"
_DDP: Final = ("ddp", "examples.engines.ddp_zero:build")


@dataclass(frozen=True)
class KnownFailure:
    """One failure of one or several engines.

    does: what the user does. happens: what comes of it. versions: that it was seen with. by_design:
    the documentation of the engine forbids it, or every torch module does the same. script: shows
    it alone; a path below docs, or a name in the history (PAGE says where). cases: shell pattern of
    the ids of cases that fail of it, without the engine; "" where no case does. check: the check
    that fails first. most: the largest relative difference that this check measures; 0 for any.
    kind, said, features, without: of random programs that fail of it: how they end, a regular
    expression of their text, what their shrunk program has (`Program.features`) and what it has
    not; kind "" where programs do not. A row without cases and kind is shown by its script alone.
    """

    engines: tuple[str, ...]
    does: str
    happens: str
    versions: str = _TORCH
    by_design: bool = False
    script: str = ""
    cases: str = ""
    check: str = ""
    most: float = 0.0
    kind: str = ""
    said: str = ""
    features: tuple[frozenset[str], ...] = ()
    without: frozenset[str] = frozenset()

    def __str__(self) -> str:
        design = ", by design" if self.by_design else ""
        shown = f"; docs/{self.script}" if self.script.endswith(".py") else ""
        return f"{self.does}: {self.happens} ({self.versions}{design}{shown})"


def _any(*features: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset({feature}) for feature in features)


#: What leaves a unit without a gradient: reentrant checkpoints of an input without one do as well.
_UNUSED: Final = (
    *_any("letter s", "letter p", "letter d"),
    frozenset({"root frozen", "letter k"}),
    frozenset({"root frozen", "letter K"}),
)
_FOUND: Final = frozenset({"find_unused_parameters=True"})

KNOWN_FAILURES: Final = (
    KnownFailure(
        ("fsdp2",),
        "a unit runs twice in a pass, each time under `checkpoint(use_reentrant=True)`",
        "**silently wrong**: the gradient of its first run is lost (0.36 of 0.72)",
        script="upstream/fsdp2-reentrant-twice.py",
        kind="differs",
        features=_any("letter K"),
    ),
    KnownFailure(
        ("fsdp2",),
        "an evaluation between the backward pass and the optimizer step",
        "**silently wrong**: the next forward pass has the root's weights from before the step",
        script="upstream/fsdp2-step-after-evaluation.py",
    ),
    KnownFailure(
        ("fsdp2",),
        "HSDP, `set_requires_all_reduce(False)` for a microbatch that gives gradients to other "
        "weights of a unit than the last one does",
        "**silently wrong**: the gradient of one weight is lost, or added to that of another",
        script="upstream/fsdp2-other-branch-in-the-last-microbatch.py",
    ),
    KnownFailure(
        ("fsdp2",),
        "a backward pass ends with an exception, and no `reset_iter_state()` follows",
        "the next backward passes reduce nothing, and `.grad` stays None",
        by_design=True,
        script="fsdp2-exception-in-a-backward-pass",
        kind="differs",
        features=_any("pass failing backward"),
    ),
    KnownFailure(
        ("fsdp2",),
        "the same, while activations are recomputed",
        "as above; of a frozen unit the next gradient is off by 0.38 of 0.45",
        by_design=True,
        script="fsdp2-exception-in-a-recomputation",
        kind="differs",
        features=_any("pass failing recompute"),
    ),
    KnownFailure(
        ("fsdp2",),
        "a forward pass ends with an exception",
        "weights of the unit that raised stay whole until its next pass",
        by_design=True,
        script="fsdp2-exception-in-a-forward-pass",
        kind="raised",
        said="full_tensor",
        features=_any("pass failing forward"),
    ),
    KnownFailure(
        ("fsdp2",),
        "ranks take different paths through the units",
        "ranks wait for each other, or a connection breaks",
        by_design=True,
        script="fsdp2-ranks-on-other-paths",
        kind="hung|raised|died",
        features=_any("differing paths True"),
    ),
    KnownFailure(
        _DDP,
        "two backward passes through one graph, or two forward passes first, the first one alone"
        " under `no_sync`",
        "a gradient is off by 0.14 of 0.76",
        by_design=True,
        script="ddp-two-backward-passes-of-one-graph",
        kind="differs",
        features=_any("last double", "last pair"),
    ),
    KnownFailure(
        _DDP,
        "a unit without a gradient in this step (left out, or behind a frozen layer under"
        " `checkpoint(use_reentrant=True)`), without `find_unused_parameters`",
        "a gradient of this step is not reduced (off by 0.14 of 0.36); the next pass raises",
        by_design=True,
        script="ddp-unit-left-out",
        kind="differs",
        features=_UNUSED,
        without=_FOUND,
    ),
    KnownFailure(
        _DDP,
        "the same",
        'raises in the next forward pass: "Expected to have finished reduction"',
        by_design=True,
        kind="raised",
        said="Expected to have finished reduction",
        features=_UNUSED,
        without=_FOUND,
    ),
    KnownFailure(
        _DDP,
        "a unit under `checkpoint(use_reentrant=True)`, twice or with `find_unused_parameters`",
        'refused: "Expected to mark a variable ready only once"',
        by_design=True,
        script="ddp-unit-under-reentrant-checkpoint",
        kind="raised",
        said="Expected to mark a variable ready only once",
    ),
    KnownFailure(
        ("ddp",),
        "`static_graph=True`, the first pass under `no_sync`",
        '`INTERNAL ASSERT FAILED`, "please report a bug"; pytorch#187732 (open) fixes it',
        script="upstream/ddp-static-graph-and-no-sync.py",
        kind="raised",
        said="INTERNAL ASSERT FAILED",
        features=_any("static_graph=True"),
    ),
    KnownFailure(
        (*_DDP, "single", "fsdp2", "examples.engines.simple_fsdp:build"),
        "a state dict with a missing entry is loaded",
        "an error, but the other entries were loaded, as by every `nn.Module`",
        by_design=True,
        cases="*/reloaded",
        check="computed weights",
    ),
    KnownFailure(
        (_OF_DEEPSPEED,),
        "its engine is deleted without `destroy()`",
        "buffers and shards stay",
        _DEEPSPEED,
        by_design=True,
        cases="*",
        check="freed after deletion",
    ),
    KnownFailure(
        (_OF_DEEPSPEED,),
        "BF16 in stage 3",
        "gradients are off by up to 1 %: its linear layer rounds once more than torch's",
        _DEEPSPEED,
        script="deepspeed-stage-3-linear-layer",
        cases="optim_grads_params/*/bf16/*",
        check="gradients",
        most=0.01,
    ),
    KnownFailure(
        (_OF_DEEPSPEED,),
        "a parameter of shape ()",
        "`_broadcast_model` fails while the engine is built",
        _DEEPSPEED,
        cases="*/scalar/*",
        check="runs to its end",
    ),
    KnownFailure(
        (_OF_DEEPSPEED,),
        "a parameter that no rank uses",
        "its gradient is zeros, where plain torch has None",
        _DEEPSPEED,
        script="deepspeed-unit-left-out",
        kind="differs",
        said="is not None, in plain torch it is None",
    ),
    KnownFailure(
        (_OF_DEEPSPEED,),
        "a unit twice under `checkpoint(use_reentrant=True)`",
        "stages 1 and 2 refuse it, as in DeepSpeed#988; an assertion without message in stage 3",
        _DEEPSPEED,
        script="deepspeed-unit-twice-under-reentrant-checkpoint",
        kind="raised",
        said="AssertionError",
        features=_any("letter K"),
    ),
    KnownFailure(
        (_OF_DEEPSPEED,),
        "two optimizer steps before the first backward pass",
        "`KeyError: 0` in stages 1 and 2",
        _DEEPSPEED,
        by_design=True,
        script="deepspeed-steps-without-a-backward-pass",
        kind="raised",
        said="KeyError: 0",
    ),
    KnownFailure(
        (_OF_DEEPSPEED,),
        "a pass ends with an exception, and training continues",
        'raises: "has already been reduced" in stages 1 and 2, "unknown parameter type" in stage 3',
        _DEEPSPEED,
        script="deepspeed-exception-in-a-backward-pass",
        kind="raised",
        said="has already been reduced|unknown parameter type",
        features=_any("pass failing forward", "pass failing recompute", "pass failing backward"),
    ),
    KnownFailure(
        ("megatron_fsdp_v2",),
        "a weight of a unit is not used in the forward pass",
        "**silently wrong**: no gradient of the unit is reduced",
        _V2,
        script="upstream/megatron-fsdp-v2-unused-weight.py",
        cases="*/unused/*",
        check="gradients",
    ),
    KnownFailure(
        ("megatron_fsdp_v2",),
        "two units or more under `checkpoint`",
        "**silently wrong**: all but the first stay unsharded after the backward pass, and the "
        "next pass uses weights from before the step; fixed later (#6153)",
        _V2,
        cases="*/recomputed/*",
        check="gradients",
    ),
    KnownFailure(
        ("megatron_fsdp_v2",),
        "its model and optimizer are deleted",
        "buffers and shards stay",
        _V2,
        cases="*",
        check="freed after deletion",
    ),
)


def known_failures(engine: str) -> tuple[KnownFailure, ...]:
    """All of `engine`."""
    return tuple(one for one in KNOWN_FAILURES if engine in one.engines)


def is_asked_by(one: KnownFailure, engine: str, case: str) -> bool:
    """Whether `case` (its whole id) of `engine` does what fails."""
    return bool(one.cases) and fnmatchcase(case.removeprefix(f"{engine}/"), one.cases)


def of_case(engine: str, case: str, failures: Sequence[CheckVerdict]) -> KnownFailure | None:
    """Why `case` (its whole id) of `engine` fails in `failures`; None for one that is new."""
    for one in known_failures(engine):
        asked = is_asked_by(one, engine, case)
        if asked and failures and failures[0].check == one.check and _within(one, failures[0]):
            return one
    return None


def _within(one: KnownFailure, failure: CheckVerdict) -> bool:
    found = re.match(r"relative difference ([^,\s]+)", failure.measured)
    return not one.most or (found is not None and float(found[1]) <= one.most)


def of_program(engine: str, kind: str, text: str, features: Collection[str]) -> KnownFailure | None:
    """Why a random program fails; None for a failure that is new."""
    for one in known_failures(engine):
        has = not one.features or any(some <= set(features) for some in one.features)
        has = has and one.without.isdisjoint(features)
        if kind in one.kind.split("|") and has and re.search(one.said, text):
            return one
    return None
