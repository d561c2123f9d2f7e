"""What devices are called."""

from __future__ import annotations

import dataclasses

import pytest

from tl_backend.configs.identity import (
    BY_NAME,
    KNOWN,
    device_identity,
    is_canonical,
    spec_of,
    unknown_identity,
)
from tl_backend.device import SHARED_MEMORY_PER_BLOCK, DeviceSpec
from tl_backend.errors import InvalidInputError

NAMES = [  # As a driver prints it, architecture, multiprocessors, canonical name.
    ("NVIDIA H100 80GB HBM3", "sm_90", 132, "nvidia_h100"),
    ("NVIDIA H100 PCIe", "sm_90", 114, "nvidia_h100_pcie"),
    ("NVIDIA H100 NVL", "sm_90", 132, "nvidia_h100_nvl"),
    ("NVIDIA H200", "sm_90", 132, "nvidia_h200"),
    ("NVIDIA H200 NVL", "sm_90", 132, "nvidia_h200"),
    ("NVIDIA GH200 480GB", "sm_90", 132, "nvidia_gh200"),
    ("NVIDIA H20", "sm_90", 78, "nvidia_h20"),
    ("NVIDIA H20-3e", "sm_90", 78, "nvidia_h20_3e"),
    ("NVIDIA A100-SXM4-40GB", "sm_80", 108, "nvidia_a100_40gb"),
    ("A100-PCIE-40GB", "sm_80", 108, "nvidia_a100_40gb"),
    ("NVIDIA A100-SXM4-80GB", "sm_80", 108, "nvidia_a100_80gb"),
    ("NVIDIA A100 80GB PCIe", "sm_80", 108, "nvidia_a100_80gb"),
    ("AMD Instinct MI210", "gfx90a", 104, "amd_mi210"),
    ("AMD Instinct MI250", "gfx90a", 104, "amd_mi210"),
    ("AMD Instinct MI250X", "gfx90a", 110, "amd_mi250x"),
    ("AMD Instinct MI300A", "gfx942", 228, "amd_mi300a"),
    ("AMD Instinct MI300X", "gfx942", 304, "amd_mi300x"),
    ("AMD Instinct MI300X OAM", "gfx942", 304, "amd_mi300x"),
    ("AMD Instinct MI308X", "gfx942", 80, "amd_mi308x"),
    ("AMD Instinct MI325X", "gfx942", 304, "amd_mi325x"),
    ("AMD Instinct MI350X", "gfx950", 256, "amd_mi350x"),
    ("AMD Instinct MI355X", "gfx950", 256, "amd_mi355x"),
    ("CPU", "c", 1, "cpu"),
]
UNKNOWN = [
    ("", "sm_90", 132, "nvidia_sm_90_132"),
    ("NVIDIA H300", "sm_90", 132, "nvidia_sm_90_132"),
    ("NVIDIA H200 prototype", "sm_90", 132, "nvidia_sm_90_132"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "sm_90", 16, "nvidia_sm_90_16"),
    ("NVIDIA H100 80GB HBM3", "sm_90", 16, "nvidia_sm_90_16"),  # A slice under the whole GPU's name.
    ("NVIDIA H200", "sm_100", 132, "nvidia_sm_100_132"),
    ("AMD Instinct MI300X", "gfx942", 38, "amd_gfx942_38"),  # A partition.
    ("AMD Instinct MI355X", "gfx942", 256, "amd_gfx942_256"),  # 256 compute units of another architecture.
    ("", "gfx950", 256, "amd_gfx950_256"),
]


def device(name: str, arch: str, multiprocessors: int) -> DeviceSpec:
    return dataclasses.replace(DeviceSpec.absent(arch), name=name, multiprocessors=multiprocessors)


@pytest.mark.parametrize(("driver_name", "arch", "multiprocessors", "name"), NAMES)
def test_known_devices_have_documented_names(driver_name: str, arch: str, multiprocessors: int, name: str) -> None:
    """CASES.md C11, among others: a variant's alias never takes the plain name away."""
    identity = device_identity(device(driver_name, arch, multiprocessors))
    assert (identity.name, identity.is_known) == (name, True)


@pytest.mark.parametrize(("driver_name", "arch", "multiprocessors", "name"), UNKNOWN)
def test_other_devices_have_names_of_their_own(driver_name: str, arch: str, multiprocessors: int, name: str) -> None:
    """CASES.md C11, C16: another name, another count or another architecture is another device."""
    identity = device_identity(device(driver_name, arch, multiprocessors))
    assert (identity.name, identity.is_known) == (name, False)
    assert identity.name not in BY_NAME
    assert is_canonical(identity)


def test_every_name_on_the_list_is_one_devices() -> None:
    assert len(BY_NAME) == len(KNOWN)
    spellings = [(name, identity.arch) for identity, names in KNOWN.items() for name in names]
    assert len(set(spellings)) == len(spellings)
    for identity, names in KNOWN.items():
        for name in names:
            assert device_identity(device(name, identity.arch, identity.multiprocessors)) == identity


def test_an_identity_leads_back_to_its_spec() -> None:
    for identity in (*KNOWN, unknown_identity("nvidia", "sm_90", 16), unknown_identity("amd", "gfx942", 38)):
        spec = spec_of(identity)
        assert device_identity(spec) == identity
        assert spec.shared_memory_per_block == SHARED_MEMORY_PER_BLOCK.get(identity.arch, 0)
    with pytest.raises(InvalidInputError, match="architecture of a device: got sm_999; shared memory is known of"):
        spec_of(unknown_identity("nvidia", "sm_999", 1))


def test_names_that_belong_to_another_device_are_not_canonical() -> None:
    h200 = BY_NAME["nvidia_h200"]
    assert is_canonical(h200)
    assert not is_canonical(dataclasses.replace(h200, multiprocessors=114))
    assert not is_canonical(dataclasses.replace(h200, name="../../etc/passwd"))
