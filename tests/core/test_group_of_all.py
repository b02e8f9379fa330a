"""The group of all ranks that hold a model, on torch's fake process group of eight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_core.comm import rendezvous
from mfsdp_core.comm.data_parallel import DataParallelAxes
from mfsdp_core.errors import CapabilityNotBuiltError

pytestmark = pytest.mark.usefixtures("fake_group")
FAKE = (1, 8)


def parallel(ranks: int) -> DataParallelAxes:
    """Two data-parallel ranks beside tensor parallelism, on the first `ranks` of the world."""
    whole = DeviceMesh("cpu", torch.arange(ranks).reshape(2, -1), mesh_dim_names=("dp", "tp"))
    return DataParallelAxes(whole["dp"], whole)


def test_all_ranks_are_the_world_and_need_no_group_of_their_own():
    assert parallel(8).group_of_all() is dist.group.WORLD


def test_some_ranks_are_refused_where_torch_would_wait_for_the_others():
    axes = parallel(4)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    with pytest.raises(CapabilityNotBuiltError, match="without device_id"):
        axes.group_of_all()


def test_some_ranks_make_a_group_of_their_own_elsewhere():
    assert dist.get_process_group_ranks(parallel(4).group_of_all()) == [0, 1, 2, 3]


def test_a_backend_that_tells_no_time_limit_has_torchs_default() -> None:
    group: Any = SimpleNamespace(_get_backend=lambda _device: object())
    assert rendezvous._time_limit(group, torch.device("cpu")) == default_pg_timeout
