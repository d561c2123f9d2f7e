"""A compiler that crashes or hangs costs one kernel."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tuner import planted
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops.compile_pool import Compiled, CompilePool, _available_bytes, num_processes
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.prefill import prefill_key
from tl_backend.testing.cases import make_problem

DEVICE = DeviceSpec.absent("c")
PROBLEM = make_problem(2, 1, 32, 16)


def key(fault: int, block_n: int = 16) -> KernelKey:
    config = replace(default_prefill_config(PROBLEM, DEVICE), threads=fault, block_n=block_n)
    return prefill_key(PROBLEM, config, DEVICE)


def outcomes(pool: CompilePool, count: int) -> dict[KernelKey, Compiled]:
    found = [pool.results.get(timeout=120) for _ in range(count)]
    assert len({outcome.key for outcome in found}) == count
    return {outcome.key: outcome for outcome in found}


def test_a_crash_and_a_hang_cost_one_kernel_each() -> None:
    fine = [key(planted.FINE, block_n) for block_n in (16, 32, 48, 64)]
    bad = [key(planted.CRASHES), key(planted.HANGS), key(planted.WRONG)]
    with CompilePool(processes=2, timeout_s=4, serve=planted.compile_with_faults) as pool:
        pool.add([bad[0], *fine[:2], bad[1], bad[2], *fine[2:]])
        found = outcomes(pool, 7)
    assert [found[k].error for k in fine] == [None] * 4
    assert found[bad[0]].error == "compiler process: killed by SIGKILL"
    assert "no kernel after" in str(found[bad[1]].error)
    assert found[bad[2]].error == "error: no such instruction"


def test_processes_are_kept_for_the_next_kernel() -> None:
    keys = [key(planted.FINE, 16 * (1 + n)) for n in range(12)]
    with CompilePool(processes=2, serve=planted.compile_with_faults) as pool:
        pool.add(keys)
        found = outcomes(pool, len(keys))
    assert len({outcome.artifact for outcome in found.values()}) <= 2


def test_processes_that_cannot_start_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tl_backend.ops.compile_pool.MAX_DEATHS", 2)
    with CompilePool(processes=1, serve=planted.dies_at_once) as pool:
        keys = [key(planted.FINE, 16 * (1 + n)) for n in range(12)]
        pool.add(keys)
        assert all(outcome.error for outcome in outcomes(pool, len(keys)).values())


def test_waiting_kernels_can_be_dropped_and_closing_ends_those_at_work() -> None:
    hang, waiting = key(planted.HANGS), key(planted.FINE)
    with CompilePool(processes=1, serve=planted.compile_with_faults) as pool:
        pool.add([hang])
        while pool._waiting:
            time.sleep(0.01)
        pool.add([waiting])
        assert pool.drop_waiting() == [waiting]
    assert pool.results.get_nowait().key == hang


def test_memory_bounds_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tl_backend.ops.compile_pool._available_bytes", lambda: 4 << 30)
    assert num_processes(8) == 2
    monkeypatch.setattr("tl_backend.ops.compile_pool._available_bytes", lambda: 1 << 20)
    assert num_processes(8) == 1
    assert num_processes() >= 1


def test_a_process_that_cannot_start_ends_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit of processes: the kernels have errors, and so have those that are asked for later."""

    def refuse(*_: object, **__: object) -> None:
        raise EnvironmentProblemError("process: no more of them")

    monkeypatch.setattr("tl_backend.ops.compile_pool.Child", refuse)
    with CompilePool(processes=2) as pool:
        for block_n in (16, 32):
            pool.add([key(planted.FINE, block_n)])
            assert pool.results.get(timeout=60).error == "not compiled: process: no more of them"
        monkeypatch.undo()
        monkeypatch.setattr(pool, "_serve", planted.compile_with_faults)
        pool.add([key(planted.FINE, 48)])
        assert pool.results.get(timeout=60).error is None


def test_a_pool_whose_thread_ends_answers_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("nobody expected this")

    monkeypatch.setattr("tl_backend.ops.compile_pool.Child", fail)
    with CompilePool(processes=2) as pool:
        for block_n in (16, 32):
            pool.add([key(planted.FINE, block_n)])
            error = pool.results.get(timeout=60).error
            assert error == "not compiled: RuntimeError: nobody expected this"


def test_files_that_were_read_take_no_memory_from_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A control group counts the weights of a model that were read as used, and gives them up when asked."""
    monkeypatch.setattr("tl_backend.ops.compile_pool.CONTROL_GROUP", str(tmp_path))
    (tmp_path / "memory.max").write_text(f"{3 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 30}\n")
    (tmp_path / "memory.stat").write_text(f"anon {1 << 20}\ninactive_file {2 << 20}\nactive_file 5\n")
    assert _available_bytes() == 2 << 20
