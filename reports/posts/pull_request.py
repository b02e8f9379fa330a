"""The block of a pull request: labels, lines, deltas, doubts and commands, below sixty lines."""

from __future__ import annotations

from collections.abc import Sequence

from reports.compare.change import less_one
from reports.compare.text import interval_text
from reports.posts.entries import PostEntry
from reports.posts.gathered import Delta, Gathered
from reports.renderers import markdown, quantity
from reports.renderers.table import Table, folded

MOST_LINES = 59
_TITLES = (
    "run | <against | time | interval | throughput | ratio | memory | loss | grad norm | <runs"
)
_MOST_DELTAS = 10
_MOST_DOUBTS = 5
_MOST_COMMANDS = 3
_MOST_KERNELS = 4
_SENTENCE = 220


def pull_request(found: Gathered) -> str:
    """Markdown for GitHub; what has no room is counted."""
    parts = [f"### {markdown.escape(found.title)}"]
    if found.deltas:
        has_live = any(delta.live is not None for delta in found.deltas)
        titles = _TITLES.replace("memory", "memory | live storage") if has_live else _TITLES
        rows = [_row(delta, has_live=has_live) for delta in found.deltas[:_MOST_DELTAS]]
        table, alike = folded(Table.of(titles, rows))
        parts.append(markdown.table(table))
        parts += [f"In every row: {markdown.escape(alike)}."] if alike else []
        more = len(found.deltas) - _MOST_DELTAS
        parts += [f"and {quantity.counted(more, 'more comparison')}"] if more > 0 else []
    if found.doubts:
        shown = _bullets(found.doubts, _MOST_DOUBTS, "doubt")
        parts.append("\n".join(["**Trade-offs and unlike things**", *shown]))
    if found.parity:
        parts.append(f"**Parity** {markdown.escape(_short(found.parity, 3 * _SENTENCE))}")
    kernels = [f"{entry.name}: {entry.kernels}" for entry in found.entries if entry.kernels]
    if kernels:
        parts.append("\n".join(["**NCCL**", *_bullets(kernels, _MOST_KERNELS, "run")]))
    commands = list(dict.fromkeys(entry.reproduce for entry in found.entries))
    tail = markdown.code_block("\n".join(commands[:_MOST_COMMANDS]), "sh")
    tail = f"**Reproduce**\n\n{tail}"
    room = MOST_LINES - _count([*parts, tail]) - 6
    parts.append(_evidence(_in_order(found), room))
    return "\n\n".join([*parts, tail]) + "\n"


def _evidence(entries: Sequence[PostEntry], room: int) -> str:
    lines: list[str] = []
    shown = 0
    for entry in entries:
        own = [f"# {entry.title}", *entry.lines]
        if shown and len(lines) + len(own) > room:
            break
        lines += own
        shown += 1
    left = len(entries) - shown
    if left:
        lines.append(f"# and {quantity.counted(left, 'more run')}")
    return "**Evidence**\n\n" + markdown.code_block("\n".join(lines), "text")


def _in_order(found: Gathered) -> list[PostEntry]:
    """What is compared first, then the rest."""
    compared = [name for delta in found.deltas for name in (delta.base, delta.head)]
    first = {name: at for at, name in enumerate(dict.fromkeys(compared))}
    return sorted(found.entries, key=lambda entry: first.get(entry.name, len(first)))


def _row(delta: Delta, *, has_live: bool) -> tuple[str, ...]:
    return (
        delta.head,
        delta.base,
        _unbroken(quantity.change(delta.time, 2)),
        _unbroken(interval_text(delta.interval)),
        _unbroken(quantity.change(less_one(delta.ratio), 2)),
        quantity.ratio(delta.ratio),
        _unbroken(quantity.change(delta.memory, 2)),
        *([_unbroken(quantity.change(delta.live, 2))] if has_live else []),
        _unbroken(quantity.change(delta.loss, 3)),
        _unbroken(quantity.change(delta.norm, 2)),
        delta.runs,
    )


def _unbroken(text: str) -> str:
    """A number stays on the line of its sign of per cent."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _bullets(texts: Sequence[str], most: int, noun: str) -> list[str]:
    """The first texts, and how many more there are."""
    shown = [f"- {markdown.escape(_short(text))}" for text in texts[:most]]
    more = len(texts) - most
    return shown + ([f"- and {quantity.counted(more, f'more {noun}')}"] if more > 0 else [])


def _short(text: str, most: int = _SENTENCE) -> str:
    return text if len(text) <= most else text[: most - 3].rstrip(" .,;:") + " ..."


def _count(parts: Sequence[str]) -> int:
    return "\n\n".join(parts).count("\n") + 1
