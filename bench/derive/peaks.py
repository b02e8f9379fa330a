"""Peak arithmetic rates of known devices, for MFU.

The key is the exact name that the driver reports, because substrings lie: "H100" names four parts
with three peaks. A device that is not listed has no peak, and its MFU is null; guessing one is how
dashboards came to show 563 %. A CPU has no entry on purpose: its peak depends on the clock that its
vector units sustain, which no name tells.
"""

from __future__ import annotations

from dataclasses import dataclass

TABLE_DATE = "2026-08"
"""When the entries were last compared with their sources."""


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """Dense peak (no structured sparsity) of one device, in TFLOP/s (1e12 per second).

    `bf16_tflops` holds for fp16 too on every device listed. `fp8_tflops` None: no FP8 units.
    """

    device_name: str
    bf16_tflops: float
    fp8_tflops: float | None
    source: str

    def tflops(self, dtype: str) -> float | None:
        """Of "bf16", "fp16" or "fp8"; None where the table has no value.

        Any other dtype has none: what fp32 products reach depends on whether TF32 is switched on,
        which the name of the device does not tell.
        """
        if dtype in ("bf16", "fp16"):
            return self.bf16_tflops
        return self.fp8_tflops if dtype == "fp8" else None


@dataclass(frozen=True, slots=True)
class ModelFlopsUtilisation:
    """`fraction` of the peak (1.0 is all of it), or None with the `reason` why there is none."""

    fraction: float | None
    peak_tflops: float | None
    reason: str = ""


_A100 = "NVIDIA A100 datasheet, dense column"
_H100 = "NVIDIA H100 datasheet, sparse column halved"
_H200 = "NVIDIA H200 datasheet, sparse column halved"
_H20 = "published H20 specification sheets; NVIDIA has no public page for it"
_L40S = "NVIDIA L40S datasheet, dense column"
_BLACKWELL = "NVIDIA GB200 NVL72 and HGX B200 specification, sparse column halved"
_MI300 = "304 compute units x 2048 FLOP per clock (ROCm MI300 architecture page) x 2.1 GHz"

_PEAKS: tuple[DevicePeak, ...] = (
    DevicePeak("NVIDIA A100-SXM4-40GB", 312.0, None, _A100),
    DevicePeak("NVIDIA A100-SXM4-80GB", 312.0, None, _A100),
    DevicePeak("NVIDIA A100-PCIE-40GB", 312.0, None, _A100),
    DevicePeak("NVIDIA A100 80GB PCIe", 312.0, None, _A100),
    DevicePeak("NVIDIA H100 80GB HBM3", 989.4, 1978.9, _H100),
    DevicePeak("NVIDIA H100 PCIe", 756.0, 1513.0, _H100),
    DevicePeak("NVIDIA H100 NVL", 835.0, 1671.0, _H100),
    DevicePeak("NVIDIA GH200 480GB", 989.4, 1978.9, _H100),
    DevicePeak("NVIDIA H200", 989.4, 1978.9, _H200),
    DevicePeak("NVIDIA H200 NVL", 835.0, 1671.0, _H200),
    DevicePeak("NVIDIA H20", 148.0, 296.0, _H20),
    DevicePeak("NVIDIA L40S", 362.0, 733.0, _L40S),
    DevicePeak("NVIDIA B200", 2250.0, 4500.0, _BLACKWELL),
    DevicePeak("NVIDIA GB200", 2500.0, 5000.0, _BLACKWELL),
    DevicePeak("NVIDIA GB300", 2500.0, 5000.0, _BLACKWELL),
    DevicePeak("AMD Instinct MI300X", 1307.4, 2614.9, _MI300),
    DevicePeak("AMD Instinct MI325X", 1307.4, 2614.9, _MI300),
)
# NVIDIA B300 is left out: published values conflict (2250 and 3500 TFLOP/s dense BF16).

PEAKS: dict[str, DevicePeak] = {peak.device_name: peak for peak in _PEAKS}


def model_flops_utilisation(
    tflops_per_second_per_device: float, device_name: str | None, dtype: str
) -> ModelFlopsUtilisation:
    """Achieved model FLOP/s over the dense peak of the compute dtype.

    A value above 1 is impossible, so it is withheld (`fraction` None) and named in `reason`: either
    the time, the number of devices or the peak is wrong.
    """
    if device_name is None:
        return ModelFlopsUtilisation(
            None, None, "no single device with a known peak (a CPU has none)"
        )
    peak = PEAKS.get(device_name)
    rate = None if peak is None else peak.tflops(dtype)
    if rate is None:
        known = "unknown device" if peak is None else f"no {dtype} peak known"
        return ModelFlopsUtilisation(None, None, f"{known}: {device_name}")
    fraction = tflops_per_second_per_device / rate
    if fraction > 1.0:
        reason = (
            f"invalid: {100 * fraction:.0f} % of the {dtype} peak of {device_name} "
            f"({rate:g} TFLOP/s); time, device count or peak must be wrong"
        )
        return ModelFlopsUtilisation(None, rate, reason)
    return ModelFlopsUtilisation(fraction, rate)
