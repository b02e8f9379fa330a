"""What an evidence run fixes: few steps, and NCCL's debug settings."""

from __future__ import annotations

from typing import Final

from bench.errors import ConfigError
from bench.spec import RunSpec, TrainSpec

# Iteration 1 runs before buffers are registered, so that the second is the first that counts; a
# few more show that the choice stays.
EVIDENCE_STEPS: Final = 5
_OWNED: Final = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


def evidence_steps(spec: RunSpec) -> TrainSpec:
    """The training of `spec`, cut to EVIDENCE_STEPS where NCCL logs every collective."""
    if spec.measure.nccl == "none" or spec.train.steps <= EVIDENCE_STEPS:
        return spec.train
    return spec.train.model_copy(update={"steps": EVIDENCE_STEPS})


def check_nccl_environment(spec: RunSpec) -> None:
    """Refuse two sources for one setting, and what would take the logs elsewhere.

    Raises:
        ConfigError: `launch.env` sets what another setting of the run sets.
    """
    for name, value in spec.launch.nccl_variables.items():
        if name in spec.launch.env:
            raise ConfigError(
                f"launch.env: {name} is {spec.launch.env[name]!r} there, and {value!r} by"
                " launch.copy_engine, launch.nvls or launch.collnet; remove one of the two"
            )
    if spec.measure.nccl == "none":
        return
    for name in _OWNED:
        if name in spec.launch.env:
            raise ConfigError(
                f"launch.env: measure.nccl=evidence sets {name} itself, found"
                f" {spec.launch.env[name]!r}; remove one of the two"
            )
