"""The rules, by name, and what each of them finds."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bench.derive.peaks import PEAKS, DevicePeak
from bench.spec import ModelShape
from reports.comparisons.change import SPEED_THRESHOLD
from reports.lint.claims import CHANGES, Beside, Claim, beside
from reports.lint.evidence import Evidence, Solution
from reports.lint.pairs import EvidencePair, all_above, devices_of, pairs

_MEMORY = 0.005
_LOSS = 0.005
_NORM = 0.02
_MEMORIES = ("allocated_change_percent", "max_allocated_change_percent")
_MFU = 0.02
_FP8 = re.compile(r"\b(?:mx)?fp8\b", re.IGNORECASE)
_SYMMETRIC = re.compile(r"sym(?:metric)?[\s_-]?(?:mem|kernel)", re.IGNORECASE)
_ENGAGED = ("symmetric", "copy_engine", "hierarchical_ce")
_ONE_NODE = 8
"""Devices of one node at most: above, the link between nodes matters."""


@dataclass(frozen=True)
class LintFinding:
    """One thing that the evidence does not support.

    run: its name. lines: of its text, that the finding rests on. values: computed numbers by name.
    level: a note needs no answer. silenced: the reason why it is.
    """

    rule: str
    run: str
    source: str
    lines: tuple[int, ...]
    values: Mapping[str, Any]
    text: str
    level: Literal["warning", "note"] = "warning"
    silenced: str | None = None


@dataclass(frozen=True)
class Subject:
    """All that rules see: runs of one text or of one set of records, and the text's lines."""

    runs: tuple[Evidence, ...]
    lines: tuple[str, ...] = ()
    shapes: Mapping[str, ModelShape] = field(default_factory=dict)

    def beside(self, run: Evidence) -> Beside:
        """What the text says about the run."""
        return beside(run, self.runs, self.lines)

    def pairs(self) -> list[EvidencePair]:
        """Runs that are compared."""
        return pairs(self.runs)

    def first_pairs(self) -> list[EvidencePair]:
        """Of every head the one with its base."""
        return list({pair.head.name: pair for pair in reversed(self.pairs())}.values())[::-1]


Rule = Callable[[Subject], Iterator[LintFinding]]


def unstated_configuration(subject: Subject) -> Iterator[LintFinding]:
    """Model, sequence length, devices or links that a reader needs and nothing states."""
    for run in subject.runs:
        if run.measured or (run.milliseconds is None and run.teraflops is None):
            continue
        solved, said = run.solution, subject.beside(run)
        seq_len = run.seq_len
        if seq_len is None and solved is not None and said.states_sequence(solved.seq_len):
            seq_len = solved.seq_len
        stated = {
            "model": run.model,
            "sequence length": seq_len,
            "number of devices": run.devices,
            "device": run.device,
        }
        missing = [word for word, value in stated.items() if value is None]
        if (solved.devices if solved else run.devices or 0) > _ONE_NODE:
            missing.append("link between nodes")
        text = [f"not stated: {', '.join(missing)}"] if missing else []
        values: dict[str, Any] = {"unstated": missing}
        if solved is not None:
            text += _implied(subject, run, solved, values, states_length=seq_len is not None)
        if text:
            yield _finding("unstated_configuration", run, "; ".join(text), values)


def _implied(
    subject: Subject,
    run: Evidence,
    solved: Solution,
    values: dict[str, Any],
    *,
    states_length: bool,
) -> list[str]:
    values |= {
        "model": solved.model,
        "seq_len": solved.seq_len,
        "devices": solved.devices,
        "devices_exact": round(solved.exact, 4),
    }
    text = [
        f"the FLOP formula gives {solved.model} at sequence length {solved.seq_len:,} on"
        f" {solved.devices} devices ({solved.exact:.3f})"
    ]
    wrong = []
    if run.seq_len not in (None, solved.seq_len):
        values["stated_seq_len"] = run.seq_len
        wrong.append(f"sequence length {run.seq_len:,} is stated")
    if run.devices not in (None, solved.devices):
        values["stated_devices"] = run.devices
        wrong.append(f"{run.devices:,} devices are stated")
    silent = Counter(
        one.solution.seq_len
        for one in subject.runs
        if one.solution is not None and one.seq_len is None and one.solution.model == solved.model
    )
    if not states_length and silent.most_common(1)[0][0] != solved.seq_len:
        values["usual_seq_len"] = silent.most_common(1)[0][0]
        wrong.append(f"other runs that state no length have {values['usual_seq_len']:,}")
    return [*text, *wrong] if wrong or values["unstated"] else []


