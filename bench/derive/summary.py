"""One run's raw samples made into its numbers. Nothing here is stored as truth: it is rebuilt.

The time of a step is the *largest* over the ranks that ran it. A step is over when its last rank is
done; rank 0 alone would hide a slow rank that the others wait for at the next collective, and a
mean over ranks would dilute it. Only steps that every rank has recorded count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from bench.derive.counts import totals
from bench.derive.device_state import RULE, device_notes, device_trouble
from bench.derive.flops import flops_per_global_batch, formula
from bench.derive.peaks import ModelFlopsUtilisation, model_flops_utilisation
from bench.derive.steady import DROPPED_STEPS, steady_window
from bench.derive.timeline import ledger_peak
from bench.record import FINISHED_GOOD, RunRecord, RunSummary, SteadyWindow, StepSample
from bench.spec import SHARDED, ResolvedRun

_RULES = f"step=max-over-ranks; window={DROPPED_STEPS}+mser; ledger=peak-of-a-step; {RULE}"


def summary_formula(resolved: ResolvedRun) -> str:
    """Changes whenever a number could come out differently from the same samples."""
    shape = resolved.shape
    return _RULES if shape is None else f"{formula(shape)}; {_RULES}"


def summarise(record: RunRecord) -> RunSummary:
    """Derive the numbers of one run; never raises for damaged or missing samples.

    Times, tokens/s and TFLOP/s are medians over the steady window and None when the run did not
    finish, is not stable, or is marked as not comparable in time. `final_loss` and
    `final_grad_norm` (last step, mean over ranks) are None for a run that did not finish. Memory
    peaks are the largest rank's and stand for failed runs too, because they explain an
    out-of-memory. TFLOP/s is per rank on a CPU, where a rank is the device. `notes` says in words
    what was withheld and why.
    """
    steps = common_steps(record.steps)
    finished = record.status.state in FINISHED_GOOD
    notes: list[str] = []
    steady = _steady(steps, record) if finished else None
    window = _window_steps(steps, steady, record, notes)
    times = step_milliseconds(window)
    middle = median(times) if times else None
    tokens = _tokens_per_step(window or steps, record, notes)
    tflops, mfu = _utilisation(record, middle, notes)
    notes += filter(None, (broken_promise(record), *device_notes(record)))
    ledger = ledger_peak(record.memory)
    if ledger.untold:
        notes.append(f"no ledger peak: the engine does not say its {', '.join(ledger.untold)}")
    if record.resolved.gathers_matrices and ledger.peak_bytes is not None:
        notes.append("no ledger peak: it lacks the whole matrices that the optimizer steps on")
        ledger = replace(ledger, peak_bytes=None)
    cpu = _cpu_milliseconds(window)
    slowest = [max(ranks, key=lambda sample: sample.milliseconds) for ranks in window]
    host = [sample.host_milliseconds for sample in slowest if sample.host_milliseconds is not None]
    phases = [sample.phase_milliseconds for sample in slowest if sample.phase_milliseconds]
    return RunSummary(
        formula=summary_formula(record.resolved),
        steady=steady,
        step_milliseconds_median=middle,
        step_milliseconds_p90=_p90(times),
        tokens_per_second=tokens / (middle / 1e3) if tokens and middle else None,
        tflops_per_second_per_device=tflops,
        mfu=mfu.fraction,
        peak_tflops=mfu.peak_tflops,
        final_loss=_final(steps, "loss") if finished else None,
        final_grad_norm=_final(steps, "grad_norm") if finished else None,
        wire_bytes_per_step=_wire_bytes(window or steps, record, notes),
        # Samples are taken between steps; the kernel's own peak, kept of one rank, can be higher.
        rss_peak_bytes=_peak(
            record.steps, "rss_bytes", (record.memory or {}).get("rss_peak_bytes")
        ),
        device_peak_bytes=_peak(record.steps, "device_peak_bytes"),
        ledger_peak_bytes=ledger.peak_bytes,
        ledger_is_measured=ledger.is_measured,
        memory_by_category_bytes=ledger.by_category,
        counts=totals(record),
        cpu_milliseconds_median=cpu.get("all"),
        cpu_milliseconds_by_thread={role: time for role, time in cpu.items() if role != "all"},
        phase_milliseconds=_medians(phases),
        host_milliseconds_median=median(host) if host else None,
        notes=tuple(notes),
    )


def common_steps(steps: dict[int, list[StepSample]]) -> list[list[StepSample]]:
    """Samples grouped by step, in order, for the steps 1, 2, ... that all ranks have.

    The list ends before the first step that a rank lacks, so that a hole (a damaged line) cannot
    shift one rank's samples against another's.
    """
    if not steps:
        return []
    by_rank = [{sample.step: sample for sample in samples} for samples in steps.values()]
    grouped: list[list[StepSample]] = []
    while all(len(grouped) + 1 in samples for samples in by_rank):
        grouped.append([samples[len(grouped) + 1] for samples in by_rank])
    return grouped


def step_milliseconds(steps: Iterable[Sequence[StepSample]]) -> list[float]:
    """Time of each step: the largest over its ranks."""
    return [max(sample.milliseconds for sample in ranks) for ranks in steps]


def device_name(record: RunRecord) -> str | None:
    """The accelerator that the run used, None for a CPU run or where the record does not say."""
    if record.resolved.launch.device == "cpu":
        return None
    names = record.runtime.get("device_names")
    if not isinstance(names, list) or len(set(map(str, names))) != 1:
        return None  # absent, or a mix that has no one peak
    return str(names[0])


def _steady(steps: list[list[StepSample]], record: RunRecord) -> SteadyWindow:
    """The steady window, which does not stand where a device has changed meanwhile."""
    steady = steady_window(step_milliseconds(steps))
    trouble = device_trouble(record, steady) if steady.stable else None
    if trouble is None:
        return steady
    return steady.model_copy(update={"stable": False, "reason": trouble})


def _window_steps(
    steps: list[list[StepSample]],
    steady: SteadyWindow | None,
    record: RunRecord,
    notes: list[str],
) -> list[list[StepSample]]:
    run, why = record.resolved, ""
    if steady is None:
        why = f"the run ended as {record.status.state}"
    elif not steady.stable:
        why = f"not steady, {steady.reason}"
    elif not record.status.comparable_in_time:
        why = "the run was profiled, which slows it down"
        if run.measure.nccl == "evidence":
            why = "NCCL wrote a log of every collective, which slows the run down"
        elif run.launch.ranks_per_device > 1:
            why = "ranks shared a device"
        elif run.measure.profile == "none":
            why = "measure.nvtx names its parts for a tool, which slows the run down if attached"
    if steady is None or why:
        notes.append(f"no times: {why}")
        return []
    if len(steps) < run.train.steps:
        notes.append(f"{len(steps)} of {run.train.steps} steps are complete")
    return steps[steady.first - 1 : steady.last]


def _tokens_per_step(
    steps: list[list[StepSample]], record: RunRecord, notes: list[str]
) -> float | None:
    """Tokens of one global batch as the ranks counted them."""
    if not steps:
        return None
    counted = median(sum(sample.tokens for sample in ranks) for ranks in steps)
    planned = record.resolved.tokens_per_step
    if counted != planned:
        notes.append(
            f"ranks consumed {counted:g} tokens per step, the configuration says {planned}"
        )
    return counted


def _utilisation(
    record: RunRecord, milliseconds: float | None, notes: list[str]
) -> tuple[float | None, ModelFlopsUtilisation]:
    """TFLOP/s of a device, and what share of its peak that is."""
    train, shape = record.resolved.train, record.resolved.shape
    if shape is None:
        notes.append("no TFLOP/s: nothing is known about a model of the user's own")
    if shape is None or milliseconds is None:
        return None, ModelFlopsUtilisation(None, None)
    flops = flops_per_global_batch(shape, train.seq_len, train.global_batch)
    tflops = flops / (milliseconds / 1e3) / 1e12 / record.resolved.launch.ranks
    mfu = model_flops_utilisation(tflops, device_name(record), record.resolved.dtypes.compute)
    if mfu.reason:
        notes.append(f"no MFU: {mfu.reason}")
    return tflops, mfu


def _cpu_milliseconds(steps: list[list[StepSample]]) -> dict[str, float]:
    """Medians over steps of CPU time over all ranks, by thread and "all"; empty if not measured."""
    by_step = []
    for ranks in steps:
        by_thread: Counter[str] = Counter()
        for sample in ranks:
            if sample.cpu_milliseconds is None:
                return {}
            by_thread.update(sample.cpu_milliseconds)
        by_step.append({**by_thread, "all": sum(by_thread.values())})
    return dict(sorted(_medians(by_step).items()))


def _medians(by_step: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Over steps, of every name; a step without one counts as 0."""
    names = dict.fromkeys(name for values in by_step for name in values)
    return {name: median(values.get(name, 0.0) for values in by_step) for name in names}


