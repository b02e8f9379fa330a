"""`enable_fine_grained_param_gather`: gathered by module, released and reduced by unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.testing.workers import WorkersError
from mfsdp_core import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model, gather_full
from mfsdp_core.errors import LifecycleError
from mfsdp_core.events import Event
from mfsdp_core.runtime.gathering import gather_points
from mfsdp_core.runtime.parameter_group import ManagedParameter
from mfsdp_core.runtime.units import Unit
from oracle.by_module import UNITS, WIDTH, Model, Reader, Table, inputs, sharded
from oracle.models import TOYS, Block
from oracle.ranks import RankPool, mesh
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import STRATEGIES, shard


def errors(unit: str, style: str, strategy: str, arguments: dict[str, Any]) -> list[float]:
    """Largest gradient error of three cycles."""
    pair = sharded(unit, style, strategy, **arguments)
    own, found = mesh(2).get_local_rank("dp"), []
    for cycle in range(3):
        for module in pair.both:
            module(inputs(own, cycle)).square().sum().backward()
        found.append(pair.worst_gradient())
        pair.zero_grad()
    return found


@pytest.mark.sample
@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("unit", "style", "arguments"),
    [
        ("part", "plain", {}),
        ("part", "plain", {"disable_bucketing": True}),
        ("part", "outside", {"disable_bucketing": True}),
        ("part", "recomputed", {"disable_bucketing": True}),
        ("attention", "plain", {"disable_bucketing": True}),
        ("reader", "plain", {"disable_bucketing": True}),
        ("gated", "plain", {"disable_bucketing": True, "overlap_param_gather": False}),
        ("gated", "plain", {"disable_bucketing": True, "allocator": "temporary"}),
        ("table", "plain", {"disable_bucketing": True}),
        ("part", "plain", {"allocator": "max_pool", "disable_bucketing": True}),
        ("part", "plain", {"overlap_param_gather": False, "allocator": "temporary"}),
    ],
)
def test_gradients_equal_those_of_one_process(
    ranks: RankPool, unit: str, style: str, arguments: dict[str, Any], strategy: str
) -> None:
    for found in ranks.run(errors, unit, style, strategy, arguments):
        assert max(found) < 1e-12


def readers_errors(types: list[type[nn.Module]]) -> list[float]:
    """As `errors` under upstream's constructor: its classes whose modules read inner weights."""
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        made.append(Model(Reader, "plain").double())
    for inner in made[1].modules():
        if isinstance(inner, Reader.Fused):
            inner.reads_child_weights = False
    model = MegatronFSDP(
        made[1],
        fsdp_unit_modules=[Reader],
        disable_bucketing=True,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
        enable_fine_grained_param_gather_hook=True,
        fine_grained_recurse_module_types=types,
    )
    made[0](inputs(0, 0)).square().sum().backward()
    model(inputs(0, 0)).square().sum().backward()
    model.finish_grad_sync()
    wanted = dict(made[0].named_parameters())
    return [
        float((gather_full(p.grad) - wanted[name].grad).abs().max())
        for name, p in made[1].named_parameters()
    ]


@pytest.mark.processes
def test_upstreams_list_names_the_modules_that_read_weights_inside_of_them(
    ranks: RankPool,
) -> None:
    for found in ranks.run(readers_errors, [Reader.Fused]):
        assert max(found) < 1e-12
    with pytest.raises(WorkersError, match="used while its unit was not running"):
        ranks.run(readers_errors, [])


def peak_bytes(by_module: bool) -> int:
    """Most bytes of compute weights in a step of recomputed units."""
    torch.manual_seed(5)
    model = fully_shard_model(
        Model(Table, "plain").double(),
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=[Table],
        overlap_param_gather=False,
        disable_bucketing=True,
        enable_fine_grained_param_gather=by_module,
    )
    model(inputs(0, 0)).sum().backward()
    return int(model.ledger.peak_bytes_by_category()["compute_weights"])


@pytest.mark.processes
def test_recomputed_modules_that_take_no_tensor_do_not_keep_their_unit(ranks: RankPool) -> None:
    fine, coarse = ranks.run(peak_bytes, True), ranks.run(peak_bytes, False)
    assert all(one <= other for one, other in zip(fine, coarse, strict=True))


