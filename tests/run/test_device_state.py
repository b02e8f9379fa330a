"""Clocks and throttling: who is asked, how answers are read, and that no meter ends a run."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from bench.meters.device_state import DeviceState, reasons_of

UUID, INSTANCE = "0", "5"


class NvmlError(Exception):
    pass


def nvml(**answers) -> ModuleType:
    """A twin of pynvml with the functions, constants and arguments of nvidia-ml-py 13.615."""
    module = ModuleType("pynvml")
    module.NVMLError = NvmlError
    module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM = 1, 2
    module.NVML_TEMPERATURE_GPU = 0
    module.NVML_VOLATILE_ECC = 0
    module.NVML_MEMORY_ERROR_TYPE_CORRECTED, module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    module.nvmlInit = lambda: None

    def by_uuid(uuid):
        known = {f"GPU-{UUID}": "handle", f"MIG-{INSTANCE}": "instance"}
        if uuid not in known:
            raise NvmlError("Not Found")
        return known[uuid]

    def ecc(handle, error_type, counter_type):
        assert (handle, counter_type) == ("handle", 0)
        if answers.get("ecc") is None:
            raise NvmlError("Not Supported")
        return answers["ecc"][error_type]

    def of_handle(value):
        return {"handle": value}.__getitem__

    module.nvmlDeviceGetHandleByUUID = by_uuid
    module.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = {"instance": "handle"}.__getitem__
    module.NVML_PERF_POLICY_POWER, module.NVML_PERF_POLICY_THERMAL = 0, 1
    counted = answers.get("counted", {"energy": 0, 0: 0, 1: 0})

    def energy(_handle):
        if "energy" not in counted:
            raise NvmlError("Not Supported")
        return counted["energy"]

    module.nvmlDeviceGetTotalEnergyConsumption = energy
    module.nvmlDeviceGetViolationStatus = lambda _handle, policy: SimpleNamespace(
        violationTime=counted[policy]
    )
    clocks = {("handle", 1): 1755, ("handle", 2): 2619}
    module.nvmlDeviceGetClockInfo = lambda *asked: clocks[asked]
    module.nvmlDeviceGetMaxClockInfo = lambda *asked: {("handle", 1): 1980}[asked]
    module.nvmlDeviceGetPowerUsage = of_handle(650_123)
    module.nvmlDeviceGetEnforcedPowerLimit = of_handle(700_000)
    module.nvmlDeviceGetTemperature = lambda *asked: {("handle", 0): 61}[asked]
    module.nvmlDeviceGetTotalEccErrors = ecc
    name = answers.get("reasons", "nvmlDeviceGetCurrentClocksEventReasons")
    setattr(module, name, of_handle(0x4))
    return module


@pytest.mark.parametrize(
    "reasons",
    ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"],
)
def test_nvml_is_asked_after_every_step_under_the_old_and_the_new_name(monkeypatch, reasons):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(reasons=reasons, ecc=(3, 0)))
    state = DeviceState("NVIDIA H200", UUID)
    assert state.after_step() == {
        "sm_mhz": 1755,
        "memory_mhz": 2619,
        "power_watts": 0.0,
        "celsius": 61,
        "throttle": ["sw_power_cap"],
    }
    report = state.report()
    assert report["source"] == "nvml"
    assert report["before"]["ecc_corrected"] == 3
    assert report["after"]["power_cap_watts"] == 700.0


def test_what_a_device_does_not_tell_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert DeviceState("x", UUID).report()["before"]["ecc_uncorrected"] is None


def test_without_the_binding_clocks_are_unknown_and_the_run_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    state = DeviceState("x", UUID)
    assert state.after_step() is None
    report = state.report()
    assert report["source"] is None
    assert report["reason"].startswith("nvml: ModuleNotFoundError: ")
    assert "mfsdp-bench[gpu]" in report["reason"]


def test_power_and_throttling_of_a_step_are_differences_of_counters(monkeypatch):
    """The device is idle when it is asked."""
    counted = {"energy": 1000, 0: 5, 1: 7}
    monkeypatch.setitem(sys.modules, "pynvml", nvml(counted=counted))
    times = iter([10.0, 12.0, 13.0])
    monkeypatch.setattr("bench.meters.device_state.monotonic", lambda: next(times))
    state = DeviceState("x", UUID)
    counted |= {"energy": 1_301_000, 0: 9}
    first = state.after_step()
    assert (first["power_watts"], first["throttle"]) == (650.0, ["power", "sw_power_cap"])
    del counted["energy"]
    second = state.after_step()
    assert (second["power_watts"], second["throttle"]) == (650.123, ["sw_power_cap"])


def test_an_instance_of_a_device_has_the_clocks_of_its_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert DeviceState("x", INSTANCE).after_step()["sm_mhz"] == 1755


def test_a_device_that_nvml_does_not_know_is_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert "NvmlError: Not Found" in DeviceState("x", "1").report()["reason"]


def test_a_source_that_stops_answering_is_asked_no_more(monkeypatch):
    twin = nvml()
    monkeypatch.setitem(sys.modules, "pynvml", twin)
    state = DeviceState("x", UUID)

    def lost(_handle):
        raise RuntimeError("GPU is lost")

    twin.nvmlDeviceGetPowerUsage = lost
    assert state.after_step() is None
    assert "nvml stopped answering: RuntimeError: GPU is lost" in state.report()["reason"]


def test_reasons_that_nobody_knows_are_shown_as_they_are():
    assert reasons_of(0) == []
    assert reasons_of(0x8 | 0x400) == ["hw_slowdown", "0x400"]


@pytest.mark.gpu
def test_this_machines_device_tells_its_clock():
    import torch

    state = DeviceState.of(torch.device("cuda", 0))
    assert state.report()["source"] == "nvml", state.report()["reason"]
    assert state.after_step()["sm_mhz"] > 0
