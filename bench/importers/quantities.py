"""Numbers as logs print them: thousands, units, two numbers in one field, per cent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

NUMBER = r"[-+]?(?:nan|inf|\.?\d(?:[\d.,]*[\d.])?(?:e[-+]?\d+)?)"
NOTHING = ("", "-", "--", "—", "–", "n/a", "na", "none", "null")  # noqa: RUF001
"""What stands where there is no value."""
_PART = re.compile(rf"(?P<number>{NUMBER})\s?(?P<unit>%|[a-zµ]+)?", re.IGNORECASE)
_JOIN = re.compile(r"\s*/\s*|\s*\(\s*(?:avg|mean|average)?:?\s*|\s*(?:±|\+/-)\s*", re.IGNORECASE)
_END = re.compile(r"(?:(?:\s*/\s*|\s+per\s+)[a-z]+)*\s*\)?", re.IGNORECASE)
# Of `812 ± 3 ms` the unit is that of both.
_SPREAD = re.compile(r"^([\d.,]+)\s*(±|\+/-)\s*([\d.,]+)\s?([a-zA-Z]+)$")
_WRAPPED = re.compile(r"(?:np\.\w+|tensor)\((.*?)(?:, device=.*)?\)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+")

TABLES: dict[str, Any] = YAML(typ="safe", pure=True).load(
    Path(__file__).with_name("wordings.yaml").read_text(encoding="utf-8")
)
"""What logs call things, and what can be: the file of that name."""
_SUFFIXES: dict[str, float] = TABLES["suffixes"]


@dataclass(frozen=True)
class Quantity:
    """One number of a field. number: None for `3,1`, a decimal comma. unit: "" where none stands.

    is_signed: whether a plus stands before it, as before a difference.
    """

    number: float | None
    unit: str
    is_signed: bool = False

    @property
    def plain(self) -> float | None:
        """With its K, M, G or T; None where it has another unit, per cent apart."""
        if self.number is None or self.unit not in ("", "%", *_SUFFIXES):
            return None
        return _times(self.number, _SUFFIXES.get(self.unit, 1.0))


def number(text: str) -> float | None:
    """A number as logs print it, with commas between thousands; None for `3,1`, a decimal comma."""
    integer = text.partition(".")[0]
    if "," in text and not _THOUSANDS.fullmatch(integer):
        return None
    try:
        return float(integer.replace(",", "") + text[len(integer) :])
    except ValueError:
        return None


def quantities(text: str) -> tuple[Quantity, ...]:
    """The numbers of a field, as `3403.0/3402.1` and `9.5GiB(64.9%)` have two; none of words.

    A number of numpy or torch is unwrapped, and quotes are taken away.
    """
    text = _SPREAD.sub(r"\1\4 ± \3\4", text.strip(" \t'\"`"))
    if wrapped := _WRAPPED.fullmatch(text):
        text = wrapped[1]
    numbers: list[Quantity] = []
    at = 0
    while part := _PART.match(text, at):
        unit = (part["unit"] or "").lower()
        numbers.append(Quantity(number(part["number"]), unit, part["number"].startswith("+")))
        if _END.fullmatch(text, part.end()):
            return tuple(numbers)
        join = _JOIN.match(text, part.end())
        if join is None:
            break
        at = join.end()
    return ()


def units_of(field: str) -> Mapping[str, float]:
    """Units of a field of `ImportedStep`: name in lower case, factor into the field's own."""
    units: dict[str, dict[str, float]] = TABLES["units"]
    return units.get("bytes" if field.endswith("_bytes") else field, {})


def in_field(amount: Quantity, field: str, unit: str) -> float | None:
    """The number in the unit of a field; None where it is no number of this kind.

    unit is that of a number with nothing behind it, "" the field's own. Per cent is none.
    """
    units = units_of(field)
    factor = units[unit.lower()] if unit not in ("", "?") else 1.0
    if amount.unit in units:
        factor = units[amount.unit]
    elif amount.unit in _SUFFIXES and (field, amount.unit) != ("milliseconds", "m"):
        factor *= _SUFFIXES[amount.unit]
    elif amount.unit or unit == "?":
        return None
    return None if amount.number is None else _times(amount.number, factor)


def _times(value: float, factor: float) -> float:
    """The product without what it has behind the digits that stand in the text."""
    return value if factor == 1.0 else float(f"{value * factor:.15g}")
