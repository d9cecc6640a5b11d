"""Accelerators and what their makers publish of them: dense arithmetic without sparsity, links one way per GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from protos.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, its place in a domain of fast links, and its share of the network. 0 FLOP/s: it cannot do that."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float
    int8_flops: float
    domain_bytes_per_s: float  # NVLink or Infinity Fabric, one way
    gpus_per_domain: int
    network_bytes_per_s: float  # one way
    source: str
    collective_s: float = 10e-6  # of one collective operation inside a domain, before the first byte: an assumption
    network_collective_s: float = 40e-6  # the same across domains

    def __post_init__(self) -> None:
        may_be_0 = {"fp8_flops", "int8_flops", "collective_s", "network_collective_s"}
        for name in (field.name for field in fields(self) if field.name not in ("name", "source")):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name not in may_be_0):
                least = "0 or more" if name in may_be_0 else "above 0"
                raise InvalidArgument(f"{name} is {value:g}; it must be {least}", field=name)
        if self.gpus_per_domain != int(self.gpus_per_domain):
            raise InvalidArgument(
                f"gpus_per_domain is {self.gpus_per_domain}; it must be whole", field="gpus_per_domain"
            )


_GB, _TB, _TFLOPS = 1e9, 1e12, 1e12
_GBIT = 1e9 / 8

HARDWARE = {
    "H100": Hardware(
        name="H100",
        memory_bytes=80 * _GB,
        memory_bytes_per_s=3.35 * _TB,
        bf16_flops=989 * _TFLOPS,
        fp8_flops=1979 * _TFLOPS,
        int8_flops=1979 * _TFLOPS,
        domain_bytes_per_s=450 * _GB,
        gpus_per_domain=8,
        network_bytes_per_s=400 * _GBIT,
        source="NVIDIA H100 data sheet (SXM); DGX H100: 8 x ConnectX-7",
    ),
    "H200": Hardware(
        name="H200",
        memory_bytes=141 * _GB,
        memory_bytes_per_s=4.8 * _TB,
        bf16_flops=989 * _TFLOPS,
        fp8_flops=1979 * _TFLOPS,
        int8_flops=1979 * _TFLOPS,
        domain_bytes_per_s=450 * _GB,
        gpus_per_domain=8,
        network_bytes_per_s=400 * _GBIT,
        source="NVIDIA H200 data sheet (SXM); DGX H200: 8 x ConnectX-7",
    ),
    "A100": Hardware(
        name="A100",
        memory_bytes=80 * _GB,
        memory_bytes_per_s=2.039 * _TB,
        bf16_flops=312 * _TFLOPS,
        fp8_flops=0,
        int8_flops=624 * _TFLOPS,
        domain_bytes_per_s=300 * _GB,
        gpus_per_domain=8,
        network_bytes_per_s=200 * _GBIT,
        source="NVIDIA A100 data sheet (SXM, 80 GB); DGX A100: 8 x ConnectX-6",
    ),
    "B200": Hardware(
        name="B200",
        memory_bytes=180 * _GB,
        memory_bytes_per_s=8 * _TB,
        bf16_flops=2250 * _TFLOPS,
        fp8_flops=4500 * _TFLOPS,
        int8_flops=4500 * _TFLOPS,
        domain_bytes_per_s=900 * _GB,
        gpus_per_domain=8,
        network_bytes_per_s=400 * _GBIT,
        source="NVIDIA Blackwell data sheet (HGX B200, 1,000 W); DGX B200: 8 x ConnectX-7",
    ),
    "MI300X": Hardware(
        name="MI300X",
        memory_bytes=192 * _GB,
        memory_bytes_per_s=5.3 * _TB,
        bf16_flops=1307.4 * _TFLOPS,
        fp8_flops=2614.9 * _TFLOPS,
        int8_flops=2614.9 * _TFLOPS,
        domain_bytes_per_s=448 * _GB,
        gpus_per_domain=8,
        network_bytes_per_s=400 * _GBIT,
        source="AMD Instinct MI300X data sheet; platform: 7 x 64 GB/s Infinity Fabric one way, 8 x 400 Gbit/s",
    ),
}
