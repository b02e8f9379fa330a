"""Which groups communication buffers are registered with, and that all their ranks are asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.judging import same
from mfsdp_core.comm.symmetric import user_buffers
from mfsdp_core.streams import Streams

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]


def test_a_group_of_several_names_is_a_member_once_and_agrees_on_all_ranks() -> None:
    streams: Any = Streams(torch.device("cpu"))
    streams.registrar = lambda _group: object()
    streams.use_pool_of = lambda _backend: object()
    world = dist.group.WORLD
    assert world is not None
    found = user_buffers([("inner", world), ("gather", world)], streams, symmetric=True)
    same("each once", [member.name for member in found.members], ["inner"])
    same("of all ranks", found.members[0].agree(dist.get_rank()), [0, 1])
