"""Steps of optimizers that look at more than one element at a time, which a shard cannot serve.

Row and column statistics and orthogonalised updates need whole tensors. For a step each parameter
has one rank of those that share it, its owner. [Note: whole matrices] One all-to-all brings
gradients and weights to their owners, which step on whole tensors, one takes the new weights back:
of n ranks, each sends 2 (n-1)/n of its rows and (n-1)/n of what it owns. State stays whole with the
owner, and becomes shards where it is looked at: `state_dict` is collective then.

Optimizers of others that need whole tensors have to say so. One that does not computes with shards,
which is right or refused: see [Note: computing with uneven shards].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.events import Event
from mfsdp_core.shard.chunk import offsets_of
from mfsdp_core.shard.dtensor import local_tensor, name_of, name_tensor
from mfsdp_core.shard.experts import expert_scope
from mfsdp_core.shard.uneven_shard import shard_like
from mfsdp_core.state.owner import OWNER

#: Attribute of a prepared optimizer: its `WholeStep`.
_WHOLE = "_mfsdp_whole_step"

State = dict[str, Any]


def needs_whole_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's that compute with rows and columns, or derived from one."""
    return isinstance(optimizer, (torch.optim.Adafactor, torch.optim.Muon))


def refuse_unserved(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what neither shards nor whole tensors serve.

    Raises:
        ConfigurationError: inner products over all parameters, or sparse gradients.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            f"{name} takes inner products over all parameters at once and evaluates "
            "the model within a step, which sharded parameters cannot serve. Use an optimizer "
            "that treats each tensor by itself (AdamW, SGD, Muon and their kin)."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigurationError(
            f"{name} reads sparse gradients, and reduced gradients are dense. Use Adam."
        )


def are_whole(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether this rank has all of every one of `parameters`."""
    return all(
        all(placement.is_replicate() for placement in parameter.placements)
        for parameter in parameters
        if isinstance(parameter, DTensor)
    )


def whole_step_of(optimizer: torch.optim.Optimizer) -> WholeStep | None:
    """What steps a prepared optimizer over whole tensors; None if that is done on shards."""
    found: WholeStep | None = getattr(optimizer, _WHOLE, None)
    return found


def show_shards(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer.state` hold shards. Collective where the last step was on whole tensors."""
    step = whole_step_of(optimizer)
    if step is not None:
        step.show_shards()


@dataclass(frozen=True)
class _Home:
    """Where one parameter is whole, and where its rows lie.

    group: ranks that share it out. owner: one of them, by its number there. spans: per rank of
    `group` its first row and how many.
    """

    parameter: DTensor
    group: dist.ProcessGroup
    owner: int
    spans: tuple[tuple[int, int], ...]

    @property
    def is_here(self) -> bool:
        return self.owner == self.group.rank()

    @property
    def row_elements(self) -> int:
        return prod(self.parameter.shape[1:])

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """New memory for all of it, contents undefined."""
        device = local_tensor(self.parameter).device
        return torch.empty(tuple(self.parameter.shape), dtype=dtype, device=device)

    def own(self, dtype: torch.dtype) -> torch.Tensor:
        """New memory for this rank's rows, contents undefined."""
        return torch.empty_like(local_tensor(self.parameter), dtype=dtype)

    def rows_of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        start, rows = self.spans[rank]
        return whole.narrow(0, start, rows)


class WholeStep:
    """Call it to step `optimizer` over whole tensors; base_step: its own method. Collective.

    Raises:
        ConfigurationError: a parameter is cut by tensor parallelism as well.
    """

    #: The step sees other tensors than the optimizer's parameters.
    is_local = True

    def __init__(self, optimizer: torch.optim.Optimizer, base_step: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._base_step = base_step
        self._states: dict[torch.Tensor, State] = {}
        self._is_shown = True
        self._known: list[torch.Tensor] = []
        self._homes: dict[torch.Tensor, _Home] = {}
        setattr(optimizer, _WHOLE, self)
        optimizer.register_state_dict_pre_hook(lambda _: self.show_shards())
        optimizer.register_load_state_dict_post_hook(lambda _: self._forget())
        for parameter in self._parameters():
            _exchange_group(parameter)

    def __call__(self, *closure: Callable[[], Any]) -> Any:
        """One step; returns what the optimizer's own method does. closure: none."""
        assert not closure
        groups, states = self._optimizer.param_groups, self._optimizer.state
        kept = [group["params"] for group in groups]
        homes = self._find_homes()
        stepping = [
            homes[p] for params in kept for p in params if p.grad is not None and p in homes
        ]
        stand_ins = self._stand_ins(stepping)
        try:
            for group, params in zip(groups, kept, strict=True):
                group["params"] = [
                    stand_ins.get(p, p) for p in params if p in stand_ins or p not in homes
                ]
            for parameter, whole in stand_ins.items():
                if parameter in self._states:
                    states[whole] = self._states[parameter]
            result = self._base_step()
        finally:
            for group, params in zip(groups, kept, strict=True):
                group["params"] = params
            for parameter, whole in stand_ins.items():
                if whole in states:
                    self._states[parameter] = states.pop(whole)
        self._is_shown = self._is_shown and not stepping
        self._to_shards(
            [(home, stand_ins.get(home.parameter)) for home in stepping],
            [local_tensor(home.parameter) for home in stepping],
        )
        return result

    @property
    def held(self) -> Iterable[State]:
        """State of whole tensors that this rank keeps."""
        return self._states.values()

    @torch.no_grad()
    def show_shards(self) -> None:
        """Let the optimizer's state hold shards until its next step.

        Tensors of a parameter's shape are cut as it is; all else is given to every rank.
        """
        if self._is_shown:
            return
        self._is_shown = True
        homes = self._find_homes()
        parameters = list(homes)
        for group in dict.fromkeys(home.group for home in homes.values()):
            own = {
                number: {key: _described(value, home) for key, value in self._states[p].items()}
                for number, p in enumerate(parameters)
                if (home := homes[p]).group == group and p in self._states
            }
            told: list[dict[int, State]] = [{} for _ in range(group.size())]
            dist.all_gather_object(told, own, group=group)
            for number, entries in sorted((k, v) for part in told for k, v in part.items()):
                parameter = parameters[number]
                self._show(homes[parameter], entries)
        self._states.clear()

    def _show(self, home: _Home, entries: State) -> None:
        parameter, mine = home.parameter, self._states.get(home.parameter, {})
        shown = self._optimizer.state[parameter]
        cut = [(key, entry.dtype) for key, entry in entries.items() if isinstance(entry, _Cut)]
        rows = [home.own(dtype) for _, dtype in cut]
        self._to_shards([(home, mine.get(key)) for key, _ in cut], rows)
        for (key, _), local in zip(cut, rows, strict=True):
            shard = shard_like(local, parameter)
            name_tensor(shard, f"{key} of {name_of(parameter)}")
            shown[key] = shard
        device = local_tensor(parameter).device
        for key, entry in entries.items():
            if not isinstance(entry, _Cut):
                on_device = isinstance(entry, _OnDevice)
                shown[key] = mine.get(key, entry.value.to(device) if on_device else entry)

    def _forget(self) -> None:
        self._states.clear()
        self._is_shown = True

    @torch.no_grad()
    def _stand_ins(self, stepping: Sequence[_Home]) -> dict[torch.Tensor, torch.Tensor]:
        """Whole weights with gradients, of what this rank owns; its state becomes whole too."""
        sent: list[tuple[_Home, torch.Tensor]] = []
        uses: list[str | None] = []
        for home in stepping:
            parameter = home.parameter
            sent += [(home, local_tensor(parameter)), (home, local_tensor(parameter.grad))]
            uses += [None, None]
            shown = self._optimizer.state.pop(parameter, {})
            for key, value in sorted(shown.items()):
                if isinstance(value, DTensor):
                    sent.append((home, local_tensor(value)))
                    uses.append(key)
                elif home.is_here:
                    self._states.setdefault(parameter, {})[key] = value
        found = self._to_owners(sent)
        stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        for (home, _), key, whole in zip(sent, uses, found, strict=True):
            if whole is None:
                continue
            parameter = home.parameter
            if key is not None:
                self._states.setdefault(parameter, {})[key] = whole
            elif parameter in stand_ins:
                stand_ins[parameter].grad = whole
            else:
                stand_ins[parameter] = whole
        return stand_ins

    def _to_owners(self, rows: Sequence[tuple[_Home, torch.Tensor]]) -> list[torch.Tensor | None]:
        """Of each tensor, all of it on its owner, None elsewhere."""
        found = [home.whole(local.dtype) if home.is_here else None for home, local in rows]
        for group, dtype, numbers in _batches((home, local.dtype) for home, local in rows):
            ranks = range(group.size())
            send = [
                [rows[n][1].reshape(-1) for n in numbers if rows[n][0].owner == r] for r in ranks
            ]
            here = [n for n in numbers if rows[n][0].is_here]
            counts = [
                [rows[n][0].spans[r][1] * rows[n][0].row_elements for n in here] for r in ranks
            ]
            for rank, pieces in enumerate(self._exchange(group, dtype, send, counts)):
                for number, piece in zip(here, pieces, strict=True):
                    home, whole = rows[number][0], found[number]
                    assert whole is not None
                    target = home.rows_of(whole, rank)
                    target.copy_(piece.view(target.shape))
        return found

    @torch.no_grad()
    def _to_shards(
        self, wholes: Sequence[tuple[_Home, torch.Tensor | None]], out: Sequence[torch.Tensor]
    ) -> None:
        """The reverse: every rank's rows, into `out`."""
        for group, dtype, numbers in _batches(
            (home, local.dtype) for (home, _), local in zip(wholes, out, strict=True)
        ):
            ranks = range(group.size())
            of_batch = (wholes[number] for number in numbers)
            here = [(home, whole) for home, whole in of_batch if whole is not None]
            send = [[home.rows_of(whole, r).reshape(-1) for home, whole in here] for r in ranks]
            back = [[n for n in numbers if wholes[n][0].owner == r] for r in ranks]
            counts = [[out[n].numel() for n in owned] for owned in back]
            for owned, pieces in zip(back, self._exchange(group, dtype, send, counts), strict=True):
                for number, piece in zip(owned, pieces, strict=True):
                    out[number].copy_(piece.view(out[number].shape))

    def _exchange(
        self,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        send: list[list[torch.Tensor]],
        counts: list[list[int]],
    ) -> list[list[torch.Tensor]]:
        """Flat pieces to every rank and from every rank; counts: elements of those that come."""
        device = local_tensor(next(iter(self._homes))).device
        empty = torch.empty(0, dtype=dtype, device=device)
        packed = torch.cat([empty, *(piece for pieces in send for piece in pieces)])
        if group.size() == 1:
            return [list(packed.split(counts[0]))] if counts[0] else [[]]
        sizes = [sum(own) for own in counts]
        received = packed.new_empty(sum(sizes))
        dist.all_to_all_single(
            received, packed, sizes, [sum(p.numel() for p in own) for own in send], group=group
        )
        self._publish(packed, group.size())
        return [
            list(part.split(own)) if own else []
            for part, own in zip(received.split(sizes), counts, strict=True)
        ]

    def _publish(self, packed: torch.Tensor, size: int) -> None:
        owner = getattr(next(iter(self._homes)), OWNER)()
        if owner is not None:
            name = str(packed.dtype).removeprefix("torch.")
            owner.events.publish(
                Event("collective", "all_to_all", name, packed.nbytes, "inner", size, "optimizer")
            )

    def _find_homes(self) -> dict[torch.Tensor, _Home]:
        """Of every sharded parameter. Collective when the optimizer has got others."""
        parameters = self._parameters()
        if [id(p) for p in parameters] != [id(p) for p in self._known]:
            by_group: dict[dist.ProcessGroup, list[DTensor]] = defaultdict(list)
            for parameter in parameters:
                by_group[_exchange_group(parameter)].append(parameter)
            found = {home.parameter: home for g, own in by_group.items() for home in _homes(g, own)}
            self._homes = {parameter: found[parameter] for parameter in parameters}
            self._known = list(parameters)
        return self._homes

    def _parameters(self) -> list[DTensor]:
        return [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if isinstance(parameter, DTensor) and offsets_of(parameter) is not None
        ]


@dataclass(frozen=True)
class _Cut:
    """Stands for a tensor that has its parameter's shape."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _OnDevice:
    """A tensor that every rank gets, on its device."""

    value: torch.Tensor


def _described(value: Any, home: _Home) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim and value.shape == home.parameter.shape:
        return _Cut(value.dtype)
    return value if value.device.type == "cpu" else _OnDevice(value.cpu())


def _batches(
    wanted: Iterable[tuple[_Home, torch.dtype]],
) -> Iterable[tuple[dist.ProcessGroup, torch.dtype, list[int]]]:
    """What goes together: numbers of tensors by group and dtype."""
    found: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = defaultdict(list)
    for number, (home, dtype) in enumerate(wanted):
        found[home.group, dtype].append(number)
    return [(group, dtype, numbers) for (group, dtype), numbers in found.items()]


def _exchange_group(parameter: DTensor) -> dist.ProcessGroup:
    """The ranks that share out `parameter`."""
    owner = getattr(parameter, OWNER)()
    axes = owner.axes_of(is_expert=expert_scope(parameter) is not None)
    cuts = [dim for dim, placed in enumerate(parameter.placements) if not placed.is_replicate()]
    if any(dim >= axes.mesh.ndim for dim in cuts):
        raise ConfigurationError(
            f"{name_of(parameter)} is cut by tensor parallelism, and the optimizer needs whole "
            "matrices. Give it the weights that are not cut, and AdamW the others."
        )
    if len(cuts) == 1:
        return parameter.device_mesh.get_group(cuts[0])
    group: dist.ProcessGroup = axes.data_group
    return group


def _homes(group: dist.ProcessGroup, parameters: Sequence[DTensor]) -> list[_Home]:
    """Owners with about equal numbers of elements: the largest first, to who has least."""
    own = torch.tensor(
        [((offsets_of(p) or (0,))[0], local_tensor(p).shape[0]) for p in parameters],
        device=local_tensor(parameters[0]).device,
    )
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group=group)
    spans = torch.stack(everyone, dim=1).tolist()
    loads, owners = [0] * group.size(), [0] * len(parameters)
    for number in sorted(range(len(parameters)), key=lambda n: -parameters[n].numel()):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += parameters[number].numel()
    return [
        _Home(
            parameter, group, owners[number], tuple((start, rows) for start, rows in spans[number])
        )
        for number, parameter in enumerate(parameters)
    ]
