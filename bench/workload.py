"""What ran and where its numbers come from, with absent fields allowed.

A run of this harness knows everything about itself (`ResolvedRun`), and its workload follows from
that. A run of another framework is known by what its log says: None is "the source does not say",
never zero and never a default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import Field

from bench.spec import Frozen, ResolvedRun

OURS = "mfsdp-bench"
_OF_SHAPE = ("parameters", "layers", "hidden", "vocab")
_OF_DTYPES = ("compute", "main_params", "main_grads", "grad_comm")
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Workload(Frozen):
    """One training run in the terms of any framework. Batches count sequences.

    framework: what ran it, as `megatron-lm`. engine, strategy: what shards. Dtypes are named as the
    source names them. device: as `NVIDIA H100 80GB HBM3`. batch: where the source does not say of
    how many devices. settings: whatever else the source says, under its own names.
    """

    framework: str
    framework_version: str | None = None
    engine: str | None = None
    strategy: str | None = None
    model: str | None = None
    parameters: Count | None = None
    layers: Count | None = None
    hidden: Count | None = None
    vocab: Count | None = None
    compute_dtype: str | None = None
    main_params_dtype: str | None = None
    main_grads_dtype: str | None = None
    grad_comm_dtype: str | None = None
    ranks: Count | None = None
    data_parallel: Count | None = None
    tensor_parallel: Count | None = None
    expert_parallel: Count | None = None
    pipeline_parallel: Count | None = None
    device: str | None = None
    steps: Count | None = None
    global_batch: Count | None = None
    micro_batch: Count | None = None
    batch: Count | None = None
    seq_len: Count | None = None
    optimizer: str | None = None
    settings: dict[str, str | int | float | bool | None] = Field(default_factory=dict)

    @classmethod
    def of(cls, run: ResolvedRun) -> Self:
        """That of a run of this harness; what its model does not tell is absent."""
        shape, dtypes, train = run.shape, run.dtypes, run.train
        return cls(
            framework=OURS,
            engine=run.engine.name,
            strategy=run.strategy,
            model=run.model_name,
            **{name: getattr(shape, name, None) for name in _OF_SHAPE},
            **{f"{name}_dtype": getattr(dtypes, name) for name in _OF_DTYPES},
            ranks=run.launch.ranks,
            data_parallel=run.data_parallel,
            tensor_parallel=run.engine.tensor_parallel,
            expert_parallel=run.engine.expert_parallel,
            pipeline_parallel=1,
            device=run.launch.device,
            steps=train.steps,
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            seq_len=train.seq_len,
            optimizer=train.optimizer,
            settings=run.engine.settings.model_dump(mode="json"),
        )

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of one global batch; None where one of its factors is absent."""
        batch, length = self.global_batch, self.seq_len
        return None if batch is None or length is None else batch * length


class Provenance(Frozen):
    """Where a run's numbers come from.

    kind: `measured` by this harness, in the folder that holds the record; or `imported`. source:
    the name of the log, without a path. sha256: of its content. importer: what read it, with its
    version. label: what the text above the run calls it, "" where nothing does; stated: what that
    label says in brackets; side: what columns of a table call it, next to those of other runs.
    lines: the first and the last line of the run in the log, from 1. absent: what the importer
    looked for and did not find, in words. remarks: what a reader must know of the log, as that
    steps stand in it twice.
    """

    kind: Literal["measured", "imported"] = "measured"
    source: str = ""
    sha256: str = ""
    importer: str = ""
    imported_utc: str = ""
    label: str = ""
    side: str = ""
    stated: tuple[str, ...] = ()
    lines: tuple[int, int] | None = None
    absent: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportedStep:
    """One step as a log tells it; one line of `steps.jsonl`. None: the log does not say.

    step: as the source counts. milliseconds: per step. loss, grad_norm: as printed. Peaks: of one
    device, what tensors held and what the allocator held; without `peak`, at that moment;
    device_memory_bytes: which of these is not said. tokens_per_second: of all devices.
    teraflops_per_device: as the source computes them. extra: whatever else the line says, under the
    source's own names. lines: where in the log it is said, from 1.
    """

    step: int
    milliseconds: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: int | None = None
    device_peak_bytes: int | None = None
    device_reserved_peak_bytes: int | None = None
    tokens_per_second_per_device: float | None = None
    teraflops_per_device: float | None = None
    device_allocated_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_memory_bytes: int | None = None
    tokens_per_second: float | None = None
    extra: dict[str, float | str] = field(default_factory=dict)
    lines: tuple[int, ...] = ()


@dataclass(frozen=True)
class ImportedRun:
    """One run of another framework. nccl: its lines of NCCL as they stand."""

    id: str
    workload: Workload
    provenance: Provenance
    steps: tuple[ImportedStep, ...]
    nccl: tuple[str, ...] = ()
