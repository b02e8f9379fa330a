"""`resolve`: every choice made, every user error raised, before a process starts.

It also fills in the dtypes that a spec leaves open, by the rules of the core's own policy.
"""

from __future__ import annotations

from typing import Final

from bench.errors import UnsupportedError
from bench.resolve.engine_choice import adds_up_as_sent, resolve_engine
from bench.resolve.environment_names import check_environment
from bench.resolve.machine import Machine
from bench.resolve.model_shape import resolve_shape
from bench.resolve.quantised_rules import resolve_linear
from bench.resolve.rules import broken_rules
from bench.resolve.validity import check_spec, data_parallel_ranks
from bench.spec import (
    DtypeSpec,
    EngineSpec,
    ResolvedDtypes,
    ResolvedRun,
    RunSpec,
    TrainSpec,
)
from mfsdp_core.plan.dtype_policy import resolve_dtypes as resolve_group_dtypes

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
