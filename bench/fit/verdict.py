"""Whether what is predicted fits a device, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from bench.fit.prediction import Prediction
from bench.resolve.machine import Machine

#: For the CUDA context, NCCL's buffers and library workspaces, which are not predicted.
HEADROOM_BYTES: Final = 2 * 2**30


@dataclass(frozen=True)
class Verdict:
    """spare_bytes: negative where it does not fit. largest: the category to attack then.

    fits: the steps do. setup_fits: whether what a rank holds before the first one, setup_bytes at
    most, fits as well.
    """

    device: str
    device_bytes: int
    fits: bool
    spare_bytes: int
    largest: str
    largest_bytes: int
    setup_fits: bool
    setup_bytes: int

    @classmethod
    def of(cls, prediction: Prediction, machine: Machine) -> Self | None:
        """On the first device of `machine`; None where it has none whose memory is known.

        Ranks that share a device have equal parts of it.
        """
        devices = machine.cuda_devices
        if not devices or devices[0].memory_bytes is None:
            return None
        sharing = prediction.resolved.launch.ranks_per_device
        room = devices[0].memory_bytes // sharing - HEADROOM_BYTES
        spare = room - prediction.peak_bytes
        held = prediction.by_category
        largest = max(held, key=lambda name: held[name])
        return cls(
            device=devices[0].name,
            device_bytes=devices[0].memory_bytes // sharing,
            fits=spare >= 0,
            spare_bytes=spare,
            largest=largest,
            largest_bytes=held[largest],
            setup_fits=prediction.setup_bytes <= room,
            setup_bytes=prediction.setup_bytes,
        )

    def setup_text(self) -> str:
        """A sentence about what comes before the steps."""
        return (
            f"set-up does not fit: each rank holds {gigabytes(self.setup_bytes)} at most before"
            " the first step"
        )

    def text(self) -> str:
        """A sentence."""
        size = f"{self.device} of {gigabytes(self.device_bytes)}"
        head = f"{gigabytes(HEADROOM_BYTES)} are left for context, NCCL and libraries"
        if self.fits:
            return f"fits {size} with {gigabytes(self.spare_bytes)} to spare ({head})"
        return (
            f"does not fit {size}: {gigabytes(-self.spare_bytes)} too much ({head});"
            f" {gigabytes(self.largest_bytes)} are {self.largest.replace('_', ' ')}"
        )


def gigabytes(size: int) -> str:
    """Powers of ten, as datasheets count."""
    return f"{size / 1e9:,.2f} GB"
