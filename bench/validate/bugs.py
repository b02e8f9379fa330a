"""Historical bugs of FSDP implementations, as small changes to the source of mfsdp_core.

One table for both users: the regression tests of the core, which have to fail on a copy with the
bug, and `validate --inject`, whose checker has to notice it without knowing which bug is in.
`bench.validate.mutation` makes the copy. The numbers are those of the regression list that every
test name and README of this project uses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """Text that occurs exactly once in `file` (below mfsdp_core), and what takes its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Bug:
    """One bug. without_changes: why it cannot be put back here (then `changes` is empty)."""

    id: str
    title: str
    changes: tuple[Change, ...] = ()
    without_changes: str = ""


_GRADIENTS = "runtime/gradient_buffers.py"
_LANDING = "adds = self._axis.landing is Landing.ADD and self._landed"

BUGS: tuple[Bug, ...] = (
    Bug(
        "R1",
        "a reduced gradient is added to the rank's own contribution instead of replacing it",
        (Change(_GRADIENTS, _LANDING, "adds = True"),),
    ),
    Bug(
        "R2",
        "the accumulator is scaled on every microbatch instead of what enters the reduction",
        (
            Change(
                _GRADIENTS,
                "view, scale = self._open_bucket().tensor(index), self._scale",
                "view, scale = self._open_bucket().tensor(index), 1.0",
            ),
            Change(_GRADIENTS, _LANDING, f"self.reduced.mul_(self._scale)\n        {_LANDING}"),
        ),
    ),
    Bug(
        "R3",
        "in a group of one rank the accumulated gradient grows on every microbatch",
        (
            Change(
                _GRADIENTS,
                _LANDING,
                f"{_LANDING}\n        if self._communicator.size == 1:\n"
                "            self.reduced.mul_(2)",
            ),
        ),
    ),
    Bug(
        "R4",
        "a phantom optimizer step, taken to create the optimizer's state early",
        (
            Change(
                "state/optimizer.py",
                "    patched: Any = optimizer\n",
                "    patched: Any = optimizer\n"
                "    for parameter in _parameters(optimizer):\n"
                "        parameter.grad = torch.zeros_like(parameter)\n"
                "    optimizer.step()\n"
                "    optimizer.zero_grad()\n",
            ),
        ),
    ),
    Bug(
        "R5",
        "the guard of a change of the communication dtype is reversed",
        (
            Change(
                "wrapper.py",
                "if not self._context.grads.is_idle:",
                "if self._context.grads.is_idle:",
            ),
        ),
    ),
    Bug(
        "R6",
        "a parameter of the root, used again at the end, takes the slots of a pool for units ahead",
        (
            Change(
                "plan/prefetch.py",
                "    if limits.slots is not None and not from_unit:\n        return []\n",
                "    if limits.slots is not None and not from_unit:\n        return [0]\n",
            ),
            Change(
                "runtime/context.py",
                "            self.params.order.finish_pass()\n"
                "            self.params.release_all()\n",
                "            self.params.order.finish_pass()\n"
                "            self.params.release_all()\n"
                '            self.params.prefetch(unit, "forward")\n',
            ),
            Change(
                "runtime/param_pipeline.py",
                "                if self._by_name[holder].ahead:\n",
                "                if not holder:\n",
            ),
        ),
    ),
    Bug(
        "R7",
        "a unit is gathered ahead while activations are recomputed",
        (Change("plan/prefetch.py", "    if recomputing:\n", "    if not sizes_bytes:\n"),),
    ),
    Bug(
        "R8",
        "the root runs through `forward`, so its hooks do not",
        (
            Change(
                "wrapper.py",
                "return self.module(*args, **kwargs)",
                "return self.module.forward(*args, **kwargs)",
            ),
        ),
    ),
    Bug(
        "R9",
        "parameters of the root are freed while a child may still read them",
        (Change("runtime/build.py", "persistent=plan.unit == ROOT,", "persistent=False,"),),
    ),
    Bug(
        "R10",
        "under hybrid sharding only the last microbatch's gradient is kept",
        (Change(_GRADIENTS, _LANDING, f"{_LANDING} and self._outer is None"),),
    ),
    Bug(
        "R11",
        "gradients of experts are divided by the ranks that share the expert alone",
        (
            Change(
                "plan/config.py",
                "return (own_ranks if self.averages else 1) / dense_ranks",
                "return (own_ranks if self.averages else 1) / own_ranks",
            ),
        ),
    ),
    Bug(
        "R12",
        "weights that no slot of a pool serves are freed for good while views of them are alive",
        (
            Change(
                "memory/allocation.py",
                "fallback: BucketAllocator = StorageResizeAllocator(device, ledger)",
                "fallback: BucketAllocator = TemporaryAllocator(device, ledger)",
            ),
            Change(
                "memory/allocators.py",
                "        if self._held.pop(key, None) is not None and "
                'key.role != "compute_weights":\n',
                "        held = self._held.pop(key, None)\n"
                "        if held is not None:\n"
                "            held.zero_()\n"
                '        if held is not None and key.role != "compute_weights":\n',
            ),
        ),
    ),
    Bug(
        "R13",
        "whole tensors are put together by torch's even chunks",
        (
            Change(
                "shard/dtensor.py",
                "    rows = tensor.to_local().detach()\n    mesh = tensor.device_mesh\n",
                "    return tensor.full_tensor()\n"
                "    rows = tensor.to_local().detach()\n    mesh = tensor.device_mesh\n",
            ),
        ),
    ),
    Bug(
        "R14",
        "weights that are whole on both axes of a mesh are placed on one of them only",
        (
            Change(
                "shard/dtensor.py",
                "placements.insert(0, outer or Replicate())",
                "placements[:0] = [outer] if outer else []",
            ),
        ),
    ),
    Bug(
        "R15",
        "a weight that tensor parallelism has cut is laid out in its whole shape",
        (
            Change(
                "runtime/parameter_group.py",
                "yield SliceBuffer(layout, self._sub_shard, flat).rows(index)",
                "whole = self.parameters[index].part.whole_shape\n"
                "                rows = SliceBuffer(layout, self._sub_shard, flat).rows(index)\n"
                "                yield rows.reshape(-1, *whole[1:])",
            ),
        ),
    ),
    Bug(
        "R16",
        "buffers are freed before the stream that reads them has passed",
        without_changes="a race between CUDA streams: needs a GPU",
    ),
    Bug(
        "R17",
        "a fused weight gradient overwrites a pooled bucket that is still being reduced",
        without_changes="a race between CUDA streams: needs a GPU",
    ),
    Bug(
        "R18",
        "a state dict or checkpoint that lacks a parameter loads without an error",
        (
            Change(
                "state/model_state.py",
                "if strict and (missing or unexpected):",
                "if strict and unexpected:",
            ),
            Change(
                "state/loading.py",
                '    if own != stored:\n        raise StateDictError(\n            f"the ',
                '    if stored - own:\n        raise StateDictError(\n            f"the ',
            ),
            Change(
                "state/loading.py",
                "for name in _under(MODEL, own.tensors):",
                "for name in _under(MODEL, stored):",
            ),
        ),
    ),
    Bug(
        "R19",
        "one bucket for rows of any size, however much padding that takes",
        (
            Change(
                "plan/layout.py",
                "if within_padding_budget(build_layout(shapes, slices)):",
                "if shapes:",
            ),
        ),
    ),
    Bug(
        "R20",
        "a deleted model is never freed",
        (Change("runtime/hooks.py", "model = weakref.ref(context)", "model = lambda: context"),),
    ),
    Bug(
        "R21",
        "gradients that nobody marked as last reach the optimizer un-reduced",
        (Change("runtime/context.py", "self.grads.issue_rest()", "self.grads.land_all()"),),
    ),
)

BUG_BY_ID: dict[str, Bug] = {bug.id: bug for bug in BUGS}
