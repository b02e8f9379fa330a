"""A model's device is one of several, and need not be the current one. No device is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mfsdp_core.comm import mesh
from mfsdp_core.streams import CopyIn

THIRD = torch.device("cuda", 3)


class Event:
    waited: Any = None

    def wait(self, stream: Any = None) -> None:
        self.waited = stream


class Stream:
    def __init__(self) -> None:
        self.event = Event()

    def record_event(self) -> Event:
        return self.event


def test_the_stream_that_waits_for_a_gather_is_of_the_models_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy_in, stream = CopyIn(THIRD), Stream()
    vars(copy_in)["stream"] = stream
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    copy_in.mark(on_host=False).wait()
    assert stream.event.waited == "stream of cuda:3"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("cuda", THIRD),
        (None, THIRD),
        ("cuda:1", torch.device("cuda", 1)),
        (2, torch.device("cuda", 2)),
    ],
)
def test_a_device_without_an_index_is_the_current_one_of_its_kind(
    given: str | int | None, found: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "current_device", lambda _kind: THIRD)
    cuda: Any = type("Mesh", (), {"device_type": "cuda"})
    assert mesh.target_device(given, cuda) == found