def tradeoff(subject: Subject) -> Iterator[LintFinding]:
    """Speed bought with memory, memory with time, or a loss that moved, without a word of it."""
    for pair in subject.pairs():
        said = subject.beside(pair.head)
        speed, values = pair.throughput or 0.0, pair.values()
        memory = [values.get(name, 0.0) for name in _MEMORIES]
        faster, slower = speed >= SPEED_THRESHOLD, speed <= -SPEED_THRESHOLD
        if not pair.devices_differ:
            if faster and max(memory) >= 100 * _MEMORY and not said.names("memory"):
                yield _of_pair("tradeoff", pair, "faster, but more memory, which is not said")
            if slower and min(memory) <= -100 * _MEMORY and not said.names("time"):
                yield _of_pair("tradeoff", pair, "less memory, but slower, which is not said")
        moved = pair.loss
        if moved is not None and abs(moved) >= _LOSS:
            parity = bool(said.parity)
            if parity or not said.names("loss"):
                words = "though parity is claimed" if parity else "which is not said"
                yield _of_pair("tradeoff", pair, f"the loss moved, {words}")


def claim_mismatch(subject: Subject) -> Iterator[LintFinding]:
    """A number that is claimed and that the runs do not give, or give as something else.

    What stands above several runs is about one of them at least.
    """
    answers: dict[Claim, list[LintFinding | None]] = {}
    for run in subject.runs:
        candidates = all_above(run, subject.runs)
        if candidates:
            for claim in subject.beside(run).claims:
                answers.setdefault(claim, []).append(_mismatch(run, claim, candidates))
    for found in answers.values():
        wrong = [one for one in found if one is not None]
        if len(wrong) == len(found):
            yield min(wrong, key=lambda one: (one.level != "note", one.values["reading"] == "none"))


def _mismatch(
    run: Evidence, claim: Claim, candidates: Sequence[EvidencePair]
) -> LintFinding | None:
    alike = [pair for pair in candidates if not pair.devices_differ] or list(candidates)
    if claim.unit == "x":
        return _times(run, claim, candidates)
    if claim.kind == "memory":
        return _of_memory(run, claim, alike)
    measures: dict[str, Callable[[EvidencePair], float | None]] = {
        "throughput": lambda pair: pair.throughput,
        "time": lambda pair: pair.time,
    }
    fits = {
        name: [p for p in alike if (c := of(p)) is not None and claim.fits(100 * c)]
        for name, of in measures.items()
    }
    reading = [name for name in fits if fits[name]]
    best = next((pair for fitting in fits.values() for pair in fitting), alike[0])
    values = {"reading": " or ".join(reading) or "none", **best.values()}
    shown = f"{claim.number:g} %"
    if not reading:
        text = f"{shown} is claimed; the nearest runs give {_in_words(best)}"
    elif claim.kind == "speed-up" and reading == ["time"]:
        text = f"{shown} is the change of time, not of throughput: {_in_words(best)}"
    elif claim.kind == "speed-up" and len(reading) > 1:
        text = f"{shown} may be time or throughput: {_in_words(best)}"
        return replace(_of_claim(run, claim, text, values), level="note")
    elif claim.kind in reading or claim.kind == "speed-up":
        return None
    else:
        text = f"{shown} is the change of {reading[0]}, not of {claim.kind}: {_in_words(best)}"
    return _of_claim(run, claim, text, values)


def _of_memory(
    run: Evidence, claim: Claim, candidates: Sequence[EvidencePair]
) -> LintFinding | None:
    """Nothing is held against a share that is no change, as of a device that is 93 % full."""
    values = [(pair, pair.values()) for pair in candidates]
    known = [(pair, [v[name] for name in _MEMORIES if name in v]) for pair, v in values]
    known = [(pair, changes) for pair, changes in known if changes]
    if not known or not CHANGES.search(claim.text):
        return None
    if any(map(claim.fits, [change for _, changes in known for change in changes])):
        return None
    text = (
        f"{claim.number:g} % of memory is claimed; the nearest runs give {_in_words(known[0][0])}"
    )
    return _of_claim(run, claim, text, {"reading": "none", **known[0][0].values()})


