"""The first collective in which ranks that wait for each other differ.

Each rank that hangs has written what it issued (`bench.worker.collective_log`). Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.store.layout import ISSUED_GLOB, rank_of
from bench.store.reading import read_json_object

_RANKS_SHOWN = 8


@dataclass(frozen=True)
class Issued:
    """issued: collectives of a rank. latest: the last ones by number. unfinished: NCCL's word."""

    issued: int
    latest: Mapping[int, str]
    unfinished: str = ""


def desync(logs: Path) -> str:
    """In a sentence; empty if no rank has left such a file."""
    issued = {}
    for file in sorted(logs.glob(ISSUED_GLOB)):
        document = read_json_object(file, []) or {}
        rank, latest = rank_of(file), document.get("latest")
        if rank is not None and isinstance(latest, list):
            issued[rank] = Issued(
                int(document.get("issued", 0)),
                {int(number): str(words) for number, words in latest},
                str(document.get("unfinished", "")),
            )
    return describe(dict(sorted(issued.items())))


def describe(ranks: Mapping[int, Issued]) -> str:
    """The first collective that ranks do not share, and who issued what."""
    if not ranks:
        return ""
    first = max(min(progress.latest, default=1) for progress in ranks.values())
    last = max(progress.issued for progress in ranks.values())
    unfinished = "".join(
        f"; rank {rank} has not ended {issued.unfinished}"
        for rank, issued in list(ranks.items())[:_RANKS_SHOWN]
        if issued.unfinished
    )
    for number in range(first, last + 1):
        by_words: dict[str, list[int]] = {}
        for rank, issued in ranks.items():
            words = (
                f"issued {issued.latest[number]}" if number in issued.latest else _behind(issued)
            )
            by_words.setdefault(words, []).append(rank)
        if len(by_words) > 1:
            each = ", ".join(
                f"rank{'s' if len(those) > 1 else ''} {_listed(those)} {words}"
                for words, those in by_words.items()
            )
            return f"ranks differ in collective {number}: {each}{unfinished}"
    (rank, issued), *others = ranks.items()
    who = f"ranks {_listed([*ranks])} have" if others else f"rank {rank} has"
    newest = issued.latest.get(last, "none")
    return f"{who} issued {last} collectives, {newest} last{unfinished}"


def _behind(issued: Issued) -> str:
    if not issued.issued:
        return "has issued none"
    return f"issued no more after {issued.issued}, {issued.latest.get(issued.issued, 'unknown')}"


def _listed(ranks: list[int]) -> str:
    more = len(ranks) - _RANKS_SHOWN
    return " and ".join(map(str, ranks[:_RANKS_SHOWN])) + (f" and {more} more" if more > 0 else "")
