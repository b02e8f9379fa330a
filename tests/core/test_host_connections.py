"""Links between processes of one host: reading, being busy, dying, and being refused."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bench.launch.first_to_break import RankFailure
from mfsdp_core.comm import host_rendezvous, peer_memory
from mfsdp_core.comm.host_connections import (
    _RECEIVE_BYTES,
    _SENT,
    _WORD,
    Addresses,
    Exchange,
    HostConnections,
    Peer,
    wake_address,
)
from mfsdp_core.errors import ConfigurationError
from oracle.ranks import RankPool, mesh
from oracle.sharded import shard

TAG, ELEMENTS = 7, 1000


def connections(
    own: int, pid: int, connection: socket.socket, bell: bytes, seconds: float
) -> HostConnections:
    return HostConnections([Peer(1 - own, pid, connection, bell)], seconds)


def offer(
    own: HostConnections, value: float, elements: int = ELEMENTS
) -> tuple[Exchange, torch.Tensor]:
    """Send a tensor of `value` to the other process and take what it offers."""
    (peer,) = own.peers
    part, found = torch.full((elements,), value), torch.zeros(elements)

    def read(addresses: Addresses) -> None:
        peer_memory.read(peer.pid, addresses[peer.rank], found)

    exchange = own.send(TAG, {peer.rank: part}, {peer.rank: found.nbytes}, read)
    return exchange, found


@contextmanager
def other(
    act: Callable[[HostConnections], Any], seconds: float = 30.0
) -> Iterator[tuple[HostConnections, int]]:
    """This process's connections to a forked one, in which `act` runs; and its process id."""
    here, there = socket.socketpair()
    bells, parent = os.pipe(), os.getpid()
    peer_memory.permit()
    bell = wake_address()
    child = os.fork()
    if child == 0:
        try:
            here.close()
            os.write(bells[1], wake_address())
            act(connections(1, parent, there, bell, seconds))
        finally:
            os._exit(0)
    there.close()
    own = connections(0, child, here, os.read(bells[0], 100), seconds)
    try:
        yield own, child
    finally:
        own.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for end in bells:
            os.close(end)


def wait_and_stay(own: HostConnections) -> None:
    offer(own, 2.0)[0].wait()
    time.sleep(30)


def send_and_be_busy(own: HostConnections) -> None:
    kept = offer(own, 2.0)
    time.sleep(30)
    del kept


def say_nothing(own: HostConnections) -> None:
    time.sleep(30)
    del own


def fork_and_send(own: HostConnections) -> None:
    """As a rank with a data loader, whose worker inherits what is open and outlives it."""
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    send_and_be_busy(own)


def failure(exchange: Exchange) -> str:
    with pytest.raises(RuntimeError) as error:
        exchange.wait()
    return str(error.value)


@pytest.mark.parametrize("act", [wait_and_stay, send_and_be_busy])
def test_a_part_arrives_whatever_the_other_process_does_after_posting(
    act: Callable[[HostConnections], None],
) -> None:
    with other(act) as (own, _):
        exchange, found = offer(own, 1.0)
        exchange.wait()
        assert exchange.is_over
        assert found.eq(2.0).all()


@pytest.mark.parametrize("act", [say_nothing, send_and_be_busy, fork_and_send])
def test_a_killed_process_is_noticed_at_once(act: Callable[[HostConnections], None]) -> None:
    with other(act) as (own, child):
        if act is not send_and_be_busy:
            time.sleep(0.3)
        os.kill(child, signal.SIGSTOP)  # so that it has sent, perhaps, and never reads
        exchange, _ = offer(own, 1.0)
        os.kill(child, signal.SIGKILL)
        message = failure(exchange)
        assert RankFailure(0, {"message": message}).lost_a_peer, message
        assert "timed out" not in message


def test_a_silent_process_is_given_up_after_the_time_out() -> None:
    with other(say_nothing, seconds=0.3) as (own, _):
        message = failure(offer(own, 1.0)[0])
        assert "timed out waiting for rank 1 of the group, 0.3 s" in message
        assert RankFailure(0, {"message": message}).lost_a_peer


def test_parts_of_another_size_are_refused() -> None:
    with other(send_and_be_busy) as (own, _):
        message = failure(offer(own, 1.0, elements=ELEMENTS - 1)[0])
        assert "expected 3996 bytes of rank 1, it sent 4000" in message


