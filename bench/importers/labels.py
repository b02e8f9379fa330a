"""What a text calls a run: the comment, bullet or heading above its lines."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

from bench.importers.quantities import TABLES, Quantity, quantities

*_MARKED, _PLAIN = (re.compile(form) for form in TABLES["labels"])
_TAGS = re.compile(r"</?[a-z]\w*[^>]*>")
_LETTER = re.compile(r"[^\W\d_]{2}")
_BRACKETS = re.compile(r"\(([^()]+)\)")
_QUOTE = re.compile(r"^\s*(?:>\s?)+")
_MARKS = re.compile(r"[`*]+|__")

_K, _LEAST = 1024, 64


@functools.cache
def wordings() -> SimpleNamespace:
    """The file of that name: `names` of numbers, and patterns of labels and of summaries."""
    table = TABLES
    number = r"\d(?:[\d,]*\d)?(?:\s?k)?"
    numbers = (
        rf"(?<![a-z])(?:{words})\s*(?:[=:]|of\b|is\b)?\s*(?P<{name}>{number}){table['end']}"
        rf"|(?<![\w.,-])(?P<{name}_before>{number})[\s-]?(?:{words})(?![a-z])"
        for name, words in table["numbers"].items()
        if name not in ("ranks", "batch")  # alone in a text, it may be a word
    )
    names = "|".join(table["numbers"].values())
    named = rf"(?:the\s+)?(?:(?:{names})\s*(?:[=:]|of\b|is\b)?\s*)?"
    words = {"NUMBER": number, "NAMED": named}
    negated = (re.sub("|".join(words), lambda m: words[m[0]], text) for text in table["negated"])
    parts = re.compile("|".join(table["parts"]))
    forms = [parts.sub(lambda m: table["parts"][m[0]], form) for form in table["devices"]]
    texts = {
        "numbers": "|".join(numbers),
        "model": table["model"],
        "device": rf"\b{table['parts']['DEVICE']}",
        "summaries": table["summaries"],
    }
    return SimpleNamespace(
        names=table["numbers"],
        at_step=re.compile(table["at_step"]),
        negated=[re.compile(text, re.IGNORECASE) for text in negated],
        devices=[re.compile(form, re.IGNORECASE) for form in forms],
        **{name: re.compile(text, re.IGNORECASE) for name, text in texts.items()},
    )


def label_of(line: str, *, alone: bool = False) -> str | None:
    """The label that the line is, None if it is none. alone: between empty lines."""
    bare = _QUOTE.sub("", line)
    for form in (*_MARKED, *((_PLAIN,) if alone else ())):
        match = form.match(bare)
        if match is not None and _LETTER.search(match["text"]):
            return _MARKS.sub("", _TAGS.sub("", match["text"])).rstrip(" :")[:300]
    return None


def stated_in(label: str) -> tuple[str, ...]:
    """What the label says in brackets."""
    return tuple(text.strip() for text in _BRACKETS.findall(label))


def without_brackets(label: str) -> str:
    """The label without what it says in brackets; all of it where nothing else is there."""
    short = re.sub(r"\s+", " ", _BRACKETS.sub("", label)).strip(" :-")
    return short or label


def facts_of(label: str) -> dict[str, Any]:
    """Fields of `Workload` that a label states: `Llama 8B @ SeqLen 1K`.

    Of `not seq 4096 but 2048` the sequence length is 2048, of `not seq 4096` it is not known.
    """
    of_another, alone = wordings().negated
    label = alone.sub("", of_another.sub(r"\g<before>\g<value>\g<behind>", label))
    stated: dict[str, Any] = {}
    if model := wordings().model.search(label):
        stated["model"] = model[1]
    counts: dict[str, set[int | None]] = {}
    for match in wordings().numbers.finditer(label):
        field, text = str(match.lastgroup).removesuffix("_before"), match[str(match.lastgroup)]
        counts.setdefault(field, set()).add(as_count(field, match[0], quantities(text)[0]))
    stated |= {field: values.pop() for field, values in counts.items() if len(values) == 1}
    stated |= _devices_of(label)
    return {field: fact for field, fact in stated.items() if fact is not None}


def as_count(field: str, name: str, amount: Quantity) -> int | None:
    """Such a number: 8K of a length are 8192, and a few of what is called `seq` alone are none."""
    is_length = field == "seq_len"
    if amount.number is None or (amount.unit and (is_length, amount.unit) != (True, "k")):
        return None
    count = int(amount.number * (_K if amount.unit else 1))
    return None if is_length and "len" not in name.lower() and count < _LEAST else count


def _devices_of(label: str) -> dict[str, Any]:
    """`8x H100`, `2 nodes x 8`, `world size 16`: nothing where a label has two such counts."""
    names = {match["device"] for match in wordings().device.finditer(label)}
    forms = (list(form.finditer(label)) for form in wordings().devices)
    said = [match.groupdict() for match in next(filter(None, forms), [])]
    counts = {int(groups["count"]) * int(groups.get("nodes") or 1) for groups in said}
    device = next((groups["device"] for groups in said[:1] if groups.get("device")), None)
    device = device or (names.pop() if len(names) == 1 else None)
    ranks = {"ranks": counts.pop()} if len(counts) == 1 else {}
    return ranks | ({"device": device} if device else {})


def as_name(label: str, most: int = 48) -> str:
    """The label as part of a name: `HFSDP 4-Node` is `hfsdp-4-node`."""
    texts = (label, label.rpartition(": ")[2])  # of a heading and a row the row tells runs apart
    words, last = (re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") for text in texts)
    words = last if len(words) > most and last else words
    return words if len(words) <= most else words[:most].rpartition("-")[0] or words[:most]
