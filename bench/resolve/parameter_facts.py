"""The parameters of a model as sharding plans see them, from its shape alone."""

from __future__ import annotations

from bench.spec import TENSOR_PARALLEL_DIMS, ModelShape
from mfsdp_core.plan.grouping import ROOT, ParameterFacts
from mfsdp_core.plan.layout import Shape

#: What expert parallelism spreads.
_SPREAD = ("experts.up", "experts.down")

#: bench's names of dtypes as torch's.
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parameter_facts(
    shape: ModelShape, compute: str, *, tensor_parallel: int = 1, expert_parallel: int = 1
) -> tuple[ParameterFacts, ...]:
    """Every parameter of a model of `shape`, as a rank of groups of these sizes holds it at first.

    compute: bench's name of the dtype that the parameters are cast to.
    """
    return tuple(
        ParameterFacts(
            names,
            (unit or ROOT,) * len(names),
            _part(names[0], size, tensor_parallel, expert_parallel),
            TORCH_NAMES[compute],
            requires_grad=True,
            is_expert=expert_parallel > 1 and names[0].endswith(_SPREAD),
        )
        for names, unit, size in shape.tensors()
    )


def _part(name: str, shape: Shape, tensor_parallel: int, expert_parallel: int) -> Shape:
    """What one rank holds of a parameter."""
    parts = name.split(".")[:-1]
    dim = TENSOR_PARALLEL_DIMS.get(".".join(parts[2:] or parts))
    divisors = [1] * len(shape)
    if dim is not None:
        divisors[dim] = tensor_parallel
    if name.endswith(_SPREAD):
        divisors[0] = expert_parallel
    return tuple(size // by for size, by in zip(shape, divisors, strict=True))
