"""The wish to end a run, and whose it is: the record says so."""

from __future__ import annotations

import threading


class StopRequest(threading.Event):
    """An event with a reason; `why` is set before the event is."""

    why = "stopped on request"
