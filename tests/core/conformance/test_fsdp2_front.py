"""FSDP2's interface: `fully_shard` in place, with any optimizer of torch, trains as plain torch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as of_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from bench.testing.toy_models import build
from conformance.judging import close, refuses, same
from conformance.small_model import (
    Recomputing,
    Small,
    batch,
    compare_gradients,
    compare_weights,
    plain_backward,
)
from mfsdp_core import fully_shard_model, gather_full
from mfsdp_core.errors import (
    CapabilityNotBuiltError,
    ConfigurationError,
    LifecycleError,
    StateDictError,
    refuse,
)
from mfsdp_core.fsdp2 import (
    FSDPModule,
    _unpinned,
    environment_of_module,
    fully_shard,
    register_fsdp_forward_method,
)

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_MAKES: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    partial(torch.optim.AdamW, lr=0.1, foreach=True),
    partial(torch.optim.AdamW, lr=0.1, foreach=False),
    partial(torch.optim.AdamW, lr=0.1, fused=True),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
)


_IN_TWO = {"reshard_after_forward": 2}


def state(model: Any) -> Any:
    """What the core knows of a module."""
    return model._mfsdp_sharded


def _shard(model: Any, **options: Any) -> Any:
    for unit in model.units:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def _pair(module: Callable[[], nn.Module] = Small, **options: Any) -> tuple[Any, Any]:
    plain = build(module, torch.float64, 3, 0.4)
    return _shard(copy.deepcopy(plain), **options), plain


def _step(*optimizers: torch.optim.Optimizer) -> None:
    for one in optimizers:
        one.step()
        one.zero_grad()


def _train_beside(model: Any, plain: Any, make: Any = _MAKES[0], steps: int = 3) -> None:
    optimizer, reference = make(model.parameters()), make(plain.parameters())
    for step in range(steps):
        model(batch(step)).backward()
        plain_backward(plain, step)
        compare_gradients(model, plain)
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.5) for one in (model, plain)]
        close("norm", gather_full(norms[0].full_tensor()), norms[1])
        _step(optimizer, reference)
        compare_weights(model, plain)


def test_any_optimizer_trains_as_over_whole_tensors() -> None:
    for number, make in enumerate(_MAKES):
        model, plain = _pair(reshard_after_forward=(None, True, False, None)[number])
        _train_beside(model, plain, make)


def test_offload_changes_no_bit() -> None:
    """Over passes that add up, with a set of modules that stays on the device, and from meta."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for options in ({"mp_policy": policy}, {"mesh": two}, {"reshard_after_forward": False}):
        found: list[list[Tensor]] = []
        before = 0  # the account is that of the mesh
        for offload in (CPUOffloadPolicy(pin_memory=False), None):
            with torch.device("meta"):
                model = Small()
            fully_shard(model.units[0], **options)
            fully_shard(model.units[1], offload_policy=offload, **options)
            fully_shard(model, offload_policy=offload, **options)
            model.to_empty(device="cpu")
            model.load_state_dict(build(Small, torch.float32, 3, 0.4).state_dict())
            optimizer = _MAKES[0](model.parameters())
            for step in range(4):
                model(batch(step).float()).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if step % 2:
                    _step(optimizer)
            found.append([gather_full(p.detach()) for p in model.parameters()])
            held = environment_of_module(model).ledger.host.bytes_by_category()["main_weights"]
            same("more on the host", held > before, offload is not None)
            before = held
        assert all(map(torch.equal, *found))


def test_gradients_of_before_count_for_nothing() -> None:
    plain = build(Small, torch.float64, 3, 0.4)
    module = copy.deepcopy(plain)
    module(batch(5)).backward()
    _train_beside(_shard(module), plain)


