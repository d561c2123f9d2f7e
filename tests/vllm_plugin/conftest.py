"""What these tests share. None of them starts an engine."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():  # Warnings are errors here, and torch has some for what vLLM imports.
    warnings.simplefilter("ignore")
    import vllm.v1.attention.backends.cpu_attn  # noqa: F401


@pytest.fixture
def register(monkeypatch):
    """The entry point's module, with nothing said yet and no TL_BACKEND_* set. Leaves the registry as it should be."""
    from tl_backend.vllm_plugin import register

    for name in ("TL_BACKEND_CPU", "TL_BACKEND_LAUNCH_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(register, "_said", set())
    monkeypatch.setattr(register, "_is_child", False)
    register.register()
    yield register
    monkeypatch.undo()
    register.register()


@pytest.fixture
def run_config():
    """A vLLM config with everything off that the backend refuses, as far as ``refuse_run`` reads it."""
    return SimpleNamespace(
        model_config=SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        attention_config=SimpleNamespace(use_non_causal=False),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        kv_transfer_config=None,
        speculative_config=None,
    )
