"""A table by axes: one row per cell, the best cell of every objective set off and named."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reports.lint.pairs import devices_of, problem
from reports.posts.entries import PostEntry
from reports.posts.gathered import Gathered
from reports.renderers import markdown, quantity
from reports.renderers.table import Row, Table, folded

# Objective: title of the column, whether less is better.
_OBJECTIVES = {
    "ms per step": True,
    "tokens/s": False,
    "TFLOP/s per device": False,
    "MFU (%)": False,
    "allocated peak (MiB)": True,
    "ledger peak (MiB)": True,
    "RSS (MiB)": True,
}
_MOST_AXES = 6


def matrix(found: Gathered) -> str:
    """Markdown for GitHub."""
    entries = [one for one in found.entries if any(one.numbers.values())]
    axes = _varying(entries)
    numbers = [
        name
        for name in dict.fromkeys(name for one in entries for name in one.numbers)
        if any(one.numbers.get(name) is not None for one in entries)
    ]
    best = {(name, at) for name in numbers for at in _best(entries, name)}
    first = 1 + len(axes)
    rows = [
        Row(
            (
                entry.name,
                *(entry.axes.get(axis, quantity.MISSING) for axis in axes),
                *(_number(name, entry.numbers.get(name)) for name in numbers),
            ),
            best=frozenset(
                first + column for column, name in enumerate(numbers) if (name, at) in best
            ),
        )
        for at, entry in enumerate(entries)
    ]
    table, constant = folded(Table.of(("cell", *_titles(axes), *numbers), rows, left=first))
    parts = [f"### {markdown.escape(found.title)}", markdown.table(table)]
    if constant:
        parts.append(f"In every row: {markdown.escape(constant)}.")
    if best:
        words = "Best cell by objective, bold in the table, among cells of one problem:"
        parts.append("\n".join([words, "", *_told(entries, numbers, best)]))
    return "\n\n".join(parts) + "\n"


def _told(
    entries: Sequence[PostEntry], numbers: Sequence[str], best: Collection[tuple[str, int]]
) -> list[str]:
    """A bullet per problem with its best cells."""
    found: dict[str, list[str]] = {}
    for at, entry in enumerate(entries):
        for name in numbers:
            if (name, at) in best:
                shown = f"{markdown.escape(name)} **{markdown.escape(entry.name)}**"
                value = _number(name, entry.numbers[name])
                found.setdefault(_problem(entry), []).append(f"{shown} ({value})")
    return [f"- {markdown.escape(of)}: {', '.join(own)}" for of, own in found.items()]


def _problem(entry: PostEntry) -> str:
    _, model, seq_len, batch = problem(entry.evidence)
    known = (
        model,
        seq_len and f"sequence {seq_len:,}",
        batch and f"batch {batch:,}",
        (count := devices_of(entry.evidence)) and f"{count:,} devices",
    )
    return ", ".join(str(one) for one in known if one) or "not stated"


def _varying(entries: Sequence[PostEntry]) -> list[str]:
    """Axes with several values; of those that always change together the first."""
    found: dict[tuple[int, ...], str] = {}
    for axis in dict.fromkeys(axis for entry in entries for axis in entry.axes):
        values = [entry.axes.get(axis, quantity.MISSING) for entry in entries]
        alike = tuple(map(values.index, values))
        if any(alike):
            found.setdefault(alike, axis)
    return list(found.values())[:_MOST_AXES]


def _titles(axes: Sequence[str]) -> list[str]:
    """Without the section of a setting, where that is enough to tell them apart."""
    short = [axis.rpartition(".")[2] for axis in axes]
    alone = [short.count(one) == 1 and one != "name" for one in short]
    return [
        one if single else axis.removesuffix(".name")
        for one, axis, single in zip(short, axes, alone, strict=True)
    ]


def _best(entries: Sequence[PostEntry], name: str) -> list[int]:
    """Of every problem the one nobody beats; none where all are equal."""
    if name not in _OBJECTIVES:
        return []
    problems: dict[object, dict[int, float]] = {}
    for at, entry in enumerate(entries):
        value = entry.numbers.get(name)
        if value is not None:
            key = (*problem(entry.evidence), devices_of(entry.evidence))
            problems.setdefault(key, {})[at] = value
    choose = min if _OBJECTIVES[name] else max
    return [
        choose(known, key=lambda at: known[at])
        for known in problems.values()
        if len(set(known.values())) > 1
    ]


def _number(name: str, value: float | None) -> str:
    if value is None:
        return quantity.MISSING
    return quantity.loss(value) if name == "loss" else quantity.significant(value)