def test_what_a_list_or_a_set_cannot_hold_is_refused() -> None:
    model = Small()
    refuses(ConfigurationError, "is in another one", fully_shard, [model, model.units[0]])
    refuses(ConfigurationError, "twice", fully_shard, [model.units[0], model.units[0]])
    refuses(ConfigurationError, "expected parameters", fully_shard, model, ignored_params={"scale"})
    refuses(ConfigurationError, "expected a DeviceMesh", fully_shard, model, mesh="dp")
    policy = MixedPrecisionPolicy(param_dtype="bf16")
    refuses(ConfigurationError, "expected a torch.dtype", fully_shard, model, mp_policy=policy)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_parameters_and_gradients_are_those_of_fsdp2() -> None:
    """Names, whole shapes, dtypes and placements; rows lie elsewhere."""
    plain = build(Small, torch.float64, 3, 0.4)
    models = []
    for shard in fully_shard, torchs:
        model = copy.deepcopy(plain)
        for unit in model.units:
            shard(unit)
            assert all(isinstance(p, DTensor) for p in unit.parameters()), "sharded by the call"
        shard(model)
        model(batch()).backward()
        models.append(model)
    facts = [
        [
            (name, one.shape, one.dtype, one.placements, one.requires_grad)
            for name, p in model.named_parameters()
            for one in (p, p.grad)
        ]
        for model in models
    ]
    same("parameters", facts[0], facts[1])
    assert isinstance(models[0], Small)
    assert isinstance(models[0], FSDPModule)
    same("class", type(models[0]).__name__, type(models[1]).__name__)


def _held(model: Any) -> list[bool]:
    """Whether full buffers are there, of both units and of the rest."""
    parts = [getattr(part, "up", part) for part in (*model.units, model)]
    return [not isinstance(next(iter(part._parameters.values())), DTensor) for part in parts]


def test_weights_stay_as_long_as_was_said() -> None:
    model, _ = _pair()
    same("before", _held(model), [False] * 3)
    loss = model(batch())
    same("the outermost stays", _held(model), [False, False, True])
    loss.backward()
    same("after a backward pass", _held(model), [False] * 3)
    model.set_reshard_after_forward(False)
    loss = model(batch())
    same("all stay", _held(model), [True] * 3)
    model.units[0].reshard()
    same("one was freed", _held(model), [False, True, True])
    model.set_reshard_after_backward(False)
    loss.backward()
    same("after it they stay", _held(model), [True] * 3)
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(True)
    model(batch())
    same("none stays", _held(model), [False] * 3)
    model.units[1].unshard()
    same("one was gathered", _held(model), [False, True, False])
    handle = model.units[0].unshard(async_op=True)
    handle.wait()
    same("two were", _held(model), [True, True, False])
    close(
        "whole",
        model.units[1].up.weight.detach(),
        gather_full(dict(model.named_parameters())["units.1.up.weight"]),
    )
    model(batch())
    same("until the pass", _held(model), [False] * 3)


def test_settings_of_the_schedule_change_no_number() -> None:
    for change in (
        lambda m: m.set_reshard_after_forward(False),
        lambda m: m.set_reshard_after_forward(True),
        lambda m: m.set_reshard_after_backward(False),
        lambda m: m.set_modules_to_forward_prefetch([m.units[1], m.units[0]]),
        lambda m: m.units[1].set_modules_to_backward_prefetch([m.units[0]]),
        lambda m: m.unshard(),
    ):
        model, plain = _pair()
        change(model)
        _train_beside(model, plain)


def test_gradients_are_added_up_over_passes() -> None:
    """Reduced in each, or once at the end; and on top of those that are there."""
    for waits in (False, True):
        model, plain = _pair()
        optimizer, reference = (_MAKES[0](one.parameters()) for one in (model, plain))
        for step in range(2):
            for micro in range(3):
                model.set_requires_gradient_sync(not waits or micro == 2)
                model.set_is_last_backward(micro == 2)
                model(batch(3 * step + micro)).backward()
                plain_backward(plain, 3 * step + micro)
            compare_gradients(model, plain)
            model(batch(9)).backward()
            plain_backward(plain, 9)
            compare_gradients(model, plain)
            _step(optimizer, reference)
            compare_weights(model, plain)


