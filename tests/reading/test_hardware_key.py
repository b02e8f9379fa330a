"""The key of the hardware behind a run: stable from day to day, different where it matters."""

from __future__ import annotations

import pytest
from recorded_runs import environment, resolved_run

from bench.derive.hardware import HardwareKey, hardware_key
from bench.record import RunRecord, RunStatus
from bench.spec import LaunchSpec

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"


def key(device: str = "cpu", **changes) -> HardwareKey:
    resolved = resolved_run(launch=LaunchSpec(ranks=2, device=device))
    return hardware_key(RunRecord("run", resolved, RunStatus(), environment() | changes, {}))


def gpus(*names: str, driver: str = DRIVER, **changes) -> HardwareKey:
    return key("cuda", runtime={"device_names": list(names)}, nvidia_driver=driver, **changes)


def test_a_processor_is_known_by_name_and_cores_not_by_host_memory_or_time():
    assert key() == key(hostname="other", memory_bytes=1, collected_utc="now")
    assert key().describe() == "Example CPU 9000, 2 cores (CPU)"
    for change in ({"cpu_name": "B"}, {"cpu_count": 4}, {"variables": {"SLURM_NNODES": "2"}}):
        assert key(**change) != key()


def test_gpus_are_known_by_name_count_and_major_driver():
    two = gpus("NVIDIA H200", "NVIDIA H200")
    assert (two.device, two.count, two.driver) == ("NVIDIA H200", 2, "550")
    assert gpus("NVIDIA H200", "NVIDIA H200", driver=DRIVER.replace("54.15", "90.07")) == two
    assert gpus("NVIDIA H200", "NVIDIA H200", driver=DRIVER.replace("550", "570")) != two
    assert gpus("NVIDIA H200") != two
    assert two.describe() == "2 x NVIDIA H200, driver 550"


def test_how_gpus_are_connected_is_part_of_the_key_where_there_are_several():
    assert gpus("A", "A", interconnect="nvlink") != gpus("A", "A", interconnect="pcie")
    assert gpus("A", interconnect="nvlink") == gpus("A")


@pytest.mark.parametrize("missing", [{"cpu_name": None}, {"cpu_count": None}, {"variables": None}])
def test_what_is_not_known_does_not_raise(missing):
    assert key(**missing).slug


def test_the_slug_is_a_file_name_and_tells_keys_apart():
    assert gpus("NVIDIA H200 (a/b)").slug.startswith("cuda-nvidia-h200-a-b-x1-")
    others = {key().slug, key(cpu_count=4).slug, gpus("A").slug, gpus("A", "A").slug}
    assert len(others) == 4
