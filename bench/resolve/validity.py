"""Checks of what is wrong on every machine. Each raises ConfigError with a way out."""

from __future__ import annotations

from bench.errors import ConfigError
from bench.spec import PREDICTION, DataSpec, ModelShape, RunSpec, known_engine

_BYTE_VALUES = 256


def check_spec(spec: RunSpec, shape: ModelShape | None, data_parallel: int) -> None:
    """Refuse a spec that no machine could run.

    Raises:
        ConfigError: a batch that does not divide, a warm-up longer than the run, a vocabulary too
            small for text, axes that do not fit.
    """
    _check_batch(spec, data_parallel)
    _check_warmup(spec)
    _check_data(spec, shape)
    _check_depths(spec, shape)
    check_launch(spec)
    _check_experts(spec, data_parallel)


def _check_depths(spec: RunSpec, shape: ModelShape | None) -> None:
    hybrid = None if shape is None else shape.hybrid
    depths = 0 if hybrid is None else hybrid.pattern.count(PREDICTION)
    if spec.train.seq_len <= depths:
        raise ConfigError(
            f"train.seq_len: {spec.train.seq_len} tokens leave nothing to predict {depths} tokens"
            f" ahead (model.pattern); expected at least {depths + 1}"
        )


def check_launch(spec: RunSpec) -> None:
    """Refuse ranks that nodes or axes do not divide.

    Raises:
        ConfigError: with the numbers that do.
    """
    ranks, nodes, outer = spec.launch.ranks, spec.launch.nodes, spec.engine.outer_size
    found = f"{ranks} ranks cannot be spread evenly over {nodes} nodes"
    _check_divides("launch.nodes", nodes, ranks, found)
    of_data = ranks // spec.engine.tensor_parallel
    found = f"{of_data} ranks cannot be split into {outer} equal groups"
    _check_divides("engine.outer_size", outer, of_data, found)


def data_parallel_ranks(spec: RunSpec) -> int:
    """Ranks that split the global batch: those of a tensor-parallel group share theirs.

    Raises:
        ConfigError: tensor parallelism does not divide the ranks.
    """
    if known_engine(spec.engine.name).one_process:
        return 1
    ranks, size = spec.launch.ranks, spec.engine.tensor_parallel
    found = f"{ranks} ranks cannot be split into groups of {size}"
    _check_divides("engine.tensor_parallel", size, ranks, found)
    return ranks // size


def _check_experts(spec: RunSpec, data_parallel: int) -> None:
    inner, size = data_parallel // spec.engine.outer_size, spec.engine.expert_parallel
    found = f"{inner} ranks of the inner data-parallel axis cannot be split into groups of {size}"
    _check_divides("engine.expert_parallel", size, inner, found)


def _check_batch(spec: RunSpec, data_parallel: int) -> None:
    train = spec.train
    per_step = data_parallel * train.micro_batch
    rest = train.global_batch % per_step
    if not rest:
        return
    lower = train.global_batch - rest
    near = " or ".join(str(size) for size in (lower, lower + per_step) if size > 0)
    raise ConfigError(
        f"train.global_batch: {train.global_batch} sequences cannot be split over {data_parallel}"
        f" data-parallel ranks x micro_batch {train.micro_batch} = {per_step} sequences; the"
        f" nearest that can: {near}"
    )


def _check_warmup(spec: RunSpec) -> None:
    train = spec.train
    if train.warmup_steps > train.steps:
        raise ConfigError(
            f"train.warmup_steps: a warm-up of {train.warmup_steps} steps is longer than the run of"
            f" {train.steps}; lower it, or raise train.steps"
        )


def _check_data(spec: RunSpec, shape: ModelShape | None) -> None:
    if shape is None:
        if spec.data != DataSpec():
            raise ConfigError(
                "data: a model.factory makes its own batches; leave the section out, or choose a"
                " preset"
            )
        return
    if spec.data.kind == "text" and shape.vocab < _BYTE_VALUES:
        raise ConfigError(
            f"data.kind: text is read as bytes and needs a vocabulary of at least {_BYTE_VALUES};"
            f" found {shape.vocab}: raise model.vocab, or use markov data"
        )
    if spec.data.path is not None and spec.data.kind != "text":
        raise ConfigError(
            f"data.path: {spec.data.kind} data is generated and reads no file; remove the path, or"
            " use data.kind: text"
        )
    if spec.data.path is not None and "\0" in spec.data.path:
        raise ConfigError("data.path: holds a NUL character; expected the path of a file or folder")


def _check_divides(name: str, size: int, ranks: int, found: str) -> None:
    if ranks % size:
        fitting = [count for count in range(1, ranks + 1) if ranks % count == 0]
        raise ConfigError(f"{name}: {found}; choose one of {fitting}")
