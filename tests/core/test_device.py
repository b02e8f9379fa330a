"""What only a device with streams can show. Skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_core import CapturedStep, fully_shard_model, fully_shard_optimizer

pytestmark = pytest.mark.gpu
_SLEEP_CYCLES = 20_000_000


def losses(*, sleep: bool, **options) -> list[float]:
    """Of a few steps; with `sleep` each layer's kernels come long after they were enqueued."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    model = fully_shard_model(
        nn.Sequential(*layers).cuda(),
        device_mesh=mesh,
        dp_shard_dim="dp",
        fsdp_unit_modules=[nn.Sequential],
        **options,
    )
    if sleep:
        for layer in layers:
            layer.register_forward_hook(lambda *_: torch.cuda._sleep(_SLEEP_CYCLES))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    found = []
    batch = torch.ones(8, 256, device="cuda")
    for _ in range(4):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [float(loss) for loss in found]


@pytest.mark.parametrize("allocator", ["temporary", "storage_resize", "fixed_pool", "max_pool"])
def test_late_kernels_change_no_loss(nccl, allocator):
    quick = losses(sleep=False, allocator=allocator)
    assert losses(sleep=True, allocator=allocator) == quick
    assert quick[-1] < quick[0]


def test_a_pool_of_nccls_allocator_holds_the_slots(nccl):
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    model = fully_shard_model(
        nn.Sequential(*(nn.Sequential(nn.Linear(256, 256)) for _ in range(3))).cuda(),
        device_mesh=mesh,
        dp_shard_dim="dp",
        fsdp_unit_modules=[nn.Sequential],
        nccl_ub=True,
    )
    report = model.buffer_registration
    assert report["bytes"] >= 2 * 256 * 257 * 4
    assert report["segments"] > 0
    model(torch.ones(2, 256, device="cuda")).sum().backward()
    assert model.buffer_registration["grown"] is False


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_replayed_steps_give_the_losses_of_steps_that_are_enqueued(nccl, strategy):
    def train(*, replays):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
        model = fully_shard_model(
            nn.Sequential(*layers).cuda(),
            device_mesh=init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)),
            dp_shard_dim="dp",
            fsdp_unit_modules=[nn.Sequential],
            zero_dp_strategy=strategy,
            fsdp_double_buffer=True,
            cuda_graph_mode=True,
        )
        rate = torch.tensor(0.01, device="cuda")
        optimizer = fully_shard_optimizer(
            torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
        )

        def step(batch):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = CapturedStep(model, optimizer, step) if replays else step
        losses = []
        for index in range(9):
            rate.fill_(0.01 / (1 + index))
            batch = torch.full((8, 256), 1.0 + index, device="cuda")
            losses.append(run(batch).detach().clone())
        assert not replays or run.is_captured
        return [float(loss) for loss in losses]

    assert train(replays=True) == train(replays=False)
