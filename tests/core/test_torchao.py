"""torchao's emulated float8 layers under this core, against torch's fully_shard."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mfsdp_core import (
    Float8Reference,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_core.errors import CapabilityNotBuiltError
from oracle.ranks import WORLD, RankPool, mesh, two_axes

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None,
        reason="torchao is not installed: pip install 'mfsdp-bench[fp8]'",
    ),
]
STEPS = 3


class Unit(nn.Module):
    """Two matrices with an activation between."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, rows), nn.Linear(rows, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def converted(
    *, float8_gathers: bool = False, recompute: bool = False, rows: int = 64
) -> nn.Module:
    """Two units whose linear layers multiply in emulated float8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(3)
    model = nn.Sequential(Unit(rows), Unit(rows))
    config = Float8LinearConfig(
        emulate=True,
        enable_fsdp_float8_all_gather=float8_gathers,
        force_recompute_fp8_weight_in_bwd=recompute,
    )
    return convert_to_float8_training(model, config=config)


def trained(model: Any, optimizer: Any, after_step: Any = None) -> list[float]:
    """Losses of this rank."""
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank() % 2)
        value = model(torch.randn(16, 32, generator=draw)).square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
        found.append(float(value.detach()))
    return found


def ours(codec: Float8Reference | None = None) -> tuple[list[float], set[str]]:
    """In a rank: losses, and the dtypes in which weights were gathered."""
    model = fully_shard_model(
        converted(),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Unit],
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, weight_codec=codec),
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    return trained(model, optimizer), set(model.wire_log.gathered_bytes)


def theirs(*, float8_gathers: bool = False, recompute: bool = False) -> list[float]:
    """In a rank: the same under torch's fully_shard."""
    from torch.distributed.fsdp import fully_shard

    model = converted(float8_gathers=float8_gathers, recompute=recompute)
    for unit in model:
        fully_shard(unit, mesh=mesh(2)["dp"])
    fully_shard(model, mesh=mesh(2)["dp"])
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.5))


def test_emulated_float8_layers_train_as_under_fully_shard(ranks: RankPool) -> None:
    for (found, gathered), expected in zip(ranks.run(ours), ranks.run(theirs), strict=True):
        assert found == expected
        assert found[-1] < found[0]
        assert gathered == {"float32"}


def test_they_train_on_weights_that_are_gathered_as_codes(ranks: RankPool) -> None:
    results = ranks.run(ours, Float8Reference("current"))
    assert len(results) == WORLD
    for found, gathered in results:
        assert found[-1] < found[0]
        assert gathered == {"uint8", "float32"}  # matrices and biases


#: Elements of the four matrices, and of the four biases.
MATRICES, BIASES = 4 * 32 * 64, 2 * (32 + 64)


def hooked(rows: int = 64, recompute: bool = False, **arguments: Any) -> Any:
    """In a rank: a sharded model whose matrices are gathered by torchao's hooks."""
    return fully_shard_model(
        converted(float8_gathers=True, recompute=recompute, rows=rows),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Unit],
        **arguments,
    )


def with_sgd(model: Any) -> Any:
    return fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))


def by_hooks(strategy: str, recompute: bool) -> tuple[list[float], dict[str, int]]:
    """In a rank: losses, and bytes sent in gathers by dtype."""
    model = hooked(zero_dp_strategy=strategy, recompute=recompute)
    return trained(model, with_sgd(model)), dict(model.wire_log.gathered_bytes)


@pytest.mark.parametrize("recompute", [False, True])
def test_float8_gathers_train_as_under_fully_shard(ranks: RankPool, recompute: bool) -> None:
    expected = ranks.run(theirs_with_float8_gathers, recompute)
    # A rank sends half of each gather: a byte per weight, four per bias. Weights that stay are
    # there from sharding on.
    gathers = {"optim_grads_params": 2 * STEPS, "optim": STEPS - 1, "no_shard": 0}
    for strategy, count in gathers.items():
        for (losses, sent), wanted in zip(
            ranks.run(by_hooks, strategy, recompute), expected, strict=True
        ):
            assert losses == wanted
            assert sent.get("uint8", 0) == count * MATRICES // 2
            assert sent.get("float32", 0) == count * 4 * BIASES // 2


def theirs_with_float8_gathers(recompute: bool) -> list[float]:
    """In a rank: torch's fully_shard with the same settings."""
    return theirs(float8_gathers=True, recompute=recompute)


def with_scales_ahead() -> tuple[list[float], int, float]:
    """In a rank: losses, scales that a gather computed itself, and the effect of a wrong one."""
    from torchao.float8 import fsdp_utils

    model = hooked()
    computed = []
    original = fsdp_utils.hp_tensor_to_float8_dynamic

    def counted(*arguments: Any, **options: Any) -> Any:
        computed.append(len(computed))
        return original(*arguments, **options)

    def ahead(model: Any) -> None:
        fsdp_utils.precompute_float8_dynamic_scale_for_fsdp(model)
        computed.clear()

    fsdp_utils.hp_tensor_to_float8_dynamic = counted
    try:
        losses = trained(model, with_sgd(model), ahead)
        with torch.no_grad():
            right = model(torch.ones(16, 32))
            model.module[0].up.weight._local_tensor._precomputed_scale *= 1000.0
            wrong = model(torch.ones(16, 32))
    finally:
        fsdp_utils.hp_tensor_to_float8_dynamic = original
    return losses, len(computed), float((right - wrong).abs().max())