def _wire_bytes(steps: list[list[StepSample]], record: RunRecord, notes: list[str]) -> float | None:
    """Bytes sent per step, summed over ranks; None if any rank did not count all of them."""
    engine = record.resolved.engine
    for size, what in ((engine.tensor_parallel, "tensor"), (engine.expert_parallel, "expert")):
        if size > 1:
            notes.append(f"no bytes sent: those of {what} parallelism are not counted")
            return None
    totals: list[int] = []
    for ranks in steps:
        counts = [sample.wire_bytes for sample in ranks if sample.wire_bytes is not None]
        if len(counts) < len(ranks):
            return None
        totals.append(sum(counts))
    return float(median(totals)) if totals else None


def _final(steps: list[list[StepSample]], field: str) -> float | None:
    """Mean over ranks at the last step, None if there is none or it is not a number."""
    values = [getattr(sample, field) for sample in steps[-1]] if steps else []
    if not values or any(value is None or not math.isfinite(value) for value in values):
        return None
    return float(sum(values) / len(values))


def _peak(steps: dict[int, list[StepSample]], field: str, *others: object) -> int | None:
    """The largest of the samples' `field` and of `others`, as far as they are known."""
    values = [getattr(sample, field) for samples in steps.values() for sample in samples]
    return max((value for value in (*values, *others) if isinstance(value, int)), default=None)


