"""Programs as users write them, beside the same program in plain torch on all ranks' data."""

from __future__ import annotations

import copy
import importlib.util
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp_core
from oracle.cycles import gathered, named
from oracle.llama import llama
from oracle.ranks import mesh
from oracle.reference import compare

pytestmark = pytest.mark.on_ranks

RANKS = 4


def compare_weights(model: nn.Module, plain: nn.Module, relative: float) -> None:
    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    compare(gathered({name: p.detach() for name, p in named(model)}), wanted, relative)


@pytest.mark.sample
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (pip install -e '.[dev]')",
)
@pytest.mark.parametrize(
    ("tied", "recompute"),
    [(False, None), (True, None), (True, "reentrant"), (False, "non-reentrant")],
)
def test_a_llama_of_transformers_trains_and_generates(tied: bool, recompute: str | None) -> None:
    """Three AdamW steps and a generation."""
    ranks = 2
    axes = mesh(ranks)  # the others need not load transformers
    warnings.simplefilter("ignore")  # what other packages say about themselves
    plain, module = llama(tied), llama(tied)
    for one in (plain, module):
        if recompute is not None:
            options = {"use_reentrant": recompute == "reentrant"}
            one.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        one.train()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = mfsdp_core.fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        device_mesh=axes,
        dp_shard_dim="dp",
        fsdp_unit_modules=["transformers.models.llama.modeling_llama.LlamaDecoderLayer"],
        zero_dp_strategy="optim_grads_params",
    )
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(1, 61, (ranks, 9), generator=generator)
        mine = tokens[dist.get_rank()][None]
        optimizer.zero_grad()
        model(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        reference.zero_grad()
        value = sum(plain(input_ids=row[None], labels=row[None]).loss for row in tokens) / ranks
        value.backward()
        losses.append(float(value.detach()))
        reference.step()
    assert losses[-1] < losses[0] + 1, losses
    compare_weights(model, plain, 1e-4)
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    texts = [
        one.eval().generate(prompt, max_new_tokens=6, do_sample=False)
        for one in (model.module, plain)
    ]
    assert torch.equal(*texts), texts


class ConvNet(nn.Module):
    """Convolutions with batch norm, as in a small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.stages = nn.ModuleList(self.stage() for _ in range(2))
        self.head = nn.Linear(6, 4)

    @staticmethod
    def stage() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(x.mean((2, 3)))


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[ranks, batch, ...] inputs and labels, equal on all ranks."""
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(RANKS, 4, 3, 8, 8, generator=generator)
    return values, torch.randint(4, (RANKS, 4), generator=generator)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_convolutional_network_with_batch_norm_trains(strategy: str) -> None:
    """SGD with momentum; each rank has statistics of its own batches, as under DDP."""
    torch.manual_seed(9)
    plain = ConvNet()
    module = copy.deepcopy(plain)
    reference, inner = (
        torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (plain, module)
    )
    model, optimizer = mfsdp_core.fully_shard(
        module,
        inner,
        device_mesh=mesh(RANKS),
        dp_shard_dim="dp",
        fsdp_unit_modules=[nn.Sequential],
        zero_dp_strategy=strategy,
    )
    statistics = {r: {k: v.clone() for k, v in plain.named_buffers()} for r in range(RANKS)}
    rank = dist.get_rank()
    for step in range(3):
        values, labels = images(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(values[rank]), labels[rank]).backward()
        optimizer.step()
        reference.zero_grad()
        for r in range(RANKS):
            plain.load_state_dict(statistics[r], strict=False)
            (nn.functional.cross_entropy(plain(values[r]), labels[r]) / RANKS).backward()
            statistics[r] = {k: v.clone() for k, v in plain.named_buffers()}
        reference.step()
    compare_weights(model, plain, 1e-4)
    own = {k: v.double() for k, v in model.module.named_buffers()}
    compare(own, {k: v.double() for k, v in statistics[rank].items()}, 1e-4)
    plain.load_state_dict(statistics[rank], strict=False)
    with torch.no_grad():
        outputs = [one.eval()(images(9)[0][0]) for one in (model, plain)]
    assert torch.allclose(*outputs, atol=1e-5)


def test_weights_in_another_memory_format_become_contiguous_and_it_is_said_once() -> None:
    torch.manual_seed(9)
    module = ConvNet().to(memory_format=torch.channels_last)
    value = images(0)[0][0].to(memory_format=torch.channels_last)
    wanted = module(value).detach()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = mfsdp_core.fully_shard_model(
            module, device_mesh=mesh(RANKS), dp_shard_dim="dp", fsdp_unit_modules=[nn.Sequential]
        )
        assert torch.allclose(model(value), wanted, atol=1e-5)
    assert len(caught) == 1, caught
    assert "channels_last" in str(caught[0].message)
