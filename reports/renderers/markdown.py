"""Markdown that shows names literally, whatever is in them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape as html_escape

from reports.renderers.document import (
    Block,
    Bullets,
    Code,
    Details,
    Document,
    Facts,
    Figure,
    Heading,
    Paragraph,
    TableBlock,
)
from reports.renderers.printable import printable
from reports.renderers.table import Table

# GitHub interprets HTML, tables, links, emphasis, mentions and issue references.
_SPECIAL = re.compile(r"[\\`*\[\]~$]")
_OUTER_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "@": "&#64;", "#": "&#35;"}
_ENTITY = re.compile("[" + "".join(_ENTITIES) + "]")
_FENCE = re.compile(r"`{3,}")


def escape(text: str) -> str:
    """`text` as inline Markdown that renders as exactly this text, on one line."""
    plain = printable(text)
    quoted = _ENTITY.sub(lambda match: _ENTITIES[match.group()], plain)
    # An escape that an entity brought in (its "#") is not seen again: order matters.
    slashed = _SPECIAL.sub(lambda match: "\\" + match.group(), quoted)
    slashed = _OUTER_UNDERSCORE.sub(lambda match: match.group().replace("_", r"\_"), slashed)
    return slashed.replace("://", "&#58;//").replace("www.", "www&#46;")


def table(data: Table) -> str:
    """A GitHub table; a row that stands out has its first cell in bold."""
    head = "| " + " | ".join(escape(column.title) for column in data.columns) + " |"
    rule = "|" + "|".join("---:" if c.align == "right" else ":---" for c in data.columns) + "|"
    lines = [head, rule]
    for row in data.rows:
        cells = [escape(cell) or " " for cell in row.cells]
        for index in row.best:
            cells[index] = f"**{cells[index]}**"
        if row.kind == "reference":
            cells[0] = f"**{cells[0]}**"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def code_block(text: str, language: str = "") -> str:
    """A fenced block, with a fence longer than any inside `text`."""
    longest = max((len(fence_inside) for fence_inside in _FENCE.findall(text)), default=2)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def document(of: Document) -> str:
    """The whole report; figures are links to `figures/<name>.svg`."""
    parts = [f"# {escape(of.title)}", *([escape(of.subtitle)] if of.subtitle else [])]
    for section in of.sections:
        parts += [f"## {escape(section.title)}", blocks(section.blocks)]
    parts.append(f"---\n\n{escape(of.footer)}")
    return "\n\n".join(parts) + "\n"


def blocks(of: Iterable[Block]) -> str:
    """Blocks with an empty line between them."""
    return "\n\n".join(_block(block) for block in of)


def _block(block: Block) -> str:
    match block:
        case Paragraph(text, tone, title):
            marks = {"plain": "{}", "lead": "**{}**"}
            shown = _title(title, " ") + marks.get(tone, "> {}").format(escape(text))
        case Heading(text, level):
            shown = f"{'#' * level} {escape(text)}"
        case Bullets():
            items = "\n".join(_item(*item) for item in block.lists)
            shown = _title(block.title, "\n") + items
        case Facts(items):
            shown = table(Table.of(("", " "), items, left=2))
        case TableBlock(data, caption):
            shown = table(data) + (f"\n\n{escape(caption)}" if caption else "")
        case Figure(name, _, caption):
            shown = f"![{escape(caption)}](figures/{name}.svg)"
        case Code(text, language):
            shown = code_block("\n".join(map(printable, text.splitlines())), language)
        case Details(title, text, inner):
            summary = html_escape(printable(title))
            body = blocks(inner) if inner else code_block(text, "json")
            shown = f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"
    return shown


def _title(title: str, end: str) -> str:
    return f"**{escape(title)}**{end}" if title else ""


def _item(name: str, text: str, below: Iterable[str]) -> str:
    first = f"**{escape(name)}**: {escape(text)}" if name else escape(text)
    return "\n".join([f"- {first}", *(f"  - {escape(line)}" for line in below)])
