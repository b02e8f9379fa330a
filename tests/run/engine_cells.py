"""Runs that tests look at together, each trained once: engines, strategies, dtypes and models."""

from __future__ import annotations

from typing import Any

from optional import missing

from bench.resolve.resolution import resolve_anywhere
from bench.spec import (
    DataSpec,
    DtypeSpec,
    EngineSpec,
    LaunchSpec,
    ModelSpec,
    ResolvedRun,
    RunSpec,
    TrainSpec,
)

STEPS = 5
LAYERS = 2
TRAIN = TrainSpec(steps=STEPS, global_batch=8, micro_batch=2, seq_len=32, lr=4e-3, warmup_steps=2)
FP32 = DtypeSpec()
MUON = {"optimizer": "muon"}
FP64 = DtypeSpec(compute="fp64", main_params="fp64")
BF16 = DtypeSpec(compute="bf16", main_grads="fp32", grad_comm="bf16")
LLAMA = ModelSpec(preset="debug", layers=LAYERS)
HYBRID = ModelSpec(preset="hybrid-tiny", pattern="ME*-", experts=4, hidden=96)
ZERO3 = "optim_grads_params"
HFSDP = {"outer_size": 2, "outer_strategy": "optim"}


def cell(
    engine: str,
    strategy: str | None = None,
    dtypes: DtypeSpec = FP32,
    model: ModelSpec = LLAMA,
    train: dict[str, Any] | None = None,
    ranks: int = 2,
    **own: Any,
) -> ResolvedRun:
    """On each rank two microbatches per step."""
    return resolve_anywhere(
        RunSpec(
            model=model,
            data=DataSpec(kind="markov"),
            engine=EngineSpec(name=engine, strategy=strategy, **own),
            dtypes=dtypes,
            train=TRAIN.model_copy(
                update={"micro_batch": 4 // ranks if ranks > 1 else 2}
            ).model_copy(update=train or {}),
            launch=LaunchSpec(ranks=1 if engine == "single" else ranks),
        )
    )


#: Engines of examples/engines, by their import path; nightly.
DEEPSPEED = "examples.engines.deepspeed:build"
SIMPLE_FSDP = "examples.engines.simple_fsdp:build"
DDP_ZERO = "examples.engines.ddp_zero:build"
DEEPSPEED_CELLS = {
    f"deepspeed-{strategy}": cell(DEEPSPEED, strategy)
    for strategy in ("optim", "optim_grads", ZERO3)
    if missing("deepspeed") is None
}
FP32_CELLS = {
    "ddp": cell("ddp"),
    "ddp_zero": cell(DDP_ZERO, "optim"),
    "fsdp2-optim_grads": cell("fsdp2", "optim_grads"),
    "fsdp2-optim_grads_params": cell("fsdp2", ZERO3),
    "simple_fsdp-optim_grads": cell(SIMPLE_FSDP, "optim_grads"),
    "simple_fsdp-optim_grads_params": cell(SIMPLE_FSDP, ZERO3),
    **DEEPSPEED_CELLS,
    "mfsdp-no_shard": cell("mfsdp", "no_shard"),
    "mfsdp-optim": cell("mfsdp", "optim"),
    "mfsdp-optim_grads": cell("mfsdp", "optim_grads"),
    "mfsdp-optim_grads_params": cell("mfsdp", ZERO3),
    "mfsdp-front-optim_grads": cell("mfsdp", "optim_grads", front="fsdp2"),
    "mfsdp-front": cell("mfsdp", ZERO3, front="fsdp2"),
}
VARIANTS = {
    "mfsdp-max_pool": cell("mfsdp", allocator="max_pool"),
    "mfsdp-per_token": cell("mfsdp", per_token_loss=True, nan_check=True),
    "simple_fsdp-recompute": cell(
        SIMPLE_FSDP, ZERO3, model=LLAMA.model_copy(update={"recompute": "full"})
    ),
    "simple_fsdp-compiled": cell(SIMPLE_FSDP.replace("build", "traced"), ZERO3),
    "simple_fsdp-compiled-optim_grads": cell(
        SIMPLE_FSDP.replace("build", "compiled"), "optim_grads"
    ),
    **{f"{name}-offload": cell(name, ZERO3, offload=True) for name in ("mfsdp", "fsdp2")},
    "mfsdp-front-offload": cell("mfsdp", ZERO3, front="fsdp2", offload=True),
    "fsdp2-reshard_to_2": cell("fsdp2", ZERO3, ranks=4, reshard_after_forward=2),
    "mfsdp-front-reshard_to_2": cell(
        "mfsdp", ZERO3, ranks=4, front="fsdp2", reshard_after_forward=2
    ),
}
BF16_CELLS = {
    "ddp-bf16": cell("ddp", None, BF16),
    "ddp_zero-bf16": cell(DDP_ZERO, "optim", BF16),
    "simple_fsdp-bf16": cell(SIMPLE_FSDP, ZERO3, BF16),
    "fsdp2-bf16": cell("fsdp2", ZERO3, BF16),
    "mfsdp-bf16": cell("mfsdp", ZERO3, BF16),
    "mfsdp-front-bf16": cell("mfsdp", ZERO3, BF16, front="fsdp2"),
    "mfsdp-no_shard-bf16": cell("mfsdp", "no_shard", BF16),
    "mfsdp-hybrid-bf16": cell("mfsdp", ZERO3, BF16, HYBRID),
    **{f"{name}-bf16": cell(DEEPSPEED, name[10:], BF16) for name in DEEPSPEED_CELLS},
}
#: Of `single-fp64`. Parts of tensor parallelism are one data-parallel rank on two ranks.
FP64_CELLS = {
    "fsdp2-hsdp": cell("fsdp2", dtypes=FP64, ranks=4, outer_size=2),
    "fsdp2-tp-hsdp": cell("fsdp2", dtypes=FP64, ranks=4, tensor_parallel=2, outer_size=2),
    "ddp_zero-fp64": cell(DDP_ZERO, "optim", dtypes=FP64),
    "simple_fsdp-fp64": cell(SIMPLE_FSDP, ZERO3, dtypes=FP64),
    "mfsdp-front-hsdp": cell("mfsdp", dtypes=FP64, ranks=4, outer_size=2, front="fsdp2"),
    "mfsdp-adamw-whole": cell("mfsdp", dtypes=FP64, matrices="whole"),
    "mfsdp-muon-fp64": cell("mfsdp", dtypes=FP64, train=MUON),
    "fsdp2-tp": cell("fsdp2", dtypes=FP64, tensor_parallel=2),
    "mfsdp-tp": cell("mfsdp", dtypes=FP64, tensor_parallel=2),
    "mfsdp-tp-hfsdp": cell("mfsdp", dtypes=FP64, ranks=4, tensor_parallel=2, **HFSDP),
}
#: Of `single-hybrid`.
HYBRID_CELLS = {
    "fsdp2-hybrid": cell("fsdp2", dtypes=FP64, model=HYBRID),
    "mfsdp-hybrid": cell("mfsdp", dtypes=FP64, model=HYBRID),
    "mfsdp-experts": cell("mfsdp", dtypes=FP64, model=HYBRID, expert_parallel=2),
    "mfsdp-experts-hfsdp": cell(
        "mfsdp", dtypes=FP64, model=HYBRID, ranks=4, expert_parallel=2, **HFSDP
    ),
}
SINGLE_CELLS = {
    "single": cell("single"),
    "single-fp64": cell("single", dtypes=FP64),
    "single-hybrid": cell("single", dtypes=FP64, model=HYBRID),
    "single-muon": cell("single", dtypes=FP64, train=MUON),
}
#: Variants of engines that are torch's own, and what other daily cells or the cases of `validate`
#: vary as well.
NIGHTLY_CELLS = {
    *(
        "fsdp2-reshard_to_2",
        "mfsdp-front-reshard_to_2",
        "fsdp2-hsdp",
        "fsdp2-tp-hsdp",
        "fsdp2-tp",
        "fsdp2-hybrid",
    ),
    *("fsdp2-optim_grads", "ddp-bf16", "mfsdp-front-optim_grads", "mfsdp-front-hsdp"),
    *("mfsdp-optim_grads", "mfsdp-adamw-whole", "mfsdp-front-bf16"),
    *("ddp_zero", "ddp_zero-bf16", "ddp_zero-fp64", *DEEPSPEED_CELLS),
    *("mfsdp-optim", "mfsdp-per_token", *(f"{name}-bf16" for name in DEEPSPEED_CELLS)),
    *("mfsdp-no_shard-bf16", "mfsdp-hybrid-bf16", "mfsdp-tp-hfsdp", "mfsdp-experts-hfsdp"),
    *(
        "simple_fsdp-optim_grads",
        "simple_fsdp-optim_grads_params",
        "simple_fsdp-recompute",
        "simple_fsdp-compiled",
    ),
    *("simple_fsdp-compiled-optim_grads", "simple_fsdp-bf16", "simple_fsdp-fp64"),
}
PARALLEL_CELLS = FP32_CELLS | VARIANTS | BF16_CELLS
CELLS = SINGLE_CELLS | PARALLEL_CELLS | FP64_CELLS | HYBRID_CELLS
