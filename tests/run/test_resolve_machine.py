from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.resolve import Machine
from bench.resolve.machine import CudaDevice, choose_visible, devices_by_proc, visible_cuda_devices

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


def test_a_process_sees_one_instance_of_mig(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = CudaDevice("1g", uuid="MIG-1"), CudaDevice("1g", uuid="MIG-2")
    assert choose_visible([one, other], None) == (one,)
    assert choose_visible([one, other], "MIG-2,MIG-1") == (other,)

    def instance(_gpu: str, index: int) -> str:
        if index > 1:
            raise LookupError
        return f"instance {index}"

    nvml: Any = SimpleNamespace(
        NVMLError=LookupError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}",
        nvmlDeviceGetMigMode=lambda gpu: (int(gpu == "gpu 1"), 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda _gpu: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetCudaComputeCapability=lambda gpu: {"gpu 0": (9, 0), "gpu 1": (10, 0)}[gpu],
        nvmlDeviceGetName=lambda handle: handle,
        nvmlDeviceGetUUID=lambda handle: f"{'MIG' if 'instance' in handle else 'GPU'}-{handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=len(handle)),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-instance 1")
    (found,) = visible_cuda_devices()
    assert (found.name, found.capability, found.memory_bytes) == ("instance 1", (10, 0), 10)


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
