"""Programs as users write them, beside the same program in plain torch on all ranks' data."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp_core
from oracle.llama import llama
from oracle.ranks import mesh
from oracle.reference import compare

pytestmark = pytest.mark.on_ranks

RANKS = 4


def compare_weights(model: nn.Module, plain: nn.Module, relative: float) -> None:
    """Gathered, under the names of the bare module."""
    found = {
        name.removeprefix("module."): mfsdp_core.gather_full(p.detach()).reshape(p.shape)
        for name, p in model.named_parameters()
    }
    compare(found, {name: p.detach() for name, p in plain.named_parameters()}, relative)


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


def sharded_convnet(
    strategy: str, make: Callable[[Any], torch.optim.Optimizer], **arguments: Any
) -> tuple[Any, Any, nn.Module, torch.optim.Optimizer]:
    """Model and optimizer, and those of plain torch."""
    torch.manual_seed(9)
    plain, module = ConvNet(), ConvNet()
    module.load_state_dict(plain.state_dict())
    model, optimizer = mfsdp_core.fully_shard(
        module,
        make(module.parameters()),
        device_mesh=mesh(RANKS),
        dp_shard_dim="dp",
        fsdp_unit_modules=[nn.Sequential],
        zero_dp_strategy=strategy,
        **arguments,
    )
    return model, optimizer, plain, make(plain.parameters())


def images(step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[ranks, batch, ...] inputs and labels, equal on all ranks."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    values = torch.randn(RANKS, 4, 3, 8, 8, generator=generator)
    return values, torch.randint(4, (RANKS, 4), generator=generator)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_convolutional_network_with_batch_norm_trains(strategy: str) -> None:
    """SGD with momentum; each rank has statistics of its own batches, as under DDP."""
    make = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731
    model, optimizer, plain, reference = sharded_convnet(strategy, make)
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


class Side:
    """One model with a scaler, a schedule and an average; `backward` is what differs."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, inner: nn.Module) -> None:
        self.model, self.optimizer, self.inner = model, optimizer, inner
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)
        self.average = torch.optim.swa_utils.AveragedModel(
            inner, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def backward(self, values: torch.Tensor, labels: torch.Tensor) -> None:
        """Half a loss, of one of two microbatches."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(values), labels) / 2
        self.scaler.scale(loss / (1 if self.model is not self.inner else RANKS)).backward()

    def step(self, clip: Callable[[Any, float], object]) -> None:
        """What follows the backward passes."""
        self.scaler.unscale_(self.optimizer)
        clip(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.inner)
        self.optimizer.zero_grad()

    def state(self) -> tuple[float, float]:
        """Scale and learning rate."""
        return self.scaler.get_scale(), self.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_mixed_precision_loop_with_all_its_companions_trains(strategy: str) -> None:
    """autocast, GradScaler, clipping, OneCycleLR, accumulation under no_sync, and an EMA.

    Scales and learning rates are those of plain torch after every step.
    """
    make = lambda p: torch.optim.AdamW(p, lr=1e-3)  # noqa: E731
    model, optimizer, plain, reference = sharded_convnet(
        strategy, make, sync_model_each_microbatch=False
    )
    ours, theirs = Side(model, optimizer, model.module), Side(plain, reference, plain)
    rank = dist.get_rank()
    for step in range(4):
        (first, first_labels), (second, second_labels) = images(step, 0), images(step, 1)
        with model.no_sync():
            ours.backward(first[rank], first_labels[rank])
        ours.backward(second[rank], second_labels[rank])
        model.finish_grad_sync()
        ours.step(mfsdp_core.clip_grad_norm_)
        for values, labels in ((first, first_labels), (second, second_labels)):
            for r in range(RANKS):
                theirs.backward(values[r], labels[r])
        theirs.step(nn.utils.clip_grad_norm_)
        assert ours.state() == theirs.state(), step
    compare_weights(model, plain, 0.02)
    with torch.no_grad():
        value = images(9)[0][0]
        # In training mode, since statistics differ: plain torch has seen the batches of all ranks.
        outputs = [side.average.train()(value) for side in (ours, theirs)]
    assert float((outputs[0] - outputs[1]).abs().max()) < 0.02


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
