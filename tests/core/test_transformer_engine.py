"""Weights that Transformer Engine keeps as codes, by a stand-in that quantises in plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.testing.quantised import quantised
from conformance.judging import same
from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer, gather_full
from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError
from oracle import transformer_engine as te
from oracle.models import Lone
from oracle.ranks import mesh, on_two_axes

pytestmark = pytest.mark.on_ranks

RECIPES = {
    "delayed": te.DelayedScaling,
    "current": te.Float8CurrentScaling,
    "block": te.Float8BlockScaling,
    "mxfp8": te.MXFP8BlockScaling,
}
STEPS = 3


class Unit(nn.Module):
    """Shards cut blocks of 128 rows and of 32; with 4 ranks, two hold nothing of `few`."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.recomputes = False
        self.up, self.down = layer(32, 144), layer(144, 32)
        self.few = layer(32, 2, bias=False)
        self.norm = nn.LayerNorm(32, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        inner = partial(checkpoint, self.inner, use_reentrant=False)
        y = inner(x) if self.recomputes else self.inner(x)
        return x + y * self.few(x).sum(-1, keepdim=True)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh())


def drawn(layer: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    head = layer(32, 16)
    return nn.Sequential(Unit(layer, dtype), Lone(layer), Unit(layer, dtype), head)


def primary(recipe: str, *, preserve: bool = True, **options: Any) -> nn.Module:
    """Under `quantized_model_init`."""
    dtype = options.pop("dtype", torch.float32)

    def layer(rows: int, columns: int, **more: Any) -> te.Linear:
        return te.Linear(rows, columns, params_dtype=dtype, device="cpu", **options, **more)

    with te.quantized_model_init(True, RECIPES[recipe](), preserve):
        return drawn(layer, dtype)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))


class Reference(nn.Module):
    """A layer of one process: decoded values of the whole matrix, from FP32 main weights."""

    def __init__(self, recipe: str, rows: int, columns: int, bias: bool = True) -> None:
        super().__init__()
        values = torch.empty(columns, rows)
        nn.init.normal_(values, 0.0, 0.023)
        self.weight = nn.Parameter(values)
        self.bias = nn.Parameter(torch.zeros(columns)) if bias else None
        self.recipe, self.earlier = recipe, []

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (
            quantised(self.recipe, self.weight.detach(), torch.float32, self.earlier, backward=b)
            for b in (False, True)
        )
        y = Decoded.apply(x, self.weight, rows, columns)
        return y if self.bias is None else y + self.bias


class Decoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        del weight
        ctx.save_for_backward(x, columns)
        return x @ rows.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, columns = ctx.saved_tensors
        return gradient @ columns, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None, None


def expected(recipe: str, ranks: int) -> list[list[float]]:
    """Losses of every rank, by one process."""
    model = drawn(lambda rows, columns, **more: Reference(recipe, rows, columns, **more))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        for rank in range(ranks):
            value = model(batch(step, rank)).square().mean()
            (value / ranks).backward()
            found[rank].append(float(value.detach()))
        for module in model.modules():
            if isinstance(module, Reference):
                module.earlier = [module.weight.detach().clone()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def sharded(model: nn.Module, axes: str, strategy: Any, **options: Any) -> Any:
    policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    options = {"mixed_precision_policy": policy, "fsdp_unit_modules": [Unit, Lone], **options}
    if axes in ("one", "fsdp"):
        options["device_mesh"] = mesh(RANKS[axes])["dp"]
    else:
        options |= on_two_axes(int(axes == "hfsdp"))
    return fully_shard_model(model, zero_dp_strategy=strategy, **options)


def with_sgd(model: Any) -> Any:
    return fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))


def codes_of(raw: Any) -> int:
    """Bytes of a weight's codes, and of copies of them."""
    names = ("_data", "_rowwise_data", "_columnwise_data", "_transpose")
    found = [getattr(raw, name, None) for name in names]
    return sum(codes.untyped_storage().nbytes() for codes in found if codes is not None)


