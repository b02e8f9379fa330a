"""The parameters of a model as sharding plans see them, from its shape alone."""

from __future__ import annotations

from bench.spec import ModelShape
from mfsdp_core.plan.grouping import ROOT, ParameterFacts
from mfsdp_core.plan.layout import Shape

#: bench's names of dtypes as torch's.
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parameter_facts(shape: ModelShape, compute: str) -> tuple[ParameterFacts, ...]:
    """Every parameter of `bench.models.llama.Llama(shape)` in registration order.

    compute: bench's name of the dtype that the parameters are cast to. The layers are the units.
    """
    matrix: Shape = (shape.vocab, shape.hidden)
    embedding = ["embedding.weight"]
    if shape.tie_embeddings:
        embedding.append("head.weight")
    found: list[tuple[tuple[str, ...], str, Shape]] = [(tuple(embedding), ROOT, matrix)]
    for layer in range(shape.layers):
        unit = f"layers.{layer}"
        found += [((f"{unit}.{name}",), unit, size) for name, size in _layer(shape)]
    found.append((("norm.weight",), ROOT, (shape.hidden,)))
    if not shape.tie_embeddings:
        found.append((("head.weight",), ROOT, matrix))
    dtype = TORCH_NAMES[compute]
    return tuple(
        ParameterFacts(names, (unit,) * len(names), size, dtype, requires_grad=True)
        for names, unit, size in found
    )


def _layer(shape: ModelShape) -> list[tuple[str, Shape]]:
    hidden, ffn = shape.hidden, shape.ffn_hidden
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        ("attention_norm.weight", (hidden,)),
        ("attention.query.weight", (query, hidden)),
        ("attention.key.weight", (kv, hidden)),
        ("attention.value.weight", (kv, hidden)),
        ("attention.output.weight", (hidden, query)),
        ("feed_forward_norm.weight", (hidden,)),
        ("feed_forward.gate.weight", (ffn, hidden)),
        ("feed_forward.up.weight", (ffn, hidden)),
        ("feed_forward.down.weight", (hidden, ffn)),
    ]
