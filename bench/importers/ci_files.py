"""Files in which other projects' CI keeps what a run must give: whole files, not lines of a log.

golden        Megatron-LM's `golden_values*.json`: metric -> steps and values, NaN as text
tensorboard   event files, read by the package of that name
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.errors import UsageError
from bench.importers.parsed import Parsed
from bench.importers.reading import FormatReader

_FRAMEWORKS: Final = {"golden": "megatron-lm"}
_EVENTS: Final = ".tfevents."


@dataclass(frozen=True)
class WholeFile:
    """What such a file says, and the digest of its bytes."""

    run: Parsed
    sha256: str


def read_file(
    name: str, pieces: Iterable[bytes], path: Path | None, readers: Sequence[FormatReader]
) -> WholeFile | Iterator[bytes]:
    """The run of such a file, or the pieces as they came where it is none of these.

    Args:
        name: what the file is called.
        pieces: its bytes.
        path: where it lies; None for standard input.
        readers: of documents; golden values and events are read where one knows their metrics.

    Raises:
        UsageError: event files without the package that reads them, or damaged ones.
    """
    tracker = next((one for one in readers if one.row.name == "tracker"), None)
    if tracker and _EVENTS in name and path is not None:
        return WholeFile(_of_events(path, tracker), hashlib.sha256(path.read_bytes()).hexdigest())
    stream = iter(pieces)
    ahead = list(itertools.islice(stream, 1))
    start = b"".join(ahead).lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start.startswith(b"{"):
        return itertools.chain(ahead, stream)
    ahead += stream
    whole = b"".join(ahead)
    try:
        document = json.loads(whole.decode(errors="replace").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return iter(ahead)
    documents = (one.document(document) for one in readers)
    found = next(filter(None, documents), None)
    if found is None and tracker is not None:
        found = _golden(document, tracker)
    if found is None:
        return iter(ahead)
    return WholeFile(found, hashlib.sha256(whole).hexdigest())


def _golden(document: object, tracker: FormatReader) -> Parsed | None:
    if not isinstance(document, dict) or not document:
        return None
    series = {}
    for metric, one in document.items():
        values = one.get("values") if isinstance(one, dict) else None
        if not isinstance(values, dict) or "start_step" not in one or "end_step" not in one:
            return None
        series[metric] = {
            int(step): value for step, value in values.items() if re.fullmatch(r"\d{1,12}", step)
        }
    return _run("golden", series, tracker)


def _of_events(path: Path, tracker: FormatReader) -> Parsed:
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            f"{path.name} holds TensorBoard events, which need the package tensorboard: pip install"
            " 'mfsdp-bench[tensorboard]'"
        )
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    series: dict[str, dict[int, Any]] = {}
    try:
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                numbers = make_ndarray(value.tensor) if value.HasField("tensor") else None
                if numbers is not None and numbers.size == 1 and numbers.dtype.kind in "fiu":
                    series.setdefault(value.tag, {})[int(event.step)] = float(numbers.reshape(()))
    except Exception as error:  # whatever that package says of a damaged file
        raise UsageError(f"{path.name} cannot be read as TensorBoard events: {error}") from error
    return _run("tensorboard", series, tracker)


def _run(kind: str, series: Mapping[str, Mapping[int, Any]], tracker: FormatReader) -> Parsed:
    """Steps that have any value; of a metric of no meaning to us, under its own name."""
    run = Parsed(kind)
    for step in sorted({step for values in series.values() for step in values}):
        told = [(name, str(values[step])) for name, values in series.items() if step in values]
        run.add(tracker.of_pairs(told, step), 0)
    run.workload["framework"] = _FRAMEWORKS.get(kind, "unknown")
    return run