class Skipping(nn.Module):
    """Units that a rank may leave out; modules run in another order than they are registered."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.third, self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.second(torch.tanh(self.first(x))))
            out: Tensor = self.third(x)
            return out

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(self.Unit() for _ in range(3))

    def forward(self, x: Tensor, path: tuple[int, ...]) -> Tensor:
        for index in path:
            x = x + self.units[index](x)
        return x.square().sum()


def errors_of_differing_paths(prefetch: bool) -> list[float]:
    """Gradient errors by cycle; the first one, which all ranks run whole, records the order."""
    torch.manual_seed(5)
    reference = Skipping().double()
    torch.manual_seed(5)
    model: Any = fully_shard_model(
        Skipping().double(),
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=[Skipping.Unit],
        overlap_param_gather=prefetch,
        disable_bucketing=True,
        enable_fine_grained_param_gather=True,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
        unused_parameters="zero",
    )
    own, found = mesh(2).get_local_rank("dp"), []
    for cycle, paths in enumerate([((0, 1, 2),) * 2, ((0, 2), (0, 1, 2)), ((1, 2), (0,))]):
        reference.zero_grad()
        for rank in range(2):
            (reference(inputs(rank, cycle), paths[rank]) / 2).backward()
        model(inputs(own, cycle), paths[own]).backward()
        wanted = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in reference.named_parameters()
        }
        found.append(
            max(
                float((gather_full(p.grad) - wanted[name]).abs().max())
                for name, p in model.module.named_parameters()
            )
        )
        model.zero_grad_buffer()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("prefetch", [True, False])
def test_ranks_that_skip_units_gather_their_buckets_in_the_order_of_those_that_run_them(
    ranks: RankPool, prefetch: bool
) -> None:
    for found in ranks.run(errors_of_differing_paths, prefetch):
        assert max(found) < 1e-12


def order_is_recorded(unit: str) -> bool:
    _, model = sharded(unit, "plain", "optim_grads_params", disable_bucketing=True).both
    model(inputs(0, 0))
    return bool(model._context.gathering._order._recorded)


@pytest.mark.processes
@pytest.mark.parametrize("unit", list(UNITS))
def test_a_complete_pass_records_the_order_of_modules(ranks: RankPool, unit: str) -> None:
    assert all(ranks.run(order_is_recorded, unit))


def returned_without_its_unit() -> str:
    _, model = sharded("gated", "plain", "optim_grads_params").both
    with pytest.raises(LifecycleError) as refused:
        model.module.units[0].plain()
    return str(refused.value)


@pytest.mark.processes
def test_weights_that_leave_a_module_called_without_its_unit_are_refused(ranks: RankPool) -> None:
    assert all("Gate of unit units.0" in text for text in ranks.run(returned_without_its_unit))


def error_of_toy(name: str, strategy: str, bucketing: bool) -> float:
    toy = shard(
        name,
        strategy,
        2,
        torch.float64,
        enable_fine_grained_param_gather=True,
        disable_bucketing=not bucketing,
    )
    toy.run_cycle(2)
    expected = expected_gradient(name, 2, 2, torch.float64)
    return relative_difference(toy.full_gradient(), expected)


@pytest.mark.sample
@pytest.mark.processes
@pytest.mark.parametrize("bucketing", [True, False])
@pytest.mark.parametrize("name", [*TOYS])
def test_gradients_of_unusual_models_equal_the_reference(
    ranks: RankPool, name: str, bucketing: bool
) -> None:
    for error in ranks.run(error_of_toy, name, "optim_grads_params", bucketing):
        assert error < 1e-12


def story(style: str, arguments: dict[str, Any]) -> list[str]:
    """What happens to the weights of the first two units in a step, and which module runs when."""
    _, model = sharded(
        "part", style, "optim_grads_params", disable_bucketing=True, **arguments
    ).both
    names = {b.name: b.parameters[0] for b in model.buckets()}
    said: list[str] = []

    def hear(event: Event) -> None:
        said.append(f"{event.kind} {names[event.bucket].removeprefix('units.')}")

    for name, module in model.module.named_modules():
        if name.endswith(("first", "second")):
            module.register_forward_pre_hook(
                lambda *_, name=name: said.append(f"run {name.removeprefix('units.')}")
            )
    model(inputs(0, 0)).sum().backward()  # the order is recorded
    model.zero_grad_buffer()
    model.events.subscribe(hear, kinds=("materialise", "release", "prefetch"))
    said.clear()
    model(inputs(0, 1)).sum()
    return [one for one in said if " 0." in one or " 1." in one]


@pytest.mark.processes
def test_a_bucket_is_gathered_when_its_module_runs_and_released_with_its_unit(
    ranks: RankPool,
) -> None:
    for said in ranks.run(story, "plain", {"overlap_param_gather": False}):
        assert said[:9] == [
            "materialise 0.scales.0",
            "materialise 0.scales.1",
            "materialise 0.first.weight",
            "materialise 0.first.bias",
            "run 0.first",
            "materialise 0.second.weight",
            "run 0.second",
            *said[7:9],
        ]
        assert sorted(said[7:12]) == sorted(
            f"release 0.{name}"
            for name in ("scales.0", "scales.1", "first.weight", "first.bias", "second.weight")
        )


@pytest.mark.processes
def test_the_next_module_is_gathered_ahead_and_no_further(ranks: RankPool) -> None:
    for said in ranks.run(story, "plain", {}):
        own = [one for one in said if not one.startswith("materialise")]
        start = own.index("run 0.first")
        assert own[start - 1] == "prefetch 0.second.weight"
        assert own[start + 1 : start + 4] == [
            "prefetch 1.scales.0",
            "prefetch 1.scales.1",
            "run 0.second",
        ]


def backward_by_surprise() -> list[str]:
    """Weights of units that a backward pass gathers, and nothing had gathered ahead."""
    _, model = sharded("part", "plain", "optim_grads_params", disable_bucketing=True).both
    names = {b.name: b.parameters[0].removeprefix("units.") for b in model.buckets()}
    model(inputs(0, 0)).sum().backward()  # the order is recorded
    model.zero_grad_buffer()
    loss = model(inputs(0, 1)).sum()
    gathered: list[str] = []
    ahead: set[str] = set()
    model.events.subscribe(lambda e: gathered.append(names[e.bucket]), kinds=("materialise",))
    model.events.subscribe(lambda e: ahead.add(names[e.bucket]), kinds=("prefetch",))
    loss.backward()
    assert len(gathered) == len(set(gathered)) == 15
    return [name for name in gathered if name not in ahead]


@pytest.mark.processes
def test_a_backward_pass_gathers_by_surprise_only_where_it_begins(ranks: RankPool) -> None:
    for surprises in ranks.run(backward_by_surprise):
        assert surprises == []


@pytest.mark.processes
def test_a_module_called_without_its_unit_is_gathered_alone_and_released_after(
    ranks: RankPool,
) -> None:
    for said in ranks.run(story, "outside", {"overlap_param_gather": False}):
        of_second_unit = [one for one in said if " 1." in one]
        assert of_second_unit == [
            "materialise 1.first.weight",
            "materialise 1.first.bias",
            "run 1.first",
            "release 1.first.weight",
            "release 1.first.bias",
            "materialise 1.second.weight",
            "run 1.second",
            "release 1.second.weight",
        ]


def held_after(style: str) -> list[int]:
    """Bytes of compute weights beyond those of the root, after each of two steps."""
    _, model = sharded("part", style, "optim_grads_params", disable_bucketing=True).both
    at_rest = model.ledger.bytes_by_category()["compute_weights"]
    found = []
    for cycle in range(2):
        model(inputs(0, cycle)).sum().backward()
        model.zero_grad_buffer()
        found.append(model.ledger.bytes_by_category()["compute_weights"] - at_rest)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("style", ["plain", "outside", "recomputed"])
def test_nothing_stays_gathered_after_a_step(ranks: RankPool, style: str) -> None:
    assert ranks.run(held_after, style) == [[0, 0]] * 4


def after_an_exception() -> float:
    """Error of a cycle that follows a forward pass which raised inside a unit."""
    pair = sharded("part", "plain", "optim_grads_params", disable_bucketing=True)
    model = pair.model
    second = model.module.units[1].second
    hook = second.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("here")))
    with pytest.raises(ValueError, match="here"):
        model(inputs(0, 0))
    hook.remove()
    for module in pair.both:
        module(inputs(mesh(2).get_local_rank("dp"), 1)).sum().backward()
    return pair.worst_gradient()


@pytest.mark.processes
def test_a_pass_that_raises_leaves_nothing_open(ranks: RankPool) -> None:
    assert max(ranks.run(after_an_exception)) < 1e-12


class FakeGroup:
    """As much of a bucket as finding gather points needs."""

    def __init__(self, *held: tuple[nn.Module, str]) -> None:
        self.parameters = [
            ManagedParameter((name,), ((module, name),), nn.Parameter(torch.ones(1)), None)  # type: ignore[arg-type]
            for module, name in held
        ]


def test_every_bucket_has_a_point_and_only_called_modules_are_points() -> None:
    root = nn.Module()
    root.units = nn.ModuleList([Block(), Reader("")])
    root.forward = lambda x: x  # type: ignore[method-assign]
    units = []
    for number, module in enumerate(root.units):
        held = [(m, a) for m in module.modules() for a in m._parameters]
        units.append(Unit(f"units.{number}", module, number, [FakeGroup(h) for h in held]))  # type: ignore[list-item]
    points = gather_points(Unit("", root, None), units)
    by_module = {id(point.module): point for point in points}
    for unit in units:
        for group in unit.groups:
            assert any(group in point.groups for point in points)
    reader = root.units[1]
    assert len(by_module[id(reader.fused)].groups) == 2
    assert id(root.units) not in by_module
    assert [point.index for point in points] == list(range(len(points)))
