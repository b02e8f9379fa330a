"""Files in which other projects' CI keeps what a run must give: whole files, not lines of a log.

golden        Megatron-LM's `golden_values*.json`: metric -> steps and values, NaN as text
tensorboard   event files, read by the package of that name
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.errors import UsageError
from bench.importers.parsed import Parsed, Said

_MILLI: Final = 1e3
_GIB: Final = float(1 << 30)
# Name of a metric -> (field of ours, factor into its unit).
_NAMES: Final[Mapping[str, tuple[str, float]]] = {
    "lm loss": ("loss", 1),
    "reduced_train_loss": ("loss", 1),
    "loss": ("loss", 1),
    "train/loss": ("loss", 1),
    "loss_metrics/global_avg_loss": ("loss", 1),
    "grad-norm": ("grad_norm", 1),
    "grad_norm": ("grad_norm", 1),
    "train/grad_norm": ("grad_norm", 1),
    "learning-rate": ("learning_rate", 1),
    "lr": ("learning_rate", 1),
    "train/learning_rate": ("learning_rate", 1),
    "iteration-time": ("milliseconds", _MILLI),
    "train_step_timing in s": ("milliseconds", _MILLI),
    "time_metrics/end_to_end(s)": ("milliseconds", _MILLI),
    "mem-allocated-bytes": ("device_allocated_bytes", 1),
    "mem-max-allocated-bytes": ("device_peak_bytes", 1),
    "mem-reserved-bytes": ("device_reserved_bytes", 1),
    "memory/max_active(GiB)": ("device_peak_bytes", _GIB),
    "memory/max_reserved(GiB)": ("device_reserved_peak_bytes", _GIB),
    "throughput(tps)": ("tokens_per_second_per_device", 1),
    "tflops": ("teraflops_per_device", 1),
}
_SETTINGS: Final = {"batch-size": "global_batch", "world-size": "ranks"}
_FRAMEWORKS: Final = {"golden": "megatron-lm"}
_EVENTS: Final = ".tfevents."
_SHOWN: Final = 5
_MOST_SHOWN: Final = 40


@dataclass(frozen=True)
class WholeFile:
    """What such a file says, and the digest of its bytes."""

    run: Parsed
    sha256: str


def read_file(name: str, pieces: Iterable[bytes], path: Path | None) -> WholeFile | Iterator[bytes]:
    """The run of such a file, or the pieces as they came where it is none of these.

    Args:
        name: what the file is called.
        pieces: its bytes.
        path: where it lies; None for standard input.

    Raises:
        UsageError: event files without the package that reads them, or damaged ones.
    """
    if _EVENTS in name and path is not None:
        return WholeFile(_of_events(path), hashlib.sha256(path.read_bytes()).hexdigest())
    stream = iter(pieces)
    ahead = list(itertools.islice(stream, 1))
    start = b"".join(ahead).lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start.startswith(b"{"):
        return itertools.chain(ahead, stream)
    ahead += stream
    whole = b"".join(ahead)
    found = _golden(whole.decode(errors="replace").removeprefix("\ufeff"))
    if found is None:
        return iter(ahead)
    return WholeFile(found, hashlib.sha256(whole).hexdigest())


def _golden(text: str) -> Parsed | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not document:
        return None
    series = {}
    for metric, one in document.items():
        values = one.get("values") if isinstance(one, dict) else None
        if not isinstance(values, dict) or "start_step" not in one or "end_step" not in one:
            return None
        series[metric] = {int(step): value for step, value in values.items() if step.isdecimal()}
    return _run("golden", series)


def _of_events(path: Path) -> Parsed:
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
    return _run("tensorboard", series)


def _run(kind: str, series: Mapping[str, Mapping[int, Any]]) -> Parsed:
    """Steps that have any value; of a metric of no meaning to us, under its own name."""
    run = Parsed(importer=kind, workload={"framework": _FRAMEWORKS.get(kind, "unknown")})
    dropped: list[str] = []
    for step in sorted({step for values in series.values() for step in values}):
        said: dict[str, float | str] = {}
        for metric, values in series.items():
            if step not in values:
                continue
            field, factor = _NAMES.get(metric, (metric, 1))
            number = _number(values[step])
            if number is None:
                dropped.append(f"{metric} {str(values[step])[:_MOST_SHOWN]} (step {step})")
            elif metric in _SETTINGS:
                run.workload[_SETTINGS[metric]] = int(number)
            elif field not in said:
                said[field] = number * factor
        if said:
            run.add(Said(step, said), 0)
    if dropped:
        more = f" and {len(dropped) - _SHOWN} more" if len(dropped) > _SHOWN else ""
        run.remarks.append(
            f"{len(dropped)} values are no numbers: {', '.join(dropped[:_SHOWN])}{more}"
        )
    return run


def _number(value: Any) -> float | None:
    """None for NaN and infinity too, as text or as JSON's extension."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
