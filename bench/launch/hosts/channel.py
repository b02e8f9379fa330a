"""Messages between the first host and another: JSON over one connection, which is a sign of life.

A process that ends closes its connection. A machine that is gone answers no keepalive, and counts
as lost half a minute later. Both sides prove that they know the key of the meeting.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]

_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 25_000,  # milliseconds
}


class Channel:
    """One end; sends from any thread, receives in one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message) -> None:
        """Nothing happens where the other side is gone: whoever receives here learns that."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Message | None:
        """Blocks; None once the other side is gone."""
        try:
            found: Message = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return found

    def close(self) -> None:
        """Also ends a `receive` that blocks in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
