"""What was taken out before 0.1.0, and what serves in its place: one table, for one release.

A refusal of an unknown verb, option, key or value asks it. Delete the module after 0.1.0.
"""

from __future__ import annotations

from typing import Final

REMOVED: Final[dict[str, str]] = {
    "same_host": "leave engine.transport out, or write native or point_to_point",
    "pack": "leave it out: runs go one after another",
    "--packed": "leave it out: runs go one after another",
    "fsdp1": "use fsdp2; torch deprecates its first FSDP",
    "collective": "use nccl-tests, which times single collectives",
    "latency": "use nccl-tests",
    "bus_bandwidth": "use nccl-tests",
    "bisect": "use git bisect run with docs/recipes/bisect.sh",
    "cancel": "use scancel: runs are made inside one allocation (docs/sweep-file.md)",
    "slurm": "give its settings to sbatch, as in sbatch --partition=gpu --nodes=2 --wrap '...'",
    "ddp_zero": "use examples.engines.ddp_zero:build, from the root of a checkout",
    "simple_fsdp": "use examples.engines.simple_fsdp:build, from the root of a checkout",
    "deepspeed": "use examples.engines.deepspeed:build, from the root of a checkout",
    "compile_backend": "use examples.engines.simple_fsdp:compiled, or :traced",
    "noise": "use baseline noise",
    "show": "use status RUN",
    "logs": "use status RUN --logs",
    "status --rank": "read logs/rankN.log in the folder that status RUN names",
    "report --format matrix": "use report or compare, whose tables have all cells",
    "schema run": "use schema, which has every setting of a run below base",
    "--until-decided": "use --budget TIME",
    "--reason": "say it in the commit that keeps the baseline's file",
    "lint": "use compare, which reads logs, and says what is not stated and what is doubtful",
    "--from": "use --format, which also takes a row of your own",
    "targets": "ask for an improvement in a policy, as step_time: {improve: 5%}",
    "train.checkpoint_every": "save in a program of your own, with mfsdp_core.save_checkpoint",
    "measure.host_time": "use measure.counts, which counts Python calls and lines",
    "host_time": "use python_calls and python_lines, with measure.counts",
    "host_calls": "use python_calls, with measure.counts",
    "ledger_difference": "use live_storage",
    "--plot": "use fit, whose table and --json have the same bytes",
    "adamw_8bit": "use precision_aware_adamw with state_dtype bf16",
    "adamw_fp8": "use precision_aware_adamw with state_dtype bf16",
    "--inject": "use python -m tools.bug_in_a_copy and an arm; tests/run/test_patches.py tries all",
    "torchao": "use transformer_engine, engine.recipe, or a model of your own (model.factory)",
    "ordered": "leave it out: tests/core/test_late_bugs.py tries races between streams",
    "nvfp4": "use mxfp8; layers of Transformer Engine still take it (model.linear_recipe)",
    "export --to": "use export --format",
    "history": "use export --format bencher, asv or github-action-benchmark",
    "max_pool": "use allocator: max_pool, which both engines have",
    "fp8_layers_cpu.yaml": "use low_precision_cpu.yaml",
}
"""Key: the word as typed; with its verb in front where it still means something alone."""


def removed(word: str) -> str:
    """`; 'WORD' was removed: USE THIS`, or an empty string."""
    instead = REMOVED.get(word)
    return f"; {word!r} was removed: {instead}" if instead else ""
