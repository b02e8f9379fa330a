"""`fit`: what runs would hold and send, without running them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.cli import console, exit_codes
from bench.cli.verb import (
    Answer,
    CellOptions,
    MachineOptions,
    argument,
    columns,
    option,
    pruned_cells,
)
from bench.errors import UnsupportedError, UsageError
from reports.renderers.document import Block, Code, Paragraph, TableBlock

if TYPE_CHECKING:
    from bench.fit.prediction import Prediction, Verdict
    from bench.fit.search import Choice
    from bench.resolve.machine import Machine
    from bench.spec import ResolvedRun, RunSpec

_SHOWN = 8
#: Settings that change no storage and no message.
_NO_MEMORY: Final[Mapping[str, Any]] = {
    "data": True,
    "measure": True,
    "launch": {"env", "timeout_seconds", "hang_seconds", "threads_per_rank", "copy_engine"},
    "train": {"steps", "lr", "warmup_steps", "weight_decay", "beta1", "beta2", "eps", "seed"},
}


class FitVerb(MachineOptions, CellOptions, name="fit"):
    """Say what each rank would hold and send, without running.

    The engine's own code runs on tensors without contents. With --device and --gpus it says
    whether that fits; a model alone needs both.

    Examples:
        fit --model llama3-8b --device H100 --gpus 64
        fit --model llama3-70b --device H100 --gpus 256 --search
        fit my.yaml --only engine.name=mfsdp
    """

    sweep: Path | None = argument(
        "SWEEP",
        "A sweep file, or the name of a sweep that comes with the tool.",
        None,
    )
    model: str | None = option("--model PRESET|config.json", "A model instead of a sweep.")
    search: bool = option("--search", "Try GPUs and switches; rank what fits by its cost.", False)
    every: bool = option("--whole", "Trace every layer, not a few of those that repeat.", False)

    def run(self) -> Answer:
        """Of a model or the cells of a sweep; 1 where it does not fit."""
        if (self.sweep is None) == (self.model is None):
            raise UsageError(
                "fit takes a sweep, or --model with a preset or a config.json: give one"
            )
        if self.model is not None:
            return self._of_model(self.model)
        if self.search:
            raise UsageError(
                "--search changes the switches of one model: give --model, not a sweep"
            )
        assert self.sweep is not None
        return self._of_sweep(self.sweep)

    def _of_model(self, model: str) -> Answer:
        from bench.fit.prediction import Verdict, predict
        from bench.resolve import resolve

        machine, gpus = self.machine(), self.gpus
        if machine is None or gpus is None:
            raise UsageError("--model needs --device and --gpus, as in --device H100 --gpus 64")
        spec = _spec(model, gpus, machine.nodes, self.assignments)
        if self.search:
            return _of_search(spec, machine)
        result = predict(resolve(spec, machine), every_layer=self.every)
        verdict = Verdict.of(result, machine)
        return Answer(
            prediction_blocks(result, verdict),
            result.to_document() | {"verdict": _data(verdict)},
            _code(fits=verdict is None or verdict.fits),
        )

    def _of_sweep(self, sweep: Path) -> Answer:
        from bench.fit.prediction import Verdict

        machine = self.machine()
        plan = self.select(sweep, machine).chosen
        runs = {cell.name_of(arm): run for cell in plan.cells for arm, run in cell.runs.items()}
        cells: dict[str, Any] = {}
        rows: list[tuple[str, ...]] = []
        verdicts: list[Verdict] = []
        for name, result in predictions(runs, every=self.every).items():
            if isinstance(result, UnsupportedError):
                cells[name] = {"refusal": result.reason}
                rows.append((name, "-", "-", "-", "-", result.reason))
                continue
            verdict = None if machine is None else Verdict.of(result, machine)
            verdicts += [] if verdict is None else [verdict]
            cells[name] = result.to_document() | {"verdict": _data(verdict)}
            rows.append(_sweep_row(name, result, verdict))
        titles = ("cell", "peak", "set-up", "sent per step", "when", "most of it")
        fitting = sum(verdict.fits and verdict.setup_fits for verdict in verdicts)
        document: list[Block] = []
        if verdicts:
            largest = min(verdicts, key=lambda verdict: verdict.spare_bytes)
            text = f"{fitting} of {len(verdicts)} cells fit; the largest {largest.text()}"
            document.append(Paragraph(text))
        return Answer(
            [*document, columns(titles, rows, left=1), *pruned_cells(plan)],
            {"cells": cells, "pruned": [vars(cell) for cell in plan.pruned]},
            _code(fits=fitting == len(verdicts)),
        )


def _code(*, fits: bool) -> int:
    return exit_codes.OK if fits else exit_codes.REQUIREMENT_NOT_MET


def _data(verdict: Verdict | None) -> dict[str, Any] | None:
    return None if verdict is None else vars(verdict)


def _spec(model: str, gpus: int, nodes: int, assignments: Sequence[str]) -> RunSpec:
    """One micro batch of 8,192 tokens in BF16 on FP32 main weights, all sharded, if left open."""
    from sweeps.selection import parse_assignments
    from sweeps.settings import run_spec

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
    from bench.fit.search import fewest_gpus, search

    gpus, choices = list(fewest_gpus(spec, machine)), search(spec, machine)
    unbuilt = [
        choice.verdict for choice in choices if choice.verdict and not choice.verdict.setup_fits
    ]
    last = "Bytes and FLOPs; no seconds: what is cheapest in time is for a run to say."
    last += f"\nOf the steps; {unbuilt[0].setup_text()}." if unbuilt else ""
    ranks = f"{spec.launch.ranks} GPUs, what fits first, then by work done twice, then traffic"
    return Answer(
        [
            Paragraph("GPUs, everything sharded"),
            _choices_table(gpus),
            Paragraph(ranks),
            _choices_table(choices),
            Code(last),
        ],
        {
            "fewest_gpus": [choice.to_document() for choice in gpus],
            "choices": [choice.to_document() for choice in choices],
            "spec": spec.model_dump(mode="json"),
        },
        _code(fits=any(choice.fits for choice in choices)),
    )


def _choices_table(choices: Sequence[Choice]) -> TableBlock:
    from bench.fit.prediction import gigabytes

    shared = set.intersection(*(set(row.switches) for row in choices))
    rows = [
        (
            ", ".join(
                str(value) if path in shared else f"{path.partition('.')[2]}={value}"
                for path, value in row.switches.items()
            ),
            "-" if row.prediction is None else gigabytes(row.prediction.peak_bytes),
            "-" if row.verdict is None else gigabytes(row.verdict.spare_bytes),
            f"{row.wire_bytes / 1e3:,.1f} kB",
            f"{row.recomputed_flops / 1e9:,.2f} G",
            row.refusal or _why_not(row.verdict),
        )
        for row in choices
    ]
    names = ", ".join(path.partition(".")[2] for path in choices[0].switches if path in shared)
    titles = (names, "peak", "to spare", "sent per token", "FLOPs again per token", "why not")
    return columns(titles, rows)


def _why_not(verdict: Verdict | None) -> str:
    from bench.fit.prediction import gigabytes

    if verdict is None or verdict.fits:
        return ""
    return f"{gigabytes(verdict.largest_bytes)} are {verdict.largest.replace('_', ' ')}"


def predictions(
    runs: Mapping[str, ResolvedRun], *, every: bool = False
) -> dict[str, Prediction | UnsupportedError]:
    """Of each run, or why there is none; runs of equal memory are traced once."""
    from bench.fit.prediction import Prediction, predict

    known: dict[str, Prediction | UnsupportedError] = {}
    results: dict[str, Prediction | UnsupportedError] = {}
    for name, run in runs.items():
        console.waiting(f"predicting the memory of {name}")
        key = run.model_dump_json(exclude=dict(_NO_MEMORY))
        if key not in known:
            try:
                known[key] = predict(run, every_layer=every)
            except UnsupportedError as error:
                known[key] = error
        same = known[key]
        results[name] = replace(same, resolved=run) if isinstance(same, Prediction) else same
    console.waiting("")
    return results


def _sweep_row(name: str, result: Prediction, verdict: Verdict | None) -> tuple[str, ...]:
    held = result.by_category
    largest = max(held, key=lambda category: held[category])
    most = f"{largest.replace('_', ' ')} {_mebibytes(held[largest])}"
    most += f"; on the host {_mebibytes(result.host_bytes)}" if result.host_bytes else ""
    if verdict is not None and not (verdict.fits and verdict.setup_fits):
        most = verdict.setup_text() if verdict.fits else verdict.text()
    sent = "-" if result.wire_bytes is None else _mebibytes(result.wire_bytes)
    peak, setup = _mebibytes(result.peak_bytes), _mebibytes(result.setup_bytes)
    return (name, peak, setup, sent, _moment_text(result), most)


def _mebibytes(size: int) -> str:
    """For small models."""
    return f"{size / 2**20:,.1f} MiB"


def _moment_text(result: Prediction) -> str:
    """The moment of the peak, as `backward of unit 31 of 32`."""
    moment = result.peak_moment
    units = sum(1 for at, _ in result.steps if at.phase == "forward" and at.unit is not None)
    units //= max(1, len({at.microbatch for at, _ in result.steps if at.phase == "loss"}))
    text = moment.phase
    if moment.unit is not None:
        text += f" of unit {moment.unit + 1} of {units}"
    if moment.microbatch is not None and result.resolved.microbatches > 1:
        text += f", microbatch {moment.microbatch + 1}"
    return text


def prediction_blocks(result: Prediction, verdict: Verdict | None) -> list[Block]:
    """For people."""
    from bench.fit.prediction import gigabytes

    rows = [(name.replace("_", " "), gigabytes(size)) for name, size in result.by_category.items()]
    rows.append(("together", gigabytes(result.peak_bytes)))
    if result.host_bytes:
        rows.append(("in host memory", gigabytes(result.host_bytes)))
    blocks: list[Block] = [
        Paragraph(f"{result.resolved.model_text}; {result.resolved.slug}"),
        Paragraph(f"peak: {_moment_text(result)}"),
        columns(("held then by each rank", ""), rows, left=1),
        Paragraph(
            f"A caching allocator rounds up by {gigabytes(result.rounding_bytes)} at most; what"
            " it fragments over many steps is not predicted."
        ),
    ]
    if verdict is not None:
        blocks.append(Paragraph(verdict.text()))
        blocks += [] if verdict.setup_fits else [Paragraph(verdict.setup_text())]
    if result.is_linear is False:
        blocks.append(
            Paragraph(
                "layers do not add up: a trace of 5 is not what those of 3 and 4 say; --whole"
            )
        )
    alive = [
        (
            group.category.replace("_", " "),
            group.contents,
            f"{group.count:,}",
            gigabytes(group.bytes),
        )
        for group in result.alive[:_SHOWN]
    ]
    blocks.append(columns(("alive then", "each", "number", "of"), alive, left=2))
    sent = [
        (group.operation, group.axis, f"{group.count:,}", f"{group.bytes:,}")
        for group in result.collectives
    ]
    titles = ("in each step", "axis", "number", "bytes of one")
    blocks.append(columns(titles, sent, left=2) if sent else Paragraph("nothing is sent"))
    if result.wire_bytes is not None:
        blocks.append(Paragraph(f"sent by each rank in a step: {gigabytes(result.wire_bytes)}"))
    return [*blocks, Paragraph("every setting: --json")]
