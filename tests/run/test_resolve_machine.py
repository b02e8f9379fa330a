from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.resolve import Machine
from bench.resolve.cuda_devices import CudaDevice, choose_visible, devices_by_proc

A = CudaDevice("NVIDIA A", uuid="GPU-aaaa1111")
B = CudaDevice("NVIDIA B", uuid="GPU-bbbb2222")
C = CudaDevice("NVIDIA C", uuid="GPU-bbbb3333")


def test_the_cores_counted_are_those_that_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert Machine.detect().cpu_count == 1
    finally:
        os.sched_setaffinity(0, before)
    assert Machine.detect().cpu_count == len(before)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (A, B, C)),
        ("", ()),
        ("-1", ()),
        ("1", (B,)),
        ("2,0", (C, A)),
        ("0,7,1", (A,)),
        ("0,-1,1", (A,)),
        (" 1 , 0 ", (B, A)),
        ("GPU-aaaa", (A,)),
        ("GPU-bbbb", ()),
        ("GPU-bbbb3,0", (C, A)),
        ("0,0", ()),
        ("nonsense", ()),
    ],
)
def test_cuda_visible_devices_is_read_as_the_driver_reads_it(
    visible: str | None, expected: tuple[CudaDevice, ...]
) -> None:
    assert choose_visible([A, B, C], visible) == expected


def test_devices_are_found_in_proc_without_nvml(tmp_path: Path) -> None:
    for bus, text in {
        "0000:01:00.0": "Model: \t\t NVIDIA H100\nIRQ:   1\nGPU UUID: \t GPU-1234\n",
        "0000:02:00.0": "",
    }.items():
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(text)
    assert devices_by_proc(tmp_path) == [
        CudaDevice("NVIDIA H100", uuid="GPU-1234"),
        CudaDevice("unknown"),
    ]
