"""What a rank does for `communication` and `sharing`; loads the core when it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from bench.spec import ResolvedRun

_OPERATIONS: Final = 10


@dataclass(frozen=True)
class Timed:
    """One rank's account. wrong: what was wrong with a value; registration: what NCCL has."""

    milliseconds: float
    wrong: str
    registration: dict[str, Any] | None


def summed(device: str) -> float:
    """In a rank: 1 + 2 + ... by the backend itself."""
    value = torch.full((1 << 16,), 1.0 + dist.get_rank(), device=device)
    dist.all_reduce(value)  # noqa: TID251 - whether the backend itself works is the question
    return float(value.max())


def time_collective(document: dict[str, Any]) -> Timed:
    """In a rank: check the operation, time it, check it again."""
    from bench.engines.collective import CollectiveEngine, WrongValuesError
    from bench.worker.collective import OperationClock
    from bench.worker.rank_process import RankProcess

    resolved = ResolvedRun.model_validate(document)
    device = torch.device("cpu")
    if resolved.launch.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    group = dist.distributed_c10d._get_default_group()
    engine = CollectiveEngine(resolved, device, group)
    process = RankProcess(dist.get_rank(), resolved.launch.ranks, device)
    clock, wrong, milliseconds = OperationClock(engine, _OPERATIONS, process), "", 0.0
    for _ in range(2):
        try:
            engine.check()
        except WrongValuesError as error:
            wrong = wrong or str(error)
        milliseconds = clock.step().milliseconds
    registration = engine.buffer_registration()
    engine.close()
    return Timed(milliseconds, wrong, registration)
