"""What measuring costs: seconds spent in each meter, to be compared with the steps they measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass
class MeterCost:
    """Accumulated seconds by meter, and of the steps; all of this rank."""

    seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    steps: int = 0

    @contextmanager
    def timed(self, meter: str) -> Iterator[None]:
        """Add the time of the block to `meter`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[meter] = self.seconds.get(meter, 0.0) + perf_counter() - start

    def add_step(self, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.step_seconds += seconds

    @property
    def fraction(self) -> float:
        """Seconds in all meters over seconds in all steps; 0 before the first step."""
        return sum(self.seconds.values()) / self.step_seconds if self.step_seconds else 0.0
