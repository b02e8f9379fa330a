"""One rank that trains a captured step, and says what of it lives when its group is destroyed."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import torch.distributed as dist

import mfsdp_core
from bench.worker.rank import run_rank

steps: list[weakref.ref[object]] = []
destroy, build = dist.destroy_process_group, mfsdp_core.CapturedStep.__init__


def note(self, *arguments):
    steps.append(weakref.ref(self))
    build(self, *arguments)


def count(*arguments):
    alive = sum(step() is not None for step in steps)
    sys.stdout.write(f"{alive} of {len(steps)} captured steps live\n")
    destroy(*arguments)


gc.disable()
# Torch has `capturable` for devices with graphs only; here it is told that a CPU is one.
sys.modules["torch.optim.adam"]._get_capturable_supported_devices = lambda **_: ["cpu"]
mfsdp_core.CapturedStep.__init__, dist.destroy_process_group = note, count
run_rank(Path(sys.argv[1]))
