"""Rule: a dtype policy that an engine cannot follow exactly is pruned, not approximated.

torch's own engines keep gradients in the dtype of their parameters. They are matched to mfsdp on
FP32 main weights (or on FP64 throughout, as a reference): fsdp2 through MixedPrecisionPolicy, ddp
and single by autocast, ddp's wire dtype by a communication hook.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.resolve.machine import Machine
from bench.spec import DtypeName, ResolvedRun

_MATCHED_MAIN: tuple[DtypeName, ...] = ("fp32", "fp64")
_AUTOCAST: tuple[DtypeName, ...] = ("bf16", "fp16")
_AUTOCASTS = frozenset((compute, "fp32") for compute in _AUTOCAST)
_DDP_HOOKS: tuple[DtypeName, ...] = ("bf16", "fp16")


def dtypes_not_in_engine(run: ResolvedRun, _machine: Machine) -> str | None:
    """The first dtype that the engine cannot match, with what it would need to be."""
    if run.engine.name == "mfsdp":
        return None
    return next(_mismatches(run), None)


def _mismatches(run: ResolvedRun) -> Iterator[str]:
    name, dtypes = run.engine.name, run.dtypes
    main = dtypes.main_params or dtypes.compute
    if main not in _MATCHED_MAIN:
        yield (
            f"engine {name} is matched on FP32 main weights; found"
            f" main_params {dtypes.main_params or 'none'} with compute {dtypes.compute}: set"
            " dtypes.main_params to fp32"
        )
    if dtypes.main_grads != main:
        yield (
            f"engine {name} keeps gradients in the dtype of its main weights, {main}; found"
            f" main_grads {dtypes.main_grads}: set dtypes.main_grads to {main}"
        )
    if name != "fsdp2" and dtypes.compute != main and (dtypes.compute, main) not in _AUTOCASTS:
        yield (
            f"engine {name} computes in another dtype by autocast, which goes from fp32 to"
            f" {' or '.join(_AUTOCAST)}; found compute {dtypes.compute} on {main} weights"
        )
    if name == "single" and dtypes.grad_comm != dtypes.main_grads:
        yield (
            f"engine single communicates nothing and cannot round gradients to"
            f" {dtypes.grad_comm}: set dtypes.grad_comm to {dtypes.main_grads} in its cells"
        )
    if name == "ddp" and dtypes.grad_comm not in {main, *_DDP_HOOKS}:
        yield (
            f"engine ddp sends gradients as {main}, or as {' or '.join(_DDP_HOOKS)} by a"
            f" communication hook; found grad_comm {dtypes.grad_comm}"
        )
