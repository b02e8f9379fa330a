"""Operations between ranks of one host: who has sent what, and who has read it.

    rank a                                   rank b
    send(tag): "my part lies at x"  ------>
                                    <------  send(tag): "mine lies at y"
    reads y of b's memory                    reads x of a's memory
    "I have read it"                <----->  "I have read it"

An operation is over on a rank when it has read from all others and all others have read from it:
then its memory may change again. Only words travel over the sockets, a few bytes each, and nobody
is woken for them: a rank reads whatever has been sent whenever it sends or waits for anything.

[Note: waking] A rank that has sent owes others its reading, and may be busy elsewhere for long,
or blocked in a collective of somebody else that they have yet to join. Who has waited for
`WAKE_SECONDS` therefore wakes a thread of that rank, which reads on its behalf. So sending is
enough, as it is for gloo.

A process that ends closes its sockets: whoever waits for it raises at once. Nothing is shared that
would outlive a process. A forked child closes its copies and has no connections.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

#: A rank that has waited so long for another one's reading asks it to see to that now.
WAKE_SECONDS = 0.05

_SENT, _READ = 0, 1
#: Kind, tag, address, bytes.
_WORD = struct.Struct("=BQQQ")
_RECEIVE_BYTES = 1 << 16

#: Addresses by rank of what was sent.
Addresses = Mapping[int, int]


@dataclass
class Peer:
    """Another rank. wake_address: of the datagram socket that its thread listens on."""

    rank: int
    pid: int
    socket: socket.socket
    wake_address: bytes
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    is_gone: bool = False


class Exchange:
    """An operation of one rank. run: called once, with where all others have sent their parts."""

    def __init__(
        self,
        connections: HostConnections,
        tag: int,
        offered: Mapping[int, torch.Tensor],
        wanted: Mapping[int, int],
        run: Callable[[Addresses], None],
    ) -> None:
        self.tag = tag
        self.offered = offered  # alive until the others have read it
        self.wanted_bytes = wanted
        self.arrived: dict[int, int] = {}
        self.unread = set(wanted)
        self.error: RuntimeError | None = None
        self.has_run = False
        self._connections = connections
        self._run = run

    def end(self) -> None:
        """All has been read: what was offered may go."""
        self.offered = {}
        self._run = _nothing

    @property
    def is_over(self) -> bool:
        """Whether all has been read, here and by the others."""
        return self.has_run and not self.unread

    def take(self, rank: int, address: int, size_bytes: int) -> None:
        """Rank `rank` has sent its part."""
        if size_bytes != self.wanted_bytes[rank]:
            self.error = RuntimeError(
                f"expected {self.wanted_bytes[rank]} bytes of rank {rank}, it sent {size_bytes}: "
                "the ranks do not run the same"
            )
        self.arrived[rank] = address

    def run(self) -> None:
        """Read, where everything has arrived."""
        if self.has_run or self.error is not None or len(self.arrived) < len(self.wanted_bytes):
            return
        self.has_run = True
        try:
            self._run(self.arrived)
        except OSError as error:
            self.error = RuntimeError(f"Connection closed by peer, or its memory: {error}")
            return
        self._connections.tell_read(self.tag)

    def wait(self) -> None:
        """Return when it is over.

        Raises:
            RuntimeError: a rank has died, does not answer within the group's time-out (both in
                words that gloo uses as well), or does not run the same.
        """
        if not torch.autograd.profiler._is_profiler_enabled:
            self._connections.wait(self)
            return
        with torch.profiler.record_function("host_connections:exchange"):
            self._connections.wait(self)


def _nothing(_addresses: Addresses) -> None:
    """What an exchange that is over does."""


class HostConnections:
    """The connections of this rank to the others of one process group."""

    def __init__(self, peers: list[Peer], timeout_seconds: float) -> None:
        self._peers = {peer.rank: peer for peer in peers}
        self._timeout_seconds = timeout_seconds
        # By tag, oldest first. Tags come again, in another model as well, and nobody need wait.
        self._open: dict[int, list[Exchange]] = {}
        self._early: dict[int, list[tuple[int, int, int]]] = {}
        for peer in peers:
            peer.socket.setblocking(False)
        _host.join(self)

    @property
    def peers(self) -> list[Peer]:
        """All other ranks."""
        return list(self._peers.values())

    def send(
        self,
        tag: int,
        outgoing: Mapping[int, torch.Tensor],
        wanted_bytes: Mapping[int, int],
        run: Callable[[Addresses], None],
    ) -> Exchange:
        """Offer `outgoing[j]` to rank j, and run `run` once every rank has offered its part.

        outgoing: contiguous, unchanged until the exchange is over. run: on this thread or another.
        """
        with _host.lock:
            exchange = Exchange(self, tag, outgoing, wanted_bytes, run)
            self._open.setdefault(tag, []).append(exchange)
            for rank, part in outgoing.items():
                self._write(self._peers[rank], _SENT, tag, part.data_ptr(), part.nbytes)
            for rank, address, size_bytes in self._early.pop(tag, ()):
                self._understand(rank, _SENT, tag, address, size_bytes)
            _host.progress()
            return exchange

    def wait(self, exchange: Exchange) -> None:
        """See `Exchange.wait`."""
        deadline = 0.0
        while True:
            with _host.lock:
                _host.progress()
                if exchange.error is not None:
                    raise exchange.error
                if exchange.is_over:
                    return
                missing = [
                    peer
                    for peer in self._peers.values()
                    if peer.rank not in exchange.arrived or peer.rank in exchange.unread
                ]
                gone = [peer.rank for peer in missing if peer.is_gone]
            if gone:
                raise RuntimeError(f"Connection closed by peer: rank {gone[0]} of the group")
            now = time.monotonic()
            deadline = deadline or now + self._timeout_seconds
            if now > deadline:
                ranks = ", ".join(str(peer.rank) for peer in missing)
                raise RuntimeError(
                    f"timed out waiting for rank {ranks} of the group, {self._timeout_seconds:g} s"
                )
            if not _host.sleep(min(WAKE_SECONDS, deadline - now)):
                for peer in missing:
                    _host.wake(peer)

    def tell_read(self, tag: int) -> None:
        """Tell all others that their parts of `tag` have been read."""
        for peer in self._peers.values():
            self._write(peer, _READ, tag, 0, 0)

    def drain(self, peer: Peer) -> None:
        """Take in what `peer` has sent, and send what it had no room for. Does not block."""
        if peer.outgoing:
            self._flush(peer)
        if peer.is_gone:
            return
        try:
            while received := peer.socket.recv(_RECEIVE_BYTES):
                peer.incoming += received
                if len(received) < _RECEIVE_BYTES:
                    break
            else:
                peer.is_gone = True
        except BlockingIOError:
            pass  # the last reading was full, and there was no more
        except OSError:
            peer.is_gone = True
        words = len(peer.incoming) // _WORD.size
        whole = bytes(peer.incoming[: words * _WORD.size])
        del peer.incoming[: words * _WORD.size]
        for kind, tag, address, size_bytes in _WORD.iter_unpack(whole):
            self._understand(peer.rank, kind, tag, address, size_bytes)

    def _understand(self, rank: int, kind: int, tag: int, address: int, size_bytes: int) -> None:
        """A word is for the oldest exchange of its tag that still lacks it from this rank."""
        opened = self._open.get(tag, ())
        if kind == _READ:
            exchange = next((one for one in opened if rank in one.unread), None)
            if exchange is not None:
                exchange.unread.discard(rank)
        else:
            exchange = next((one for one in opened if rank not in one.arrived), None)
            if exchange is None:
                self._early.setdefault(tag, []).append((rank, address, size_bytes))
            else:
                exchange.take(rank, address, size_bytes)
                exchange.run()
        if exchange is not None and exchange.is_over:
            # Running it may have sent another one and heard more: it can be gone already.
            exchange.end()
            left = [one for one in self._open.pop(tag, ()) if one is not exchange]
            if left:
                self._open[tag] = left

    def _write(self, peer: Peer, *word: int) -> None:
        peer.outgoing += _WORD.pack(*word)
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            del peer.outgoing[: peer.socket.send(peer.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            peer.outgoing.clear()  # what it has sent before is still to be read

    def close(self) -> None:
        """Forget the peers; those who wait for this rank raise."""
        _host.leave(self)
        for peer in self._peers.values():
            peer.socket.close()


class _Host:
    """All connections of this process, the one lock around them, and the thread that is woken."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """No connections: at the start, and in a forked child."""
        self.lock = threading.RLock()
        self._connections: list[HostConnections] = []
        self._poll = select.poll()
        self._is_progressing = False
        self._bell: socket.socket | None = None

    def after_fork(self) -> None:
        """In a child: close what is the parent's."""
        for connections in self._connections:
            for peer in connections.peers:
                peer.socket.close()
        if self._bell is not None:
            self._bell.close()
        self.reset()

    def join(self, connections: HostConnections) -> None:
        """Progress these connections as well."""
        with self.lock:
            self._connections.append(connections)
            for peer in connections.peers:
                self._poll.register(peer.socket, select.POLLIN)

    def leave(self, connections: HostConnections) -> None:
        """Forget them."""
        with self.lock:
            if connections in self._connections:
                self._connections.remove(connections)
                for peer in connections.peers:
                    self._unregister(peer)

    def progress(self) -> None:
        """Read and answer whatever has been sent. Under the lock."""
        if self._is_progressing:
            return
        self._is_progressing = True
        try:
            for connections in list(self._connections):
                for peer in connections.peers:
                    was_gone = peer.is_gone
                    connections.drain(peer)
                    if peer.is_gone and not was_gone:
                        self._unregister(peer)
        finally:
            self._is_progressing = False

    def sleep(self, seconds: float) -> bool:
        """Until somebody says something or the time is over; whether somebody did."""
        return bool(self._poll.poll(max(1.0, seconds * 1e3)))

    def wake_address(self) -> bytes:
        """Where others wake this process's thread, which starts now."""
        if self._bell is None:
            self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._bell.bind("")
            threading.Thread(
                target=self._answer, args=(self._bell,), name="mfsdp-host", daemon=True
            ).start()
        address: bytes = self._bell.getsockname()
        return address

    def wake(self, peer: Peer) -> None:
        """Wake that thread of a peer."""
        if self._bell is not None:
            with suppress(OSError):
                self._bell.sendto(b"!", socket.MSG_DONTWAIT, peer.wake_address)

    def _answer(self, bell: socket.socket) -> None:
        while True:
            try:
                bell.recv(1)
            except OSError:
                return
            with self.lock:
                self.progress()

    def _unregister(self, peer: Peer) -> None:
        with suppress(KeyError, ValueError):
            self._poll.unregister(peer.socket)


_host = _Host()
wake_address = _host.wake_address
os.register_at_fork(after_in_child=_host.after_fork)
