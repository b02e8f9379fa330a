"""Clocks and throttling: who is asked, how answers are read, and that no meter ends a run."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from bench.meters.device_state import DeviceState, find_source, reasons_of

UUID = "GPU-0"
SMI = "#!/bin/sh\necho \"$@\" > {said}\necho '{line}'\n"
LINE = "1980, 2619, 1980, 412.5, 700.00, 48, 0, [N/A], 0x0000000000000044"


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
        if uuid != UUID:
            raise NvmlError("Not Found")
        return "handle"

    def ecc(handle, error_type, counter_type):
        assert (handle, counter_type) == ("handle", 0)
        if answers.get("ecc") is None:
            raise NvmlError("Not Supported")
        return answers["ecc"][error_type]

    def of_handle(value):
        return {"handle": value}.__getitem__

    module.nvmlDeviceGetHandleByUUID = by_uuid
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


@pytest.fixture
def no_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def smi(no_smi, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def answer(line):
        said = no_smi / "said"
        command = no_smi / "nvidia-smi"
        command.write_text(SMI.format(line=line, said=said))
        command.chmod(0o755)
        return said

    return answer


@pytest.mark.parametrize(
    "reasons",
    ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"],
)
def test_nvml_is_asked_after_every_step_under_the_old_and_the_new_name(
    monkeypatch, no_smi, reasons
):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(reasons=reasons, ecc=(3, 0)))
    state = DeviceState("NVIDIA H200", UUID, steps=9)
    assert state.after_step(1) == {
        "sm_mhz": 1755,
        "memory_mhz": 2619,
        "power_watts": 650.123,
        "celsius": 61,
        "throttle": ["sw_power_cap"],
    }
    report = state.report()
    assert report["source"] == "nvml"
    assert report["before"]["ecc_corrected"] == 3
    assert report["after"]["power_cap_watts"] == 700.0


def test_what_a_device_does_not_tell_is_none(monkeypatch, no_smi):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert DeviceState("x", UUID, 1).report()["before"]["ecc_uncorrected"] is None


def test_without_the_binding_nvidia_smi_is_asked_for_this_device_and_seldom(smi):
    said = smi(LINE)
    state = DeviceState("NVIDIA H200", UUID, steps=9)
    assert f"--id={UUID} --query-gpu=clocks.sm," in said.read_text()
    read = [step for step in range(1, 10) if state.after_step(step) is not None]
    assert read == [4, 9]
    report = state.report()
    assert report["source"] == "nvidia-smi"
    assert report["reason"].startswith("nvml: ")
    after = report["after"]
    assert (after["sm_mhz"], after["power_watts"], after["power_cap_watts"]) == (1980, 412.5, 700)
    assert after["ecc_uncorrected"] is None
    assert after["throttle"] == ["sw_power_cap", "hw_thermal_slowdown"]


@pytest.mark.parametrize("line", ["No devices were found", "", LINE + ", 1"])
def test_an_answer_that_is_none_is_unknown_with_the_reason(smi, line):
    smi(line)
    source, reason = find_source(UUID)
    assert source is None
    assert "nvidia-smi: SubprocessError" in reason


def test_without_both_clocks_are_unknown_and_the_run_goes_on(no_smi, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    state = DeviceState("x", UUID, steps=2)
    assert state.after_step(2) is None
    report = state.report()
    assert report["source"] is None
    assert "FileNotFoundError" in report["reason"]


def test_a_source_that_stops_answering_is_asked_no_more(monkeypatch, no_smi):
    twin = nvml()
    monkeypatch.setitem(sys.modules, "pynvml", twin)
    state = DeviceState("x", UUID, steps=3)

    def lost(_handle):
        raise RuntimeError("GPU is lost")

    twin.nvmlDeviceGetPowerUsage = lost
    assert state.after_step(1) is None
    assert "nvml stopped answering: RuntimeError: GPU is lost" in state.report()["reason"]


def test_reasons_that_nobody_knows_are_shown_as_they_are():
    assert reasons_of(0) == []
    assert reasons_of(0x8 | 0x400) == ["hw_slowdown", "0x400"]


@pytest.mark.gpu
def test_this_machines_device_tells_its_clock():
    import torch

    state = DeviceState.of(torch.device("cuda", 0), steps=1)
    assert state.report()["source"] in {"nvml", "nvidia-smi"}, state.report()["reason"]
    assert state.after_step(1)["sm_mhz"] > 0
