"""Messages between the first host and another: JSON over one connection, which is a sign of life.

A process that ends closes its connection. A machine that is gone answers no keepalive, and counts
as lost half a minute later. Both sides prove that they know the key of the meeting, within a time
limit: what listens or calls there may be anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Self

Message = dict[str, Any]

# For each message of a greeting.
GREETING_SECONDS = 20.0
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 25_000,  # milliseconds
}


class Channel:
    """One end; sends from any thread, receives in one. Made by `called` and `accepted`."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connected
        self._connection = Connection(os.dup(connected.fileno()))
        self._lock = threading.Lock()
        self.limit_receiving(GREETING_SECONDS)

    @classmethod
    def called(cls, address: str, port: int, key: bytes) -> Self:
        """To the first host; `receive` stays limited to `GREETING_SECONDS`.

        Raises:
            OSError: nobody is there, or not whom we expect.
        """
        channel = cls(socket.create_connection((address, port), GREETING_SECONDS))
        with channel._greeting():
            answer_challenge(channel._connection, key)
            deliver_challenge(channel._connection, key)
        return channel

    @classmethod
    def accepted(cls, connected: socket.socket, key: bytes) -> Self:
        """The other end of `called`; it raises the same."""
        channel = cls(connected)
        with channel._greeting():
            deliver_challenge(channel._connection, key)
            answer_challenge(channel._connection, key)
        return channel

    @contextlib.contextmanager
    def _greeting(self) -> Any:
        try:
            yield
        except (AuthenticationError, AssertionError, EOFError, OSError, ValueError) as error:
            self.close()
            raise ConnectionError(f"no greeting: {error}") from error

    def limit_receiving(self, seconds: float) -> None:
        """How long `receive` waits for the next bytes; 0 is for ever."""
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, message: Message) -> None:
        """Nothing happens where the other side is gone: whoever receives here learns that."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Message | None:
        """Blocks; None once the other side is gone, or said nothing within the limit."""
        try:
            found: Message = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return found

    def last(self, message: Message) -> None:
        """Send, and say that no more will come. Receive on until None, so that it arrives."""
        self.send(message)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Also ends a `receive` that blocks in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