def test_passes_that_wait_send_nothing() -> None:
    model, plain = _pair()
    sent: list[str] = []
    model(batch()).backward()
    plain_backward(plain, 0)
    state(model).context.events.subscribe(
        lambda event: sent.append(event.operation), kinds=("collective", "agreement")
    )
    model.set_requires_gradient_sync(False)
    model(batch(1)).backward()
    plain_backward(plain, 1)
    assert not {"reduce_scatter", "all_reduce"}.intersection(sent), sent
    model.units[0].set_requires_gradient_sync(True)
    model(batch(2)).backward()
    plain_backward(plain, 2)
    same("one unit reduces", sent.count("reduce_scatter"), len(state(model.units[0]).unit.buckets))
    compare_gradients(model.units[0], plain.units[0])
    model.set_requires_gradient_sync(True)
    model(batch(3)).backward()
    plain_backward(plain, 3)
    compare_gradients(model, plain)


def test_a_factor_in_place_of_the_number_of_ranks() -> None:
    model, plain = _pair()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    model(batch()).backward()
    plain_backward(plain, 0, times=2.0)
    compare_gradients(model, plain)


@pytest.mark.on_ranks(4)
def test_two_dimensions_replicate_and_shard() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for reduces in (True, False):
        model, plain = _pair(mesh=mesh)
        optimizer, reference = (_MAKES[0](one.parameters()) for one in (model, plain))
        for step in range(2):
            for micro in range(3):
                model.set_requires_all_reduce(reduces or micro == 2)
                model(batch(3 * step + micro)).backward()
                plain_backward(plain, 3 * step + micro)
            compare_gradients(model, plain)
            _step(optimizer, reference)
            compare_weights(model, plain)
    same("placements", str(next(model.parameters()).placements), "(Replicate(), Shard(dim=0))")
    full = {name: value + 1 for name, value in plain.state_dict().items()}
    whole = of_dcp.StateDictOptions(full_state_dict=True)
    of_dcp.set_model_state_dict(model, dict(full), options=whole)
    plain.load_state_dict(full)
    compare_weights(model, plain)


@pytest.mark.on_ranks(4)
def test_a_part_is_kept_for_the_backward_pass() -> None:
    """Of pairs of four ranks; pairs of two shard over all, and there is nothing between."""
    for wrong, found in (3, "[2]"), (4, "[2]"), (1, "[2]"), (2.0, "[2]"), ("2", "[2]"):
        refuses(ConfigurationError, found, fully_shard, Small(), reshard_after_forward=wrong)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    refuses(ConfigurationError, "divides the 2 ranks", fully_shard, Small(), mesh=mesh, **_IN_TWO)
    plain = build(Small, torch.float64, 3, 0.4)
    model = copy.deepcopy(plain)
    for unit in model.units:
        fully_shard(unit, **_IN_TWO)
    environment = environment_of_module(fully_shard(model))
    seen: list[tuple[str, str, int]] = []
    environment.events.subscribe(
        lambda event: seen.append((event.operation, event.bucket, event.group_size)),
        kinds=("collective",),
    )

    def parts() -> list[int]:
        alive = environment.ledger.alive()
        return [entry.count_bytes for entry in alive if entry.role == "compute_shard"]

    _train_beside(model, plain)
    units = [state(unit).unit.buckets for unit in model.units]
    buckets = [bucket for of_unit in units for bucket in of_unit]
    step = [(bucket.plan.name, 4) for bucket in buckets]
    step += [(bucket.plan.name, 2) for of_unit in reversed(units) for bucket in of_unit]
    names = dict(step)
    gathers = [
        (name, ranks) for what, name, ranks in seen if what == "all_gather" and name in names
    ]
    same("gathers of three steps", gathers, 3 * step)
    sizes = [bucket.weights.full.size_bytes // 2 for bucket in buckets]
    with torch.no_grad():
        model(batch())
    same("parts after an evaluation", parts(), [])
    loss = model(batch())
    same("parts after a forward pass", parts(), sizes)
    loss.backward()
    same("parts after a backward pass", parts(), [])


class _Casts(Small):
    """Remembers what its layers compute in."""

    seen: list[torch.dtype]

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.units[0].up.weight.dtype, self.units[0](x).dtype]
        return super().forward(x)


