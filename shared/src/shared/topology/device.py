"""Peak rates and memory of a device, with presets from public data sheets.

Peaks are for dense matrices; rates and capacities are decimal, as in data sheets. A peak is an
upper bound, not a measurement: planners scale it by a profiler's measurements.

Sources of the presets, SXM forms where there are several:

- H200: "NVIDIA H200 Tensor Core GPU" data sheet. BF16 1,979 TFLOPS with sparsity, hence 989.5
  dense; INT8 and FP8 3,958 with sparsity; FP32 67; 141 GB at 4.8 TB/s.
- H100: "NVIDIA H100 Tensor Core GPU" data sheet. The same peaks; 80 GB at 3.35 TB/s.
- A100_80, A100_40: "NVIDIA A100 Tensor Core GPU" data sheet. BF16 312 dense; INT8 624 dense; FP32
  19.5; 80 GB at 2,039 GB/s, 40 GB at 1,555 GB/s.
- A800: vendors' tables for NVIDIA A800 80GB SXM. As A100 80GB; its NVLink is the slower one.
- V100_32: "NVIDIA V100 Tensor Core GPU" data sheet. FP16 125; FP32 15.7; 32 GB at 900 GB/s.
- P100_12: "NVIDIA Tesla P100" data sheet, PCIe. FP16 18.7; FP32 9.3; 12 GB at 549 GB/s.
- T4: "NVIDIA T4 Tensor Core GPU" data sheet. FP16 65; INT8 130; FP32 8.1; 16 GB at 320 GB/s.
- L4: "NVIDIA L4 Tensor Core GPU" data sheet. BF16 242 with sparsity, hence 121 dense; INT8 and FP8
  485 with sparsity; FP32 30.3; 24 GB at 300 GB/s.
- CPU: no data sheet. One core with two 256-bit multiply-adds a cycle at 3 GHz, in round numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from shared.errors import TopologyError
from shared.units import GB

__all__ = [
    "A100_40",
    "A100_80",
    "A800",
    "CPU",
    "H100",
    "H200",
    "L4",
    "P100_12",
    "PRESETS",
    "T4",
    "V100_32",
    "Device",
]

_TFLOPS = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU, or one CPU core as a rank uses it.

    Attributes:
        name: the device's name; for a preset its key in `PRESETS`.
        kind: "cuda" or "cpu".
        flops_per_s: dense matrix peak in bfloat16 or float16.
        flops_fp32_per_s: peak in float32.
        memory_bytes: capacity of its memory.
        memory_bytes_per_s: bandwidth of its memory.
        int8_ops_per_s: dense matrix peak of 8-bit integers; None where its matrix units have none.
        fp8_flops_per_s: dense matrix peak of 8-bit floats; None where it has none.

    Raises:
        TopologyError: the kind is unknown, or a number is not positive and finite.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    flops_per_s: float
    flops_fp32_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    int8_ops_per_s: float | None = None
    fp8_flops_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("cuda", "cpu"):
            raise TopologyError(
                f"device {self.name!r}: kind must be 'cuda' or 'cpu', got {self.kind!r}"
            )
        for key in (
            *("flops_per_s", "flops_fp32_per_s", "memory_bytes", "memory_bytes_per_s"),
            *("int8_ops_per_s", "fp8_flops_per_s"),
        ):
            value = getattr(self, key)
            if value is not None and not (isfinite(value) and value > 0):
                raise TopologyError(
                    f"device {self.name!r}: {key} must be positive and finite, got {value}"
                )


def _gpu(
    name: str,
    half: float,
    fp32: float,
    memory_gb: int,
    memory_gb_per_s: float,
    *,
    int8: float | None = None,
    fp8: float | None = None,
) -> Device:
    return Device(
        name=name,
        kind="cuda",
        flops_per_s=half * _TFLOPS,
        flops_fp32_per_s=fp32 * _TFLOPS,
        memory_bytes=memory_gb * GB,
        memory_bytes_per_s=memory_gb_per_s * GB,
        int8_ops_per_s=None if int8 is None else int8 * _TFLOPS,
        fp8_flops_per_s=None if fp8 is None else fp8 * _TFLOPS,
    )


H200 = _gpu("H200", 989.5, 67.0, 141, 4800.0, int8=1979.0, fp8=1979.0)
H100 = _gpu("H100", 989.5, 67.0, 80, 3350.0, int8=1979.0, fp8=1979.0)
A100_80 = _gpu("A100_80", 312.0, 19.5, 80, 2039.0, int8=624.0)
A100_40 = _gpu("A100_40", 312.0, 19.5, 40, 1555.0, int8=624.0)
A800 = _gpu("A800", 312.0, 19.5, 80, 2039.0, int8=624.0)
V100_32 = _gpu("V100_32", 125.0, 15.7, 32, 900.0)
P100_12 = _gpu("P100_12", 18.7, 9.3, 12, 549.0)
T4 = _gpu("T4", 65.0, 8.1, 16, 320.0, int8=130.0)
L4 = _gpu("L4", 121.0, 30.3, 24, 300.0, int8=242.5, fp8=242.5)
CPU = Device(
    name="CPU",
    kind="cpu",
    flops_per_s=0.1 * _TFLOPS,
    flops_fp32_per_s=0.1 * _TFLOPS,
    memory_bytes=8 * GB,
    memory_bytes_per_s=10.0 * GB,
)

PRESETS = {
    device.name: device
    for device in (H200, H100, A100_80, A100_40, A800, V100_32, P100_12, T4, L4, CPU)
}
"""The presets by name."""
