"""A two-node Slurm of this machine's own, started once, and the command line in front of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_runs import Cluster
from two_node_slurm import SlurmNotStartedError, TwoNodeSlurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[TwoNodeSlurm]:
    folder = Path(tempfile.mkdtemp(prefix="two-nodes-"))
    try:
        with TwoNodeSlurm(folder) as cluster:
            yield cluster
    except SlurmNotStartedError as error:
        pytest.skip(f"Slurm does not start here: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(slurm: TwoNodeSlurm, tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(slurm, tmp_path)
    yield found
    for job in slurm.jobs():
        slurm.command("scancel", job)
    found.ready()
    assert not found.store.outlines()[1], "records are lost"
    assert not slurm.tasks(), "processes of jobs are left"