def test_mixed_precision_is_that_of_fsdp2() -> None:
    """To the bits of one rank's sums; weights that are kept, and gradients, in their own dtype."""
    for policy in (
        MixedPrecisionPolicy(torch.bfloat16),
        MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
        MixedPrecisionPolicy(None, torch.bfloat16),
    ):
        plain = build(_Casts, torch.float32, 3, 0.4)
        losses, gradients, models = [], [], []
        for shard in fully_shard, torchs:
            model = copy.deepcopy(plain)
            for unit in model.units:
                shard(unit, mp_policy=MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype))
            shard(model, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(3):
                loss = model(batch(step, dtype=torch.float32))
                loss.backward()
                losses.append(loss.detach())
                gradients.append(
                    [
                        gather_full(p.grad) if shard is fully_shard else p.grad.full_tensor()
                        for p in model.parameters()
                    ]
                )
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
        same("dtypes inside", models[0].seen, models[1].seen)
        for mine, other in zip(losses[:3], losses[3:], strict=True):
            same("dtype of the loss", mine.dtype, other.dtype)
            close("loss", mine, other, 1e-6)
        for mine, other in zip(gradients[:3], gradients[3:], strict=True):
            for one, two in zip(mine, other, strict=True):
                same("dtype", one.dtype, torch.float32)
                close("gradient", one, two, 1e-6)


def test_recomputed_units_train_as_plain_torch() -> None:
    for keeps in (None, False):
        _train_beside(*_pair(Recomputing, reshard_after_forward=keeps))


class _Drawn(Small):
    """Can be built on the meta device."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.shift.fill_(0.25)


def _built_on_meta() -> Any:
    with torch.device("meta"):
        model = _Drawn()
    return _shard(model.double())


@pytest.mark.on_ranks(4)
def test_a_second_model_trains_where_one_rank_has_collected_the_first() -> None:
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {}, _IN_TWO, _IN_TWO):
            model, plain = _pair(**options)
            _train_beside(model, plain, steps=1)
            del model
            if dist.get_rank() == 0:
                gc.collect()
    finally:
        gc.enable()


def test_a_model_on_the_meta_device_gets_memory_and_values_later() -> None:
    model = _built_on_meta()
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    refuses(ConfigurationError, "on the meta device", model, batch())
    model.to_empty(device="cpu")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True)), "same objects"
    torch.manual_seed(5)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    plain = _Drawn().double()
    plain.load_state_dict({n: gather_full(v) for n, v in model.state_dict().items()})
    _train_beside(model, plain)


def test_a_model_on_the_meta_device_is_loaded() -> None:
    source, plain = _pair(_Drawn)
    model = _built_on_meta()
    refuses(ConfigurationError, "on the meta device", model.load_state_dict, source.state_dict())
    model.load_state_dict(source.state_dict(), assign=True)
    _train_beside(model, plain)


def test_state_dicts_of_torch_are_read_and_written(tmp_path: Path) -> None:
    model, plain = _pair()
    optimizer, reference = (_MAKES[0](one.parameters()) for one in (model, plain))
    for _ in range(2):
        model(batch()).backward()
        plain_backward(plain, 0)
        _step(optimizer, reference)
    whole = of_dcp.StateDictOptions(full_state_dict=True)
    full = of_dcp.get_model_state_dict(model, options=whole)
    for name, value in plain.state_dict().items():
        close(name, full[name], value)
    state = {
        "model": of_dcp.get_model_state_dict(model),
        "optimizer": of_dcp.get_optimizer_state_dict(model, optimizer),
    }
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    dcp.save(state, checkpoint_id=folder[0])
    again = _shard(build(Small, torch.float64, 4, 0.1))
    other = _MAKES[0](again.parameters())
    state = {
        "model": of_dcp.get_model_state_dict(again),
        "optimizer": of_dcp.get_optimizer_state_dict(again, other),
    }
    dcp.load(state, checkpoint_id=folder[0])
    of_dcp.set_model_state_dict(again, state["model"])
    of_dcp.set_optimizer_state_dict(again, other, state["optimizer"])
    compare_weights(again, plain)
    for model_, optimizer_ in ((again, other), (model, optimizer)):
        model_(batch(1)).backward()
        optimizer_.step()
    plain_backward(plain, 1)
    reference.step()
    compare_weights(again, plain)
    compare_weights(model, plain)
    of_dcp.set_model_state_dict(again, dict(full), options=whole)
    close("whole", gather_full(next(again.parameters()).detach()), next(iter(full.values())))
    wrong = {**full, "scale": full["scale"][:2]}
    refuses(StateDictError, "expected shape", again.load_state_dict, wrong)


def test_weights_that_anybody_changes_are_seen() -> None:
    """In place, by a state dict, and by a step after an evaluation."""
    model, plain = _pair()
    optimizer, reference = (_MAKES[0](one.parameters()) for one in (model, plain))
    model(batch()).backward()
    plain_backward(plain, 0)
    with torch.no_grad():
        close("evaluated", model(batch(5)), plain(batch(5)))
    for one in (optimizer, reference):
        one.step()
    with torch.no_grad():
        close("stepped", model(batch(5)), plain(batch(5)))
        for one in (model, plain):
            one.units[0].up.weight.mul_(0.5)
        close("changed", model(batch(5)), plain(batch(5)))
    model.load_state_dict({n: v * 0.5 for n, v in plain.state_dict().items()})
    plain.load_state_dict({n: v * 0.5 for n, v in plain.state_dict().items()})
    with torch.no_grad():
        close("loaded", model(batch(5)), plain(batch(5)))


class _Twice(Small):
    """Another way in, which uses one unit."""

    def first(self, x: Tensor) -> Tensor:
        out: Tensor = self.units[0](x) * self.scale
        return out.square().mean()


def test_another_method_runs_as_forward_does() -> None:
    model, plain = _pair(_Twice)
    register_fsdp_forward_method(model, "first")
    register_fsdp_forward_method(plain, "first")
    for step in range(2):
        (model.first(batch(step)) + model(batch(step))).backward()
        for rank in range(2):
            x = batch(step, rank)
            ((plain.first(x) + plain(x)) / 2).backward()
    compare_gradients(model, plain)
    refuses(ConfigurationError, "no method 'third'", register_fsdp_forward_method, model, "third")


def test_ignored_frozen_and_listed_parameters() -> None:
    plain = build(Small, torch.float64, 3, 0.4)
    plain.units[1].down.requires_grad_(False)
    model: Any = copy.deepcopy(plain)
    fully_shard([model.units[0], model.units[1]])
    fully_shard(model, ignored_params={model.scale})
    assert type(model.scale) is nn.Parameter
    model(batch()).backward()
    plain(batch()).backward()
    close("of the rank alone", model.scale.grad, plain.scale.grad)
    plain.zero_grad()
    plain_backward(plain, 0)
    for name, parameter in model.units.named_parameters():
        wanted = dict(plain.units.named_parameters())[name].grad
        same(name, parameter.grad is None, wanted is None)
        if wanted is not None:
            close(name, gather_full(parameter.grad), wanted)


class AnswersItself(nn.Module):
    """Somebody's module, whose attributes are not to be read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "_parameters":
            raise RuntimeError(name)
        return super().__getattribute__(name)


def test_weights_that_several_modules_hold() -> None:
    """In one list they are left to the module around; elsewhere refused or warned of."""

    def tied() -> Any:
        model = build(Small, torch.float64, 3, 0.4)
        model.units[1].up.weight = model.units[0].up.weight
        return model

    plain, _unbuilt = tied(), nn.Module.__new__(nn.Module)
    _answers_itself = AnswersItself()
    _answers_itself.__dict__["_parameters"] = None
    model = copy.deepcopy(plain)
    fully_shard([model.units[0], model.units[1]])
    _train_beside(fully_shard(model), plain)
    model = tied()
    fully_shard(model.units[0])
    refuses(ConfigurationError, "also in a module that is sharded", fully_shard, model)
    with pytest.warns(UserWarning, match=r"up\.weight is also held by a Linear outside"):
        model(batch())
    model = tied()
    with pytest.warns(UserWarning, match=r"up\.weight is also held by a Linear outside"):
        fully_shard_model(model.units[0])
    model = tied()
    fully_shard([model.units[0], model.units[1]])
    refuses(ConfigurationError, "nobody would average its gradients", model, batch())
    _train_beside(fully_shard(model), tied())


def test_a_pass_that_raises_leaves_a_model_that_trains() -> None:
    model, plain = _pair()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(batch()[:, :3])
    model.reset_iter_state()
    _train_beside(model, plain)


def test_what_is_refused_before_anything_is_sharded() -> None:
    def whole() -> Any:
        return build(Small, torch.float64, 3, 0.4)

    world = init_device_mesh("cpu", (2,))
    nameless = init_device_mesh("cpu", (2, 1))
    layer = nn.Linear(4, 4)
    wrong: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
        (ConfigurationError, "does not know dp_mesh_dims", {"dp_mesh_dims": None}),
        (ConfigurationError, "two with names", {"mesh": nameless}),
        (CapabilityNotBuiltError, "S(1)", {"shard_placement_fn": lambda _: Shard(1)}),
        (ConfigurationError, "divides the 2 ranks", {"reshard_after_forward": 2}),
        (ConfigurationError, "expected True, False or None", {"reshard_after_forward": "yes"}),
        (ConfigurationError, "found str", {"mp_policy": "bf16"}),
        (ConfigurationError, "found str", {"offload_policy": "cpu"}),
    )
    for error, words, options in wrong:
        model = whole()
        refuses(error, words, fully_shard, model, mesh=options.pop("mesh", world), **options)
        same("class", type(model), Small)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    unpinned = _unpinned(CPUOffloadPolicy(pin_memory=False), torch.device("cuda"))
    refuses(CapabilityNotBuiltError, "pin_memory", refuse, unpinned)
    refuses(ConfigurationError, "a module with a forward()", fully_shard, nn.ModuleList([layer]))
    refuses(ConfigurationError, "sharded already", fully_shard, fully_shard(layer))
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    policy = MixedPrecisionPolicy(torch.bfloat16)
    refuses(ConfigurationError, "2 dtypes", fully_shard, mixed, mp_policy=policy)
    model, _ = _pair()
    refuses(LifecycleError, "cannot be copied", copy.deepcopy, model)
    model.units[0](batch())
    refuses(LifecycleError, "has run already", fully_shard, nn.Sequential(model))
    refuses(
        ConfigurationError,
        "expected an FSDPModule",
        model.set_modules_to_forward_prefetch,
        [nn.Linear(1, 1)],
    )


