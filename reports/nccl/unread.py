"""What was not understood, counted by shape, so that nothing is left out silently."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

_MOST_SHAPES: Final = 500
_SHOWN_CHARACTERS: Final = 160
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


@dataclass
class Unread:
    """Counts of lines that carry no fact.

    ignored: text without a NCCL prefix, and NCCL messages that are known to carry no evidence.
    damaged: pieces of lines that were cut, glued or overwritten. overlong: lines beyond the longest
    that is read. unknown: NCCL messages of other forms, by shape (numbers replaced).
    """

    ignored: int = 0
    damaged: int = 0
    overlong: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    damaged_examples: list[str] = field(default_factory=list)

    @property
    def unknown_lines(self) -> int:
        """NCCL messages of unknown form."""
        return self.unknown.total()

    def add_unknown(self, message: str) -> None:
        """Count a message by its shape."""
        shape = _NUMBER.sub("#", message)[:_SHOWN_CHARACTERS]
        if shape not in self.unknown and len(self.unknown) >= _MOST_SHAPES:
            shape = "(other forms)"
        self.unknown[shape] += 1
        self.examples.setdefault(shape, message[:_SHOWN_CHARACTERS])

    def add_damaged(self, text: bytes) -> None:
        """Count a piece of a line that cannot be trusted."""
        self.damaged += 1
        if len(self.damaged_examples) < 3:  # noqa: PLR2004 - enough to recognise the damage
            self.damaged_examples.append(text[:_SHOWN_CHARACTERS].decode("utf-8", "replace"))

    def add(self, other: Unread) -> None:
        """Take over the counts of another stretch."""
        self.ignored += other.ignored
        self.damaged += other.damaged
        self.overlong += other.overlong
        self.unknown.update(other.unknown)
        self.examples = {**other.examples, **self.examples}
        self.damaged_examples = (self.damaged_examples + other.damaged_examples)[:3]