def _p90(times: list[float]) -> float | None:
    """Nearest rank: a time that was measured, not one between two."""
    return sorted(times)[max(0, math.ceil(0.9 * len(times)) - 1)] if times else None


#: Dtypes of codes and scales, by torch's names.
_ONE_BYTE = ("uint8", "int8", "float8")
#: Vectors and scalars travel as they are, and are little next to matrices.
_LEAST_SHARE = 0.5


def broken_promise(record: RunRecord) -> str | None:
    """Why a run that requested low-precision gathers has not shown them; None where it has.

    None also where it did not ask, where nothing is gathered, and for runs that did not finish.
    Engines have ignored such a request in silence: torchtitan issue 3123 tells of float8 gathers
    that were requested and travelled as bfloat16. The bytes on the wire tell.
    """
    run = record.resolved
    recipe = run.engine.asked("recipe") or "none"
    wanted = recipe != "none" and run.engine.asked("gather_precision") == "recipe"
    if run.linear.quantised_weights:
        recipe, wanted = f"{run.linear.kind} {run.linear.recipe}", True
    gathers = bool(SHARDED[run.strategy]) and run.data_parallel > run.engine.outer_size
    if not (wanted and gathers) or record.status.state not in FINISHED_GOOD:
        return None
    recorded = record.runtime.get("gathered_bytes")
    by_dtype = recorded.items() if isinstance(recorded, dict) else ()
    sent = {str(dtype): size for dtype, size in by_dtype if isinstance(size, int)}
    total = sum(sent.values())
    if not total:
        return f"requested gathers of {recipe} weights; the record does not say what was gathered"
    wide = {dtype: size for dtype, size in sent.items() if not dtype.startswith(_ONE_BYTE)}
    if total - sum(wide.values()) >= _LEAST_SHARE * total:
        return None
    others = ", ".join(
        f"{100 * size / total:.0f} % {dtype}" for dtype, size in sorted(wide.items())
    )
    return f"requested gathers of {recipe} weights and did not get them: {others} on the wire"
