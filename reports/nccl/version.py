"""What a log proves about the version of NCCL: one exact version, or an interval of versions."""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int, int]

OLDEST: Version = (0, 0, 0)
NEWEST: Version = (99, 99, 99)
_DOTTED = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})")


@dataclass(frozen=True, slots=True)
class Versions:
    """All versions from `low` to `high`, both included."""

    low: Version = OLDEST
    high: Version = NEWEST

    @property
    def exact(self) -> bool:
        """Whether only one version is left."""
        return self.low == self.high

    def meet(self, other: Versions) -> Versions | None:
        """Versions in both; None where there is no such version."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Versions(low, high) if low <= high else None

    def all_before(self, version: Version) -> bool:
        """Whether every version of the interval is older than `version`."""
        return self.high < version

    def all_from(self, version: Version) -> bool:
        """Whether every version of the interval is `version` or newer."""
        return self.low >= version

    def __str__(self) -> str:
        if self.exact:
            return dotted(self.low)
        if self == Versions():
            return "unknown"
        if self.high == NEWEST:
            return f"{dotted(self.low)} or later"
        if self.low == OLDEST:
            return f"{dotted(self.high)} or earlier"
        return f"{dotted(self.low)} to {dotted(self.high)}"


ANY = Versions()


def dotted(version: Version) -> str:
    """`2.27.3`."""
    return ".".join(map(str, version))


def parse(text: str) -> Version | None:
    """The version in `2.27.3`, or None for anything else."""
    match = _DOTTED.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))