def _times(run: Evidence, claim: Claim, candidates: Sequence[EvidencePair]) -> LintFinding | None:
    ratios = [round(pair.ratio, 4) for pair in candidates if pair.ratio is not None]
    if not ratios or any(map(claim.fits, ratios)):
        return None
    shown = ", ".join(f"{ratio:.2f}x" for ratio in ratios)
    text = f"{claim.number:g}x is claimed; the runs above give {shown}"
    return _of_claim(run, claim, text, {"reading": "none", "ratios": ratios})


def unlike_iterations(subject: Subject) -> Iterator[LintFinding]:
    """Runs that are compared at different iterations."""
    for pair in subject.pairs():
        before, after = pair.base.iteration, pair.head.iteration
        if None not in (before, after) and before != after:
            values = {"base_iteration": before, "head_iteration": after}
            text = f"iteration {after} is compared with iteration {before}: {_in_words(pair)}"
            yield _of_pair("unlike_iterations", pair, text, values, words=False)


def single_run(subject: Subject) -> Iterator[LintFinding]:
    """A comparison of single runs, which has no interval."""
    for pair in subject.first_pairs():
        if min(pair.base.n, pair.head.n) == 1 and pair.time is not None:
            values = {"base_n": pair.base.n, "head_n": pair.head.n}
            text = f"n = {min(pair.base.n, pair.head.n)}, no interval: {_in_words(pair)}"
            yield _of_pair("single_run", pair, text, values, words=False)


def no_spread(subject: Subject) -> Iterator[LintFinding]:
    """Parity that is claimed without how far runs of one configuration are apart."""
    for pair in subject.first_pairs():
        said = subject.beside(pair.head)
        if not said.parity or said.has_spread or min(pair.base.n, pair.head.n) > 1:
            continue
        text = "parity is claimed, but not how far equal runs are apart"
        found = _of_pair("no_spread", pair, text)
        lines = {*found.lines, *said.parity} - {0}
        yield replace(found, lines=tuple(sorted(lines)))


def impossible_utilisation(subject: Subject) -> Iterator[LintFinding]:
    """More than the peak, or FP8 arithmetic against the peak of BF16."""
    for run in subject.runs:
        fp8 = bool(_FP8.search(run.text)) or _text_has(subject, _FP8)
        peak = None if run.device is None else PEAKS.get(run.device)
        values: dict[str, Any] = {"teraflops": run.teraflops, "mfu_percent": run.mfu_percent}
        if run.mfu_percent is not None and run.mfu_percent > 100:  # noqa: PLR2004 - per cent
            text = f"{run.mfu_percent:g} % of the peak cannot be"
            yield _finding("impossible_utilisation", run, text, values)
        elif run.teraflops and run.teraflops > _highest(peak, fp8=fp8):
            most = _highest(peak, fp8=fp8)
            text = f"{run.teraflops:g} TFLOP/s per device is above the peak of {most:g}"
            values |= {"peak_teraflops": most, "mfu_percent": round(100 * run.teraflops / most, 2)}
            yield _finding("impossible_utilisation", run, text, values)
        elif fp8 and run.mfu_percent and run.teraflops:
            against = run.teraflops / run.mfu_percent * 100
            for known in [peak] if peak else PEAKS.values():
                if known.fp8_tflops and abs(against / known.bf16_tflops - 1) <= _MFU:
                    right = round(100 * run.teraflops / known.fp8_tflops, 2)
                    values |= {"peak_teraflops": known.bf16_tflops, "mfu_fp8_percent": right}
                    text = (
                        f"{run.mfu_percent:g} % is FP8 against the BF16 peak of"
                        f" {known.bf16_tflops:g}; against that of FP8 it is {right:g} %"
                    )
                    yield _finding("impossible_utilisation", run, text, values)
                    break


def norm_scale(subject: Subject) -> Iterator[LintFinding]:
    """Gradient norms that differ by the number of devices, or by its root."""
    for pair in subject.pairs():
        before, after = pair.base.grad_norm, pair.head.grad_norm
        devices = devices_of(pair.head)
        if not before or not after or not devices or devices < 4:  # noqa: PLR2004 - else by chance
            continue
        factor = max(after / before, before / after)
        for size, words in (
            (devices, "the number"),
            (math.sqrt(devices), "the root of the number"),
        ):
            if abs(factor / size - 1) <= _NORM:
                values = {"factor": round(factor, 4), "devices": devices}
                text = f"gradient norms differ by {factor:.3f}, {words} of devices ({devices})"
                yield _of_pair("norm_scale", pair, text, values, words=False)
                break