FLAT = "optim_grads_params"
ALL = [("fsdp", s) for s in ("no_shard", "optim", "optim_grads", FLAT)]
ALL += [(axes, FLAT) for axes in ("one", "hsdp", "hfsdp")]
DAILY = {
    ("delayed", "fsdp", "optim_grads"),
    ("current", "hsdp", FLAT),
    ("block", "hfsdp", FLAT),
    ("mxfp8", "fsdp", "no_shard"),
    ("mxfp8", "fsdp", "optim"),
    ("mxfp8", "hfsdp", FLAT),
}
CASES = [
    pytest.param(recipe, *case, marks=() if (recipe, *case) in DAILY else pytest.mark.nightly)
    for recipe in RECIPES
    for case in ALL
]
RANKS = {"one": 1, "fsdp": 2, "hsdp": 4, "hfsdp": 4}


@pytest.mark.parametrize(("recipe", "axes", "strategy"), CASES)
def test_codes_are_those_of_one_process_and_so_are_losses(
    recipe: str, axes: str, strategy: str
) -> None:
    """Rows and columns, with scales over parts of all ranks; and no codes are left of units."""
    fuses = strategy != "optim"
    with te.installed():
        model = sharded(primary(recipe, fuse_wgrad_accumulation=fuses), axes, strategy)
        optimizer = with_sgd(model)
        # What layers compute with, and the main weights behind it.
        losses, seen, earlier = [], {}, {}
        raws: dict[str, Any] = {}
        names = {id(m): f"{name}.weight" for name, m in model.module.named_modules()}

        def look(module: nn.Module, args: Any, output: Tensor) -> None:
            weight: Any = module.weight
            name = names[id(module)]
            raws[name] = weight
            seen[name] = [weight.dequantize()]
            # The head is the root's, whose columns come with the gradient of its output.
            tensor = args[0] if name == "3.weight" else output
            if tensor.requires_grad:
                tensor.register_hook(lambda _g: seen[name].append(weight.columns().clone()) or None)

        for module in [m for m in model.modules() if isinstance(m, te.Linear)]:
            module.register_forward_hook(look)
        rank = torch.distributed.get_rank() % RANKS[axes]
        for step in range(STEPS):
            main = {n: gather_full(p).detach() for n, p in model.module.named_parameters()}
            with te.autocast(recipe=RECIPES[recipe]()):
                value = model(batch(step, rank)).square().mean()
            value.backward()
            losses.append(float(value.detach()))
            assert sum(map(len, seen.values())) == 16
            for name, both in seen.items():
                # Reciprocals of reciprocals: delayed scales differ in their last bit.
                for backward, found in enumerate(both if recipe != "delayed" else []):
                    then = earlier.get(name, [])
                    wanted = quantised(recipe, main[name], torch.float32, then, backward=backward)
                    assert torch.equal(found, wanted), (step, name, backward)
            earlier = {name: [value] for name, value in main.items()}
            optimizer.step()
            optimizer.zero_grad()
        # The head belongs to the root, which stays: its rows, and its columns or their copy.
        held = sum(map(codes_of, raws.values()))
        assert strategy != FLAT or held <= 2 * 16 * 32, held
    assert losses == pytest.approx(expected(recipe, RANKS[axes])[rank], rel=1e-5)


