"""`enable_fine_grained_param_gather`: gathered by module, released and reduced by unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.judging import same
from mfsdp_core import fully_shard_model
from mfsdp_core.errors import LifecycleError
from mfsdp_core.events import Event
from oracle.beside_torch import Pair, beside
from oracle.ranks import mesh
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks

WIDTH = 8


class Part(nn.Module):
    """A unit of three modules, not registered as they run; `style` says how they are used."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.full((WIDTH,), 0.5)])
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scales[0]
        if self.style == "recomputed":
            x = x + checkpoint(self.first, x, use_reentrant=False)
            return x + checkpoint(self.second, x, use_reentrant=True) * self.scales[1]
        return x + self.second(torch.tanh(self.first(x))) * self.scales[1]


class Attention(nn.Module):
    """A unit whose attention reads the weight of its output projection without calling it."""

    def __init__(self, _style: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)[None]
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out[0]


class Reader(nn.Module):
    """A unit with a module that reads what another one holds, and says so."""

    class Fused(nn.Module):
        reads_child_weights = True

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.inner.weight, self.inner.bias)

    def __init__(self, _style: str) -> None:
        super().__init__()
        self.fused = self.Fused()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(torch.tanh(self.fused(x)))
        return out


class Gate(nn.Module):
    """Returns its own weight, or a view of it."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.view = view

    def forward(self) -> Tensor:
        return self.w.T if self.view else self.w


class Gated(nn.Module):
    """A unit that multiplies with what its modules return."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.plain, self.turned = Gate(view=False), Gate(view=True)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(x @ self.plain()) @ self.turned())
        return out


class Table(nn.Module):
    """A unit that is recomputed with a module that takes no tensor."""

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH))

        def forward(self) -> Tensor:
            return self.w * 1.5

    def __init__(self, _style: str) -> None:
        super().__init__()
        self.bias = self.Bias()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.linear(x)) + self.bias()
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.run, x, use_reentrant=True)
        return out


class Model(nn.Module):
    """Three units between two linears of the root."""

    def __init__(self, unit: Callable[[str], nn.Module], style: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(unit(style) for _ in range(3))
        self.behind = nn.Linear(WIDTH, 1)
        self.style = style

    def forward(self, x: Tensor, path: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        """path: of the units that run."""
        x = self.before(x)
        for index in path:
            unit: Any = self.units[index]
            if self.style == "outside" and index == 1:
                # Modules of the second unit, which does not run itself.
                x = x + unit.second(torch.tanh(unit.first(x)))
            else:
                x = unit(x)
        out: Tensor = self.behind(x)
        return out


UNITS: dict[str, Callable[[str], nn.Module]] = {
    "part": Part,
    "attention": Attention,
    "reader": Reader,
    "gated": Gated,
    "table": Table,
}


def sharded(unit: str, style: str, strategy: str, **arguments: Any) -> Pair:
    """The model in plain torch, and gathered by module over two ranks."""
    return beside(
        lambda: Model(UNITS[unit], style),
        (strategy, arguments.pop("allocator", "storage_resize")),
        units=[UNITS[unit]],  # type: ignore[list-item]
        **{"enable_fine_grained_param_gather": True, "pool_slots": 2} | arguments,
    )


def inputs(rank: int, cycle: int) -> Tensor:
    seed = torch.Generator().manual_seed(10 * cycle + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=seed)


@pytest.mark.sample
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
    unit: str, style: str, arguments: dict[str, Any], strategy: str
) -> None:
    pair = sharded(unit, style, strategy, **arguments)
    own = mesh(2).get_local_rank("dp")
    for cycle in range(3):
        for module in pair.both:
            module(inputs(own, cycle)).square().sum().backward()
        pair.compare_gradients()
        pair.zero_grad()


def test_modules_that_read_weights_inside_of_them_have_to_say_so() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader.Fused, "reads_child_weights", False)
        model = sharded("reader", "plain", "optim_grads_params", disable_bucketing=True).model
        with pytest.raises(LifecycleError, match="used while its unit was not running"):
            model(inputs(0, 0))


def test_recomputed_modules_that_take_no_tensor_do_not_keep_their_unit() -> None:
    peaks = {}
    options: dict[str, Any] = {"overlap_param_gather": False, "disable_bucketing": True}
    for by_module in (True, False):
        options["enable_fine_grained_param_gather"] = by_module
        model = sharded("table", "plain", "optim_grads_params", **options).model
        model(inputs(0, 0)).sum().backward()
        peaks[by_module] = model.ledger.peak_bytes_by_category()["compute_weights"]
    assert peaks[True] <= peaks[False], peaks