def test_more_is_posted_than_a_socket_holds() -> None:
    def send_many(own: HostConnections) -> None:
        works = [own.send(tag, {0: part}, {0: part.nbytes}, lambda _: None) for tag in range(5000)]
        for work in works:
            work.wait()
        time.sleep(30)

    part = torch.zeros(1)
    with other(send_many) as (own, _):
        time.sleep(0.5)
        for tag in range(5000):
            own.send(tag, {1: part}, {1: part.nbytes}, lambda _: None).wait()


def card(**changes: Any) -> Any:
    memory = torch.zeros(16, dtype=torch.uint8)
    plain = host_rendezvous._Card("boot", os.getpid(), b"", b"", memory.data_ptr(), bytes(16))
    card.kept.append(memory)  # type: ignore[attr-defined]
    return plain._replace(**changes)


card.kept = []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"boot": "another"}, "run on different hosts"),
        ({"token": b"x" * 16}, "see different processes"),
        ({"address": 8}, "may not read the memory of rank 1 of the group: [Errno 14]"),
        ({"pid": 2**22 - 1}, "may not read the memory of rank 1 of the group: [Errno 3]"),
    ],
)
def test_ranks_that_may_not_read_each_other_say_why(changes: dict[str, Any], wanted: str) -> None:
    assert wanted in str(host_rendezvous._greet([card(), card(**changes)], 0, []))


def test_a_full_queue_of_connections_is_called_one() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(f"\0mfsdp-full-{os.getpid()}")
        door.listen(0)
        full = card(door=door.getsockname())
        peers: list[Any] = []
        said = [host_rendezvous._greet([full, card()], 1, peers) for _ in range(2)]
        for peer in peers:
            peer.socket.close()
    assert said[0] is None
    assert "its queue of connections is full: 2 ranks meet" in str(said[1])


def refusal(broken: str, failure: Callable[..., Any]) -> str:
    """What `same_host` says where one rank cannot do what `broken` names."""
    group = mesh(2).get_group("dp")
    known, host_rendezvous._known = host_rendezvous._known, type(host_rendezvous._known)()
    module = peer_memory if hasattr(peer_memory, broken) else host_rendezvous
    works = getattr(module, broken)
    if group.rank() == 1:
        setattr(module, broken, failure)
    try:
        with pytest.raises(ConfigurationError) as error:
            shard("linear_stack", "optim_grads_params", 2, transport="same_host")
        return str(error.value)
    finally:
        setattr(module, broken, works)
        host_rendezvous._known = known


def forbidden(*_: Any) -> Any:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.processes
def test_ranks_that_may_not_read_each_other_refuse_with_the_reason(ranks: RankPool) -> None:
    why = "rank 1 may not read the memory of rank 0 of the group: [Errno 1] Operation not permitted"
    for message in ranks.run(refusal, "read", forbidden):
        assert why in message
        assert "Use 'auto'" in message


@pytest.mark.processes
def test_a_sandbox_that_lets_no_link_be_offered_is_a_refusal_on_all_ranks(ranks: RankPool) -> None:
    for message in ranks.run(refusal, "_card", forbidden):
        assert "does not let one process read another" in message


def again(theirs: HostConnections, ready: int) -> None:
    offers = [offer(theirs, value) for value in (1.0, 2.0)]
    os.read(ready, 1)
    offers.append(offer(theirs, 3.0))
    offers[-1][0].wait()
    time.sleep(30)


def test_what_nobody_waits_for_takes_nothing_from_what_comes_later_under_its_tag() -> None:
    ready = os.pipe()
    with other(lambda theirs: again(theirs, ready[0])) as (own, _):
        offers = [offer(own, value) for value in (10.0, 20.0, 30.0)]
        os.write(ready[1], b"!")
        offers[-1][0].wait()
        assert [float(found[0]) for _, found in offers] == [1.0, 2.0, 3.0]
        assert own._open == {}
    for end in ready:
        os.close(end)


def test_words_that_fill_a_reading_exactly_are_understood_at_once() -> None:
    here, there = socket.socketpair()
    own = HostConnections([Peer(1, os.getpid(), here, b"")], 1.0)
    try:
        words = b"".join(_WORD.pack(_SENT, tag, 0, 0) for tag in range(_RECEIVE_BYTES))
        there.sendall(words[:_RECEIVE_BYTES])
        own.drain(own.peers[0])
        assert len(own._early) == _RECEIVE_BYTES // _WORD.size
    finally:
        own.close()
        there.close()
