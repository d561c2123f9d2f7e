"""What these tests share. None of them starts an engine."""

import functools
import os
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():  # Warnings are errors here, and torch has some for what vLLM imports.
    warnings.simplefilter("ignore")
    import vllm.v1.attention.backends.cpu_attn  # noqa: F401

from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention

from tests.vllm_plugin.steps import PAGE
from tl_backend.testing.checkpoint import write_checkpoint


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


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_checkpoint(
        tmp_path_factory.mktemp("llama"), num_q_heads=4, num_kv_heads=2, head_dim=32, max_position_embeddings=16384
    )


@pytest.fixture
def make_config(model, register, monkeypatch):
    """Makes whole vLLM configs, as the engine does; that leaves its marks in os.environ."""
    before = dict(os.environ)
    monkeypatch.setenv("TL_BACKEND_CPU", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def make(**changes):
        arguments = {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "block_size": PAGE,
            "enforce_eager": True,
            "attention_backend": "tilelang",
        }
        return EngineArgs(model=str(model), **arguments | changes).create_engine_config()

    yield make
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def config(make_config):
    return make_config()


@pytest.fixture
def add_layers():
    """Registers attention layers with a config, as a model does while it is built; returns the names of all.

    Each is (query heads, kv heads, head size), or these and more arguments.
    """

    def add(config, *shapes):
        with set_current_vllm_config(config):
            for heads, kv_heads, size, *rest in shapes:
                name = f"model.layers.{len(config.compilation_config.static_forward_context)}.self_attn.attn"
                more = rest[0] if rest else {}
                Attention(heads, size, size**-0.5, kv_heads, cache_config=config.cache_config, prefix=name, **more)
        return list(config.compilation_config.static_forward_context)

    return add


@pytest.fixture
def layers(config, add_layers):
    """As ``add_layers``, of ``config``."""
    return functools.partial(add_layers, config)
