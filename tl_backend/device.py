"""What a kernel is compiled for: the facts of a device that configs and compilation need.

Imports without torch; ``DeviceSpec.of`` is the one function that asks torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tl_backend.errors import UnsupportedError, describe

if TYPE_CHECKING:
    import torch

Vendor = Literal["nvidia", "amd", "cpu"]

# Dynamic shared memory that one block may use, bytes. NVIDIA: CUDA C++ Programming Guide, "Technical specifications per
# compute capability" (maximum per block). AMD: LDS of a compute unit, CDNA2 / CDNA3 / CDNA4 ISA documents.
SHARED_MEMORY_PER_BLOCK = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx90a": 64 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
MIN_NVIDIA_ARCH = (8, 0)
# Hopper's prefill is fastest from pages of 128: those of 16 take 0.4 to 4.2% longer (H200, the rows of
# benchmarks/results/prefill_h200.json). Decodes of 32/8 with the H200 table's configs are as fast on average, from 1.07
# to 0.83 times (64 requests of up to 1024 keys).
HOPPER_PAGE_SIZE = 128
AMD_ARCHES = ("gfx90a", "gfx942", "gfx950")


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One kind of device.

    Attributes:
        vendor: "nvidia", "amd" or "cpu".
        arch: "sm_90", "gfx942", ... or "c".
        name: as its driver prints it.
        multiprocessors: SMs or compute units; on a CPU 1, since the C target runs one thread.
        shared_memory_per_block: bytes one block may allocate; on a CPU unlimited (0).
        wave_size: threads of a warp or wave.
    """

    vendor: Vendor
    arch: str
    name: str
    multiprocessors: int
    shared_memory_per_block: int
    wave_size: int

    @property
    def is_gpu(self) -> bool:
        return self.vendor != "cpu"

    @property
    def has_tma(self) -> bool:
        """Whether block copies to shared memory are asynchronous and end at a barrier."""
        return self.vendor == "nvidia" and self.arch not in ("sm_80", "sm_86", "sm_89")

    @property
    def page_size(self) -> int:
        """Block size of a server here that was given none: this package prefers its own on Hopper, vLLM on a CPU."""
        return HOPPER_PAGE_SIZE if self.arch == "sm_90" else 16 if self.is_gpu else 128

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that attention kernels take here: the C target's code generator has float32 only."""
        return ("float16", "bfloat16") if self.is_gpu else ("float32",)

    @property
    def target(self) -> dict[str, Any] | str:
        """TileLang's target. Hopper's wgmma and TMA need the "a" variant of the arch."""
        if self.vendor == "cpu":
            return "c"
        if self.vendor == "amd":
            return {"kind": "hip", "mcpu": self.arch}
        return {"kind": "cuda", "arch": self.arch + ("a" if self.arch in ("sm_90", "sm_100", "sm_120") else "")}

    @classmethod
    def of(cls, device: torch.device) -> DeviceSpec:
        """The spec of a torch device.

        Raises:
            UnsupportedError: neither a CPU nor a GPU that the kernels serve.
        """
        return _of(device.type, device.index)

    @classmethod
    def absent(cls, arch: str, *, multiprocessors: int | None = None) -> DeviceSpec:
        """The spec of an architecture whose device need not be here: to generate and inspect code anywhere."""
        if arch == "c":
            return _CPU
        vendor: Vendor = "amd" if arch.startswith("gfx") else "nvidia"
        counts = {"sm_80": 108, "sm_90": 132, "gfx90a": 104, "gfx942": 304, "gfx950": 256}
        return cls(
            vendor=vendor,
            arch=arch,
            name=f"absent {arch}",
            multiprocessors=multiprocessors or counts.get(arch, 100),
            shared_memory_per_block=SHARED_MEMORY_PER_BLOCK[arch],
            wave_size=64 if vendor == "amd" else 32,
        )


_CPU = DeviceSpec(vendor="cpu", arch="c", name="CPU", multiprocessors=1, shared_memory_per_block=0, wave_size=1)


@functools.cache
def _of(kind: str, index: int | None) -> DeviceSpec:
    if kind == "cpu":
        return _CPU
    if kind != "cuda":
        raise UnsupportedError(
            describe("device", value=kind, limit="cpu, cuda and ROCm devices are supported", remedy="Move the tensors.")
        )
    import torch

    props = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    if torch.version.hip:
        arch = props.gcnArchName.split(":")[0]
        supported, limit = arch in AMD_ARCHES, f"{', '.join(AMD_ARCHES)} are supported"
        vendor: Vendor = "amd"
    else:
        arch = f"sm_{props.major}{props.minor}"
        supported, limit = (props.major, props.minor) >= MIN_NVIDIA_ARCH, "sm_80 and newer are supported"
        vendor = "nvidia"
    if not supported:
        raise UnsupportedError(
            describe(f"GPU {props.name}", value=arch, limit=limit, remedy="Use another attention backend on this GPU.")
        )
    shared = SHARED_MEMORY_PER_BLOCK.get(arch) or int(getattr(props, "shared_memory_per_block_optin", 48 * 1024))
    return DeviceSpec(
        vendor=vendor,
        arch=arch,
        name=props.name,
        multiprocessors=props.multi_processor_count,
        shared_memory_per_block=shared,
        wave_size=64 if vendor == "amd" else 32,
    )
