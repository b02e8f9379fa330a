"""What `fit` says of a run, kept beside what the run measured.

[Note: predicted where it ran] A memory profile's rank 0 predicts after its process group is gone:
with the code, the torch and the configuration that ran, once, in a run whose times do not count. A
report loads no torch and shows what the record has, so it costs nothing there, and a later version
of `fit` changes no old record.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from bench.fit.prediction import predict
from bench.spec import ResolvedRun
from bench.store.atomic import write_json_atomically

#: The names of `bench.meters.memory`, and what of `fit` they cover.
_PARTS: Final = {
    "main_weights": ("main_weights",),
    "compute_weights": ("compute_weights", "gathered_weights"),
    "gradients": ("gradients",),
    "communication_buffers": ("communication",),
    "optimizer_state": ("optimizer_state",),
    "activations": ("activations", "logits_and_loss"),
    "pools": ("pools",),
}


def keep_prediction(resolved: ResolvedRun, file: Path) -> None:
    """Add `predicted` to `memory.json`; of a run that cannot be traced, why."""
    write_json_atomically(
        file, json.loads(file.read_text(encoding="utf-8")) | {"predicted": _document(resolved)}
    )


def _document(resolved: ResolvedRun) -> dict[str, Any]:
    try:
        found = predict(resolved, check=False)
    except Exception as error:  # The run is over and good, whatever this does.
        return {"refusal": f"{type(error).__name__}: {error}"}
    highest = {
        name: max(sum(held.get(part, 0) for part in parts) for _, held in found.steps)
        for name, parts in _PARTS.items()
    }
    return {
        "peak_bytes": found.peak_bytes,
        "setup_bytes": found.setup_bytes,
        "wire_bytes": found.wire_bytes,
        "by_category_bytes": {name: size for name, size in highest.items() if size},
    }
