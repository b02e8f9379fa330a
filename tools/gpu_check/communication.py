"""Part `communication`: every collective brings right values from plain and from registered memory.

Its times are of few operations: `sweeps/communication.yaml` measures.
"""

from __future__ import annotations

from typing import Any, Final, get_args

from bench.derive.bandwidth import algorithm_bytes_per_second, bus_factor
from bench.spec import CollectiveName, RegistrationName
from tools.gpu_check.record import Device, PartFindings
from tools.gpu_check.timed import Timed, time_collective
from tools.gpu_check.training import asked, launch, note_ranks, rank_count, ranks

_SECONDS: Final = 60.0
_SIZES: Final[dict[Device, tuple[int, ...]]] = {
    "cpu": (1 << 16,),
    "cuda": (1 << 16, 1 << 23, 1 << 27),
}


def check(device: Device) -> PartFindings:
    """Run the part."""
    findings = PartFindings()
    note_ranks(device, findings)
    with ranks(device, rank_count(device)) as workers:
        for spec in _specs(device):
            engine = spec["engine"]
            name = " ".join(str(value) for value in list(engine.values())[1:])
            resolved = asked(spec, findings, name)
            if resolved is None:
                continue
            document, count = resolved.model_dump(mode="json"), resolved.launch.ranks
            found = workers.run(time_collective, document, seconds=_SECONDS, ranks=count)
            judge(name, engine, found, findings)
    return findings


def _specs(device: Device) -> list[dict[str, Any]]:
    memories = get_args(RegistrationName)
    transports = ("point_to_point",) if device == "cpu" else ()
    engines = [
        {"name": "collective", "operation": operation, "size_bytes": size, **own}
        for operation in get_args(CollectiveName)
        for size in _SIZES[device]
        for own in (
            *({"registration": memory} for memory in memories),
            *({"transport": transport} for transport in transports),
        )
    ]
    return [
        {"engine": engine, "dtypes": {"compute": "bf16"}, "launch": launch(device)}
        for engine in engines
    ]


def judge(name: str, engine: dict[str, Any], found: list[Timed], findings: PartFindings) -> None:
    """Values on every rank, and whether NCCL has registered what was asked for."""
    wrong = [one.wrong for one in found if one.wrong]
    slowest = max(one.milliseconds for one in found)
    bandwidth = algorithm_bytes_per_second(engine["size_bytes"], slowest)
    bandwidth *= bus_factor(engine["operation"], len(found))
    said = f"{slowest * 1e3:.1f} us, bus bandwidth {bandwidth / 1e9:.3g} GB/s"
    findings.expect(name, not wrong, wrong[0] if wrong else said)
    findings.measurements[name] = {
        "milliseconds": slowest,
        "bus_bytes_per_second": bandwidth,
        "registration": found[0].registration,
    }
    for group in ((found[0].registration or {}).get("groups") or {}).values():
        wanted = (found[0].registration or {})["wanted"]
        said = group["reason"] or f"got {group['got']}"
        findings.expect(f"{name}: registered", group["got"] == wanted, said)
