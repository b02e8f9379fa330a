"""Blocks of the hybrid family against their definitions, written again token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.models.build import build_model
from bench.models.decoder import LEFT_OUT, Decoder
from bench.models.experts import Experts
from bench.models.hybrid import HybridBlock
from bench.models.state_space import Mamba, scan
from bench.spec import HybridShape, ModelShape

CPU = torch.device("cpu")
PARTS = HybridShape(
    pattern="ME*-",
    mamba_heads=4,
    mamba_head_dim=3,
    mamba_groups=2,
    state=5,
    chunk=4,
    experts=5,
    experts_per_token=2,
    expert_hidden=7,
    shared_expert_hidden=6,
    routed_scale=2.5,
)
SMALL = ModelShape(
    preset="small",
    layers=4,
    hidden=12,
    ffn_hidden=10,
    heads=4,
    kv_heads=2,
    head_dim=4,
    vocab=11,
    tie_embeddings=True,
    hybrid=PARTS,
)


def small(recompute="none", shape: ModelShape = SMALL) -> Decoder:
    return build_model(shape, recompute=recompute, seed=7, device=CPU)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def batch(rows: int = 3, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def test_the_pattern_spells_the_blocks_in_order_and_every_block_is_a_unit():
    model = small()
    assert [block.mixer for block in model.layers] == [
        "mamba",
        "experts",
        "attention",
        "feed_forward",
    ]
    assert model.unit_classes == (HybridBlock,)
    inside = {id(p) for block in model.layers for p in block.parameters()}
    rest = {name for name, p in model.named_parameters() if id(p) not in inside}
    assert rest == {"embedding.weight", "norm.weight"}


def recurrence(x, step, a, b, c):
    """The state-space model as it is written down: token by token, head by head."""
    out = torch.zeros_like(x)
    rows, length, heads, head_dim = x.shape
    per_group = heads // b.shape[2]
    for row in range(rows):
        for head in range(heads):
            state = torch.zeros(head_dim, b.shape[3], dtype=x.dtype)
            group = head // per_group
            for t in range(length):
                size = step[row, t, head]
                state = torch.exp(size * a[head]) * state
                state = state + size * torch.outer(x[row, t, head], b[row, t, group])
                out[row, t, head] = state @ c[row, t, group]
    return out


@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (4, 4), (9, 4), (9, 3), (9, 100)])
def test_the_chunked_scan_is_the_recurrence(length, chunk):
    x, b, c = drawn(2, length, 4, 3), drawn(2, length, 2, 5, seed=1), drawn(2, length, 2, 5, seed=2)
    step, a = F.softplus(drawn(2, length, 4, seed=3)), -drawn(4, seed=4).exp()
    assert torch.allclose(scan(x, step, a, b, c, chunk), recurrence(x, step, a, b, c), atol=1e-12)


def test_gradients_of_the_chunked_scan_are_those_of_the_recurrence():
    x, b, c = drawn(1, 7, 2, 2), drawn(1, 7, 1, 3, seed=1), drawn(1, 7, 1, 3, seed=2)
    step, a = F.softplus(drawn(1, 7, 2, seed=3)), -drawn(2, seed=4).exp()
    leaves = [value.requires_grad_() for value in (x, step, a, b, c)]
    weight = drawn(1, 7, 2, 2, seed=5)
    found = torch.autograd.grad((scan(*leaves, 3) * weight).sum(), leaves)
    wanted = torch.autograd.grad((recurrence(*leaves) * weight).sum(), leaves)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-11)


def test_strong_decays_over_a_long_chunk_neither_overflow_nor_give_nan():
    x, b, c = drawn(1, 256, 1, 2), drawn(1, 256, 1, 3, seed=1), drawn(1, 256, 1, 3, seed=2)
    x = x.float().requires_grad_()
    step = torch.full((1, 256, 1), 10.0)
    y = scan(x, step, torch.tensor([-16.0]), b.float(), c.float(), 256)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()


def test_a_mamba_mixer_is_its_definition():
    torch.manual_seed(0)
    mixer = Mamba(12, PARTS, 1e-5).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(drawn(*parameter.shape, seed=parameter.numel()) * 0.5)
    x = drawn(2, 9, 12)
    gate, rest, step = (x @ mixer.input.weight.T).split((12, 32, 4), -1)
    convolved = F.conv1d(
        F.pad(rest.transpose(1, 2), (3, 0)), mixer.conv_weight, mixer.conv_bias, groups=32
    )
    channels, b, c = F.silu(convolved).transpose(1, 2).split((12, 10, 10), -1)
    channels, b, c = channels.view(2, 9, 4, 3), b.view(2, 9, 2, 5), c.view(2, 9, 2, 5)
    size = F.softplus(step + mixer.step_bias)
    y = recurrence(channels, size, -mixer.log_decay.exp(), b, c)
    y = (y + channels * mixer.skip.view(1, 1, 4, 1)).flatten(2) * F.silu(gate)
    grouped = y.view(2, 9, 2, 6)
    normed = (grouped / (grouped.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(2, 9, 12)
    expected = (normed * mixer.norm.weight) @ mixer.output.weight.T
    assert torch.allclose(mixer(x), expected, atol=1e-12)


def test_a_token_is_answered_by_its_best_experts_and_the_shared_one():
    experts = Experts(12, PARTS).double()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(drawn(*parameter.shape, seed=parameter.numel()))
    x = drawn(2, 6, 12)
    out = torch.zeros_like(x)
    for place in ((row, t) for row in range(2) for t in range(6)):
        token = x[place]
        scores = torch.sigmoid(experts.router.weight @ token)
        best = scores.argsort(descending=True)[:2]
        shares = 2.5 * scores[best] / scores[best].sum()
        for share, expert in zip(shares, best.tolist(), strict=True):
            up = experts.up[7 * expert : 7 * (expert + 1)]
            down = experts.down[12 * expert : 12 * (expert + 1)]
            out[place] += share * (down @ torch.relu(up @ token) ** 2)
        shared = experts.shared
        out[place] += shared.down.weight @ torch.relu(shared.up.weight @ token) ** 2
    assert torch.allclose(experts(x), out, atol=1e-11)


def test_experts_that_no_token_chose_have_a_zero_gradient_and_not_none():
    experts = Experts(12, PARTS)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(drawn(*parameter.shape, seed=parameter.numel()).float())
        experts.router.weight.zero_()
        experts.router.weight[:2, 0] = 1.0  # the first two experts are best for positive inputs
    experts(drawn(1, 4, 12).float().abs()).sum().backward()
    used = experts.up.grad.view(5, 7, 12).abs().sum((1, 2)) > 0
    assert used.tolist() == [True, True, False, False, False]


def test_no_token_sees_what_comes_after_it():
    model = small().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(drawn(*parameter.shape, seed=parameter.numel()) * 0.3)
    tokens, _ = batch(rows=2)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-12)
    for later in range(5, 9):
        assert not torch.allclose(before[:, later], after[:, later], atol=1e-9)


PREDICTING = SMALL.model_copy(
    update={"hybrid": PARTS.model_copy(update={"pattern": "M*/*/-E"}), "layers": 7}
)


def test_a_depth_predicts_one_token_further_from_the_stream_before_it() -> None:
    """The loss by its definition, position by position, from the blocks alone."""
    model = small(shape=PREDICTING).double()
    tokens, targets = batch()
    trunk, first, second = model.layers[:2], model.layers[2:4], model.layers[4:]
    x = model.embedding(tokens)
    for layer in trunk:
        x = layer(x)
    length = tokens.shape[1]
    wanted = F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())
    for ahead, (join, *layers) in enumerate((first, second)):
        # Positions whose token so far ahead is known; later ones change nothing before them.
        known = length - ahead
        x = join(x[:, :known], model.embedding(targets[:, ahead:]))
        for layer in layers:
            x = layer(x)
        logits = model.head(model.norm(x))[:, : known - 1]
        further = targets[:, ahead + 1 :]
        wanted = wanted + 0.05 * F.cross_entropy(logits.flatten(0, 1), further.flatten())
    torch.testing.assert_close(model(tokens, targets), wanted)


@pytest.mark.parametrize("shape", [SMALL, SMALL.model_copy(update={"hybrid": None})])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputing_activations_changes_nothing(recompute, shape):
    plain, recomputed = small(shape=shape), small(recompute, shape)
    tokens, targets = batch()
    losses = []
    for model in (plain, recomputed):
        loss = model(tokens, targets)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("shape", [SMALL, SMALL.model_copy(update={"hybrid": None})])
def test_a_loss_in_chunks_is_the_same_to_rounding_without_whole_logits(shape):
    plain, chunked = small(shape=shape).double(), small(shape=shape).double()
    chunked.loss_chunks = 4
    tokens, targets = batch()  # 27 tokens: 7, 7, 7 and 6
    targets = targets.masked_fill(torch.arange(9) == 2, LEFT_OUT)
    sizes = []
    chunked.head.register_forward_hook(lambda *found: sizes.append(found[2].shape[:-1].numel()))
    losses = [model(tokens, targets) for model in (plain, chunked)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    assert set(sizes) == {6, 7}
    for one, other in zip(plain.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-14)
