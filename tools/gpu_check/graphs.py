"""Part `graphs`: whole iterations captured as CUDA graphs; the same losses to the last bit.

A CPU has no graphs: there steps run as they are.
"""

from __future__ import annotations

from typing import Any

from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve
from bench.spec import STRATEGIES, RunSpec
from bench.testing.workers import Workers
from tools.gpu_check.record import Device, PartFindings
from tools.gpu_check.trained import Trained, train
from tools.gpu_check.training import note_ranks, rank_count, ranks, small_run

_SECONDS = 200.0
_STEPS = 8
_VARIANTS: tuple[dict[str, Any], ...] = (
    *({"strategy": strategy, "allocator": "fixed_pool"} for strategy in STRATEGIES),
    {"strategy": "optim_grads_params", "allocator": "max_pool"},
    {"strategy": "optim_grads_params", "allocator": "fixed_pool", "fine_grained_gather": True},
)


def check(device: Device) -> PartFindings:
    """Run the part."""
    findings = PartFindings()
    note_ranks(device, findings)
    with ranks(device, rank_count(device)) as workers:
        for variant in _VARIANTS:
            name = " ".join(str(value) for value in variant.values())
            document = _document(device, variant)
            plain, found = (_train(workers, document, captures=c) for c in (False, True))
            same = [one.losses for one in plain] == [one.losses for one in found]
            findings.expect(name, same, "losses are bit-equal" if same else "losses differ")
            _judge_capture(device, name, found, findings)
            findings.measurements[name] = {
                "plain_milliseconds": plain[0].step_milliseconds,
                "replayed_milliseconds": found[0].milliseconds[-1],
                "losses": found[0].losses,
            }
    return findings


def _document(device: Device, variant: dict[str, Any]) -> dict[str, Any]:
    """The run, resolved. On a CPU, where torch's AdamW counts steps on the host, with SGD."""
    engine = {"name": "mfsdp", "double_buffer": True, "transport": "native", **variant}
    optimizer = "adamw" if device == "cuda" else "sgd"
    spec = small_run(device, engine, steps=_STEPS, optimizer=optimizer)
    # Resolved first: a CPU is refused by name where a user asks.
    resolved = resolve(RunSpec.model_validate(spec), Machine.detect())
    graphs = resolved.model_copy(update={"engine": resolved.engine.with_settings(cuda_graph=True)})
    return graphs.model_dump(mode="json")


def _train(workers: Workers, document: dict[str, Any], *, captures: bool) -> list[Trained]:
    count = document["launch"]["ranks"]
    found: list[Trained] = workers.run(train, document, captures, seconds=_SECONDS, ranks=count)
    return found


def _judge_capture(device: Device, name: str, found: list[Trained], findings: PartFindings) -> None:
    if device == "cpu":
        findings.note(f"{name}: captured", "skipped", "a CPU has no graphs")
        return
    captured = all(one.is_captured for one in found)
    findings.expect(f"{name}: captured", captured, "steps 6 and later are replays")
