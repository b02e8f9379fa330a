"""Rule: a dtype policy that an engine cannot follow exactly is pruned, not approximated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from bench.resolve.engine_choice import adds_up_as_sent
from bench.resolve.machine import Machine
from bench.spec import DtypePolicies, EngineSpec, ResolvedDtypes, ResolvedRun, known_engine
from mfsdp_core.plan.dtype_policy import is_wider


def dtypes(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """The first dtype that the engine cannot match, with what it would need to be."""
    for found in islice(_mismatches(run, known_engine(run.engine.name).dtypes), 1):
        yield "dtypes-not-in-engine", found


def _mismatches(run: ResolvedRun, offered: DtypePolicies) -> Iterator[str]:
    name, dtypes = run.engine.name, run.dtypes
    main = dtypes.main_params or dtypes.compute
    if offered.main is not None and main not in offered.main:
        yield (
            f"engine {name} is matched on FP32 main weights; found"
            f" main_params {dtypes.main_params or 'none'} with compute {dtypes.compute}: set"
            f" dtypes.main_params to {offered.main[0]}"
        )
    if offered.gradients_as_main and dtypes.main_grads != main:
        yield (
            f"engine {name} keeps gradients in the dtype of its main weights, {main}; found"
            f" main_grads {dtypes.main_grads}: set dtypes.main_grads to {main}"
        )
    autocast = offered.autocast
    reached = main == "fp32" and dtypes.compute in (autocast or ())
    if autocast is not None and dtypes.compute != main and not reached:
        yield (
            f"engine {name} computes in another dtype by autocast, which goes from fp32 to"
            f" {' or '.join(autocast)}; found compute {dtypes.compute} on {main} weights"
        )
    if offered.wire == () and dtypes.grad_comm != dtypes.main_grads:
        yield (
            f"engine {name} communicates nothing and cannot round gradients to"
            f" {dtypes.grad_comm}: set dtypes.grad_comm to {dtypes.main_grads} in its cells"
        )
    if offered.wire and dtypes.grad_comm not in {main, *offered.wire}:
        yield (
            f"engine {name} sends gradients as {main}, or as {' or '.join(offered.wire)} by a"
            f" communication hook; found grad_comm {dtypes.grad_comm}"
        )
    if offered.sends_as_computed and dtypes.grad_comm != dtypes.compute:
        yield (
            f"engine {name} sends gradients in the dtype it computes in, {dtypes.compute}; found"
            f" grad_comm {dtypes.grad_comm}: set dtypes.grad_comm to {dtypes.compute}"
        )
    yield from _sums_elsewhere(run.engine, dtypes)


def _sums_elsewhere(engine: EngineSpec, dtypes: ResolvedDtypes) -> Iterator[str]:
    """What cannot add up as wanted, and the setting that can."""
    wire, total = dtypes.grad_comm, dtypes.reduce
    if total in (None, wire):
        return
    change = f"found reduce {total}: set dtypes.reduce to {wire}"
    if not is_wider(total, wire):
        yield f"sums over ranks hold at least what is sent, {wire}; {change}"
    elif adds_up_as_sent(engine):
        by = "with nccl_ub or cuda_graph " if known_engine(engine.name).dtypes.sums else ""
        yield f"engine {engine.name} {by}adds up in the dtype of the wire, {wire}; {change}"
    elif engine.setting("transport") == "native":
        yield (
            f"transport native adds up in the dtype of the wire, {wire}; {change}, or"
            " engine.transport to auto, which adds up in any"
        )
