"""What a text calls a run: the comment, bullet or heading above its lines."""

from __future__ import annotations

import re
from typing import Any

_COMMENT = re.compile(r"^\s{0,8}#{1,6}\s+(?P<text>\S.*?)\s*#*\s*$")
_BULLET = re.compile(r"^\s*(?:[-*+•◦▪‣·○]|\d{1,2}[.)])\s+(?P<text>\S.*?)\s*$")
# Words can stand behind what is bold, and the summary of what folds is a label, too.
_BOLD = re.compile(r"^\s*(?P<text>(?:\*\*|__(?!\w+__))[^*_\s].*?(?:\*\*|__).{0,80}?)\s*:?\s*$")
_TAG = re.compile(r"^\s*(?:<details>\s*)?<(summary|b|strong|h\d)>(?P<text>.+?)</\1>.*$")
_TAGS = re.compile(r"</?[a-z]\w*[^>]*>")
# A heading of a page that was pasted has lost its mark, and stands alone between empty lines.
_PLAIN = re.compile(r"^(?P<text>[A-Z][^|=\[\]{}]{2,98}[^|=\[\]{}.,;])\s*$")
_LETTER = re.compile(r"[^\W\d_]{2}")
_BRACKETS = re.compile(r"\(([^()]+)\)")
_QUOTE = re.compile(r"^\s*(?:>\s?)+")
_MARKS = re.compile(r"[`*]+|__")

_MODEL = re.compile(r"\b(llama[\s-]?(?:3(?:\.\d)?[\s-]?)?\d+(?:\.\d+)?\s?b)\b", re.IGNORECASE)
_SEQUENCE = re.compile(
    r"(?:seq(?:uence)?[\s_-]?len(?:gth)?[\s=:]*(?P<a>[\d,]*\d)\s?(?P<ak>k)?\b(?!\.\d))"
    r"|(?:(?<![\d.,])(?P<b>\d[\d,]*)\s?(?P<bk>k)?\s*seq(?:uence)?[\s_-]?len)",
    re.IGNORECASE,
)

_DEVICE = (
    r"(?P<device>(?:(?:NVIDIA|AMD|Intel)\s)?(?:Instinct\s)?"
    r"(?:A(?:10G?|30|40|100|800)|H(?:20|100|200|800)|B[123]00|G[BH][23]00|L40S?|L4|V100"
    r"|MI\d{3}[AX]?|RTX\s?\w{4,5}|TPU\sv\d\w?)"
    r"(?:[\s-](?:SXM\d?|PCIe|NVL\d*|HBM\d\w?|\d{2,3}\s?GB))*)s?\b"
)
_THINGS = r"(?:GPUs?|ranks|devices|accelerators|processes|chips)\b"
_TIMES = r"\s*[x\u00d7*]\s*"
_COUNT = r"(?<![\w.,-])(?P<count>\d{1,6})"
_EACH = r"(?:\s(?:per|a|each|/)\s?node|/node|\seach)"
# How people write how many devices there are, and which: the first of these that a text has.
_DEVICES = tuple(
    re.compile(form, re.IGNORECASE)
    for form in (
        # nodes, and devices of each
        rf"(?<![\w.,-])(?P<nodes>\d{{1,5}})\snodes?(?:{_TIMES}|\s(?:of|with)\s)(?P<count>\d{{1,3}})"
        rf"(?:(?:{_TIMES}|\s){_DEVICE}|\s{_THINGS}|(?![\w.]))",
        rf"(?<![\w.,-])(?P<nodes>\d{{1,5}})\snodes?\W+(?P<count>\d{{1,3}})(?:{_TIMES}|\s)"
        rf"(?:{_DEVICE}(?:\s{_THINGS})?|{_THINGS}){_EACH}",
        rf"(?<![\w.,-])(?P<nodes>\d{{1,5}}){_TIMES}(?P<count>\d{{1,3}})(?:{_TIMES}|\s)"
        rf"(?:{_DEVICE}|{_THINGS})",
        # all devices
        rf"{_COUNT}(?:{_TIMES}|\s){_DEVICE}(?!\s?(?:{_THINGS})?{_EACH})",
        rf"{_DEVICE}{_TIMES}(?P<count>\d{{1,6}})(?![\w.])",
        rf"{_COUNT}\s{_THINGS}(?!{_EACH})",
        r"\b(?:world[\s_-]?size|(?:n|num_?)gpus?|gpus)\s?[=:]?\s?(?P<count>\d{1,6})(?![\w.])",
    )
)
_ONLY_DEVICE = re.compile(rf"\b{_DEVICE}", re.IGNORECASE)


def label_of(line: str, *, alone: bool = False) -> str | None:
    """The label that the line is, None if it is none. alone: between empty lines."""
    bare = _QUOTE.sub("", line)
    forms = (_COMMENT, _BULLET, _BOLD, _TAG, *((_PLAIN,) if alone else ()))
    for form in forms:
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
    """Fields of `Workload` that a label states: `Llama 8B @ SeqLen 1K`."""
    stated: dict[str, Any] = {}
    if model := _MODEL.search(label):
        stated["model"] = model[1]
    if sequence := _SEQUENCE.search(label):
        text, thousand = (sequence["a"] or sequence["b"]), (sequence["ak"] or sequence["bk"])
        stated["seq_len"] = int(text.replace(",", "")) * (1024 if thousand else 1)
    return stated | _devices_of(label)


def _devices_of(label: str) -> dict[str, Any]:
    """`8x H100`, `2 nodes x 8`, `world size 16`: nothing where a label has two such counts."""
    for form in _DEVICES:
        if matches := list(form.finditer(label)):
            said = matches[0].groupdict()
            counts = {
                int(match["count"]) * int(match.groupdict().get("nodes") or 1) for match in matches
            }
            device = said.get("device") or _device_of(label)
            ranks = {"ranks": counts.pop()} if len(counts) == 1 else {}
            return ranks | ({"device": device} if device else {})
    device = _device_of(label)
    return {"device": device} if device else {}


def _device_of(label: str) -> str | None:
    names = {match["device"] for match in _ONLY_DEVICE.finditer(label)}
    return names.pop() if len(names) == 1 else None


def as_name(label: str, most: int = 48) -> str:
    """The label as part of a name: `HFSDP 4-Node` is `hfsdp-4-node`."""
    words = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    return words if len(words) <= most else words[:most].rpartition("-")[0] or words[:most]
