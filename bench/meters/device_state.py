"""Clocks, power, throttling and errors of this rank's CUDA device.

From NVML by its binding `pynvml`; without it they are unknown, with the reason. NVML answers in
tens of microseconds. It is read before the first step and after every step, never within one: the
device is idle then, so power and throttling are differences of counters, where it counts them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import torch

#: Bits of the reasons for which a clock is below its maximum, as nvml.h numbers them.
THROTTLE_REASONS: Final = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
#: Counters of the time in which a limit has held clocks down, by their constants' last part.
_LIMITS: Final = ("POWER", "THERMAL", "SYNC_BOOST", "BOARD_LIMIT", "RELIABILITY")
#: Entry of a reading -> the call that answers it, and the constants that it takes.
_READINGS: Final = {
    "sm_mhz": ("ClockInfo", "CLOCK_SM"),
    "memory_mhz": ("ClockInfo", "CLOCK_MEM"),
    "max_sm_mhz": ("MaxClockInfo", "CLOCK_SM"),
    "power_watts": ("PowerUsage",),
    "power_cap_watts": ("EnforcedPowerLimit",),
    "celsius": ("Temperature", "TEMPERATURE_GPU"),
    "ecc_corrected": ("TotalEccErrors", "MEMORY_ERROR_TYPE_CORRECTED", "VOLATILE_ECC"),
    "ecc_uncorrected": ("TotalEccErrors", "MEMORY_ERROR_TYPE_UNCORRECTED", "VOLATILE_ECC"),
    "energy_joules": ("TotalEnergyConsumption",),
}
#: What of a reading changes from step to step.
_PER_STEP: Final = ("sm_mhz", "memory_mhz", "power_watts", "celsius", "throttle")

Reading = dict[str, Any]


class NvmlDevice:
    """One device of NVIDIA's library. Raises whatever the binding raises where it cannot start."""

    def __init__(self, uuid: str) -> None:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        self._nvml = nvml
        try:
            self._device = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:  # an instance, by MIG: clocks and power are those of its GPU
            instance = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            self._device = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
        modern = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        self._reasons = modern or nvml.nvmlDeviceGetCurrentClocksThrottleReasons

    def read(self) -> Reading:
        """What is known now, by 14 calls; entries that the device does not tell are None.

        energy_joules, limited_milliseconds: counters, the second by limit.
        """
        nvml, device = self._nvml, self._device
        reading: Reading = {"seconds": monotonic()}
        for name, (call, *constants) in _READINGS.items():
            more = [getattr(nvml, f"NVML_{constant}") for constant in constants]
            value = self._ask(getattr(nvml, f"nvmlDeviceGet{call}"), device, *more)
            is_in_thousandths = value is not None and name.endswith(("_watts", "_joules"))
            reading[name] = value / 1e3 if is_in_thousandths else value
        reasons = self._ask(self._reasons, device)
        reading["throttle"] = None if reasons is None else reasons_of(reasons)
        return reading | {"limited_milliseconds": self._limited()}

    def _limited(self) -> dict[str, float]:
        nvml, throttled = self._nvml, {}
        for name in _LIMITS:
            policy = getattr(nvml, f"NVML_PERF_POLICY_{name}", None)
            status = policy is not None and self._ask(
                nvml.nvmlDeviceGetViolationStatus, self._device, policy
            )
            if status:
                throttled[name.lower()] = status.violationTime / 1e6
        return throttled

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nvml.NVMLError:  # as "Not Supported", for errors of memory without ECC
            return None


def since(last: Reading | None, step: Reading, now: Reading) -> Reading:
    """`step` with power and throttling of the time between two readings, where both count them."""
    if last is None:
        return step
    seconds = now["seconds"] - last["seconds"]
    if now["energy_joules"] is not None and last["energy_joules"] is not None and seconds > 0:
        step["power_watts"] = (now["energy_joules"] - last["energy_joules"]) / seconds
    before = last["limited_milliseconds"]
    limits = [n for n, time in now["limited_milliseconds"].items() if time > before.get(n, time)]
    if limits:
        step["throttle"] = [*limits, *(step["throttle"] or ())]
    return step


def reasons_of(bits: int) -> list[str]:
    """Names of the reasons in `bits`, those that nobody knows as a hexadecimal number."""
    known = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~sum(THROTTLE_REASONS)
    return known + ([hex(rest)] if rest else [])


class DeviceState:
    """Reads one device around the steps of a run; no error of it ends the run."""

    def __init__(self, name: str, uuid: str) -> None:
        self._name, self._uuid, self._reason = name, uuid, ""
        self._last: Reading | None = None
        self._device: NvmlDevice | None = None
        try:
            self._device = NvmlDevice(uuid)
        except Exception as error:
            self._reason = f"nvml: {_first_line(error)}: pip install 'mfsdp-bench[gpu]'"
        self._before = self._read()

    @classmethod
    def of(cls, device: torch.device) -> DeviceState | None:
        """Of a rank's device; None on a CPU."""
        if device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.name, str(properties.uuid))

    def after_step(self) -> Reading | None:
        """What changes from step to step; None if it is unknown."""
        if self._device is None:
            return None
        last, now = self._last or self._before, self._read()
        self._last = now
        return None if now is None else since(last, {name: now[name] for name in _PER_STEP}, now)

    def report(self) -> dict[str, Any]:
        """For the record. reason: why nothing is known, or no more."""
        return {
            "name": self._name,
            "uuid": self._uuid,
            "source": None if self._device is None else "nvml",
            "reason": self._reason,
            "before": self._before,
            "after": self._last,
        }

    def _read(self) -> Reading | None:
        if self._device is None:
            return None
        try:
            return self._device.read()
        except Exception as error:
            self._reason = f"nvml stopped answering: {_first_line(error)}"
            self._device = None
            return None


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
