"""Steps of optimizers that look at more than one element at a time, which a shard cannot serve.

Row and column statistics and orthogonalised updates need whole tensors. For a step each parameter
has one rank of those that share it, its owner. [Note: whole matrices] One all-to-all brings
gradients and weights to their owners, which step on whole tensors, one takes the new weights back:
of n ranks, each sends 2 (n-1)/n of its rows and (n-1)/n of what it owns. State stays whole with the
owner, and becomes shards where it is looked at: `state_dict` is collective then. Muon and Adafactor
step in rounds, which are bounded by bytes per owner, so that not all matrices are there at once;
hooks of their step run in each round. Others may count their steps, and are called once.

Optimizers of others that need whole tensors have to say so. One that does not computes with shards,
which is right or refused: see [Note: computing with uneven shards].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mfsdp_core.comm.agreement import from_all
from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.events import Event
from mfsdp_core.shard.chunk import offsets_of
from mfsdp_core.shard.dtensor import local_tensor, name_of, name_tensor
from mfsdp_core.shard.experts import expert_scope
from mfsdp_core.shard.uneven_shard import shard_like
from mfsdp_core.state.optimizer_parameters import OWNER, standing_in

#: Attribute of a prepared optimizer: its `WholeStep`.
_WHOLE = "_mfsdp_whole_step"

#: Weights that an owner steps in a round, unless a single one takes more.
ROUND_BYTES = 1 << 25

State = dict[str, Any]


#: Those whose state is each parameter's own, so that parameters may step one after another.
_BY_PARAMETER = (torch.optim.Adafactor, torch.optim.Muon)


def needs_whole_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's that compute with rows and columns, or derived from one."""
    return isinstance(optimizer, _BY_PARAMETER)


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


def whole_states(optimizer: torch.optim.Optimizer) -> Iterable[State]:
    """State of whole tensors that this rank keeps for a prepared optimizer."""
    step: WholeStep | None = getattr(optimizer, _WHOLE, None)
    return () if step is None else step.states.values()


