"""What users call beside forward and step: scaling, loading, broadcasting, fused gradients."""

from __future__ import annotations

import warnings

import pytest
import torch

from mfsdp_core import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
)
from mfsdp_core.errors import ConfigurationError, LifecycleError, StateDictError
from oracle.models import Block, batch, build, loss
from oracle.ranks import RankPool, mesh
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

NAME = "aligned_stack"


def scaled_error(strategy: str, per_token: bool, in_collective: bool, factor: float) -> float:
    """Error of the gradient, times `factor` by scale_gradients, against `factor` x reference."""
    toy = shard(
        NAME,
        strategy,
        2,
        torch.float64,
        calculate_per_token_loss=per_token,
        average_in_collective=in_collective,
    )
    toy.run_cycle(2)
    toy.model.scale_gradients(factor)
    weight = factor * (2 if per_token else 1)
    expected = expected_gradient(NAME, 2, 2, torch.float64, 0)
    scaled = {name: gradient * weight for name, gradient in expected.items()}
    return relative_difference(toy.full_gradient(), scaled)


def after_loading(strategy: str, compute: torch.dtype) -> tuple[bool, bool, list[str]]:
    """Load whole fp32 tensors: main weights equal them, compute weights equal their cast."""
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    toy = shard(NAME, strategy, 2, compute, mixed_precision_policy=policy)
    wanted = build(NAME, torch.float32, seed=99)
    state = {f"module.{name}": value for name, value in wanted.state_dict().items()}
    toy.model.load_state_dict(state)
    found = toy.full_parameters()
    main = all(torch.equal(found[name], value) for name, value in wanted.state_dict().items())
    value = batch(NAME, 0, 0, compute)
    with torch.no_grad():
        compute_equal = torch.equal(toy.model(value), wanted.to(compute)(value))
    refused = []
    first = next(iter(state))
    for broken in (
        {name: value for name, value in state.items() if name != first},
        {**state, "module.none": torch.zeros(1)},
        {**state, first: torch.zeros(3, 3)},
    ):
        with pytest.raises(StateDictError) as error:
            toy.model.load_state_dict(broken)
        refused.append(str(error.value))
    with pytest.raises(LifecycleError, match="assign"):
        toy.model.load_state_dict(state, assign=True)
    return main, compute_equal, refused


def around_start_grad_sync(strategy: str) -> tuple[list[int], bool, float]:
    """Reductions issued by: an unmarked backward pass, the start, a second start, the finish;
    whether the start attached gradients; the error of the gradient."""
    toy = shard(NAME, strategy, 2, torch.float64)
    issued = []

    def count() -> None:
        kinds = {"all_reduce", "reduce_scatter"}
        total = sum(record.operation in kinds for record in toy.model.wire_log)
        issued.append(total - sum(issued))

    with toy.model.no_sync():
        toy.backward()
    count()
    toy.model.start_grad_sync()
    count()
    attached = any(p.grad is not None for _, p in toy.parameters())
    toy.model.start_grad_sync()
    count()
    toy.model.finish_grad_sync()
    count()
    expected = expected_gradient(NAME, 2, 1, torch.float64)
    return issued, attached, relative_difference(toy.full_gradient(), expected)


def groups_of_a_sharded_optimizer() -> tuple[list[float], list[int]]:
    """Learning rates and sizes of the parameter groups after `fully_shard`."""
    module = build(NAME)
    groups = [
        {"params": list(module.blocks.parameters()), "lr": 0.5},
        {"params": list(module.last.parameters())},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.25)
    _, optimizer = fully_shard(
        module, optimizer, device_mesh=mesh(4)["dp"], fsdp_unit_modules=["oracle.models.Block"]
    )
    return (
        [group["lr"] for group in optimizer.param_groups],
        [len(group["params"]) for group in optimizer.param_groups],
    )


def refused_optimizers() -> list[str]:
    messages = []
    module = build(NAME)
    used = torch.optim.AdamW(module.parameters())
    loss(module(batch(NAME, 0, 0, torch.float32))).backward()
    used.step()
    foreign = torch.optim.SGD(build(NAME).parameters(), lr=1)
    for optimizer in (used, foreign):
        with pytest.raises(ConfigurationError) as error:
            fully_shard(module, optimizer, device_mesh=mesh(4)["dp"], fsdp_unit_modules=[Block])
        messages.append(str(error.value))
    return messages


