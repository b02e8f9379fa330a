"""Clocks, power, throttling and errors of this rank's CUDA device.

From NVML where its binding is installed, else from nvidia-smi, else unknown, with the reason. NVML
answers in tens of microseconds and is read after every step; nvidia-smi starts a process, and is
asked three times: before the first step, in its middle and after the last. Nobody is asked inside
of a step.
"""

from __future__ import annotations

import importlib
import math
import subprocess
from collections.abc import Callable
from typing import Any, Final, Protocol

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
_SMI_FIELDS: Final = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "max_sm_mhz": "clocks.max.sm",
    "power_watts": "power.draw",
    "power_cap_watts": "power.limit",
    "celsius": "temperature.gpu",
    "ecc_corrected": "ecc.errors.corrected.volatile.total",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
    "throttle": "clocks_throttle_reasons.active",
}
_SMI_SECONDS: Final = 10.0
#: What of a reading changes from step to step.
_PER_STEP: Final = ("sm_mhz", "memory_mhz", "power_watts", "celsius", "throttle")

Reading = dict[str, Any]


class DeviceSource(Protocol):
    """Somebody who knows one device. name: who. is_quick: whether it may be asked every step."""

    name: str
    is_quick: bool

    def read(self) -> Reading:
        """What is known now; entries that the device does not tell are None."""


class NvmlSource:
    """NVIDIA's library through the binding `pynvml`."""

    name = "nvml"
    is_quick = True

    def __init__(self, uuid: str) -> None:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        self._nvml = nvml
        self._device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        modern = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        self._reasons = modern or nvml.nvmlDeviceGetCurrentClocksThrottleReasons

    def read(self) -> Reading:
        """Eight calls."""
        nvml, device = self._nvml, self._device
        volatile = nvml.NVML_VOLATILE_ECC
        corrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        ask = self._ask
        milliwatts = ask(nvml.nvmlDeviceGetPowerUsage, device)
        cap = ask(nvml.nvmlDeviceGetEnforcedPowerLimit, device)
        reasons = ask(self._reasons, device)
        return {
            "sm_mhz": ask(nvml.nvmlDeviceGetClockInfo, device, nvml.NVML_CLOCK_SM),
            "memory_mhz": ask(nvml.nvmlDeviceGetClockInfo, device, nvml.NVML_CLOCK_MEM),
            "max_sm_mhz": ask(nvml.nvmlDeviceGetMaxClockInfo, device, nvml.NVML_CLOCK_SM),
            "power_watts": None if milliwatts is None else milliwatts / 1e3,
            "power_cap_watts": None if cap is None else cap / 1e3,
            "celsius": ask(nvml.nvmlDeviceGetTemperature, device, nvml.NVML_TEMPERATURE_GPU),
            "ecc_corrected": ask(nvml.nvmlDeviceGetTotalEccErrors, device, corrected, volatile),
            "ecc_uncorrected": ask(nvml.nvmlDeviceGetTotalEccErrors, device, uncorrected, volatile),
            "throttle": None if reasons is None else reasons_of(reasons),
        }

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nvml.NVMLError:  # as "Not Supported", for errors of memory without ECC
            return None


class SmiSource:
    """NVIDIA's command `nvidia-smi`."""

    name = "nvidia-smi"
    is_quick = False

    def __init__(self, uuid: str) -> None:
        self._command = [
            *("nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(_SMI_FIELDS.values())}"),
            "--format=csv,noheader,nounits",
        ]
        self.read()

    def read(self) -> Reading:
        """One line of it.

        Raises:
            OSError: there is no such command.
            subprocess.SubprocessError: it failed.
        """
        done = subprocess.run(
            self._command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
        values = [value.strip() for value in done.stdout.strip().split(",")]
        if len(values) != len(_SMI_FIELDS):
            raise subprocess.SubprocessError(f"one value each was expected: {done.stdout[:200]!r}")
        reading: Reading = dict(zip(_SMI_FIELDS, map(_number, values), strict=True))
        if reading["throttle"] is not None:
            reading["throttle"] = reasons_of(int(reading["throttle"]))
        return reading


def reasons_of(bits: int) -> list[str]:
    """Names of the reasons in `bits`, those that nobody knows as a hexadecimal number."""
    known = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~sum(THROTTLE_REASONS)
    return known + ([hex(rest)] if rest else [])


def find_source(uuid: str) -> tuple[DeviceSource | None, str]:
    """Who tells about the device, and why not somebody better."""
    refusals: list[str] = []
    for kind in (NvmlSource, SmiSource):
        try:
            return kind(uuid), "; ".join(refusals)
        except Exception as error:
            refusals.append(f"{kind.name}: {_first_line(error)}")
    return None, "; ".join(refusals)


class DeviceState:
    """Reads one device around the steps of a run."""

    def __init__(self, name: str, uuid: str, steps: int) -> None:
        self._name, self._uuid = name, uuid
        self._source, self._reason = find_source(uuid)
        self._rare = {max(1, steps // 2), steps}
        self._last: Reading | None = None
        self._before = self._read()

    @classmethod
    def of(cls, device: torch.device, steps: int) -> DeviceState | None:
        """Of a rank's device, over a run of `steps`; None on a CPU."""
        if device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.name, f"GPU-{properties.uuid}", steps)

    def after_step(self, step: int) -> Reading | None:
        """What changes from step to step; None where it is not asked this time."""
        if self._source is None or not (self._source.is_quick or step in self._rare):
            return None
        self._last = self._read()
        return None if self._last is None else {name: self._last[name] for name in _PER_STEP}

    def report(self) -> dict[str, Any]:
        """For the record. reason: why the source is not a better one, or why there is none."""
        return {
            "name": self._name,
            "uuid": self._uuid,
            "source": None if self._source is None else self._source.name,
            "reason": self._reason,
            "before": self._before,
            "after": self._last,
        }

    def _read(self) -> Reading | None:
        if self._source is None:
            return None
        try:
            return self._source.read()
        except Exception as error:
            self._reason = f"{self._source.name} stopped answering: {_first_line(error)}"
            self._source = None
            return None


def _number(text: str) -> float | int | None:
    """A value of nvidia-smi; None for `[N/A]` and `[Not Supported]`."""
    try:
        number = float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
