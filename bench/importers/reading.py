"""A line, a row of a table or a whole document, as a row of `formats` understands it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from bench.importers.formats import OURS, Format, LineForm, Target, shipped
from bench.importers.labels import as_count, wordings
from bench.importers.parsed import Parsed, Said
from bench.importers.quantities import NOTHING, Quantity, in_field, quantities, units_of

MOST = 2**40
"""Above every number of a step."""
_LONGEST_NAME = 60
_TEXTS = ("framework", "engine", "model", "device", "optimizer", "strategy")
_MEANS = re.compile(r"(?:median|mean|average|avg|final|last|train|training|total|p50)[. ]+")
_BRACKETS = re.compile(r"\s*[(\[][^)\]]*[)\]]\s*$")


class FormatReader:
    """Reads texts by one row."""

    def __init__(self, row: Format) -> None:
        self.row = row
        names = row.fields
        if row.patterns:
            # A table has the names that frameworks give to trackers, as perf/time_per_step.
            others = (row.fields.items() for row in shipped())
            names = {name: to for fields in others for name, to in fields if "/" in name}
        self._exact = {" ".join(name.lower().split()): to for name, to in names.items()}
        kept = [pattern.pattern for pattern in row.kept]
        told = [*map(re.escape, self._exact), *(p.pattern for p in (*row.facts, row.step)), *kept]
        self.known = re.compile("|".join(told), re.IGNORECASE)
        self._kept = re.compile("|".join(kept) or "(?!)", re.IGNORECASE)
        self.meaning = functools.cache(self._meaning)
        self.fact = functools.cache(self._fact_of)

    def read(self, text: str) -> Said | None:
        """What a line says; None for a line of anything else."""
        for form in self.row.lines:
            if any(word in text for word in form.has) and (match := form.match.search(text)):
                said = self._said(form, match)
                if said is not None and _count_named(said) >= form.least:
                    return said
        return None

    def document(self, content: Mapping[str, Any]) -> Parsed | None:
        """The run of a whole document of JSON; None where it is none of this row."""
        form = self.row.document
        entries = content.get(form.history) if form else None
        if form is None or not isinstance(entries, list):
            return None
        run = Parsed(self.row.name, workload={"framework": self.row.framework})
        if isinstance(steps := content.get(form.steps), int) and 0 < steps < MOST:
            run.workload["steps"] = steps
        for entry in entries:
            step = entry.get(form.step) if isinstance(entry, dict) else None
            if type(step) is int and 0 <= step < MOST:
                kind = "step" if form.needs in entry else "evaluation"
                told = {k: str(v) for k, v in entry.items() if type(v) in (int, float, str)}
                del told[form.step]
                run.add(self.of_pairs(told.items(), step, kind), 0)
        return run

    def _meaning(self, name: str) -> tuple[Target, ...]:
        """Where the numbers of a field go; nowhere for a name that the row does not have."""
        shown = " ".join(name.lower().split())
        if shown in self._exact or not self.row.patterns or "%" in shown:
            return self._exact.get(shown, ())
        if name in OURS:
            return (Target(name),)
        plain = wordings().at_step.sub("", _plain(shown))
        units = re.findall(r"[a-z]+", plain)
        bare = _BRACKETS.sub("", plain)
        for tried in (plain, bare, bare.rpartition("/")[2]):
            for form, (target, *_) in self.row.patterns.items():
                if form.fullmatch(tried):
                    own = [unit for unit in units if unit in units_of(target.name)]
                    return (Target(target.name, (own or [target.unit])[-1]),)
        return ()

    def _fact_of(self, name: str) -> str:
        bare = _BRACKETS.sub("", _plain(name.lower()))
        facts = {pattern.pattern: to for pattern, to in self.row.facts.items()}
        if self.row.patterns:
            facts |= {words: to for to, words in wordings().names.items()}
        return next((to for form, to in facts.items() if re.fullmatch(form, bare)), "")

    def _said(self, form: LineForm, match: re.Match[str]) -> Said | None:
        groups = {name: text for name, text in match.groupdict().items() if text is not None}
        if form.kind == "argument":
            name, text = groups["name"], groups["value"].strip()
            fact = self.row.arguments.get(name, "")
            said = Said(arguments={name: text})
            if fact and (stated := text if fact in _TEXTS else _whole(text)) is not None:
                said.facts[fact] = stated
            return said
        if form.kind == "facts":
            return Said(facts={name: _whole(text) for name, text in groups.items()})
        stands, steps = groups.pop("step", None), _whole(groups.pop("steps", ""))
        step = _whole(stands or "")
        pairs, strange, tail, ends = _cut(form, groups.pop("fields", ""))
        if step is None and (stands is not None or (strange and not pairs)):
            return None
        number = None if step is None else step + 1 - form.count_from
        said = self.of_pairs([*groups.items(), *pairs], number, form.kind)
        if steps:
            said.facts["steps"] = steps
        said.unknown += strange
        said.belongs = form.belongs
        last = self.meaning(pairs[-1][0]) if pairs else ()
        unread = {name for name, _ in said.unread}
        said.is_cut_off = bool(tail) or not ends or any(target.name in unread for target in last)
        if tail and (end := form.field.fullmatch(tail)) and (to := self.meaning(end["name"])):
            said.cut_off = (to[0].name, f"{end['value']} without a | behind it, cut off")
        return said

    def of_pairs(
        self, pairs: Iterable[tuple[str, str]], step: int | None, kind: str = "step"
    ) -> Said:
        """What names and texts say. Of two names for one field the first counts."""
        said = Said(step, facts={"framework": self.row.framework}, kind=kind)
        told: set[str] = set()
        for name, text in pairs:
            if name in self.row.frameworks:
                said.facts["framework"] = self.row.frameworks[name]
            targets, fact, amounts = self.meaning(name), self.fact(name), quantities(text)
            first = targets and targets[0].name not in told
            told.update(target.name for target in targets[:1])
            number = amounts[0].plain if amounts else None
            if text.strip().lower() in NOTHING:
                said.empty += bool(targets)
                continue
            if number is not None and 0 <= number < MOST and self.row.step.fullmatch(name):
                said.step = int(number) + 1 - self.row.step_from
            elif fact in _TEXTS and not first:
                said.facts[fact] = text[:80]
            elif fact and number and 0 < number < MOST and as_count(fact, name, amounts[0]):
                said.facts[fact] = as_count(fact, name, amounts[0])
                if len(amounts) > 1 and self.row.second:
                    said.values[self.row.second.replace("{name}", name)] = amounts[1].plain or text
            elif first:
                self._numbers(said, name, text, amounts)
            else:
                # A table has names, as FP8-CS, in which there are digits.
                numbers = bool(amounts) if self.row.patterns else any(map(str.isdigit, text))
                is_unknown = numbers and not self._kept.fullmatch(name)
                said.unknown += [name] * is_unknown
                kept = self.row.unknown.replace("{name}", name) if is_unknown else name
                _keep(said, kept, text, amounts)
        return said

    def _numbers(self, said: Said, name: str, text: str, amounts: tuple[Quantity, ...]) -> None:
        targets = self.meaning(name)
        if self.row.second and len(amounts) == 2:  # noqa: PLR2004 - a second number
            targets = (*targets[:1], Target(self.row.second.replace("{name}", name)))
        if not amounts or len(amounts) > len(targets):
            said.unread.append((targets[0].name, text.strip()))
            return
        for printed, target in zip(amounts, targets, strict=False):
            unit = self.row.units.get(printed.unit.upper())
            amount = printed if unit is None else replace(printed, unit=unit.lower())
            if target.name not in OURS:
                shown = f"{amount.number} {amount.unit}" if amount.plain is None else amount.plain
                said.values[target.name] = shown
            elif amount.is_signed and (amount.unit == "%" or units_of(target.name)):
                # A difference, such as +3.76%, is no value.
                said.values[f"{name} (difference)"] = text.strip()
            elif target.unit == "?" and not amount.unit:
                _keep(said, name, text, amounts)
            elif (value := in_field(amount, target.name, target.unit)) is None:
                said.unread.append((target.name, text.strip()))
            else:
                said.values[target.name] = value
                said.ours.add(target.name)


def _count_named(said: Said) -> int:
    """Fields of ours that a line names; 0 where none of them has a text."""
    read = len(said.ours) + len(said.unread)
    return read and read + said.empty


def _cut(form: LineForm, text: str) -> tuple[list[tuple[str, str]], list[str], str, bool]:
    """Pairs of name and text, texts that are no pair, what has no separator behind it.

    At last whether it ends with a pair.
    """
    if form.split is None:
        matches = list(form.field.finditer(text))
        ends = [0, *(m.end() for m in matches)]
        starts = [*(m.start() for m in matches), len(text)]
        strange = [text[end:start] for end, start in zip(ends, starts, strict=True)]
        pairs = [(_name(m["name"]), m["value"]) for m in matches]
        words = [_without_digits(rest) for rest in strange if re.search(r"\w", rest)]
        return pairs, words, "", not re.search(r"\w", strange[-1])
    parts = [part.strip() for part in form.split.split(text)]
    tail = parts.pop() if form.closed else ""
    both = [(part, form.field.fullmatch(part)) for part in parts if part]
    pairs = [(_name(m["name"]), m["value"].strip()) for _, m in both if m]
    strange = [_without_digits(part) for part, m in both if not m]
    # What begins with a digit, as `12.5% done`, is no name that was cut off from its value.
    return pairs, strange, tail, not both or bool(both[-1][1] or both[-1][0][0].isdigit())


def _whole(text: str) -> int | None:
    """A number of steps, ranks or elements; None for anything else."""
    return int(text) if re.fullmatch(r"\d{1,15}", text) else None


def _keep(said: Said, name: str, text: str, amounts: tuple[Quantity, ...]) -> None:
    """By its own name, as a number where it is one without a unit."""
    name = f"{name} (as printed)" if name in OURS or name in said.values else name
    plain = amounts[0].plain if len(amounts) == 1 else None
    said.values[name] = text.strip() if plain is None else plain


def _plain(name: str) -> str:
    spaced = re.sub(r"\s*/\s*", "/", re.sub(r"[_ -]+", " ", name))
    return _MEANS.sub("", spaced, count=1)


def step_in(name: str) -> int | None:
    """The step that a name states, as `loss @100` does."""
    stated = wordings().at_step.search(_plain(name.lower()))
    count = quantities(stated["step"])[0].plain if stated else None
    return None if count is None else int(count)


def _without_digits(text: str) -> str:
    """What has no name, so that it is counted as one thing in all lines."""
    return re.sub(r"\d[\d.,]*", "#", _name(text))


def _name(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_NAME]
