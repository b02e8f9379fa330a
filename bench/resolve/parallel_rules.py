"""Rules about tensor and expert parallelism: what can be cut, and what is built beside it."""

from __future__ import annotations

from bench.errors import ConfigError
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun, RunSpec, known_engine


def data_parallel_ranks(spec: RunSpec) -> int:
    """Ranks that split the global batch: those of a tensor-parallel group share theirs.

    Raises:
        ConfigError: tensor parallelism does not divide the ranks.
    """
    if known_engine(spec.engine.name).one_process:
        return 1
    ranks, size = spec.launch.ranks, spec.engine.tensor_parallel
    _check_divides("engine.tensor_parallel", size, ranks, f"{ranks} ranks")
    return ranks // size


def check_expert_parallel(spec: RunSpec, data_parallel: int) -> None:
    """Refuse experts that would be spread over no whole number of groups.

    Raises:
        ConfigError: with the sizes that can.
    """
    inner = data_parallel // spec.engine.outer_size
    found = f"{inner} ranks of the inner data-parallel axis"
    _check_divides("engine.expert_parallel", spec.engine.expert_parallel, inner, found)


def _check_divides(name: str, size: int, ranks: int, found: str) -> None:
    if ranks % size:
        fitting = [count for count in range(1, ranks + 1) if ranks % count == 0]
        raise ConfigError(
            f"{name}: {found} cannot be split into groups of {size}; choose one of {fitting}"
        )


def parallelism_not_in_engine(run: ResolvedRun, _machine: Machine) -> str | None:
    """An engine is given a model that it cannot shard."""
    row = known_engine(run.engine.name)
    for name in ("tensor_parallel", "expert_parallel"):
        size = run.engine.setting(name)
        if size > 1 and name not in row.parallel:
            return f"engine {row.name} has no {name}={size}: leave it at 1 in its cells"
    return None


def tensor_parallel_cuts_evenly(run: ResolvedRun, _machine: Machine) -> str | None:
    """Every rank of a group computes as much of a layer as the others."""
    size, shape = run.engine.tensor_parallel, run.shape
    if size == 1:
        return None
    if shape is None or shape.hybrid is not None:
        what = "a model of the user's own" if shape is None else f"the hybrid {shape.preset}"
        return f"tensor_parallel={size} cuts the layers of a Llama; found {what}"
    uneven = [
        f"{name} {getattr(shape, name)}"
        for name in ("heads", "kv_heads", "ffn_hidden", "vocab")
        if getattr(shape, name) % size
    ]
    if not uneven:
        return None
    return (
        f"tensor_parallel={size} gives each rank as many heads, channels and tokens of the"
        f" vocabulary as the others; found {', '.join(uneven)}: choose a divisor"
    )


def expert_parallel_spreads_evenly(run: ResolvedRun, _machine: Machine) -> str | None:
    """Every rank of a group holds as many experts as the others."""
    size = run.engine.expert_parallel
    hybrid = None if run.shape is None else run.shape.hybrid
    if size == 1:
        return None
    if run.engine.tensor_parallel > 1:
        return f"expert_parallel={size} beside tensor_parallel is not built: set one of them to 1"
    if hybrid is None or "E" not in hybrid.pattern:
        return f"expert_parallel={size} spreads experts over ranks; found a model without any"
    if hybrid.experts % size:
        return (
            f"expert_parallel={size} gives each rank as many experts as the others; found"
            f" {hybrid.experts}: choose a divisor of it"
        )
    if run.train.checkpoint_every is not None:
        return (
            "experts of different ranks have equal names, and a checkpoint would mix them up: set"
            " train.checkpoint_every to null, or expert_parallel to 1"
        )
    return None
