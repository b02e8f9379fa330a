"""What goes wrong on a cluster, one thing after another, in a real Slurm of two nodes."""

from __future__ import annotations

import pytest
from cluster_runs import Cluster
from fifty_faults import Fault, faults, inject

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(480)]


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault.kind}: {fault.name}")
def test_a_fault_leaves_the_records_that_it_should_and_nothing_else(
    cluster: Cluster, fault: Fault
) -> None:
    assert inject(cluster, fault) == []