def show_shards(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer.state` hold shards. Collective where the last step was on whole tensors."""
    step: WholeStep | None = getattr(optimizer, _WHOLE, None)
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

    def matrix(self, dtype: torch.dtype) -> torch.Tensor | None:
        """New memory for all of it, contents undefined, on its owner; None elsewhere."""
        device = local_tensor(self.parameter).device
        shape = tuple(self.parameter.shape)
        return torch.empty(shape, dtype=dtype, device=device) if self.is_here else None

    def rows_of(self, matrix: torch.Tensor, rank: int) -> torch.Tensor:
        start, rows = self.spans[rank]
        return matrix.narrow(0, start, rows)


#: A tensor of a parameter's shape: where it is whole, all of it (None but on its owner), own rows.
_Spread = tuple[_Home, torch.Tensor | None, torch.Tensor]
#: Besides names of the state: what else a step reads.
_WEIGHT, _GRADIENT = "a weight", "its gradient"


class WholeStep:
    """Call it to step `optimizer` over whole tensors; base_step: its own method. Collective.

    states: of whole tensors, that this rank keeps.

    Raises:
        ConfigurationError: a parameter is cut by tensor parallelism as well.
    """

    #: The step sees other tensors than the optimizer's parameters.
    is_local = True

    def __init__(self, optimizer: torch.optim.Optimizer, base_step: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._base_step = base_step
        self.states: dict[torch.Tensor, State] = {}
        self._is_shown = True
        self._homes: dict[torch.Tensor, _Home] = {}
        setattr(optimizer, _WHOLE, self)
        optimizer.register_state_dict_pre_hook(lambda _: self.show_shards())
        optimizer.register_load_state_dict_post_hook(lambda _: self._forget())
        for parameter in self._parameters():
            _exchange_group(parameter)

    def __call__(self, *closure: Callable[[], Any]) -> Any:
        """One step; returns what the optimizer's own method does. closure: none."""
        assert not closure
        homes = self._find_homes()
        stepping = [home for parameter, home in homes.items() if parameter.grad is not None]
        first, *others = self._rounds(stepping)
        result = self._step(first, takes_rest=True)
        for stepping in others:
            self._step(stepping, takes_rest=False)
        return result

    def _rounds(self, stepping: list[_Home]) -> list[list[_Home]]:
        """See [Note: whole matrices]; the same on all ranks."""
        if type(self._optimizer) not in _BY_PARAMETER:
            return [stepping]
        rounds: dict[int, list[_Home]] = {0: []}
        at: dict[tuple[dist.ProcessGroup, int], tuple[int, int]] = {}
        for home in stepping:
            number, held = at.get((home.group, home.owner), (0, 0))
            size = home.parameter.numel() * home.parameter.element_size()
            if held and held + size > ROUND_BYTES:
                number, held = number + 1, 0
            at[home.group, home.owner] = number, held + size
            rounds.setdefault(number, []).append(home)
        return [rounds[number] for number in range(len(rounds))]

    def _step(self, stepping: list[_Home], *, takes_rest: bool) -> Any:
        """Of some matrices. takes_rest: and of what is no matrix of ours."""
        homes, states = self._homes, self._optimizer.state
        stand_ins = self._stand_ins(stepping)

        def seen(group: State) -> list[torch.Tensor]:
            own = group["params"]
            rest = {p for p in own if takes_rest and p not in homes}
            return [stand_ins.get(p, p) for p in own if p in stand_ins or p in rest]

        try:
            with standing_in(self._optimizer, seen):
                for parameter, matrix in stand_ins.items():
                    if parameter in self.states:
                        states[matrix] = self.states[parameter]
                result = self._base_step()
        finally:
            for parameter, matrix in stand_ins.items():
                if matrix in states:
                    self.states[parameter] = states.pop(matrix)
        self._is_shown = self._is_shown and not stepping
        parameters = [home.parameter for home in stepping]
        self._move(
            [(homes[p], stand_ins.get(p), local_tensor(p)) for p in parameters], to_owners=False
        )
        return result

    @torch.no_grad()
    def show_shards(self) -> None:
        """Let the optimizer's state hold shards until its next step.

        Tensors of a parameter's shape are cut unchanged; all else is given to every rank.
        """
        if self._is_shown:
            return
        self._is_shown = True
        homes = self._find_homes()
        parameters = list(homes)
        for group in dict.fromkeys(home.group for home in homes.values()):
            own = {
                number: {key: _announced(value, p) for key, value in self.states[p].items()}
                for number, p in enumerate(parameters)
                if homes[p].group == group and p in self.states
            }
            entries = (pair for part in from_all(group, own) for pair in part.items())
            for number, state in sorted(entries, key=itemgetter(0)):
                self._show(homes[parameters[number]], state)
        self.states.clear()

    def _show(self, home: _Home, entries: dict[str, tuple[str, Any]]) -> None:
        parameter, mine = home.parameter, self.states.get(home.parameter, {})
        local, shown = local_tensor(parameter), self._optimizer.state[parameter]
        rows = {
            key: torch.empty_like(local, dtype=value)
            for key, (kind, value) in entries.items()
            if kind == "cut"
        }
        self._move([(home, mine.get(key), own) for key, own in rows.items()], to_owners=False)
        for key, own in rows.items():
            shown[key] = shard_like(own, parameter)
            name_tensor(shown[key], f"{key} of {name_of(parameter)}")
        for key, (kind, value) in entries.items():
            if kind != "cut":
                there = value.to(local.device) if kind == "on device" else value
                shown[key] = mine.get(key, there)

    def _forget(self) -> None:
        self.states.clear()
        self._is_shown = True

    @torch.no_grad()
    def _stand_ins(self, stepping: Sequence[_Home]) -> dict[torch.Tensor, torch.Tensor]:
        """Whole weights with gradients, of what this rank owns; its state becomes whole too."""
        spread: list[_Spread] = []
        keys: list[str] = []
        for home in stepping:
            parameter, states = home.parameter, self._optimizer.state
            read = {_WEIGHT: parameter, _GRADIENT: parameter.grad}
            for key, value in (*read.items(), *sorted(states.pop(parameter, {}).items())):
                if isinstance(value, DTensor):
                    local = local_tensor(value)
                    spread.append((home, home.matrix(local.dtype), local))
                    keys.append(key)
                elif home.is_here:
                    self.states.setdefault(parameter, {})[key] = value
        self._move(spread, to_owners=True)
        stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        for (home, matrix, _), key in zip(spread, keys, strict=True):
            parameter = home.parameter
            if matrix is None:
                continue
            if key == _WEIGHT:
                stand_ins[parameter] = matrix
            elif key == _GRADIENT:
                stand_ins[parameter].grad = matrix
            else:
                self.states.setdefault(parameter, {})[key] = matrix
        return stand_ins

    @torch.no_grad()
    def _move(self, tensors: Iterable[_Spread], *, to_owners: bool) -> None:
        """Between whole tensors and every rank's rows: one exchange for each group and dtype."""
        batches: dict[tuple[dist.ProcessGroup, torch.dtype], list[_Spread]] = defaultdict(list)
        for spread in tensors:
            batches[spread[0].group, spread[2].dtype].append(spread)
        for (group, dtype), batch in batches.items():
            ranks = range(group.size())
            of_wholes = [
                [home.rows_of(matrix, rank) for home, matrix, _ in batch if matrix is not None]
                for rank in ranks
            ]
            own = [[local for home, _, local in batch if home.owner == rank] for rank in ranks]
            send, receive = (own, of_wholes) if to_owners else (of_wholes, own)
            self._exchange(group, dtype, send, receive)

    def _exchange(
        self,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        send: list[list[torch.Tensor]],
        receive: list[list[torch.Tensor]],
    ) -> None:
        """Copy tensors of every rank into those of every rank."""
        device = local_tensor(next(iter(self._homes))).device
        pieces = (piece.reshape(-1) for pieces in send for piece in pieces)
        packed = torch.cat([torch.empty(0, dtype=dtype, device=device), *pieces])
        targets = [target for targets in receive for target in targets]
        received = packed
        if group.size() > 1:
            sizes, out = ([sum(t.numel() for t in part) for part in s] for s in (receive, send))
            received = packed.new_empty(sum(sizes))
            dist.all_to_all_single(received, packed, sizes, out, group=group)
            owner = getattr(next(iter(self._homes)), OWNER)()
            if owner is not None:
                sent = (dtype_name(dtype), packed.nbytes, "inner", group.size(), "optimizer")
                owner.events.publish(Event("collective", "all_to_all", *sent))
        for target in targets:
            piece, received = received.tensor_split((target.numel(),))
            target.copy_(piece.view(target.shape))

    def _find_homes(self) -> dict[torch.Tensor, _Home]:
        """Of every sharded parameter."""
        parameters = self._parameters()
        if [*map(id, parameters)] != [*map(id, self._homes)]:
            by_group: dict[dist.ProcessGroup, list[DTensor]] = defaultdict(list)
            for parameter in parameters:
                by_group[_exchange_group(parameter)].append(parameter)
            homes_of = {
                home.parameter: home for g, own in by_group.items() for home in _homes(g, own)
            }
            self._homes = {parameter: homes_of[parameter] for parameter in parameters}
        return self._homes

    def _parameters(self) -> list[DTensor]:
        return [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if isinstance(parameter, DTensor) and offsets_of(parameter) is not None
        ]


def _announced(value: Any, parameter: torch.Tensor) -> tuple[str, Any]:
    """What other ranks are given of state: how it is to be shown, and its dtype or value."""
    if isinstance(value, torch.Tensor):
        if value.ndim and value.shape == parameter.shape:
            return "cut", value.dtype
        if value.device.type != "cpu":
            return "on device", value.cpu()
    return "unchanged", value


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
    loads, owners = [0] * group.size(), [0] * len(parameters)
    for number in sorted(range(len(parameters)), key=lambda n: -parameters[n].numel()):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += parameters[number].numel()
    models = {getattr(parameter, OWNER)() for parameter in parameters}
    wanted = dict.fromkeys(parameters)
    spans = {
        managed.sharded: _spans(bucket.axes.mesh, group, bucket.plan.layout.cuts[index])
        for model in models
        for bucket in model._buckets()
        for index, managed in enumerate(bucket.parameters)
        if managed.sharded in wanted
    }
    return [
        _Home(parameter, group, owner, spans[parameter])
        for parameter, owner in zip(parameters, owners, strict=True)
    ]


def _spans(
    mesh: DeviceMesh, group: dist.ProcessGroup, cuts: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Per rank of `group`, its first row and how many; cuts: rows in each slice of the layout."""
    ranks = mesh.mesh.movedim(-1, 0).flatten()  # inner-major, as slices are
    if len(cuts) < len(ranks):  # replicas along the outer axis
        ranks = mesh.mesh[mesh.get_local_rank(0)]
    held = zip(ranks.tolist(), accumulate(cuts, initial=0), cuts, strict=False)
    by_rank = {dist.get_group_rank(group, rank): (start, rows) for rank, start, rows in held}
    return tuple(by_rank[rank] for rank in range(group.size()))
