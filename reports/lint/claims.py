"""What the prose beside runs claims: per cent, times faster, parity, and what it names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reports.lint.evidence import Evidence

Kind = Literal["time", "throughput", "speed-up", "memory"]
_ABOVE = 6
"""Lines of text, at most, between a claim and the run that it is about."""

# `1,000 %` and, of a decimal comma, `11,1 %`: neither is 0 or 1 per cent.
_AMOUNT = r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?)"
_PERCENT = re.compile(
    r"(?P<about>~|≈|about |around |roughly |nearly |circa )?\s*[+\-\u2212]?(?<![\d.,])"
    rf"{_AMOUNT}\s?%"
)
_TIMES = re.compile(rf"(?<![\w.,]){_AMOUNT}\s?[x×](?![\w/])")  # noqa: RUF001
_NUMBER = re.compile(r"[+\-]?\d+(?:\.\d+)?[x×]?")  # noqa: RUF001
_SPEED_UP = re.compile(r"speed\s?-?\s?up", re.IGNORECASE)
_WORDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("memory", re.compile(r"\bmemory\b|\bvram\b|\ballocat|\bsav(?:e|ing)", re.IGNORECASE)),
    (
        "time",
        re.compile(
            r"step time|iteration time|latency|\boverhead|\bslow(?:er|down)|time reduction|"
            r"less time|regress",
            re.IGNORECASE,
        ),
    ),
    ("throughput", re.compile(r"throughput|tokens?/s|tflop", re.IGNORECASE)),
    (
        "speed-up",
        re.compile(r"speed\s?-?\s?up|faster|improve|performance|\bgain", re.IGNORECASE),
    ),
)
_NAME = re.compile(r"\s*(?:#+\s|\*\*)")
"""A line that only names a run; a bullet is a sentence about it."""
_PARITY = re.compile(r"\bparity\b|\bidentical\b|\bequivalent\b|\bmatch(?:es)?\b", re.IGNORECASE)
_SPREAD = re.compile(r"±|std|stddev|standard deviation|interval|noise floor|spread", re.IGNORECASE)
CHANGES = re.compile(
    r"less|lower|fewer|more|higher|sav(?:e|ing)|reduc|cut|decreas|increas|drop|grow", re.IGNORECASE
)
"""Words of a number that is a change, not a share."""
NAMED = {
    "memory": _WORDS[0][1],
    "time": re.compile(r"slow|speed|faster|throughput|step time|overhead|perf", re.IGNORECASE),
    "loss": re.compile(r"loss|accuracy|converge", re.IGNORECASE),
}


@dataclass(frozen=True)
class Claim:
    """A number that is claimed: of per cent, or of times. low, high: what rounds to it."""

    line: int
    text: str
    kind: Kind
    unit: Literal["%", "x"]
    number: float
    half: float

    def fits(self, value: float | None) -> bool:
        """Whether a computed number, without its sign, is the claimed one within its digits."""
        return value is not None and abs(abs(value) - self.number) <= self.half


@dataclass(frozen=True)
class Beside:
    """The prose that is about one run: its label and the text directly above and below."""

    text: str
    claims: tuple[Claim, ...]
    parity: tuple[int, ...]
    has_spread: bool

    def names(self, what: str) -> bool:
        """Whether the prose says anything of memory, time or loss."""
        return NAMED[what].search(self.text) is not None

    def states_sequence(self, seq_len: int) -> bool:
        """Whether the prose names this length of a sequence."""
        number = rf"(?:{seq_len}|{seq_len // 1024}\s?k)"
        form = rf"\b{number}\s*seq|seq\w*[\s_-]*(?:len\w*)?[\s=:]*{number}\b"
        return re.search(form, self.text, re.IGNORECASE) is not None


def beside(run: Evidence, runs: Sequence[Evidence], lines: Sequence[str]) -> Beside:
    """What the text says about a run. lines: the text, none where only records are known.

    The text goes from the run above to the run's own lines. Where nothing but a label stands there,
    the runs belong together, and what is above the first of them is about all of them.
    """
    if not lines or not run.lines:
        return _read([(0, run.label)])
    first = run.begin or min(run.lines)
    own = _in_columns(run, lines)
    text: list[tuple[int, str]] = []
    while True:
        start = max(
            (max(one.lines) for one in runs if one.lines and max(one.lines) < first), default=0
        )
        between = [(at, lines[at - 1]) for at in range(start + 1, first) if lines[at - 1].strip()]
        text = [(at, line) for at, line in between if " NCCL INFO " not in line][-_ABOVE:] + text
        above = next((one for one in runs if one.lines and max(one.lines) == start), None)
        if above is None or len(between) > 1 or any(not _NAME.match(line) for _, line in between):
            return _read(text, own)
        first = above.begin or min(above.lines)


def _in_columns(run: Evidence, lines: Sequence[str]) -> tuple[Claim, ...]:
    """What columns of the run's own row claim; a bare number of a speed-up is of times."""
    at = max(run.lines)
    found: list[Claim] = []
    for name, said in run.columns.items():
        cells = [cell for cell in _NUMBER.findall(lines[at - 1]) if said in (_number(cell), cell)]
        if not cells:
            continue
        percent = f"{cells[0]}%" in lines[at - 1].replace(" %", "%") or "%" in name
        is_bare = cells[0][-1].isdigit() and not percent
        if is_bare and not _SPEED_UP.search(name):
            continue
        unit = "%" if percent else "x" if is_bare else ""
        found += _claims(at, f"{name.replace('%', '')} {cells[0]}{unit}")
    return tuple(found)


def _number(cell: str) -> float | None:
    return float(cell) if cell[-1].isdigit() else None


def _read(text: Sequence[tuple[int, str]], own: tuple[Claim, ...] = ()) -> Beside:
    claims = (*own, *(claim for at, line in text for claim in _claims(at, line)))
    parity = tuple(at for at, line in text if _PARITY.search(line))
    whole = " ".join(line for _, line in text)
    return Beside(whole, claims, parity, bool(_SPREAD.search(whole)))


def _claims(at: int, line: str) -> list[Claim]:
    found = []
    kind = next((kind for kind, words in _WORDS if words.search(line)), None)
    speed = next((kind for kind, words in _WORDS[1:] if words.search(line)), None)
    if kind is None:
        return []
    for match in _PERCENT.finditer(line):
        clause = line[max(0, match.start() - 40) : match.end() + 40]
        own: Kind = next((one for one, words in _WORDS if words.search(clause)), kind)
        number = _plain(match["number"])
        half = _half(number) * (2 if match["about"] else 1)
        found.append(Claim(at, line.strip(), own, "%", float(number), half))
    for match in _TIMES.finditer(line) if speed is not None else ():
        number = _plain(match["number"])
        found.append(Claim(at, line.strip(), "speed-up", "x", float(number), _half(number)))
    return found


def _plain(text: str) -> str:
    """Without commas between thousands, and with a point for a decimal one."""
    thousands = re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", text)
    return text.replace(",", "" if thousands else ".")


def _half(text: str) -> float:
    """Half a unit of the last digit that is printed."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9
