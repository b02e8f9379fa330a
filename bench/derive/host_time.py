"""What an engine costs the host per unit and pass: the record, and the numbers made of it.

[Note: host time] A run with `measure.host_time` takes passes behind everything else that it
measures: forward and backward of a decoder with 8 layers, so small that its arithmetic hardly
counts, under the run's engine, settings and ranks, in turn with the same decoder without an engine.
The time is processor time of the threads that run Python and the dispatcher (the main one and
autograd's), which does not go on while they sleep for a link. What the decoder alone takes is
subtracted. Optimizer steps lie between passes and do not count.
"""

from __future__ import annotations

from statistics import fmean

from pydantic import BaseModel, ConfigDict

from bench.record import RunRecord, understood


class HostPass(BaseModel):
    """`host.json`. By rank: microseconds of each pass, with the engine and of the model alone.

    calls: Python functions and builtins that the engine called in one pass, by rank. reason: why
    nothing was measured.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    units: int = 1
    microseconds: tuple[tuple[float, ...], ...] = ()
    model_microseconds: tuple[tuple[float, ...], ...] = ()
    calls: tuple[int, ...] = ()
    reason: str = ""


def host_pass(record: RunRecord) -> HostPass | None:
    """What the run measured; None where it did not, or it cannot be read."""
    found = understood(HostPass, record.host)
    return found if found and found.microseconds and found.model_microseconds else None


def microseconds_per_unit(found: HostPass) -> float:
    """The least of a pass, less that of the model alone, per unit; mean over ranks.

    The least, because other processes only add to it: caches, and clocks that they share.
    """
    pairs = zip(found.microseconds, found.model_microseconds, strict=True)
    return fmean(min(engine) - min(model) for engine, model in pairs) / found.units


def calls_per_unit(found: HostPass) -> float | None:
    """Mean over ranks."""
    return fmean(found.calls) / found.units if found.calls else None
