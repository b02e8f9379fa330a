"""The Llama model against its definition, written again without the code under test."""

from __future__ import annotations

import math

import pytest
import torch

from bench.models.build import build_model
from bench.models.llama import Llama
from bench.resolve.presets import PRESETS
from bench.spec import ModelShape

CPU = torch.device("cpu")
SMALL = ModelShape(
    preset="small",
    layers=2,
    hidden=24,
    ffn_hidden=40,
    heads=6,
    kv_heads=2,
    head_dim=4,
    vocab=11,
    tie_embeddings=False,
)


def small(*, recompute="none", seed=7, dtype=torch.float32, **changes) -> Llama:
    shape = SMALL.model_copy(update=changes)
    return build_model(shape, recompute=recompute, seed=seed, device=CPU).to(dtype)


def spread(model: Llama) -> Llama:
    """Initial weights are so small that a wrong attention would hardly show; enlarge them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(30)
    return model


def batch(rows=3, length=5, vocab=11) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(vocab, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1], drawn[:, 1:]


def reference_logits(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    """From the papers: complex rotation, explicit mask and sums, one sequence at a time."""
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    shape = model.shape

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + shape.norm_eps) * weights[name]

    def rotate(x):
        half = shape.head_dim // 2
        turns = torch.polar(
            torch.ones(x.shape[0], half, dtype=torch.float64),
            torch.tensor(
                [
                    [p * shape.rope_theta ** (-2 * i / shape.head_dim) for i in range(half)]
                    for p in range(x.shape[0])
                ],
                dtype=torch.float64,
            ),
        )
        turned = torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous()) * turns
        return torch.cat((turned.real, turned.imag), dim=-1)

    def attend(x, prefix):
        d, group = shape.head_dim, shape.heads // shape.kv_heads
        query = x @ weights[f"{prefix}.query.weight"].T
        key = x @ weights[f"{prefix}.key.weight"].T
        value = x @ weights[f"{prefix}.value.weight"].T
        heads = []
        for head in range(shape.heads):
            shared = head // group
            q = rotate(query[:, head * d : (head + 1) * d])
            k = rotate(key[:, shared * d : (shared + 1) * d])
            scores = q @ k.T / math.sqrt(d)
            scores[torch.ones_like(scores).triu(1).bool()] = -math.inf
            heads.append(scores.softmax(-1) @ value[:, shared * d : (shared + 1) * d])
        return torch.cat(heads, dim=-1) @ weights[f"{prefix}.output.weight"].T

    def sequence(row):
        x = weights["embedding.weight"][row]
        for i in range(shape.layers):
            layer = f"layers.{i}"
            x = x + attend(norm(x, f"{layer}.attention_norm.weight"), f"{layer}.attention")
            y = norm(x, f"{layer}.feed_forward_norm.weight")
            gate = y @ weights[f"{layer}.feed_forward.gate.weight"].T
            up = y @ weights[f"{layer}.feed_forward.up.weight"].T
            down = weights[f"{layer}.feed_forward.down.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ down
        head = weights.get("head.weight", weights["embedding.weight"])
        return norm(x, "norm.weight") @ head.T

    return torch.stack([sequence(row) for row in tokens])


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 1e-3),
        ({"kv_heads": 6}, 1e-3),
        ({"tie_embeddings": True}, 1e-3),
        ({"dtype": torch.float64}, 1e-5),  # its rotary tables are FP32
    ],
)
def test_logits_follow_the_definition_of_llama(changes, most):
    model = spread(small(**changes))
    tokens, _ = batch()
    found = model.logits(tokens)
    assert found.dtype == changes.get("dtype", torch.float32)
    assert torch.allclose(found.double(), reference_logits(model, tokens), atol=most)


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_targets():
    model = spread(small())
    tokens, targets = batch()
    likelihood = reference_logits(model, tokens).log_softmax(-1)
    expected = -likelihood.gather(-1, targets[..., None]).mean()
    assert model(tokens, targets).item() == pytest.approx(expected.item(), rel=1e-5)


def test_casting_the_model_leaves_rotation_tables_and_loss_in_fp32():
    model = small().to(torch.bfloat16)
    tokens, targets = batch()
    assert model(tokens, targets).dtype == torch.float32
    tables = model._rotary.tables(5, CPU)
    assert {table.dtype for table in tables} == {torch.float32}
    # Rounded to bf16 it would be off by up to 2e-3.
    assert tables.cos[4, 0].item() == pytest.approx(math.cos(4), abs=1e-7)


def test_initial_values_depend_on_the_seed_and_the_shape_alone():
    torch.manual_seed(1)
    first = small(seed=7).state_dict()
    torch.manual_seed(2)
    again, other = small(seed=7).state_dict(), small(seed=8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_initial_spread_is_0_02_and_scaled_by_depth_where_the_residual_is_written():
    model = build_model(PRESETS["debug"], recompute="none", seed=1, device=CPU)
    layer = model.layers[0]
    assert layer.feed_forward.up.weight.std().item() == pytest.approx(0.02, rel=0.02)
    scaled = 0.02 / math.sqrt(2 * 4)
    assert layer.feed_forward.down.weight.std().item() == pytest.approx(scaled, rel=0.02)
    assert layer.attention.output.weight.std().item() == pytest.approx(scaled, rel=0.02)
    assert torch.equal(layer.attention_norm.weight, torch.ones(128))


def test_a_tied_embedding_is_one_parameter_and_gets_both_gradients():
    model = spread(small(tie_embeddings=True))
    assert model.head.weight is model.embedding.weight
    tokens, targets = batch()
    model(tokens, targets).backward()
    untied = spread(small())
    with torch.no_grad():
        untied.head.weight.copy_(untied.embedding.weight)
    untied(tokens, targets).backward()
    both = untied.head.weight.grad + untied.embedding.weight.grad
    assert torch.allclose(model.head.weight.grad, both, atol=1e-6)


def test_an_odd_head_size_is_refused():
    with pytest.raises(ValueError, match="even head_dim, found 5"):
        small(head_dim=5)