def losses_of(recipe: str, recomputes: bool = False, **options: Any) -> tuple[list[float], Any]:
    """Of this rank, and the model."""
    model = primary(recipe)
    for unit in model.modules():
        if isinstance(unit, Unit):
            unit.recomputes = recomputes
    model = sharded(model, "fsdp", FLAT, **options)
    optimizer = with_sgd(model)
    found = []
    for step in range(STEPS):
        with te.autocast(recipe=RECIPES[recipe]()):
            value = model(batch(step, mesh(2).get_local_rank("dp"))).square().mean()
        value.backward()
        found.append(float(value.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return found, model


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_recomputed_activations_read_rows_again(recipe: str) -> None:
    """Also where codes are in slots."""
    with te.installed():
        plain, _ = losses_of(recipe)
        again, _ = losses_of(recipe, recomputes=True, enable_fine_grained_param_gather=True)
        pooled, model = losses_of(recipe, allocator="max_pool")
    assert plain == again == pooled
    codes = [one for one in model.pool_plan["units"] if one["role"] == "payload"]
    assert {one["placement"] for one in codes} == {"pool"}


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_a_gather_sends_a_byte_per_weight_and_no_full_weights_exist(recipe: str) -> None:
    with te.installed():
        model = sharded(primary(recipe), "fsdp", FLAT)
        at_rest = sum(
            codes_of(managed.raw)
            for group in model._buckets()
            for managed in group.parameters
            if group.plan.unit and group.plan.primary
        )
        assert at_rest == 0
        model(batch(0, 0)).square().mean().backward()
    gathers = [
        (r.bucket, r.payload_bytes)
        for r in model.wire_log
        if r.bucket.startswith("0/") and r.dtype == "uint8"
    ]
    elements = 2 * 32 * 144 + 2 * 32
    assert 2 * elements <= sum(size for _, size in gathers) <= 2.05 * elements, gathers
    assert len(gathers) == 2 * len(dict(gathers)), gathers  # forward and backward
    assert model.ledger.peak_bytes_by_category()["compute_weights"] < 4 * elements


def test_copies_of_columns_are_dropped_unless_they_are_to_be_kept() -> None:
    losses = {}
    with te.installed():
        for keep in (False, True):
            losses[keep], model = losses_of("current", keep_fp8_transpose_cache=keep)
            raws = [g.parameters[0].raw for g in model._buckets() if g.plan.unit and g.plan.primary]
            assert all(raw._transpose is not None for raw in raws) == keep
    assert losses[False] == losses[True]


@pytest.mark.parametrize(
    ("recipe", "weights_alone"), [("current", False), ("mxfp8", False), ("mxfp8", True)]
)
def test_loading_main_weights_quantises_them_again(recipe: str, weights_alone: bool) -> None:
    """In another model, to the bit. weights_alone: as a model of plain layers saves them.

    Extra state is saved and may be left out.
    """
    with te.installed():
        _, source = losses_of(recipe)
        state = source.state_dict()
        given = {n: v for n, v in state.items() if not (weights_alone and "_extra_state" in n)}
        assert (len(given) < len(state)) == weights_alone
        target = sharded(primary(recipe), "fsdp", FLAT)
        target.load_state_dict(given, strict=not weights_alone)
        with torch.no_grad():
            same("outputs", target(batch(9, 0)), source(batch(9, 0)))


def another_kind(layer: Any) -> None:
    layer.weight.__class__ = type("NVFP4Tensor", (type(layer.weight),), {})


def no_columns(layer: Any) -> None:
    layer.weight._columnwise_data = None


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (
            *(None, {"mixed_precision_policy": MixedPrecisionPolicy(None)}),
            *(ConfigurationError, "main_params_dtype=None leaves no weights"),
        ),
        (another_kind, {}, CapabilityNotBuiltError, "NVFP4Tensor"),
        (no_columns, {}, ConfigurationError, "_columnwise_data"),
    ],
)
def test_what_is_not_built_is_refused_in_words(
    change: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with te.installed():
        model: Any = primary("mxfp8")
        if change is not None:
            change(model[0].up)
        with pytest.raises(error, match=words):
            sharded(model, "fsdp", FLAT, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_on_the_meta_device_become_codes_unit_by_unit(recipe: str) -> None:
    """With the losses of a model that was made on its device."""
    found = []
    for device in ("cpu", "meta"):
        with te.installed(), te.quantized_model_init(True, RECIPES[recipe](), True):

            def layer(rows: int, columns: int, bias: bool = True, on: str = device) -> te.Linear:
                ones = nn.init.ones_
                return te.Linear(rows, columns, False, ones, bias, torch.float32, on)

            model: Any = drawn(layer)
            ours = sharded(model, "fsdp", FLAT, init_model_with_meta_device=device == "meta")
            found.append(ours(batch(0, 0)).sum().item())
    assert found[0] == found[1] != 0


def test_main_weights_without_the_drawn_values_are_warned_about() -> None:
    """They are the decoded ones."""
    with te.installed():
        model: Any = primary("current", preserve=False)
        wanted = model[0].up.weight.dequantize()
        with pytest.warns(RuntimeWarning, match="preserve_high_precision_init_val=True"):
            ours = sharded(model, "fsdp", FLAT)
        found = gather_full(dict(ours.module.named_parameters())["0.up.weight"])
    same("main weights", found.detach(), wanted)
