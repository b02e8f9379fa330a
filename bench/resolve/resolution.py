"""`resolve`: every choice made, every user error raised, before a process starts.

It refuses what is wrong on every machine (`check_spec`), each time with a way out, and fills in the
dtypes that a spec leaves open, by the rules of the core's own policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.errors import ConfigError, UnsupportedError
from bench.resolve.engine_choice import adds_up_as_sent, resolve_engine
from bench.resolve.environment_names import check_environment
from bench.resolve.machine import Machine
from bench.resolve.model_shape import resolve_shape
from bench.resolve.quantised_rules import resolve_linear
from bench.resolve.rules import broken_rules
from bench.spec import (
    PREDICTION,
    DataSpec,
    DtypeSpec,
    EngineSpec,
    ModelShape,
    ResolvedDtypes,
    ResolvedRun,
    RunSpec,
    TrainSpec,
    known_engine,
)
from mfsdp_core.plan.dtype_policy import resolve_dtypes as resolve_group_dtypes

_BYTE_VALUES = 256


def check_spec(spec: RunSpec, shape: ModelShape | None, data_parallel: int) -> None:
    """Refuse a spec that no machine could run.

    Raises:
        ConfigError: a batch that does not divide, a warm-up longer than the run, a vocabulary too
            small for text, axes that do not fit.
    """
    for holds, message in (
        *_of_training(spec, data_parallel),
        *_of_data(spec, shape),
        *_of_axes(spec, data_parallel),
    ):
        if holds:
            raise ConfigError(message)


_Refusals = Iterator[tuple[object, str]]
"""Whether something is wrong, and what then is said, with a way out."""


def _of_training(spec: RunSpec, data_parallel: int) -> _Refusals:
    train = spec.train
    per_step = data_parallel * train.micro_batch
    rest = train.global_batch % per_step
    lower = train.global_batch - rest
    near = " or ".join(str(size) for size in (lower, lower + per_step) if size > 0)
    yield (
        rest,
        f"train.global_batch: {train.global_batch} sequences cannot be split over {data_parallel}"
        f" data-parallel ranks x micro_batch {train.micro_batch} = {per_step} sequences; the"
        f" nearest that can: {near}",
    )
    yield (
        train.warmup_steps > train.steps,
        f"train.warmup_steps: a warm-up of {train.warmup_steps} steps is longer than the run of"
        f" {train.steps}; lower it, or raise train.steps",
    )
    yield (
        spec.measure.nvtx and spec.measure.profile == "torch",
        "measure.nvtx: profile torch names the same ranges, and takes CUPTI from the tool that"
        " reads them; set one of the two back",
    )


def _of_data(spec: RunSpec, shape: ModelShape | None) -> _Refusals:
    data = spec.data
    if shape is None:
        yield (
            data != DataSpec(),
            "data: a model.factory makes its own batches; leave the section out, or choose a"
            " preset",
        )
        return
    yield (
        data.kind == "text" and shape.vocab < _BYTE_VALUES,
        f"data.kind: text is read as bytes and needs a vocabulary of at least {_BYTE_VALUES};"
        f" found {shape.vocab}: raise model.vocab, or use markov data",
    )
    yield (
        data.path is not None and data.kind != "text",
        f"data.path: {data.kind} data is generated and reads no file; remove the path, or"
        " use data.kind: text",
    )
    yield (
        "\0" in (data.path or ""),
        "data.path: holds a NUL character; expected the path of a file or folder",
    )
    depths = 0 if shape.hybrid is None else shape.hybrid.pattern.count(PREDICTION)
    yield (
        spec.train.seq_len <= depths,
        f"train.seq_len: {spec.train.seq_len} tokens leave nothing to predict {depths} tokens"
        f" ahead (model.pattern); expected at least {depths + 1}",
    )


def _of_axes(spec: RunSpec, data_parallel: int) -> _Refusals:
    """Ranks that nodes or axes do not divide, with the numbers that do."""
    ranks, nodes, engine = spec.launch.ranks, spec.launch.nodes, spec.engine
    of_data, outer = ranks // engine.tensor_parallel, engine.outer_size
    what = f"{ranks} ranks cannot be spread evenly over {nodes} nodes"
    yield _does_not_divide("launch.nodes", nodes, ranks, what)
    what = f"{of_data} ranks cannot be split into {outer} equal groups"
    yield _does_not_divide("engine.outer_size", outer, of_data, what)
    inner, size = data_parallel // outer, engine.expert_parallel
    what = f"{inner} ranks of the inner data-parallel axis cannot be split into groups of {size}"
    yield _does_not_divide("engine.expert_parallel", size, inner, what)


def data_parallel_ranks(spec: RunSpec) -> int:
    """Ranks that split the global batch: those of a tensor-parallel group share theirs.

    Raises:
        ConfigError: tensor parallelism does not divide the ranks.
    """
    if known_engine(spec.engine.name).one_process:
        return 1
    ranks, size = spec.launch.ranks, spec.engine.tensor_parallel
    what = f"{ranks} ranks cannot be split into groups of {size}"
    wrong, message = _does_not_divide("engine.tensor_parallel", size, ranks, what)
    if wrong:
        raise ConfigError(message)
    return ranks // size


def _does_not_divide(name: str, size: int, ranks: int, what: str) -> tuple[bool, str]:
    fitting = [count for count in range(1, ranks + 1) if ranks % count == 0]
    return ranks % size > 0, f"{name}: {what}; choose one of {fitting}"


#: Iteration 1 runs before buffers are registered, so that the second is the first that counts; a
#: few more show that the choice stays.
EVIDENCE_STEPS: Final = 5


def resolve(spec: RunSpec, machine: Machine) -> ResolvedRun:
    """Turn a request into a run that can start on `machine`.

    Raises:
        ConfigError: the spec is wrong on every machine.
        UnsupportedError: it cannot run here; `rule` and `reason` are for the plan.
    """
    run = resolve_anywhere(spec)
    broken = next(broken_rules(run, machine), None)
    if broken is not None:
        raise UnsupportedError(*broken)
    return run


def resolve_anywhere(spec: RunSpec) -> ResolvedRun:
    """The choices alone: whether any machine can run the result is not checked.

    Raises:
        ConfigError: the spec is wrong on every machine.
    """
    shape = resolve_shape(spec.model)
    check_environment(spec)
    data_parallel = data_parallel_ranks(spec)
    check_spec(spec, shape, data_parallel)
    return ResolvedRun(
        shape=shape,
        recompute=spec.model.recompute,
        data=spec.data,
        engine=resolve_engine(spec),
        dtypes=resolve_dtypes(spec.dtypes, spec.engine),
        train=_steps(spec),
        launch=spec.launch,
        measure=spec.measure,
        data_parallel=data_parallel,
        factory=spec.model.factory,
        linear=resolve_linear(spec.model),
        loss_chunks=spec.model.loss_chunks,
        microbatches=spec.train.global_batch // (data_parallel * spec.train.micro_batch),
    )


def _steps(spec: RunSpec) -> TrainSpec:
    """The training of `spec`, cut to EVIDENCE_STEPS where NCCL logs every collective."""
    if spec.measure.nccl == "none" or spec.train.steps <= EVIDENCE_STEPS:
        return spec.train
    return spec.train.model_copy(update={"steps": EVIDENCE_STEPS})


def resolve_dtypes(dtypes: DtypeSpec, engine: EngineSpec) -> ResolvedDtypes:
    """The dtypes of a run.

    main_grads defaults to the compute dtype, grad_comm to main_grads, reduce to the wider of the
    two, or to grad_comm where collectives add up. `main_params` None is kept: it says that the
    compute weights are the main ones, whatever their dtype.
    """
    group = resolve_group_dtypes(
        dtypes.compute, dtypes.main_params, dtypes.main_grads, dtypes.grad_comm, dtypes.reduce
    )
    as_sent = dtypes.reduce is None and adds_up_as_sent(engine)
    return ResolvedDtypes(
        compute=group.compute,
        main_params=dtypes.main_params,
        main_grads=group.main_grads,
        grad_comm=group.grad_comm,
        reduce=group.grad_comm if as_sent else group.reduce,
    )
