"""Encoder-only and cross attention through the classes that vLLM derives from the backend's for such layers.

Legend: H query heads, HK kv heads, D head size, N tokens of a block.
"""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

from tl_backend.ops.reference import varlen_attention_reference
from tl_backend.testing.checkpoint import write_checkpoint
from tl_backend.testing.poison_judge import relative_rms
from tl_backend.vllm_plugin.backend import TileLangBackend

CPU = torch.device("cpu")
H, HK, D, N, SCALE = 4, 2, 32, 16, 0.25
SPEC = {"block_size": N, "num_kv_heads": HK, "head_size": D, "dtype": torch.float32}
LAYER = SimpleNamespace(kv_sharing_target_layer_name=None)
TOLERANCE = 1e-5


@pytest.fixture
def config(tmp_path, register, monkeypatch):
    before = dict(os.environ)
    monkeypatch.setenv("TL_BACKEND_CPU", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield EngineArgs(
        model=str(write_checkpoint(tmp_path / "llama", num_q_heads=H, num_kv_heads=HK, head_dim=D)),
        dtype="float32", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=256, block_size=N,
        enforce_eager=True, attention_backend="tilelang",
    ).create_engine_config()  # fmt: skip
    os.environ.clear()
    os.environ.update(before)


def made(backend, spec, attn_type, config, **features):
    """The builder and the implementation, as vLLM constructs them."""
    builder = backend.get_builder_cls()(spec, ["placeholder"], config, CPU)
    impl = backend.get_impl_cls()(
        H, D, SCALE, HK, None, features.get("window"), "auto", None, attn_type, None
    )  # fmt: skip
    return builder, impl


def starts_of(lens):
    return torch.tensor([0, *lens]).cumsum(0).int()


def common(query_lens, seq_lens, block_table, **more):
    starts = starts_of(query_lens)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=block_table,
        slot_mapping=torch.full((sum(query_lens),), -1),
        **more,
    )


def test_encoder_only_attention(config):
    """Every token sees its whole request, and no other; there is no cache."""
    lens = [5, 1, 40, 33]
    backend = create_encoder_only_attention_backend(TileLangBackend)
    builder, impl = made(backend, EncoderOnlyAttentionSpec(**SPEC), AttentionType.ENCODER_ONLY, config)
    metadata = builder.build(0, common(lens, lens, torch.zeros(len(lens), 1, dtype=torch.int32)))
    qkv = torch.randn(sum(lens) + 2, H + 2 * HK, D, generator=torch.Generator().manual_seed(0))
    query, key, value = qkv.split([H, HK, HK], dim=1)
    impl.do_kv_cache_update(LAYER, key, value, torch.empty(0), metadata.slot_mapping)
    output = impl.forward(LAYER, query, key, value, torch.empty(0), metadata, torch.full(query.shape, torch.nan))
    starts = starts_of(lens)
    wanted = varlen_attention_reference(query, key, value, starts, starts, softmax_scale=SCALE, causal=False)
    assert relative_rms(output, wanted) <= TOLERANCE
    causal = varlen_attention_reference(query, key, value, starts, starts, softmax_scale=SCALE)
    assert relative_rms(output, causal) > 1e-2


def test_cross_attention_in_its_first_step_and_in_the_next(config):
    """The first step writes the encoder's keys; in the next, only requests that are new do."""
    generator = torch.Generator().manual_seed(1)
    backend = create_cross_attention_backend(TileLangBackend)
    assert backend.forward_includes_kv_cache_update  # Of the derived class: vLLM then writes within forward.
    builder, impl = made(backend, CrossAttentionSpec(**SPEC), AttentionType.ENCODER_DECODER, config)
    encoder_lens = [37, 16, 50]
    block_table = torch.tensor([[7, 2, 9, 0], [4, 0, 0, 0], [1, 3, 5, 8]], dtype=torch.int32)
    cache = torch.full((10, HK, N, 2 * D), torch.nan)
    key, value = torch.randn(2, sum(encoder_lens), HK, D, generator=generator)

    def attend(query_lens, seq_lens, requests, key, value):
        lens = [encoder_lens[request] for request in requests]
        step = common(
            query_lens, seq_lens, block_table[requests],
            encoder_seq_lens=torch.tensor(lens, dtype=torch.int32), encoder_seq_lens_cpu=np.array(lens, dtype=np.int32),
        )  # fmt: skip
        query = torch.randn(sum(query_lens), H, D, generator=generator)
        output = torch.full(query.shape, torch.nan)
        impl.forward(LAYER, query, key, value, cache, builder.build(0, step), output)
        return query, output

    def wanted(query, query_lens, requests):
        rows = torch.cat([torch.arange(*starts_of(encoder_lens)[request : request + 2]) for request in requests])
        lens = [encoder_lens[request] for request in requests]
        return varlen_attention_reference(
            query, key[rows], value[rows], starts_of(query_lens), starts_of(lens), softmax_scale=SCALE, causal=False
        )

    first = sum(encoder_lens[:2])
    query, output = attend([4, 60], [4, 60], [0, 1], key[:first], value[:first])
    assert relative_rms(output, wanted(query, [4, 60], [0, 1])) <= TOLERANCE
    query, output = attend([1, 1, 3], [5, 61, 3], [0, 1, 2], key[first:], value[first:])
    assert relative_rms(output, wanted(query, [1, 1, 3], [0, 1, 2])) <= TOLERANCE
    query, output = attend([1, 1, 1], [6, 62, 4], [0, 1, 2], None, None)
    assert relative_rms(output, wanted(query, [1, 1, 1], [0, 1, 2])) <= TOLERANCE
