"""Source text of what differs by engine: how a program shards, accumulates and looks.

Every engine has `shard(module)`, which returns a model and an optimizer, and the functions that
`Trial` in `script` calls. `$NAME` stands for what the program says.
"""

from __future__ import annotations

MFSDP = '''
from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_, fully_shard_model
from mfsdp_core import fully_shard_optimizer, gather_full, load_checkpoint, save_checkpoint


def shard(module):
    $MESH
    model = fully_shard_model(
        module,
        device_mesh=mesh,
        $AXES
        fsdp_unit_modules=Model.unit_classes or None,
        zero_dp_strategy=$STRATEGY,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
        $OPTIONS
    )
    return model, $OPTIMIZER


def accumulating(model, last):
    return $ACCUMULATING


def finish(model, end):
    if end == "start":
        model.start_grad_sync()
    model.finish_grad_sync()


def sharded(model):
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}


def gradient(parameter):
    found = getattr(parameter, "$GRAD", None)
    return None if found is None else gather_full(found)


def weight(parameter):
    return gather_full(parameter.detach())


def clip(model, bound):
    return clip_grad_norm_(model, bound)


def load(model, weights):
    model.load_state_dict({f"module.{name}": value for name, value in weights.items()})


def forget(model, optimizer):
    model.zero_grad_buffer()


def held(model):
    """Bytes by category; weights are visible as shards whenever no pass runs."""
    assert all(hasattr(p.data, "device_mesh") for p in model.module.parameters()), "whole weights"
    used = sum(one.count_bytes for one in model.ledger.alive() if one.in_pool)
    changes = {"optimizer_state": 0, "in_pools": used}  # the state comes with the first step
    return model.ledger.bytes_by_category() | changes


def send_gradients_in(model, dtype):
    sums = dtype if "native" in model.transports.values() else None
    changed = dataclasses.replace(model.mp_policy, grad_comm_dtype=dtype, reduce_dtype=sums)
    model.reset_mixed_precision_policy(changed)


def gather_ahead(model):
    model.start_param_sync()


def resume(model, optimizer, module):
    """A checkpoint, loaded into a new model with other weights."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    save_checkpoint(f"{folder[0]}/step", model, optimizer)
    fresh, its_optimizer = shard(module)
    for group in its_optimizer.param_groups:
        group["lr"] = 7.0  # the one that was saved is to count
    load_checkpoint(f"{folder[0]}/step", fresh, its_optimizer)
    shutil.rmtree(folder[0], ignore_errors=True)
    return fresh, its_optimizer
'''

FSDP2 = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def shard(module):
    $MESH
    for unit in module.units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=$RESHARD)
    model = fully_shard(module, mesh=mesh, reshard_after_forward=$RESHARD)
    $OPTIONS
    return model, sgd(model.parameters())


@contextlib.contextmanager
def accumulating(model, last):
    $ACCUMULATING
    yield


def sharded(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root keeps whole weights after an evaluation
    return dict(model.named_parameters())


def gradient(parameter):
    found = parameter.grad
    return found.full_tensor() if isinstance(found, DTensor) else found


def weight(parameter):
    return parameter.detach().full_tensor()


def clip(model, bound):
    norm = nn.utils.clip_grad_norm_(model.parameters(), bound)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def load(model, weights):
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
"""

FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy


def shard(module):
    $MESH
    units = set(module.units)
    model = FullyShardedDataParallel(
        module,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.$SHARDING,
        auto_wrap_policy=CustomPolicy(lambda one: one in units),
        use_orig_params=True,
    )
    return model, sgd(model.parameters())


def accumulating(model, last):
    return contextlib.nullcontext() if last else model.no_sync()


def sharded(model):
    found = {}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for name, p in model.named_parameters():
            grad = None if p.grad is None else p.grad.clone()
            found[name.replace("_fsdp_wrapped_module.", "")] = p.detach().clone(), grad
    return found


def gradient(parameter):
    found = parameter[1]
    # In a unit that was used, what nobody used has zeros.
    return found if found is not None and found.any() else None


def weight(parameter):
    return parameter[0]


def load(model, weights):
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(weights)
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel


def shard(module):
    model = DistributedDataParallel(module, $OPTIONS)
    return model, sgd(model.parameters())


def accumulating(model, last):
    return contextlib.nullcontext() if last else model.no_sync()


def sharded(model):
    return dict(model.module.named_parameters())


def gradient(parameter):
    return parameter.grad


def weight(parameter):
    return parameter.detach()


def clip(model, bound):
    return nn.utils.clip_grad_norm_(model.parameters(), bound)


def load(model, weights):
    model.module.load_state_dict(weights)
"""

#: Of torch's own engines.
OF_TORCH = """
def finish(model, end):
    pass


def forget(model, optimizer):
    optimizer.zero_grad()


def held(model):
    return {}
"""

#: Of the engines above: a pass with a backward pass.
TRAIN = """
def train(model, batch, last):
    with accumulating(model, last):
        loss = model(*batch)
        loss.backward()
    return loss


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""

OUTSIDE = """
from bench.validate.fuzz.outside import accumulating, clip, finish, forget, gradient
from bench.validate.fuzz.outside import held, load, sgd, sharded, sharded_by, train, weight


def shard(module):
    return sharded_by("$ENGINE", module, strategy=$STRATEGY)
"""
SOURCES = {
    "mfsdp": f"{MFSDP}\n{TRAIN}",
    "fsdp2": f"{FSDP2}\n{OF_TORCH}\n{TRAIN}",
    "fsdp1": f"{FSDP1}\n{OF_TORCH}\n{TRAIN}",
    "ddp": f"{DDP}\n{OF_TORCH}\n{TRAIN}",
}
