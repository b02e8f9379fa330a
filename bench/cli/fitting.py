"""`fit`: what runs would hold and send, without running them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from bench.cli import console, exit_codes
from bench.cli.chosen_sweep import choose, machine_of, pruned_text
from bench.cli.console import Answer
from bench.cli.options import SweepRequest
from bench.cli.verbs.measure import FitRequest
from bench.errors import UnsupportedError, UsageError
from bench.fit.prediction import Prediction, Verdict, gigabytes, predict
from bench.fit.search import Choice, fewest_gpus, search
from bench.resolve import resolve
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun, RunSpec
from sweeps.selection import parse_assignments
from sweeps.settings import run_spec

_SHOWN = 8
Found = Prediction | UnsupportedError
#: Settings that change no storage and no message.
_NO_MEMORY: Final[Mapping[str, Any]] = {
    "data": True,
    "measure": True,
    "launch": {"env", "timeout_seconds", "hang_seconds", "threads_per_rank", "copy_engine"},
    "train": {"steps", "lr", "warmup_steps", "weight_decay", "beta1", "beta2", "eps", "seed"},
}


def show_fit(request: FitRequest) -> Answer:
    """What a model or the cells of a sweep would hold and send; 1 where it does not fit."""
    if (request.sweep is None) == (request.model is None):
        raise UsageError("fit takes a sweep, or --model with a preset or a config.json: give one")
    if request.model is not None:
        return _of_model(request, request.model)
    if request.search:
        raise UsageError("--search changes the switches of one model: give --model, not a sweep")
    return _of_sweep(request)


def _code(*, fits: bool) -> int:
    return exit_codes.OK if fits else exit_codes.REQUIREMENT_NOT_MET


def _of_model(request: FitRequest, model: str) -> Answer:
    machine, gpus = machine_of(request.machine), request.machine.gpus
    if machine is None or gpus is None:
        raise UsageError("--model needs --device and --gpus, as in --device H100 --gpus 64")
    spec = _spec(model, gpus, machine.nodes, request.cells.assignments)
    if request.search:
        return _of_search(spec, machine)
    found = predict(resolve(spec, machine), whole=request.whole)
    verdict = Verdict.of(found, machine)
    return Answer(
        lambda: found.to_document() | {"verdict": _document(verdict)},
        lambda: prediction_text(found, verdict),
        _code(fits=verdict is None or verdict.fits),
    )


def _document(verdict: Verdict | None) -> dict[str, Any] | None:
    return None if verdict is None else vars(verdict)


def _spec(model: str, gpus: int, nodes: int, assignments: Sequence[str]) -> RunSpec:
    """One micro batch of 8,192 tokens in BF16 on FP32 main weights, all sharded, if left open."""
    is_file = model.endswith(".json") or "/" in model
    given = parse_assignments(assignments)
    settings: dict[str, Any] = {
        "model.config" if is_file else "model.preset": model,
        "engine.name": "mfsdp",
        "engine.strategy": "optim_grads_params",
        "dtypes.compute": "bf16",
        "dtypes.main_params": "fp32",
        "dtypes.main_grads": "fp32",
        "train.seq_len": 8192,
        "train.micro_batch": 1,
        "launch.device": "cuda",
        "launch.ranks": gpus,
        "launch.nodes": nodes,
    }
    settings |= given
    if settings["engine.name"] != "mfsdp" and "engine.strategy" not in given:
        del settings["engine.strategy"]
    tensor = settings.get("engine.tensor_parallel", 1)
    per_step = settings["launch.ranks"] // tensor * settings["train.micro_batch"]
    return run_spec({"train.global_batch": per_step} | settings)


def _of_search(spec: RunSpec, machine: Machine) -> Answer:
    gpus = list(fewest_gpus(spec, machine))
    choices = search(spec, machine)
    ranks = f"{spec.launch.ranks} GPUs, what fits first, then by work done twice, then traffic"
    unbuilt = [one.verdict for one in choices if one.verdict and not one.verdict.setup_fits]
    last = "Bytes and FLOPs; no seconds: what is cheapest in time is for a run to say."
    last += f"\nOf the steps; {unbuilt[0].setup_text()}." if unbuilt else ""
    return Answer(
        lambda: {
            "fewest_gpus": [one.to_document() for one in gpus],
            "choices": [one.to_document() for one in choices],
            "spec": spec.model_dump(mode="json"),
        },
        lambda: "\n\n".join(
            ("GPUs, everything sharded", _choices_text(gpus), ranks, _choices_text(choices), last)
        ),
        _code(fits=any(one.verdict is not None and one.verdict.fits for one in choices)),
    )


def _choices_text(choices: Sequence[Choice]) -> str:
    shared = set.intersection(*(set(one.switches) for one in choices))
    rows = [
        (
            ", ".join(
                str(value) if path in shared else f"{path.partition('.')[2]}={value}"
                for path, value in one.switches.items()
            ),
            "-" if one.prediction is None else gigabytes(one.prediction.peak_bytes),
            "-" if one.verdict is None else gigabytes(one.verdict.spare_bytes),
            f"{one.wire_bytes / 1e3:,.1f} kB",
            f"{one.recomputed_flops / 1e9:,.2f} G",
            one.refusal or _why_not(one.verdict),
        )
        for one in choices
    ]
    names = ", ".join(path.partition(".")[2] for path in choices[0].switches if path in shared)
    titles = (names, "peak", "to spare", "sent per token", "FLOPs again per token", "why not")
    return console.columns(titles, rows)


def _why_not(verdict: Verdict | None) -> str:
    if verdict is None or verdict.fits:
        return ""
    return f"{gigabytes(verdict.largest_bytes)} are {verdict.largest.replace('_', ' ')}"


def _of_sweep(request: FitRequest) -> Answer:
    assert request.sweep is not None
    machine = machine_of(request.machine)
    wanted = SweepRequest(sweep=request.sweep, cells=request.cells)
    plan = choose(wanted, machine=machine).chosen
    found = predictions(
        {cell.name_of(arm): run for cell in plan.cells for arm, run in cell.runs.items()},
        whole=request.whole,
    )
    verdicts = {
        name: Verdict.of(one, machine)
        for name, one in found.items()
        if machine is not None and isinstance(one, Prediction)
    }

    def document() -> dict[str, Any]:
        cells = {
            name: {"refusal": one.reason}
            if isinstance(one, UnsupportedError)
            else one.to_document() | {"verdict": _document(verdicts.get(name))}
            for name, one in found.items()
        }
        return {"cells": cells, "pruned": [vars(one) for one in plan.pruned]}

    def text() -> str:
        rows = [_sweep_row(name, one, verdicts.get(name)) for name, one in found.items()]
        titles = ("cell", "peak", "set-up", "sent per step", "when", "most of it")
        pruned = f"\n\n{pruned_text(plan)}" if plan.pruned else ""
        return console.columns(titles, rows, left=1) + pruned

    fits = all(one is None or (one.fits and one.setup_fits) for one in verdicts.values())
    return Answer(document, text, _code(fits=fits))


def predictions(runs: Mapping[str, ResolvedRun], *, whole: bool = False) -> dict[str, Found]:
    """Of each run, or why there is none; runs of equal memory are traced once."""
    known: dict[str, Found] = {}
    found: dict[str, Found] = {}
    for name, run in runs.items():
        console.waiting(f"predicting the memory of {name}")
        key = run.model_dump_json(exclude=dict(_NO_MEMORY))
        if key not in known:
            try:
                known[key] = predict(run, whole=whole)
            except UnsupportedError as error:
                known[key] = error
        same = known[key]
        found[name] = replace(same, resolved=run) if isinstance(same, Prediction) else same
    console.waiting("")
    return found


def _sweep_row(name: str, found: Found, verdict: Verdict | None) -> tuple[str, ...]:
    if isinstance(found, UnsupportedError):
        return (name, "-", "-", "-", "-", found.reason)
    held = found.by_category
    largest = max(held, key=lambda category: held[category])
    most = f"{largest.replace('_', ' ')} {mebibytes(held[largest])}"
    if verdict is not None and not (verdict.fits and verdict.setup_fits):
        most = verdict.setup_text() if verdict.fits else verdict.text()
    sent = "-" if found.wire_bytes is None else mebibytes(found.wire_bytes)
    when = moment_text(found)
    return (name, mebibytes(found.peak_bytes), mebibytes(found.setup_bytes), sent, when, most)


def mebibytes(size: int) -> str:
    """For small models."""
    return f"{size / 2**20:,.1f} MiB"


def moment_text(found: Prediction) -> str:
    """The moment of the peak, as `backward of unit 31 of 32`."""
    moment = found.peak_moment
    units = sum(1 for one, _ in found.steps if one.phase == "forward" and one.unit is not None)
    units //= max(1, len({one.microbatch for one, _ in found.steps if one.phase == "loss"}))
    text = moment.phase
    if moment.unit is not None:
        text += f" of unit {moment.unit + 1} of {units}"
    if moment.microbatch is not None and found.resolved.microbatches > 1:
        text += f", microbatch {moment.microbatch + 1}"
    return text


def prediction_text(found: Prediction, verdict: Verdict | None) -> str:
    """For people."""
    resolved = found.resolved
    held = found.by_category
    rows = [(name.replace("_", " "), gigabytes(size)) for name, size in held.items()]
    rows.append(("together", gigabytes(found.peak_bytes)))
    parts = [
        f"{resolved.model_text}; {resolved.slug}",
        f"peak: {moment_text(found)}",
        console.columns(("held then by each rank", ""), rows, left=1),
        f"A caching allocator rounds up by {gigabytes(found.rounding_bytes)} at most; what it"
        " fragments over many steps is not predicted.",
    ]
    if verdict is not None:
        parts.append(verdict.text())
        if not verdict.setup_fits:
            parts.append(verdict.setup_text())
    if found.is_linear is False:
        parts.append("layers do not add up: a trace of 5 is not what those of 3 and 4 say; --whole")
    alive = [
        (one.category.replace("_", " "), one.contents, f"{one.count:,}", gigabytes(one.bytes))
        for one in found.alive[:_SHOWN]
    ]
    parts.append(console.columns(("alive then", "each", "number", "of"), alive, left=2))
    sent = [
        (one.operation, one.axis, f"{one.count:,}", f"{one.bytes:,}") for one in found.collectives
    ]
    titles = ("in each step", "axis", "number", "bytes of one")
    parts.append(console.columns(titles, sent, left=2) if sent else "nothing is sent")
    if found.wire_bytes is not None:
        parts.append(f"sent by each rank in a step: {gigabytes(found.wire_bytes)}")
    parts.append("every setting: --json")
    return "\n\n".join(parts)
