"""Raw samples on disk: one file per node, to which every rank of that node appends its lines.

    steps.node<K>.jsonl   {"rank": 3, "step": 1, ...}

[Note: one writer per line] Thousands of ranks must not make thousands of files. Ranks of one node
share a file: each line is handed to the kernel by one write in append mode, so lines of two
processes never mix. Two nodes never share one, as a shared file system does not promise that.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bench.errors import first_problem
from bench.record import StepSample

GLOB = "steps.node*.jsonl"

_SAMPLE: TypeAdapter[StepSample] = TypeAdapter(StepSample)
_SAMPLES: TypeAdapter[list[StepSample]] = TypeAdapter(list[StepSample])
_RANK_IN_LINE = re.compile(rb'\{"rank": (\d+),')
_RANKS_IN_LINES = re.compile(rb'^\{"rank": (\d+),', re.MULTILINE)
_MAX_PROBLEMS_PER_FILE = 3


def node_file(node: int) -> str:
    """Name of the file of the ranks of one node."""
    return f"steps.node{node}.jsonl"


def lines_by_rank(content: bytes) -> Counter[int]:
    """How many lines each rank has in `content`, whole lines of a file."""
    return Counter(int(rank) for rank in _RANKS_IN_LINES.findall(content))


def read_samples(path: Path, problems: list[str]) -> dict[int, list[StepSample]]:
    """The samples of every rank of the run in folder `path`; `problems` grows by what is damaged.

    A last line without its newline was cut off while being written, and is left out.
    """
    steps: dict[int, list[StepSample]] = {}
    for file in sorted(path.glob(GLOB)):
        try:
            content = file.read_bytes()
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror}")
            continue
        for rank, samples in _samples_of(file, content, problems).items():
            steps.setdefault(rank, []).extend(samples)
    return dict(sorted(steps.items()))


def last_samples(file: Path, tail_bytes: int) -> dict[int, dict[int, StepSample]]:
    """The samples in the last `tail_bytes` of a growing file: rank, then step."""
    try:
        with file.open("rb") as stream:
            start = max(0, stream.seek(0, 2) - tail_bytes)
            stream.seek(start)
            content = stream.read()
    except OSError:
        return {}
    # The first line may be cut off by the start of the tail, the last one is still being written.
    if start:
        content = content.partition(b"\n")[2]
    by_rank = _samples_of(file, content, [])
    return {rank: {sample.step: sample for sample in samples} for rank, samples in by_rank.items()}


def _samples_of(file: Path, content: bytes, problems: list[str]) -> dict[int, list[StepSample]]:
    lines = content.split(b"\n")
    own_problems: list[str] = []
    if lines.pop():
        own_problems.append(f"{file.name}: the last line is cut off and was left out")
    try:
        steps = _read_whole(lines)
    except (ValueError, RecursionError):
        steps = _read_line_by_line(file, lines, own_problems)
    if len(own_problems) > _MAX_PROBLEMS_PER_FILE:
        more = len(own_problems) - _MAX_PROBLEMS_PER_FILE
        own_problems = [
            *own_problems[:_MAX_PROBLEMS_PER_FILE],
            f"{file.name}: {more} more such lines",
        ]
    problems.extend(own_problems)
    return steps


def _read_whole(lines: Iterable[bytes]) -> dict[int, list[StepSample]]:
    """Many lines at once, which is seven times as fast as one by one.

    Raises:
        ValueError: any of them cannot be understood.
    """
    by_rank: dict[int, list[bytes]] = {}
    for line in lines:
        by_rank.setdefault(_rank_in(line), []).append(line)
    steps = {}
    for rank, own in by_rank.items():
        steps[rank] = _SAMPLES.validate_json(b"[" + b",".join(own) + b"]")
        if len(steps[rank]) != len(own):
            raise ValueError("a line that holds no sample, or several")
    return steps


def _read_line_by_line(
    file: Path, lines: Iterable[bytes], problems: list[str]
) -> dict[int, list[StepSample]]:
    steps: dict[int, list[StepSample]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            sample = _SAMPLE.validate_python(json.loads(line))
            rank = _rank_in(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"{file.name}:{number} was left out: {_first_line(error)}")
        else:
            steps.setdefault(rank, []).append(sample)
    return steps


def _rank_in(line: bytes) -> int:
    match = _RANK_IN_LINE.match(line)
    if match is None:
        raise ValueError('expected a line that begins with {"rank": N,')
    return int(match.group(1))


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return first_problem(error)
    return str(error).splitlines()[0] if str(error) else type(error).__name__
