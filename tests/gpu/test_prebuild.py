"""Kernels for a GPU that is not here: the groups are what the programs ask for, and what is built can be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import prebuild
from tl_backend.device import DeviceSpec
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.kernel_store import KernelStore
from tl_backend.ops.prepare import required_kernels
from tl_backend.testing.cases import make_problem

C = DeviceSpec.absent("c")


@pytest.mark.parametrize("group", prebuild.GROUPS)
def test_a_group_has_kernels_for_a_gpu_that_is_not_here(group: str) -> None:
    keys = prebuild.GROUPS[group](prebuild.device_of("h200"))
    assert "prefill_hopper" in {key.kind for key in keys}
    assert {key.device.arch for key in keys} == {"sm_90"}


def test_what_is_built_is_found_and_what_does_not_compile_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [key for key in required_kernels(make_problem(2, 1, 32, 16), C) if key.kind == "cache_write"]
    bad = [KernelKey("no_such_kernel", key.problem, key.config, C) for key in good]
    monkeypatch.setitem(prebuild.GROUPS, "engine", lambda device: [*good, *good])
    arguments = ["engine", "--arch", "c", "--out", str(tmp_path), "--processes", "1"]
    assert prebuild.main([*arguments, "--count"]) == 0
    assert KernelStore(tmp_path).find(good[0]) is None
    assert prebuild.main(arguments) == 0
    assert KernelStore(tmp_path).find(good[0]) is not None
    monkeypatch.setitem(prebuild.GROUPS, "engine", lambda device: bad)
    assert prebuild.main(arguments) == 1
    assert "FAILED no_such_kernel" in capsys.readouterr().out
