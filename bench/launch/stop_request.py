"""A request to end a run, and who made it: the record says so."""

from __future__ import annotations

import threading

from bench.record import RunState


class StopRequest(threading.Event):
    """An event with a reason; `why` and the state of the run are set before the event is."""

    why = "stopped on request"
    state: RunState = "interrupted"


class PartialStop(StopRequest):
    """Ends one of several runs; set also by the stop that ends all of them, for its reason."""

    def __init__(self, whole: threading.Event) -> None:
        super().__init__()
        self._whole = whole

    def is_set(self) -> bool:
        """Whether this run, or all of them, are to end."""
        if not super().is_set() and self._whole.is_set():
            if isinstance(self._whole, StopRequest):
                self.why, self.state = self._whole.why, self._whole.state
            self.set()
        return super().is_set()
