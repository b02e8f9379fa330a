"""Connects the ranks of a group that share a host and may read each other's memory."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mfsdp_core.comm import peer_memory
from mfsdp_core.comm.host_connections import HostConnections, Peer, wake_address

_TOKEN_BYTES = 16
_CONNECT_SECONDS = 20.0
_CREDENTIALS = struct.Struct("3i")

_known: WeakKeyDictionary[dist.ProcessGroup, HostConnections | str] = WeakKeyDictionary()


class _Card(NamedTuple):
    """What a rank tells the others. address: of 16 bytes of its memory that hold `token`."""

    boot: str
    pid: int
    door: bytes
    wake_address: bytes
    address: int
    token: bytes


def connections_of(group: dist.ProcessGroup) -> HostConnections | str:
    """The connections between the ranks of `group`, or in words why there are none. Collective.

    The same kind of answer on all ranks, and the same object for as long as the group lives.
    """
    found = _known.get(group)
    if found is None:
        found = _known[group] = _connected(group)
        if isinstance(found, HostConnections):
            weakref.finalize(group, found.close).atexit = False
    return found


def _connected(group: dist.ProcessGroup) -> HostConnections | str:
    with ExitStack() as stack:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stack.callback(door.close)
        token = secrets.token_bytes(_TOKEN_BYTES)
        memory = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        card = None
        if peer_memory.is_known():
            with suppress(OSError):  # a sandbox without such sockets, or without /proc
                card = _card(door, group.size(), memory.data_ptr(), token)
        cards: list[_Card | None] = _everywhere(card, group)
        peers: list[Peer] = []
        refusal = _greet(cards, group.rank(), peers)
        refusals = [one for one in _everywhere(refusal, group) if one]
        if refusals:
            for peer in peers:
                peer.socket.close()
            return str(refusals[0])
        known = [card for card in cards if card is not None]
        _receive(door, known, group.rank(), peers)
        # Nobody leaves before all have read everybody's token.
        return HostConnections(peers, _timeout_seconds(group))


def _card(door: socket.socket, ranks: int, address: int, token: bytes) -> _Card:
    door.bind(f"\0mfsdp-{os.getpid()}-{secrets.token_hex(8)}")
    door.listen(ranks)
    door.settimeout(_CONNECT_SECONDS)
    peer_memory.permit()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return _Card(boot, os.getpid(), door.getsockname(), wake_address(), address, token)


def _greet(cards: list[_Card | None], own: int, peers: list[Peer]) -> str | None:
    """Connect to all ranks before `own` and read the tokens of all; what stands in the way."""
    mine = cards[own]
    for rank, card in enumerate(cards):
        if card is None or mine is None:
            return "the system has no process_vm_readv, or does not let one process read another"
        if card.boot != mine.boot:
            return f"ranks {own} and {rank} of the group run on different hosts"
        if rank == own:
            continue
        try:
            found = torch.empty(_TOKEN_BYTES, dtype=torch.uint8)
            peer_memory.read(card.pid, card.address, found)
            if bytes(found.tolist()) != card.token:
                return f"ranks {own} and {rank} of the group see different processes"
        except OSError as error:
            return f"rank {own} may not read the memory of rank {rank} of the group: {error}"
        if rank < own:
            refusal = _connect(rank, card, own, len(cards), peers)
            if refusal is not None:
                return refusal
    return None


def _connect(rank: int, card: _Card, own: int, ranks: int, peers: list[Peer]) -> str | None:
    """Add the connection to `rank` to `peers`; what stands in the way."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_SECONDS)
    try:
        connection.connect(card.door)
    except (BlockingIOError, TimeoutError):
        connection.close()
        return (
            f"rank {rank} of the group does not take the connection of rank {own}, since its queue "
            f"of connections is full: {ranks} ranks meet, and net.core.somaxconn limits the queue"
        )
    except OSError as error:
        connection.close()
        return f"rank {own} cannot connect to rank {rank} of the group: {error}"
    peers.append(Peer(rank, card.pid, connection, card.wake_address))
    return None


def _receive(door: socket.socket, cards: list[_Card], own: int, peers: list[Peer]) -> None:
    """Take the connections of all ranks behind `own`; strangers are turned away."""
    awaited = {card.pid: rank for rank, card in enumerate(cards) if rank > own}
    while awaited:
        connection, _ = door.accept()
        size = _CREDENTIALS.size
        pid, _, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        rank = awaited.pop(pid, None)
        if rank is None:
            connection.close()
        else:
            peers.append(Peer(rank, pid, connection, cards[rank].wake_address))


def _everywhere(value: object, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _timeout_seconds(group: Any) -> float:
    """How long operations of the group may take."""
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds
