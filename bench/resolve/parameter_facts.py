"""The parameters of a model as sharding plans see them, from its shape alone."""

from __future__ import annotations

from bench.spec import TENSOR_PARALLEL_DIMS, HybridShape, ModelShape
from mfsdp_core.plan.grouping import ROOT, ParameterFacts
from mfsdp_core.plan.layout import Shape

_Layer = list[tuple[str, Shape]]

#: What expert parallelism spreads.
_SPREAD = ("experts.up", "experts.down")

#: bench's names of dtypes as torch's.
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parameter_facts(
    shape: ModelShape, compute: str, *, tensor_parallel: int = 1, expert_parallel: int = 1
) -> tuple[ParameterFacts, ...]:
    """Every parameter of `bench.models.build.empty_model(shape)` in registration order.

    compute: bench's name of the dtype that the parameters are cast to. The layers are the units.
    Shapes are those that a rank of groups of these sizes holds before sharding.
    """
    matrix: Shape = (shape.vocab, shape.hidden)
    embedding = ["embedding.weight"]
    if shape.tie_embeddings:
        embedding.append("head.weight")
    found: list[tuple[tuple[str, ...], str, Shape]] = [(tuple(embedding), ROOT, matrix)]
    for index, layer in enumerate(_layers(shape)):
        unit = f"layers.{index}"
        found += [((f"{unit}.{name}",), unit, size) for name, size in layer]
    found.append((("norm.weight",), ROOT, (shape.hidden,)))
    if not shape.tie_embeddings:
        found.append((("head.weight",), ROOT, matrix))
    dtype = TORCH_NAMES[compute]
    return tuple(
        ParameterFacts(
            names,
            (unit,) * len(names),
            _part(names[0], size, tensor_parallel, expert_parallel),
            dtype,
            requires_grad=True,
            is_expert=expert_parallel > 1 and names[0].endswith(_SPREAD),
        )
        for names, unit, size in found
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


def _layers(shape: ModelShape) -> list[_Layer]:
    if shape.hybrid is None:
        return [_llama_layer(shape)] * shape.layers
    norm: _Layer = [("norm.weight", (shape.hidden,))]
    mixers = {
        "M": _mamba(shape.hidden, shape.hybrid),
        "*": _attention(shape),
        "E": _experts(shape.hidden, shape.hybrid),
        "-": _feed_forward("feed_forward", shape.hidden, shape.ffn_hidden),
        "/": [
            ("embedded_norm.weight", (shape.hidden,)),
            ("join.weight", (shape.hidden, 2 * shape.hidden)),
        ],
    }
    return [norm + mixers[letter] for letter in shape.hybrid.pattern]


def _llama_layer(shape: ModelShape) -> _Layer:
    hidden, ffn = shape.hidden, shape.ffn_hidden
    return [
        ("attention_norm.weight", (hidden,)),
        *_attention(shape),
        ("feed_forward_norm.weight", (hidden,)),
        ("feed_forward.gate.weight", (ffn, hidden)),
        *_feed_forward("feed_forward", hidden, ffn),
    ]


def _attention(shape: ModelShape) -> _Layer:
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: _Layer = []
    for name, size in (("query", query), ("key", kv), ("value", kv)):
        found.append((f"attention.{name}.weight", (size, shape.hidden)))
        found += [(f"attention.{name}.bias", (size,))] if shape.qkv_bias else []
    return [*found, ("attention.output.weight", (shape.hidden, query))]


def _feed_forward(name: str, hidden: int, width: int) -> _Layer:
    return [(f"{name}.up.weight", (width, hidden)), (f"{name}.down.weight", (hidden, width))]


def _mamba(hidden: int, hybrid: HybridShape) -> _Layer:
    inner, convolved, heads = hybrid.mamba_inner, hybrid.mamba_convolved, hybrid.mamba_heads
    return [
        ("mamba.conv_weight", (convolved, 1, hybrid.conv_kernel)),
        ("mamba.conv_bias", (convolved,)),
        ("mamba.log_decay", (heads,)),
        ("mamba.step_bias", (heads,)),
        ("mamba.skip", (heads,)),
        ("mamba.input.weight", (inner + convolved + heads, hidden)),
        ("mamba.norm.weight", (inner,)),
        ("mamba.output.weight", (hidden, inner)),
    ]


def _experts(hidden: int, hybrid: HybridShape) -> _Layer:
    width = hybrid.shared_expert_hidden
    return [
        ("experts.up", (hybrid.experts * hybrid.expert_hidden, hidden)),
        ("experts.down", (hybrid.experts * hidden, hybrid.expert_hidden)),
        ("experts.router.weight", (hybrid.experts, hidden)),
        *(_feed_forward("experts.shared", hidden, width) if width else []),
    ]
