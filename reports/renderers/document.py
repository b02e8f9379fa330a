"""A report as data: sections of blocks in plain text. Renderers escape; sections never do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reports.renderers.table import Table, folded

Tone = Literal["plain", "note", "warning", "lead"]


@dataclass(frozen=True)
class Paragraph:
    """Prose; `tone` sets a remark, a warning or the sentence to take away off from the rest.

    title: words before it that stand out.
    """

    text: str
    tone: Tone = "plain"
    title: str = ""


@dataclass(frozen=True)
class Bullets:
    """A list of sentences, each with an optional name before it; below: lines under each."""

    items: tuple[tuple[str, str], ...]
    below: tuple[tuple[str, ...], ...] = ()
    title: str = ""

    @property
    def lists(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Name, sentence and the lines under it."""
        below = self.below or ((),) * len(self.items)
        return [(*item, lines) for item, lines in zip(self.items, below, strict=True)]


@dataclass(frozen=True)
class Facts:
    """Short labelled values: the page's first glance."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class TableBlock:
    """A table with an optional caption."""

    table: Table
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """One `<svg>` element; `name` is also its file name next to the Markdown."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Details:
    """Literal text or blocks, folded away under its title.

    title_alone: all that a terminal shows of it.
    """

    title: str
    text: str = ""
    blocks: tuple[Block, ...] = ()
    title_alone: bool = False


@dataclass(frozen=True)
class Code:
    """Literal lines to copy; language: what Markdown calls them."""

    text: str
    language: str = "sh"


@dataclass(frozen=True)
class Heading:
    """A heading inside a section, or of a document (level 2)."""

    text: str
    level: int = 3


Block = Paragraph | Bullets | Facts | TableBlock | Figure | Details | Code | Heading


@dataclass(frozen=True)
class Section:
    """`anchor` is a fixed word, never taken from a record."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    footer: str


def note(text: str) -> Paragraph:
    """A remark."""
    return Paragraph(text, "note")


def warning(text: str) -> Paragraph:
    """What a reader must not miss."""
    return Paragraph(text, "warning")


def folded_blocks(table: Table, each: str = "row", caption: str = "") -> list[Block]:
    """The table, behind one sentence on the columns that say the same of `each`."""
    shown, alike = folded(table)
    said: list[Block] = [Paragraph(f"In every {each}: {alike}.")] if alike else []
    return [*said, TableBlock(shown, caption)]
