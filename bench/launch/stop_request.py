"""A request to end a run, and who made it: the record says so."""

from __future__ import annotations

import threading

from bench.record import RunState


class StopRequest(threading.Event):
    """An event with a reason; `why` and the state of the run are set before the event is."""

    why = "stopped on request"
    state: RunState = "interrupted"
