"""Recordings of two steps are compared as a CUDA graph would repeat them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.judging import same
from mfsdp_core.replay import Recording, differences

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]


def test_recordings_are_compared_operation_by_operation() -> None:
    """Names, operands, constants, lengths; not what a backend does in a wait."""

    def recorded(what: Callable[[Recording], Any]) -> Recording:
        recording = Recording()
        with recording.watching():
            what(recording)
        return recording

    x = torch.ones(4, 2)
    one = recorded(lambda _: x.add(1))
    same("itself", differences(one, recorded(lambda _: x.add(1))), [])
    for words, what in (
        ("was aten::add", lambda _: x.mul(1)),
        ("has 2 where the step before had 1", lambda _: x.add(2)),
        ("works on (2, 2) where the step before had (4, 2)", lambda _: x[:2].add(1)),
        ("1 operations in one step and 2", lambda _: (x.add(1), x.add(1))),
    ):
        found = differences(one, recorded(what))
        assert any(words in text for text in found), (words, found)
    moved = differences(recorded(lambda _: x[:2].add(1)), recorded(lambda _: x[2:].add(1)))
    assert "another address" in moved[0], moved

    def two(recording: Recording, *, turned: bool) -> None:
        numbers = [recording.issued("gather", None, (x,), (x,)) for _ in range(2)]
        for number in reversed(numbers) if turned else numbers:
            recording.waited(number)

    orders = [recorded(lambda r, t=turned: two(r, turned=t)) for turned in (False, True)]
    assert "has 2 where the step before had 1" in differences(*orders)[0], differences(*orders)

    def backend(recording: Recording) -> None:
        number = recording.issued("gather", None, (x,), (x,))
        recording.waiting(number)
        torch.ones(2)
        recording.waited(number)
        recording.released(x, "it")

    names = [entry.name for entry in recorded(backend).entries]
    same("entries", names, ["gather", "wait", "release of it"])
