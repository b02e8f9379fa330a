"""Part `fp8`: weights gathered as codes, and layers that multiply FP8, beside BF16."""

from __future__ import annotations

from typing import Any

from bench.testing.workers import Workers
from tools.gpu_check.core import mean_losses
from tools.gpu_check.record import Device, PartFindings
from tools.gpu_check.training import note_ranks, rank_count, ranks, run, small_run

#: Three times what a CPU shows: rounding to three bits of mantissa moves a loss by less.
_RELATIVE = 2e-3
_RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")
_LAYERS: tuple[dict[str, Any], ...] = tuple(
    {"linear": "transformer_engine", "quantised_weights": as_codes} for as_codes in (False, True)
)
_DTYPES = {"compute": "bf16", "main_params": "fp32", "main_grads": "fp32", "grad_comm": "bf16"}


def check(device: Device) -> PartFindings:
    """Run the part."""
    findings = PartFindings()
    note_ranks(device, findings)
    with ranks(device, rank_count(device)) as workers:
        plain = _losses(workers, device, findings, "bf16")
        for recipe in _RECIPES:
            codes = _losses(workers, device, findings, recipe, recipe=recipe)
            name = f"{recipe}, gathered in BF16"
            same = _losses(
                workers, device, findings, name, recipe=recipe, gather_precision="compute"
            )
            _compare(findings, recipe, codes, plain)
            if codes is not None and same is not None:
                findings.expect(name, codes == same, f"losses {same}; as codes {codes}")
        for layers in _LAYERS:
            name = layers["linear"] + (", kept as codes" if layers["quantised_weights"] else "")
            found = _losses(workers, device, findings, name, model=layers)
            _compare(findings, name, found, plain)
    return findings


def _losses(
    workers: Workers,
    device: Device,
    findings: PartFindings,
    name: str,
    model: dict[str, Any] | None = None,
    **engine: Any,
) -> list[float] | None:
    """Means over ranks; None, with the reason in `findings`, where it cannot run here."""
    spec = small_run(device, {"name": "mfsdp", "strategy": "optim_grads_params", **engine})
    spec["model"] |= model or {}
    spec["dtypes"] = _DTYPES
    trained = run(workers, spec, findings, name)
    return None if trained is None else mean_losses(trained)


def _compare(
    findings: PartFindings, name: str, losses: list[float] | None, plain: list[float] | None
) -> None:
    if losses is None or plain is None:
        return
    apart = max(abs(a - b) / abs(a) for a, b in zip(plain, losses, strict=True))
    said = f"losses differ by {apart:.1e} of BF16's; allowed {_RELATIVE:.0e}"
    findings.expect(name, apart <= _RELATIVE, said)
    findings.measurements[name] = {"losses": losses, "bf16": plain}