def warned_double_reduction() -> list[str]:
    toy = shard(NAME, 1, 2, on_double_reduction="warn")
    toy.run_cycle(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toy.run_cycle(1)
    return sorted({str(w.message) for w in caught if w.category is RuntimeWarning})


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("per_token", "in_collective"), [(True, False), (False, True)])
def test_gradients_are_averaged_as_asked_and_scaled_once(
    ranks: RankPool, strategy: str, per_token: bool, in_collective: bool
) -> None:
    errors = ranks.run(scaled_error, strategy, per_token, in_collective, 0.5)
    assert max(errors) < 1e-12


@pytest.mark.sample
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loading_whole_tensors_sets_main_and_compute_weights(
    ranks: RankPool, strategy: str, compute: torch.dtype
) -> None:
    for main, compute_equal, refused in ranks.run(after_loading, strategy, compute):
        assert main
        assert compute_equal
        missing, unexpected, shape = refused
        assert "Missing: ['module.blocks.0.norm.weight']" in missing
        assert "Unexpected: ['module.none']" in unexpected
        assert "expected shape (8,), found (3, 3)" in shape


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_start_grad_sync_issues_what_the_cycle_owes_and_attaches_nothing(
    ranks: RankPool, strategy: str
) -> None:
    whole = strategy in {"no_shard", "optim"}
    for issued, attached, error in ranks.run(around_start_grad_sync, strategy):
        assert issued == ([0, 4, 0, 0] if whole else [4, 0, 0, 0])
        assert not attached
        assert error < 1e-12


def test_fully_shard_keeps_parameter_groups_and_takes_import_paths(ranks: RankPool) -> None:
    assert ranks.run(groups_of_a_sharded_optimizer) == [([0.5, 0.25], [15, 1])] * 4


def test_an_optimizer_with_state_or_of_another_model_is_refused(ranks: RankPool) -> None:
    for stepped, foreign in ranks.run(refused_optimizers):
        assert "has not stepped yet" in stepped
        assert "not of this module" in foreign


def test_the_warning_of_upstream_can_be_had_instead_of_the_error(ranks: RankPool) -> None:
    for messages in ranks.run(warned_double_reduction):
        assert messages
        assert all("already reduced in this cycle" in message for message in messages)


def clipped_without_a_mark(style: str) -> tuple[float, float, float]:
    """Norm of an accumulated gradient that nobody has finished, the reference's, and the error
    of the clipped gradient."""
    toy = shard(NAME, "optim", 2, torch.float64)
    for j in range(3):
        toy.backward(j)
    whole = style == "model"
    norm = clip_grad_norm_(toy.model if whole else list(toy.model.parameters()), 0.5)
    expected = expected_gradient(NAME, 2, 3, torch.float64, 0)
    wanted = torch.stack([g.norm() for g in expected.values()]).norm()
    clipped = {name: g * (0.5 / (wanted + 1e-6)) for name, g in expected.items()}
    error = relative_difference(toy.full_gradient(), clipped)
    return float(norm), float(wanted), error


@pytest.mark.parametrize("style", ["model", "parameters"])
def test_clipping_finishes_a_gradient_that_nobody_has_marked_as_last(
    ranks: RankPool, style: str
) -> None:
    for norm, wanted, error in ranks.run(clipped_without_a_mark, style):
        assert norm == pytest.approx(wanted, rel=1e-12)
        assert error < 1e-12


def frozen_outputs_after_loading(strategy: str) -> bool:
    """Whether a frozen weight that was loaded after a forward pass is what the next one uses."""
    toy = shard("frozen", strategy, 4)
    value = batch("frozen", 0, 0, torch.float32)
    with torch.no_grad():
        toy.model(value)
        wanted = build("frozen", seed=8)
        state = {f"module.{name}": value for name, value in wanted.state_dict().items()}
        toy.model.load_state_dict(state)
        return torch.equal(toy.model(value), wanted(value))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loading_reaches_the_compute_copies_of_frozen_weights(
    ranks: RankPool, strategy: str
) -> None:
    assert ranks.run(frozen_outputs_after_loading, strategy) == [True] * 4