def test_scales_that_are_computed_ahead_are_used(ranks: RankPool) -> None:
    expected = ranks.run(theirs_with_float8_gathers, False)
    for (losses, computed, effect), wanted in zip(
        ranks.run(with_scales_ahead), expected, strict=True
    ):
        assert losses == wanted
        assert computed == 0
        assert effect > 0.01


def saved_and_loaded(folder: str) -> tuple[list[float], list[float], str]:
    """In a rank: losses after a checkpoint, and of a model of another strategy that loads it."""
    from mfsdp_core import load_checkpoint, save_checkpoint

    model = hooked()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    trained(model, optimizer)
    save_checkpoint(folder, model, optimizer)
    other = hooked(zero_dp_strategy="optim_grads", fsdp_double_buffer=True)
    loaded = fully_shard_optimizer(torch.optim.AdamW(other.parameters(), lr=0.05))
    load_checkpoint(folder, other, loaded)
    stored = model.state_dict()["module.0.up.weight"]._local_tensor
    return trained(model, optimizer), trained(other, loaded), type(stored).__name__


def test_checkpoints_hold_plain_weights(ranks: RankPool, tmp_path: Any) -> None:
    for before, after, kind in ranks.run(saved_and_loaded, str(tmp_path / "saved")):
        assert before == after
        assert kind == "Tensor"


def in_other_ways() -> dict[str, Any]:
    """In a rank: what else a user does with such a model."""
    import copy

    from mfsdp_core import gather_full

    x = torch.ones(16, 32)
    found: dict[str, Any] = {"losses": trained(model := hooked(), with_sgd(model))}
    for name, arguments in (
        ("pool", {"fsdp_double_buffer": True}),
        ("by module", {"enable_fine_grained_param_gather": True}),
        ("fresh storage", {"allocator": "temporary"}),
    ):
        found[name] = trained(other := hooked(**arguments), with_sgd(other))
    with torch.device("meta"):
        blank = converted(float8_gathers=True)
    made = fully_shard_model(
        blank,
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Unit],
        init_model_with_meta_device=True,
    )
    found["meta"] = trained(made, with_sgd(made))
    with torch.no_grad():
        found["copy"] = torch.equal(copy.deepcopy(model.module)(x), model(x))
        before = gather_full(model.module[0].up.weight)
        found["rows"] = tuple(before.shape)
        first = model(x)
        model.module[0].up.weight.mul_(0.5)
        found["changed"] = float((model(x) - first).abs().max())
    uneven = hooked(rows=51)
    found["uneven"] = trained(uneven, with_sgd(uneven))
    held = uneven.ledger.bytes_by_category()
    found["held"] = held["compute_weights"] + held["communication_buffers"]
    return found


def test_models_with_float8_gathers_can_be_used_as_any_other(ranks: RankPool) -> None:
    for found in ranks.run(in_other_ways):
        assert found["pool"] == found["by module"] == found["fresh storage"] == found["losses"]
        assert found["meta"][-1] < found["meta"][0]
        assert found["copy"]
        assert found["rows"] == (64, 32)
        assert found["changed"] > 0.01
        assert found["uneven"][-1] < found["uneven"][0]
        assert found["held"] == 0


def refused() -> list[str]:
    """In a rank: what sharding says of float8 gathers where their hooks cannot work."""
    two, both = two_axes()
    hybrid = {"dp_shard_dim": "inner", "dp_outer_dim": "outer", "hybrid_fsdp_group": both}
    hybrid["outer_dp_sharding_strategy"] = "optim"
    said = []
    model = converted(float8_gathers=True)
    for arguments in (hybrid, {"dp_shard_dim": "outer", "tp_dim": "inner"}):
        try:
            fully_shard_model(model, device_mesh=two, **arguments)
        except CapabilityNotBuiltError as error:
            said.append(str(error))
    return said


def test_hooks_are_refused_where_they_cannot_gather(ranks: RankPool) -> None:
    for hybrid, tensor_parallel in ranks.run(refused):
        assert "0.up.weight is a WeightWithDynamicFloat8CastTensor" in hybrid
        assert "not built where the outer axis shards the optimizer" in hybrid
        assert "not built with tp_dim" in tensor_parallel


def test_weights_that_are_no_single_tensor_are_refused() -> None:
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    from mfsdp_core.shard.gather_hooks import check_hooked

    codes = Int8QuantizedTrainingLinearWeight.from_float(torch.randn(4, 4))
    with pytest.raises(CapabilityNotBuiltError, match="other than one tensor"):
        check_hooked("weight", codes)
