"""What saving checkpoints cost a run, from what it recorded."""

from __future__ import annotations

from statistics import median

from pydantic import BaseModel, ConfigDict, Field

from bench.record import RunRecord, understood


class SavedCheckpoint(BaseModel):
    """One save: after which step, how long rank 0 took, and bytes of all ranks together."""

    model_config = ConfigDict(extra="ignore")

    step: int = Field(ge=1)
    milliseconds: float = Field(ge=0)
    bytes: int = Field(ge=0)


class CheckpointCost(BaseModel):
    """`checkpoints.json`."""

    model_config = ConfigDict(extra="ignore")

    every_steps: int = Field(ge=1)
    saves: tuple[SavedCheckpoint, ...] = ()

    @property
    def median_milliseconds(self) -> float | None:
        """None where nothing was saved."""
        return median(save.milliseconds for save in self.saves) if self.saves else None

    @property
    def largest_bytes(self) -> int:
        """0 where nothing was saved."""
        return max((save.bytes for save in self.saves), default=0)


def checkpoint_cost(record: RunRecord) -> CheckpointCost | None:
    """None for a run that saved none, or whose account cannot be understood."""
    return understood(CheckpointCost, record.checkpoints)