def unlike_machines(subject: Subject) -> Iterator[LintFinding]:
    """Base and head on different machines, or on different numbers of devices."""
    for pair in subject.pairs():
        devices = [devices_of(run) for run in (pair.base, pair.head)]
        if pair.devices_differ:
            text = f"{devices[1]} devices are compared with {devices[0]}"
            values: dict[str, Any] = {"base_devices": devices[0], "head_devices": devices[1]}
            yield _of_pair("unlike_machines", pair, text, values)
        elif pair.base.device and pair.head.device and pair.base.device != pair.head.device:
            text = f"{pair.head.device} is compared with {pair.base.device}"
            values = {"base_device": pair.base.device, "head_device": pair.head.device}
            yield _of_pair("unlike_machines", pair, text, values)


def no_engagement(subject: Subject) -> Iterator[LintFinding]:
    """Symmetric kernels that are asked for, and no line that shows that they ran.

    Where one operation ran with them, they were asked for.
    """
    for run in subject.runs:
        asked = bool(_SYMMETRIC.search(run.text))
        if not run.nccl:
            if asked:
                values: dict[str, Any] = {"symmetric_lines": 0, "other_lines": 0}
                text = "symmetric kernels are asked for, and no line of NCCL shows which kernel ran"
                yield _finding("no_engagement", run, text, values)
            continue
        engaged = {operation for operation, kind in run.nccl if kind in _ENGAGED}
        if not (asked or engaged or _text_has(subject, _SYMMETRIC)):
            continue
        for operation in sorted({operation for operation, _ in run.nccl} - engaged):
            others = sum(n for (other, _), n in run.nccl.items() if other == operation)
            values = {"operation": operation, "symmetric_lines": 0, "other_lines": others}
            text = f"symmetric kernels are asked for; none of {others} lines of {operation} is one"
            lines = run.nccl_lines or run.lines
            yield _finding("no_engagement", run, text, values, lines=lines)


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        unstated_configuration,
        tradeoff,
        claim_mismatch,
        unlike_iterations,
        single_run,
        no_spread,
        impossible_utilisation,
        norm_scale,
        unlike_machines,
        no_engagement,
    )
}


def _finding(
    rule: str,
    run: Evidence,
    text: str,
    values: Mapping[str, Any],
    lines: tuple[int, ...] | None = None,
) -> LintFinding:
    own = run.lines if lines is None else lines
    return LintFinding(rule, run.name, run.source, own, values, text)


def _of_pair(
    rule: str,
    pair: EvidencePair,
    text: str,
    values: Mapping[str, Any] | None = None,
    *,
    words: bool = True,
) -> LintFinding:
    whole = f"{text}: {_in_words(pair)}" if words else text
    computed = {"base": pair.base.name, **(values or {}), **pair.values()}
    against = f"{whole} (against {pair.base.shown})"
    return LintFinding(rule, pair.head.name, pair.head.source, pair.lines, computed, against)


def _of_claim(run: Evidence, claim: Claim, text: str, values: Mapping[str, Any]) -> LintFinding:
    computed = {"claimed": claim.number, "unit": claim.unit, **values}
    lines = tuple(sorted({*run.lines, claim.line} - {0}))
    return _finding("claim_mismatch", run, text, computed, lines)


def _in_words(pair: EvidencePair) -> str:
    """Every change that is known, each by its name."""
    shown = pair.values()
    parts = []
    for key, words, unit, digits in (
        ("time_change_percent", "time", " %", 2),
        ("throughput_change_percent", "throughput", " %", 2),
        ("ratio", "ratio", "x", 3),
        ("allocated_change_mib", "allocated", " MiB", 1),
        ("max_allocated_change_mib", "max allocated", " MiB", 1),
        ("loss_change_percent", "loss", " %", 3),
        ("grad_norm_change_percent", "gradient norm", " %", 1),
    ):
        if key in shown:
            sign = "" if key == "ratio" else "+"
            parts.append(f"{words} {shown[key]:{sign},.{digits}f}{unit}")
    return ", ".join(parts)


def _highest(peak: DevicePeak | None, *, fp8: bool) -> float:
    known = [peak] if peak is not None else PEAKS.values()
    return max((fp8 and one.fp8_tflops) or one.bf16_tflops for one in known)


def _text_has(subject: Subject, words: re.Pattern[str]) -> bool:
    first = min((min(run.lines) for run in subject.runs if run.lines), default=0)
    return any(words.search(line) for line in subject.lines[:first])
