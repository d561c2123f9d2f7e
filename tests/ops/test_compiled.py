"""Kernels are held in one place and compiled once, whatever asks for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tl_backend.configs.prefill import default_prefill_config
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops import compiled
from tl_backend.ops.compiled import KernelCache, KernelKey
from tl_backend.ops.prefill import prefill_key
from tl_backend.testing.cases import make_problem

DEVICE = DeviceSpec.of(torch.device("cpu"))
PROBLEM = make_problem(8, 2, 64, 16)
KEY = prefill_key(PROBLEM, default_prefill_config(PROBLEM, DEVICE), DEVICE)
THREADS = 8


def test_threads_that_ask_for_one_kernel_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    everyone_asks = threading.Barrier(THREADS)

    def compile_slowly(key: KernelKey):
        calls.append(key)
        # Long enough for the other threads to find no kernel yet; the outcome does not depend on it.
        threading.Event().wait(0.05)
        return None, None

    monkeypatch.setattr(compiled, "_compile", compile_slowly)
    monkeypatch.setattr(compiled.Launcher, "of", lambda *_, **__: object())
    cache = KernelCache()

    def ask(_):
        everyone_asks.wait()
        return cache.get(KEY)

    with ThreadPoolExecutor(THREADS) as pool:
        kernels = set(pool.map(ask, range(THREADS)))
    assert calls == [KEY]
    assert len(kernels) == 1
    assert cache.num_compiled == 1


def test_a_failed_compilation_is_tried_again_and_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(key):
        raise RuntimeError("first line\nTL999: no such instruction")

    cache = KernelCache()
    with monkeypatch.context() as patched:
        patched.setattr(compiled, "build_program", lambda key: None)
        import tilelang

        patched.setattr(tilelang, "compile", lambda *args, **kwargs: fail(args))
        with pytest.raises(
            EnvironmentProblemError, match="compiling prefill for CPU: got RuntimeError: first line / TL999"
        ) as caught:
            cache.get(KEY)
    assert "must compile for c" in str(caught.value)
    assert cache.num_compiled == 0
    assert cache.get(KEY)
    assert cache.num_compiled == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"num_q_heads": 4},
        {"num_kv_heads": 4},
        {"head_dim": 80, "head_dim_v": 80},
        {"page_size": 32},
        {"causal": False},
        {"kv_dtype": "float8_e5m2"},
        {"window": 100},
        {"soft_cap": 50.0},
        {"sinks_dtype": "float32"},
        {"has_alibi": True},
        {"returns_lse": True},
    ],
    ids=str,
)
def test_every_field_of_a_problem_is_in_its_key(changes) -> None:
    """CASES.md C9, A30: a key without a field hands out another problem's kernel."""
    from dataclasses import replace

    assert prefill_key(replace(PROBLEM, **changes), KEY.config, DEVICE) != KEY
    assert KEY._replace(kind="decode") != KEY
    assert KEY._replace(device=DeviceSpec.absent("sm_90")) != KEY
