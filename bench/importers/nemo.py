"""Logs of NeMo: the line of its progress printer, and the progress bar of older versions.

Both count iterations from 0, and print four significant digits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bench.importers.parsed import NUMBER, Said, Value, renamed, value

_PRINTED = re.compile(r"Training epoch (\d+), iteration (\d+)/\d+ \|(.*)")
_BAR = re.compile(r"Epoch (\d+):.*?\b(\d+)/(?:\d+|\?) \[.*?, (.*\breduced_train_loss=.*?)\]?\s*$")
_BAR_FIELD = re.compile(rf"([\w ./]+?)=({NUMBER})", re.IGNORECASE)
_NAMES: Mapping[str, tuple[str, float]] = {
    "reduced_train_loss": ("loss", 1.0),
    "train_step_timing in s": ("milliseconds", 1e3),
    "lr": ("learning_rate", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "TFLOPS_per_GPU": ("teraflops_per_device", 1.0),
}


def line(text: str) -> Said | None:
    """What a line of NeMo says; None for any other."""
    said: dict[str, Value] = {}
    if found := _PRINTED.search(text):
        for part in found[3].split("|"):
            name, _, one = part.partition(":")
            if one.strip():
                said[name.strip()] = value(one)
        shown = int(found[2]) + 1
    elif found := _BAR.search(text):
        said = {name.strip(): value(one) for name, one in _BAR_FIELD.findall(found[3])}
        shown = int(found[2])
    else:
        return None
    step = said.pop("global_step", None)
    batch = said.pop("global_batch_size", None)
    facts = {"framework": "nemo"}
    if isinstance(batch, float) and 0 < batch < 2**40:
        facts["global_batch"] = int(batch)  # type: ignore[assignment]
    # Of a second epoch the iteration begins again; the global step does not.
    number = int(step) + 1 if isinstance(step, float) and 0 <= step < 2**40 else shown
    return Said(number, renamed(said, _NAMES), facts)
