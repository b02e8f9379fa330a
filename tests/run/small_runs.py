"""Small runs that tests vary: a tiny Llama, few steps, two ranks of this machine."""

from __future__ import annotations

from typing import Any

from bench.resolve import Machine, resolve
from bench.resolve.resolution import resolve_anywhere
from bench.spec import ResolvedRun, RunSpec

LAPTOP = Machine(cpu_count=2, memory_bytes=16 * 2**30)
#: All defaults.
RUN = resolve(RunSpec(), LAPTOP)
BF16 = {"compute": "bf16", "main_params": "fp32", "main_grads": "fp32"}
MAIN16 = {"compute": "bf16", "main_params": None}
FP64 = {"compute": "fp64", "main_params": "fp64"}
ZERO3 = {"name": "mfsdp", "strategy": "optim_grads_params"}
HFSDP = {"outer_size": 2, "outer_strategy": "optim"}


def small_run(engine: str | dict[str, Any], **sections: dict[str, Any]) -> ResolvedRun:
    """engine: its name, or its settings. sections: of the spec; `model` stands for the whole."""
    settings = {"name": engine} if isinstance(engine, str) else engine
    launch = {"ranks": 1 if settings["name"] == "single" else 2} | sections.pop("launch", {})
    train = {"steps": 3, "global_batch": 2 * launch["ranks"], "micro_batch": 1, "seq_len": 32}
    document = {
        "model": {"preset": "debug", "layers": 2},
        "engine": settings,
        "train": train | sections.pop("train", {}),
        "launch": launch,
    }
    return resolve_anywhere(RunSpec.model_validate(document | sections))


TIED = {"preset": "debug", "layers": 3, "tie_embeddings": True}
HYBRID = {"preset": "hybrid-tiny"}


def accumulating_run(
    engine: dict[str, Any],
    dtypes: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> ResolvedRun:
    """Of two microbatches, on two ranks; of five layers unless `model` says."""
    return small_run(
        engine,
        model=model or {"preset": "debug", "layers": 5},
        dtypes=dtypes or {},
        train={"global_batch": 4, "micro_batch": 2},
    )


CODES = {"recipe": "delayed"}
SENT16 = BF16 | {"grad_comm": "bf16"}
#: Runs of which what set-up makes and holds is looked at.
SET_UPS = {
    "zero1-bf16": accumulating_run(ZERO3 | {"strategy": "optim"}, BF16),
    "zero3-main16": accumulating_run(ZERO3, MAIN16),
    "zero3-fp64-tied": accumulating_run(ZERO3, FP64, TIED),
    "zero3-codes": accumulating_run(ZERO3 | CODES, BF16, TIED),
    "hfsdp-pool": accumulating_run(ZERO3 | HFSDP | {"allocator": "max_pool"}, BF16, TIED),
    "hybrid": accumulating_run(ZERO3, BF16, HYBRID),
    "fsdp2-zero2-fp32": accumulating_run({"name": "fsdp2", "strategy": "optim_grads"}),
    "fsdp2-main16-tied": accumulating_run({"name": "fsdp2"}, MAIN16, TIED),
    "no-shard": accumulating_run(ZERO3 | {"strategy": "no_shard"}, BF16),
    "fsdp2-hybrid": accumulating_run({"name": "fsdp2"}, BF16, HYBRID),
}
