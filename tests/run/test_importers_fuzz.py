"""Damaged texts: each gives runs, a refusal or exit 3, and no number that stands nowhere in it."""

from __future__ import annotations

import dataclasses
import random
import re
import signal
from types import FrameType

import pytest
from format_texts import MEGATRON, SAMPLES, TRAINER

from bench.errors import NothingMeasuredError, UsageError
from bench.importers.table import read_text
from bench.workload import ImportedRun

SEED = 48
DAILY, NIGHTLY, BATCH = 400, 10_000, 100
FRAGMENTS = [text for text, _ in SAMPLES.values()] + [
    "\n".join(MEGATRON.format(at, at, f"{800 + at}/799.5", "99 (avg 98)", 2.5, 1) for at in (1, 2)),
    '"Step","main - loss","main - loss__MIN","pr - loss"\n"0","8.5","8.0","7.5"\n"1","","","7.25"',
    "| Run | Steps | Step time (s) |\n|-|-:|-|\n| main | 50 | 1.5 |\n| pr | 50 | 2 |",
    "| | main | PR |\n|-|-|-|\n| Step time (ms) | 901.5 | 812 ms |\n| loss | 2.5 | +3% |",
    "step,loss,step time (ms),note\n1,2.5,250,a\n2,2.25,251,b",
    "# step loss grad_norm\n1 8.5 1.25\n2 7.75 1.5",
    "1 8.5\n2 7.75",
    '{"max_steps": 9, "log_history": [{"step": 5, "loss": 2.5}, {"step": 6, "eval_loss": 2.0}]}',
    '{"lm loss": {"start_step": 1, "end_step": 2, "values": {"1": 2.5, "2": "nan", "x": 3}}}',
    "  world_size ...... 8\n  num_layers ...... 4\n number of parameters on (t, p) rank (0, 0): 81",
    "[Rank 0] (after 2 iterations) memory (MB) | allocated: 10.50 | max allocated: 20.25",
    "# before (fp32)", "**after** on 8x H100", "<summary>log</summary>", "```", "words", "",
    TRAINER.format(1.5, "nan", 0.1) + " " + TRAINER.format(1.25, 4.5, 0.2),
]  # fmt: skip
JUNK = ["|", "||", "\x1b[31m", "[0m", "nan", "-inf", "1e999", "9" * 40, "٣", "½", "\0", "\r", "\t"]
JUNK += ["`", "{", "}", '"', "'", ",", ", ", "/", " (avg ", "%", "GiB", "K", "step", "loss", ": "]
JUNK += ["=", "+", "-", "\n", "\n\n", "\ufeff", " - ", "1,5", "3.", ".", "e", "é", "\u2028", "…"]


def damaged(draw: random.Random) -> str:
    """Fragments one below the other, with pieces that were lost, doubled, moved or put in."""
    text = "\n".join(draw.choice(FRAGMENTS) for _ in range(draw.randint(1, 4)))
    for _ in range(draw.choice([0, 1, 1, 2, 4, 16])):
        start = draw.randint(0, len(text))
        end = min(len(text), start + draw.choice([0, 1, 3, 10, 80]))
        new = draw.choice(["", draw.choice(JUNK), text[start:end] * 2, draw.choice(JUNK) * 3])
        text = text[:start] + new + text[end:]
    return text


NUMBER = r"(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
FACTORS = [10.0**power for power in (0, 3, 6, 9, 12, 15, -3, -6, -12)]
FACTORS += [2.0 ** (10 * at) for at in (1, 2, 3, 4)]


def standing(text: str) -> set[str]:
    """Every number of the text, in every unit, with nine digits; lines are joined in two ways."""
    bare = re.sub(r"(?:\x1b|\ufffd)?\[[\d;]+m|\x1b\[[\d;?]*[A-Za-z]", "", text)
    forms = [text, bare, *(re.sub(r"\s*[\r\n]+\s*", gap, bare) for gap in ("", " "))]
    words = {word for form in forms for word in re.findall(NUMBER, form)}
    words |= set(re.findall("(?i)nan|inf", bare))
    words |= {part for word in words for part in word.split(",")}
    numbers = set()
    for word in words:
        try:
            numbers.add(float(word.replace(",", "")))
        except ValueError:
            continue
    return {f"{one * factor:.9g}" for one in numbers for factor in FACTORS} | {
        f"{round(one * factor):.9g}" for one in numbers for factor in FACTORS if one * factor < 1e18
    }


def check(run: ImportedRun, known: set[str]) -> None:
    numbered = any("numbered as they stand" in one for one in run.provenance.remarks)
    for step in run.steps:
        told = dataclasses.asdict(step)
        told |= {name: one for name, one in told.pop("extra").items() if isinstance(one, float)}
        at, _ = told.pop("step"), told.pop("lines")
        told.pop("memory after iterations", None)
        assert numbered or at == 0 or {f"{at:.9g}", f"{at - 1:.9g}"} & known, at
        for name, one in told.items():
            assert one is None or f"{abs(one):.9g}" in known, (name, one)


def stop(_: int, __: FrameType | None) -> None:
    raise AssertionError("one text took more than 10 s")


def try_texts(batch: int) -> None:
    draw = random.Random(SEED + batch)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(BATCH):
            text = damaged(draw)
            signal.alarm(10)
            try:
                runs = read_text("page", [text.encode()], None, {})
            except (NothingMeasuredError, UsageError):
                continue
            finally:
                signal.alarm(0)
            known = standing(text)
            for run in runs:
                check(run, known)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("batch", range(DAILY // BATCH))
def test_a_damaged_text_gives_no_number_that_stands_nowhere(batch: int) -> None:
    try_texts(batch)


@pytest.mark.nightly
@pytest.mark.parametrize("batch", range(DAILY // BATCH, NIGHTLY // BATCH))
def test_ten_thousand_damaged_texts_give_no_number_that_stands_nowhere(batch: int) -> None:
    try_texts(batch)