class _Known(Small):
    """A unit twice under reentrant checkpointing, and a unit that one rank leaves out."""

    way = "twice"

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "twice":
            for unit in (self.units[0], self.units[0], self.units[1]):
                x = checkpoint(unit, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
        else:
            for unit in self.units[: 1 if self.way == "rank 1 alone" and batch_of(x) == 0 else 2]:
                x = unit(x)
            if self.way == "raises":
                x = _Raises.apply(x)
        return (x * self.scale + self.shift).square().mean()


def batch_of(x: Tensor) -> int:
    """The rank whose batch of number 0 `x` is."""
    return int(not torch.equal(x.detach(), batch(0, 0)))


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, _gradient: Tensor) -> Any:
        raise ArithmeticError


def test_what_fsdp2_is_known_to_get_wrong() -> None:
    """docs/upstream: recomputed twice, a pass that raises, ranks on other paths."""
    for way in ("twice", "rank 1 alone"):
        model, plain = _pair(_Known)
        model.way = plain.way = way
        for _ in range(2):
            model(batch()).backward()
            plain_backward(plain, 0)
        compare_gradients(model, plain)
    model, plain = _pair(_Known)
    model.way = "raises"
    with pytest.raises(ArithmeticError):
        model(batch()).backward()
    model.way = plain.way = "plain"
    _train_beside(model, plain)


@pytest.mark.on_ranks(4)
def test_other_weights_in_the_last_microbatch_of_a_hybrid() -> None:
    """Where FSDP2 loses a gradient: set_requires_all_reduce(False), then another branch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = _pair(_OtherBranch, mesh=mesh)
    for last in (False, True):
        model.set_requires_all_reduce(last)
        for one in (model, plain):
            one.units[0].first = not last
        model(batch(int(last))).backward()
        plain_backward(plain, int(last))
    compare_gradients(model, plain)


class _Either(nn.Module):
    """Uses one of two layers."""

    first = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.up if self.first else self.down)(x)
        return out


class _OtherBranch(Small):
    unit = _Either
