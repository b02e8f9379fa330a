"""What a record says about its machine: hardware key, load, registered buffers."""

from __future__ import annotations

import pytest
from recorded_runs import environment, in_memory, resolved_run

from bench.derive.hardware import HardwareKey, hardware_key
from bench.record import RunRecord
from bench.spec import LaunchSpec
from reports.views.machine import busiest_start, registration_shortfalls

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"


def key(device: str = "cpu", nodes: int = 1, **changes) -> HardwareKey:
    resolved = resolved_run(launch=LaunchSpec(ranks=2, device=device, nodes=nodes))
    return hardware_key(in_memory({}, resolved=resolved, environment=environment() | changes))


def gpus(*names: str, driver: str = DRIVER, **changes) -> HardwareKey:
    return key("cuda", runtime={"device_names": list(names)}, nvidia_driver=driver, **changes)


def test_a_processor_is_known_by_name_and_cores_not_by_host_memory_or_time():
    assert key() == key(hostname="other", memory_bytes=1, collected_utc="now")
    assert key().describe() == "Example CPU 9000, 2 cores (CPU)"
    for change in ({"cpu_name": "B"}, {"cpu_count": 4}, {"nodes": 2}):
        assert key(**change) != key()
    allocation_of_two = {"variables": {"SLURM_NNODES": "2"}}  # of which a run may use one
    assert key(**allocation_of_two) == key()


def test_gpus_are_known_by_name_count_major_driver_and_the_links_between_several():
    two = gpus("NVIDIA H200", "NVIDIA H200")
    assert (two.device, two.count, two.driver) == ("NVIDIA H200", 2, "550")
    assert gpus("NVIDIA H200", "NVIDIA H200", driver=DRIVER.replace("54.15", "90.07")) == two
    assert gpus("NVIDIA H200", "NVIDIA H200", driver=DRIVER.replace("550", "570")) != two
    assert gpus("NVIDIA H200") != two
    assert two.describe() == "2 x NVIDIA H200, driver 550"
    assert gpus("A", "A", interconnect="nvlink") != gpus("A", "A", interconnect="pcie")
    assert gpus("A", interconnect="nvlink") == gpus("A")
    # The slug is a file name, and what is not known does not raise.
    assert gpus("NVIDIA H200 (a/b)").slug.startswith("cuda-nvidia-h200-a-b-x1-")
    others = [key(), key(cpu_count=4), gpus("A"), gpus("A", "A"), key(cpu_name=None)]
    assert len({one.slug for one in (*others, key(cpu_count=None), key(variables=None))}) >= 6


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        *[([load], "") for load in (0.1, 2.0, 3.0, None, "busy")],
        ([1.0, 9.5, 4.0], "load average was 9.5, where 2 would be"),
    ],
)
def test_the_worst_load_is_named_and_that_of_the_benchmark_itself_is_none(loads, said):
    records = [
        in_memory({}, environment={"load_average_before": load, "cpu_count": 2}) for load in loads
    ]
    assert said in busiest_start(records)
    assert bool(busiest_start(records)) == bool(said)


def registered(*got: str, grown: bool = False, **outside: int) -> RunRecord:
    groups = {
        name: {"got": level, "reason": "TypeError: symm"}
        for name, level in zip("ab", got, strict=False)
    }
    registration = {"wanted": "symmetric", "groups": groups, "grown": grown, "outside": outside}
    return in_memory({}, environment={"runtime": {"buffer_registration": registration}})


WANTED = "Buffers were to be registered with NCCL as symmetric; group"


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([registered("symmetric", "symmetric"), in_memory({})], []),
        (
            [registered("symmetric", "plain")] * 2 + [registered("none")],
            [
                f"{WANTED} b got plain instead: TypeError: symm. (2 runs)",
                f"{WANTED} a got none instead: TypeError: symm. (1 runs)",
            ],
        ),
        (
            [
                registered(
                    "symmetric",
                    **{
                        "all_gather of layers.0/0": 4096,
                        "all_gather of layers.1/0": 4096,
                        "reduce_scatter of (root)/0": 2048,
                        "all_reduce of flags": 7,
                    },
                )
            ],
            [
                "Collectives had memory that is not registered: 2 all_gather, 1 reduce_scatter."
                " (1 runs)"
            ],
        ),
        (
            [registered("symmetric", grown=True)],
            [
                "Memory was allocated for collectives after the registration, which lacks it."
                " (1 runs)"
            ],
        ),
    ],
)
def test_each_group_that_got_less_than_was_asked_is_named_with_the_reason(records, said):
    assert registration_shortfalls(records) == said
