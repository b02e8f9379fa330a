"""The model of `toy_model`, of which rank 1 stays behind in the third step, before its last unit.

Rank 0 then has what NCCL has and gloo has not: a thread that ends the process, and raises nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from toy_model import Block, Regression, make_batch

from bench.models.factory import UserModel
from bench.spec import ResolvedRun

STEP = 3


def build(_resolved: ResolvedRun, device: torch.device) -> UserModel:
    """The factory that `model.factory: stuck_model:build` names."""
    model = Regression().to(device)
    if dist.get_rank() == 1:
        passes = iter(range(1, 1000))
        model.blocks[2].register_forward_pre_hook(lambda *_: _stay_behind(next(passes)))
    else:
        threading.Thread(target=_watch, daemon=True).start()
    return UserModel(model, (Block,), make_batch)


def _stay_behind(number: int) -> None:
    while number >= STEP:
        time.sleep(1)


def _watch() -> None:
    """As a watchdog, whose patience is longer than it takes ranks to note that they stand still."""
    logs = Path(sys.argv[-1]) / "logs"
    while len(list(logs.glob("issued.rank*.json"))) < dist.get_world_size():
        time.sleep(0.1)
    os.abort()
