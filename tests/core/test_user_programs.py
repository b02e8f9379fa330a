"""Programs as users and frameworks write them: as in plain torch, or refused in words."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mfsdp_core
from conformance.judging import same
from mfsdp_core.errors import LifecycleError, MfsdpError
from oracle.beside_torch import Pair, beside
from oracle.models import Chain
from oracle.ranks import mesh
from oracle.reference import compare

pytestmark = pytest.mark.on_ranks

RANKS = 4


def llama(tied: bool, layers: int = 2) -> Any:
    """From a config, which keeps keys and values (use_cache); equal weights on all ranks."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    )


@pytest.mark.needs("transformers", "safetensors")
@pytest.mark.parametrize(
    ("tied", "recompute", "layers", "options"),
    [
        (True, "reentrant", 2, {}),
        (False, "non-reentrant", 2, {}),
        (False, None, 2, {}),
        # Kept keys and values hold no unit's slot.
        (False, None, 4, {"fsdp_double_buffer": True}),
    ],
    ids=str,
)
def test_a_llama_of_transformers_trains_and_generates(
    tied: bool, recompute: str | None, layers: int, options: dict[str, Any]
) -> None:
    """Three AdamW steps and a generation."""
    axes = mesh(2)  # the others need not load transformers
    warnings.simplefilter("ignore")  # what other packages say about themselves
    plain, module = llama(tied, layers), llama(tied, layers)
    for one in (plain, module):
        if recompute is not None:
            how = {"use_reentrant": recompute == "reentrant"}
            one.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        one.train()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = mfsdp_core.fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        device_mesh=axes,
        dp_shard_dim="dp",
        fsdp_unit_modules=["transformers.models.llama.modeling_llama.LlamaDecoderLayer"],
        zero_dp_strategy="optim_grads_params",
        **options,
    )
    pair = Pair(plain, model)
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        mine = torch.randint(1, 61, (1, 9), generator=generator)
        pair.zero_grad()
        for one in pair.both:
            one(input_ids=mine, labels=mine).loss.backward()
        pair.average()
        optimizer.step()
        reference.step()
    pair.compare_weights(1e-4)
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
    """[batch, ...] inputs and labels of this rank."""
    generator = torch.Generator().manual_seed(RANKS * step + dist.get_rank())
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(4, (4,), generator=generator)


def test_a_convolutional_network_with_batch_norm_trains() -> None:
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
    )
    pair = Pair(plain, model, dist.group.WORLD)
    for step in range(3):
        values, labels = images(step)
        pair.zero_grad()
        for one in pair.both:
            nn.functional.cross_entropy(one(values), labels).backward()
        pair.average()
        optimizer.step()
        reference.step()
    pair.compare_weights(1e-4)
    own, wanted = ({k: v.double() for k, v in one.named_buffers()} for one in (model.module, plain))
    compare(own, wanted, 1e-4)
    with torch.no_grad():
        outputs = [one.eval()(images(9)[0]) for one in pair.both]
    assert torch.allclose(*outputs, atol=1e-5)


def test_weights_in_another_memory_format_become_contiguous_and_it_is_said_once() -> None:
    torch.manual_seed(9)
    module = ConvNet().to(memory_format=torch.channels_last)
    value = images(0)[0].to(memory_format=torch.channels_last)
    wanted = module(value).detach()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = mfsdp_core.fully_shard_model(
            module, device_mesh=mesh(RANKS), dp_shard_dim="dp", fsdp_unit_modules=[nn.Sequential]
        )
        assert torch.allclose(model(value), wanted, atol=1e-5)
    assert len(caught) == 1, caught
    assert "channels_last" in str(caught[0].message)


def test_wrappers_and_copies_of_frameworks_are_answered_in_words() -> None:
    """Attributes of the module inside, a second wrapper, a copy."""
    model = beside(Chain, ("optim_grads_params", "storage_resize")).model
    model.module.generate = model.module.forward
    weight = model.module.head.weight
    for error, words, action in (
        (AttributeError, "object has no attribute 'generate'", lambda: model.generate),
        (
            LifecycleError,
            "averaged over ranks already",
            lambda: DistributedDataParallel(model),
        ),
        (
            LifecycleError,
            "not offloaded to the CPU",
            lambda: type(weight)(weight.detach(), requires_grad=True),
        ),
    ):
        with pytest.raises(error, match=words):
            action()


@pytest.mark.needs("transformers", "safetensors")
def test_transformers_saves_whole_weights(tmp_path: Path) -> None:
    """And the core; neither save_pretrained by itself nor a resized embedding is let through."""
    warnings.simplefilter("ignore")  # of transformers
    axes = mesh(2)  # the others need not load transformers
    plain = llama(tied=True)
    model = mfsdp_core.fully_shard_model(
        llama(tied=True),
        device_mesh=axes["dp"],
        fsdp_unit_modules=[type(plain.model.layers[0])],
    )
    with pytest.raises(MfsdpError, match=r"save_pretrained\(state_dict=\.\.\.\)"):
        model.module.save_pretrained(tmp_path / "refused")
    words = r"load export_state_dict\(model\) into an unsharded model"
    with pytest.raises(MfsdpError, match=words):
        model.module.resize_token_embeddings(70)
    state = mfsdp_core.export_state_dict(model)
    mfsdp_core.save_safetensors(tmp_path / "core", model)
    if axes.get_local_rank("dp") == 0:
        model.module.save_pretrained(tmp_path / "theirs", state_dict=state)
        model.module.config.save_pretrained(tmp_path / "core")
    dist.barrier(axes.get_group("dp"))
    wanted = plain.state_dict()
    for name in ("theirs", "core"):
        back = type(plain).from_pretrained(tmp_path / name).state_dict()
        for key, value in back.items():
            same(f"{key} of {name}", value, wanted[key])
