"""What an arm is asked to be, before anything of it is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ArmRequest:
    """One named side of a comparison.

    git: a ref of `repo` (None: the repository of this checkout). checkout: a folder as it is.
    With neither, the working tree that this process runs from, as it is. python: interpreter of
    the ranks. packages: what pip installs for this arm alone, as pip understands it. settings: of
    a run, full path to value, that this arm's runs have on top of their cell's.
    """

    name: str
    git: str | None = None
    repo: Path | None = None
    checkout: Path | None = None
    python: Path | None = None
    packages: tuple[str, ...] = ()
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    @property
    def has_own_code(self) -> bool:
        """Whether its ranks run other code than the working tree, or may."""
        return bool(self.git or self.checkout or self.python or self.packages)

    def described(self) -> str:
        """The arm in a few words, without any path."""
        parts = []
        if self.git is not None:
            parts.append(f"git {self.git}" + (f" of {self.repo.name}" if self.repo else ""))
        elif self.checkout is not None:
            parts.append(f"checkout {self.checkout.name}")
        else:
            parts.append("working tree")
        if self.python is not None:
            parts.append("its own interpreter")
        parts += [Path(pin).name for pin in self.packages]
        parts += [f"{path}={value}" for path, value in self.settings.items()]
        return ", ".join(parts)