def test_weights_that_leave_a_module_called_without_its_unit_are_refused() -> None:
    model = sharded("gated", "plain", "optim_grads_params").model
    with pytest.raises(LifecycleError, match=r"Gate of unit units\.0"):
        model.module.units[0].plain()


def story(style: str, **arguments: Any) -> list[str]:
    """What happens to the weights of the first two units in a step, and which module runs when."""
    model = sharded("part", style, "optim_grads_params", disable_bucketing=True, **arguments).model
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


def test_a_bucket_is_gathered_when_its_module_runs_and_released_with_its_unit() -> None:
    said = story("plain", overlap_param_gather=False)
    same(
        "the first unit",
        said[:7],
        [
            "materialise 0.scales.0",
            "materialise 0.scales.1",
            "materialise 0.first.weight",
            "materialise 0.first.bias",
            "run 0.first",
            "materialise 0.second.weight",
            "run 0.second",
        ],
    )
    names = ("first.bias", "first.weight", "scales.0", "scales.1", "second.weight")
    same("its releases", sorted(said[7:12]), [f"release 0.{name}" for name in names])


def test_the_next_module_is_gathered_ahead_and_no_further() -> None:
    own = [one for one in story("plain") if not one.startswith("materialise")]
    start = own.index("run 0.first")
    assert own[start - 1] == "prefetch 0.second.weight", own
    ahead = ["prefetch 1.scales.0", "prefetch 1.scales.1", "run 0.second"]
    same("behind the first module", own[start + 1 : start + 4], ahead)


def test_a_module_called_without_its_unit_is_gathered_alone_and_released_after() -> None:
    said = story("outside", overlap_param_gather=False)
    same(
        "the second unit",
        [one for one in said if " 1." in one],
        [
            "materialise 1.first.weight",
            "materialise 1.first.bias",
            "run 1.first",
            "release 1.first.weight",
            "release 1.first.bias",
            "materialise 1.second.weight",
            "run 1.second",
            "release 1.second.weight",
        ],
    )


def test_a_backward_pass_gathers_nothing_that_was_not_gathered_ahead() -> None:
    model = sharded("part", "plain", "optim_grads_params", disable_bucketing=True).model
    names = {b.name: b.parameters[0].removeprefix("units.") for b in model.buckets()}
    model(inputs(0, 0)).sum().backward()  # the order is recorded
    model.zero_grad_buffer()
    loss = model(inputs(0, 1)).sum()
    gathered: list[str] = []
    ahead: set[str] = set()
    model.events.subscribe(lambda e: gathered.append(names[e.bucket]), kinds=("materialise",))
    model.events.subscribe(lambda e: ahead.add(names[e.bucket]), kinds=("prefetch",))
    loss.backward()
    assert len(gathered) == len(set(gathered)) == 15, gathered
    assert set(gathered) <= ahead, sorted(set(gathered) - ahead)


class Layer(nn.Module):
    """A unit of a norm and four products, which run as they are registered."""

    def __init__(self, _style: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8 * WIDTH)
        self.parts = nn.ModuleList(nn.Linear(8 * WIDTH, 8 * WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("by_module", [False, True])
def test_later_modules_of_a_unit_and_all_but_one_of_the_next_are_not_there_yet(
    by_module: bool,
) -> None:
    torch.manual_seed(0)
    model = fully_shard_model(
        nn.Sequential(*[Layer("") for _ in range(3)]),
        device_mesh=mesh(2),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Layer],
        zero_dp_strategy="optim_grads_params",
        enable_fine_grained_param_gather=by_module,
    )
    at_rest = model.ledger.bytes_by_category()["compute_weights"]
    norm, module = 4 * 2 * 8 * WIDTH, 4 * (8 * WIDTH) ** 2
    unit = norm + 4 * module
    peaks = {"forward": 0, "backward": 0}
    held = [0]
    model.ledger.subscribe(
        lambda _: held.append(model.ledger.bytes_by_category()["compute_weights"] - at_rest)
    )
    for _ in range(2):  # the order is recorded in the first
        held[:] = [0]
        loss = model(torch.ones(2, 8 * WIDTH)).sum()
        peaks["forward"] = max(peaks["forward"], *held)
        held[:] = [0]
        loss.backward()
        peaks["backward"] = max(peaks["backward"], *held)
        model.zero_grad_buffer()
    ahead = {"forward": norm, "backward": module} if by_module else dict.fromkeys(peaks, unit)
    assert peaks == {way: unit + more for way, more in ahead.items()}
