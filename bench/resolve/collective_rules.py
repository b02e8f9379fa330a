"""Runs that time one collective: what is wrong on every machine, and what cannot run here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.errors import ConfigError
from bench.resolve.machine import Machine
from bench.spec import (
    CollectiveSettings,
    DataSpec,
    DtypeName,
    DtypeSpec,
    ModelSpec,
    ResolvedRun,
    RunSpec,
    TrainSpec,
)

#: What a run without a model reads of the sections that are about training.
_READ: Final = {"train": ("steps",), "dtypes": ("compute",)}
_DEFAULTS: Final = {
    "model": ModelSpec(),
    "data": DataSpec(),
    "train": TrainSpec(),
    "dtypes": DtypeSpec(),
}
_WHOLE: Final = ("all_reduce", "broadcast")


def check_collective(spec: RunSpec, settings: CollectiveSettings) -> None:
    """Refuse settings that nobody would read, and a size that ranks cannot share.

    Raises:
        ConfigError: with what to leave out, or the nearest sizes.
    """
    for section, default in _DEFAULTS.items():
        given = getattr(spec, section)
        for name in type(default).model_fields:
            found = getattr(given, name)
            if name not in _READ.get(section, ()) and found != getattr(default, name):
                raise ConfigError(
                    f"{section}.{name}: engine {spec.engine.name} times one operation and trains"
                    f" nothing, so that nobody would read {found!r}; leave it out"
                )
    unit = element_bytes(spec.dtypes.compute)
    unit *= 1 if settings.operation in _WHOLE else spec.launch.ranks
    rest = settings.size_bytes % unit
    if rest:
        lower = settings.size_bytes - rest
        near = " or ".join(str(size) for size in (lower, lower + unit) if size)
        raise ConfigError(
            f"engine.size_bytes: {settings.size_bytes} bytes cannot be split into equal numbers of"
            f" {spec.dtypes.compute} elements of {spec.launch.ranks} ranks; the nearest that can:"
            f" {near}"
        )


def element_bytes(dtype: DtypeName) -> int:
    """Size of one element."""
    return {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}[dtype]


def buffer_bytes_of_all_ranks(run: ResolvedRun) -> int | None:
    """Whole buffers, and the slices of a gather or scatter; None for a run that trains."""
    settings = run.collective
    if settings is None:
        return None
    slices = 0 if settings.operation in _WHOLE else settings.size_bytes
    return settings.size_bytes * run.launch.ranks + slices


def collectives(run: ResolvedRun, _machine: Machine) -> Iterator[tuple[str, str]]:
    """What one collective can be asked for."""
    settings, launch, measure = run.collective, run.launch, run.measure
    if settings is None:
        return
    operation, transport = settings.operation, settings.transport
    registration = settings.registration
    if launch.ranks == 1:
        yield (
            "collective-needs-ranks",
            "a collective of one rank sends nothing: set launch.ranks to 2 or more",
        )
    looks = {"counts=true": measure.counts}
    looks[f"profile={measure.profile}"] = measure.profile != "none"
    for name in [name for name, asked in looks.items() if asked][:1]:
        yield (
            "collective-is-only-timed",
            f"measure.{name} looks into training steps, and a collective has none: leave it out",
        )
    if transport != "native" and operation == "broadcast":
        yield (
            "transport-has-no-broadcast",
            f"transport {transport} has no broadcast of its own, the backend does it: use native",
        )
    if registration != "plain" and launch.device != "cuda":
        yield (
            "registration-needs-nccl",
            f"registration={registration} registers memory with NCCL; found device"
            f" {launch.device}: use cuda, or plain memory",
        )
    elif registration != "plain" and transport != "native":
        yield (
            "registration-needs-nccl",
            f"registration={registration} serves NCCL's own collectives; found transport"
            f" {transport}: use native, or plain memory",
        )
    if launch.copy_engine and operation != "all_gather":  # it copies and cannot add
        yield (
            "copy-engine-only-gathers",
            f"launch.copy_engine does gathers only; found operation {operation}: use all_gather, or"
            " leave it out",
        )
