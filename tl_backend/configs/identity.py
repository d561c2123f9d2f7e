"""What a device is called: the one function that names it, for the tuner that writes a table and the runtime."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tl_backend.device import SHARED_MEMORY_PER_BLOCK, DeviceSpec, Vendor
from tl_backend.errors import InvalidInputError, describe


@dataclass(frozen=True, kw_only=True)
class DeviceIdentity:
    """A kind of device, as far as its best configs depend on it.

    Attributes:
        vendor, arch, multiprocessors: as of ``DeviceSpec``.
        name: canonical, fit for a file: "nvidia_h200". Of a device that is not in ``KNOWN`` it says vendor,
            architecture and multiprocessors, "nvidia_sm_90_16", and no shipped table has it.
    """

    vendor: Vendor
    arch: str
    multiprocessors: int
    name: str

    @property
    def is_known(self) -> bool:
        """Whether it is in ``KNOWN``."""
        return self in KNOWN

    def __str__(self) -> str:
        """For people: "nvidia_h200 (nvidia, sm_90, 132 multiprocessors)"."""
        return f"{self.name} ({self.vendor}, {self.arch}, {self.multiprocessors} multiprocessors)"


@dataclass(frozen=True, kw_only=True)
class _Known:
    identity: DeviceIdentity
    driver_names: tuple[str, ...]


def _known(name: str, arch: str, multiprocessors: int, *driver_names: str) -> _Known:
    vendor: Vendor = "cpu" if arch == "c" else "amd" if arch.startswith("gfx") else "nvidia"
    identity = DeviceIdentity(vendor=vendor, arch=arch, multiprocessors=multiprocessors, name=name)
    return _Known(identity=identity, driver_names=driver_names)


# Names as drivers print them. What differs in chip, multiprocessors or memory is another device, since another config
# may be best there. Multiprocessors are the whole device's: a MIG slice or a partition (CPX) is another device.
_LIST = (
    _known("nvidia_h100", "sm_90", 132, "NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5 80GB"),
    _known("nvidia_h100_pcie", "sm_90", 114, "NVIDIA H100 PCIe"),
    _known("nvidia_h100_nvl", "sm_90", 132, "NVIDIA H100 NVL"),
    # The NVL has the H200's chip, multiprocessors and memory (141 GB at 4.8 TB/s). Its lower power limit slows all
    # configs of a kernel alike.
    _known("nvidia_h200", "sm_90", 132, "NVIDIA H200", "NVIDIA H200 NVL"),
    # Hopper's chip with other clocks; 96 GB of HBM3 or 144 GB of HBM3e.
    _known("nvidia_gh200", "sm_90", 132, "NVIDIA GH200 480GB"),
    _known("nvidia_gh200_144gb", "sm_90", 132, "NVIDIA GH200 144G HBM3e"),
    _known("nvidia_h20", "sm_90", 78, "NVIDIA H20"),
    _known("nvidia_h20_3e", "sm_90", 78, "NVIDIA H20-3e"),
    # Of one memory size SXM and PCIe differ in power and, at 80 GB, by 5% in bandwidth.
    _known("nvidia_a100_40gb", "sm_80", 108, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    _known("nvidia_a100_80gb", "sm_80", 108, "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    # A device of torch is one of the two chips of an MI250 or MI250X; an MI250's is the MI210's.
    _known("amd_mi210", "gfx90a", 104, "AMD Instinct MI210", "AMD Instinct MI250"),
    _known("amd_mi250x", "gfx90a", 110, "AMD Instinct MI250X"),
    _known("amd_mi300a", "gfx942", 228, "AMD Instinct MI300A"),
    _known("amd_mi300x", "gfx942", 304, "AMD Instinct MI300X", "AMD Instinct MI300X VF"),
    _known("amd_mi308x", "gfx942", 80, "AMD Instinct MI308X"),
    _known("amd_mi325x", "gfx942", 304, "AMD Instinct MI325X"),
    _known("amd_mi350x", "gfx950", 256, "AMD Instinct MI350X"),
    _known("amd_mi355x", "gfx950", 256, "AMD Instinct MI355X"),
    _known("cpu", "c", 1, "CPU"),
)
KNOWN = {known.identity: known.driver_names for known in _LIST}
BY_NAME = {identity.name: identity for identity in KNOWN}


def device_identity(device: DeviceSpec) -> DeviceIdentity:
    """The identity of a device: the entry of ``KNOWN`` with its driver's name, architecture and multiprocessors.

    A driver's name may have "NVIDIA" or "AMD Instinct" or lack it, and may end in the module's form, "OAM".
    """
    word = _word(device.name)
    for identity, driver_names in KNOWN.items():
        same_chip = (identity.vendor, identity.arch, identity.multiprocessors) == (
            device.vendor,
            device.arch,
            device.multiprocessors,
        )
        if same_chip and word in map(_word, driver_names):
            return identity
    return unknown_identity(device.vendor, device.arch, device.multiprocessors)


def unknown_identity(vendor: Vendor, arch: str, multiprocessors: int) -> DeviceIdentity:
    """The identity of a device that is not in ``KNOWN``."""
    name = f"{vendor}_{arch}_{multiprocessors}"
    return DeviceIdentity(vendor=vendor, arch=arch, multiprocessors=multiprocessors, name=name)


def is_canonical(identity: DeviceIdentity) -> bool:
    """Whether ``device_identity`` gives this identity to some device."""
    return identity.is_known or (
        identity == unknown_identity(identity.vendor, identity.arch, identity.multiprocessors)
        and identity.name not in BY_NAME
    )


def spec_of(identity: DeviceIdentity) -> DeviceSpec:
    """The spec of a device that need not be here, whose identity is this one.

    Raises:
        InvalidInputError: nothing is known of its architecture.
    """
    if identity.vendor != "cpu" and identity.arch not in SHARED_MEMORY_PER_BLOCK:
        raise InvalidInputError(
            describe(
                "architecture of a device",
                value=identity.arch,
                limit=f"shared memory is known of {', '.join(SHARED_MEMORY_PER_BLOCK)}",
                remedy="Ask on a machine that has the device.",
            )
        )
    absent = DeviceSpec.absent(identity.arch, multiprocessors=identity.multiprocessors)
    return dataclasses.replace(absent, name=KNOWN[identity][0]) if identity.is_known else absent


def _word(driver_name: str) -> str:
    """A driver's name without what does not tell devices apart: "h200nvl"."""
    words = driver_name.casefold().split()
    return "".join(word for word in words if word not in ("nvidia", "amd", "instinct", "oam"))
