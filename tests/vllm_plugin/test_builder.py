"""The builder: problems from the layers, everything compiled at construction, and a plan a step."""

import logging
from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from tests.vllm_plugin.steps import PAGE, common
from tl_backend import ops
from tl_backend.errors import UnsupportedError
from tl_backend.ops.prepare import Prepared
from tl_backend.vllm_plugin import kernels
from tl_backend.vllm_plugin.builder import TileLangMetadataBuilder
from tl_backend.vllm_plugin.layer import LayerShape, refuse_run

CPU = torch.device("cpu")


SPEC = {"block_size": PAGE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def spec(**changes):
    return FullAttentionSpec(**SPEC | changes)


def window_spec(**changes):
    return SlidingWindowSpec(**SPEC | {"sliding_window": 64} | changes)


@pytest.fixture
def prepared(monkeypatch):
    """The problems that were prepared, without compiling."""
    seen = []

    def prepare(problems, device, *, batch_invariant, processes, on_progress):
        seen.extend(problems)
        assert processes >= 1
        on_progress(0, 1, "")
        on_progress(1, 1, "prefill")
        return Prepared(1, 0, 0.1)

    monkeypatch.setattr(ops, "prepare", prepare)
    return seen


def test_one_problem_for_equal_layers(config, layers, prepared):
    TileLangMetadataBuilder(spec(), layers((4, 2, 32), (4, 2, 32)), config, CPU)
    (problem,) = prepared
    assert (problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.page_size) == (4, 2, 32, PAGE)
    assert problem.dtype == problem.kv_dtype == problem.out_dtype == "float32"
    assert problem.causal


def test_problems_come_from_the_layers_not_the_group(config, layers, prepared):
    names = layers((4, 2, 32), (8, 2, 32))
    builder = TileLangMetadataBuilder(spec(), names, config, CPU)
    assert [p.num_q_heads for p in prepared] == [4, 8]
    impls = [config.compilation_config.static_forward_context[name].impl for name in names]
    plans = builder.build(0, common([1, 5], [9, 5])).plans
    assert [plans[impl.shape].problem for impl in impls] == prepared


def test_names_that_are_not_registered_take_the_specs_problem(config, prepared):
    """VLLM's own backend tests pass "placeholder"."""
    builder = TileLangMetadataBuilder(spec(num_kv_heads=2, head_size=64), ["placeholder"], config, CPU)
    (problem,) = prepared
    assert (problem.num_q_heads, problem.num_kv_heads, problem.head_dim) == (4, 2, 64)
    shape = LayerShape(4, 2, 64, dtype="float32", kv_dtype="float32")
    assert list(builder.build(0, common([1], [3])).plans) == [shape]


@pytest.mark.parametrize("kv_spec", [window_spec(), spec(sliding_window=64)], ids=lambda s: type(s).__name__)
def test_a_name_that_is_not_registered_takes_the_specs_window(config, prepared, kv_spec):
    builder = TileLangMetadataBuilder(kv_spec, ["placeholder"], config, CPU)
    (problem,) = prepared
    assert problem.window == 64
    (plan,) = builder.build(0, common([1, 5], [100, 90])).plans.values()
    assert plan.problem == problem


def test_a_name_that_is_not_registered_takes_the_configs_cache_dtype(config, prepared):
    config.cache_config.cache_dtype = "fp8_e5m2"
    TileLangMetadataBuilder(spec(dtype=torch.uint8), ["placeholder"], config, CPU)
    assert [problem.kv_dtype for problem in prepared] == ["float8_e5m2"]
    TileLangMetadataBuilder(EncoderOnlyAttentionSpec(**SPEC), ["placeholder"], config, CPU)
    assert prepared[-1].kv_dtype == "float32"  # It has no cache.


def test_layers_of_a_sliding_window_group(config, layers, prepared):
    """The spec of a group of equal windows, as vLLM's hybrid cache manager makes them."""
    names = layers(*[(4, 2, 32, {"per_layer_sliding_window": 64})] * 2)
    specs = [layer.get_kv_cache_spec(config) for layer in config.compilation_config.static_forward_context.values()]
    assert {type(layer_spec) for layer_spec in specs} == {SlidingWindowSpec}
    TileLangMetadataBuilder(window_spec(), names, config, CPU)
    assert [problem.window for problem in prepared] == [64]


def test_layers_of_different_windows_and_caps_in_one_group(config, layers, prepared):
    """Without that manager a full-attention spec holds all layers, and the longest window."""
    features = [{}, {"per_layer_sliding_window": 64}, {"per_layer_sliding_window": 40}, {"logits_soft_cap": 5.0}]
    names = layers(*[(4, 2, 32, feature) for feature in features], (4, 2, 32))
    builder = TileLangMetadataBuilder(spec(sliding_window=64), names, config, CPU)
    assert [(problem.window, problem.soft_cap) for problem in prepared] == [
        (None, None),
        (64, None),
        (40, None),
        (None, 5.0),
    ]
    impls = [config.compilation_config.static_forward_context[name].impl for name in names]
    plans = builder.build(0, common([1, 5], [100, 90])).plans
    assert [plans[impl.shape].problem for impl in impls] == [*prepared, prepared[0]]


def test_a_layer_with_another_value_head_size_is_refused(config, layers, prepared):
    names = layers((4, 2, 32, {"head_size_v": 64}))
    with pytest.raises(UnsupportedError, match="value head size: got 64; it must equal the key head size, 32"):
        TileLangMetadataBuilder(spec(), names, config, CPU)


def test_everything_is_compiled_at_construction_with_a_progress_bar(
    config, layers, monkeypatch, tmp_path, fresh_kernels, capsys
):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    monkeypatch.setattr(kernels.logger, "handlers", [handler])
    monkeypatch.setenv("TL_BACKEND_CACHE_DIR", str(tmp_path))
    builder = TileLangMetadataBuilder(spec(), layers((4, 2, 32)), config, CPU)
    assert messages[0].startswith("TileLang kernels: 5 compiled, 0 from the kernel cache")
    assert "Compiling TileLang kernels: 100%" in capsys.readouterr().err
    compiled = fresh_kernels.num_compiled
    assert compiled == 0  # By processes of their own.
    for query_lens in ([1, 1], [1, 40], [64, 64]):
        builder.build(0, common(query_lens, [64, 64]))
    builder.build(0, common([1], [256]))  # One request with a long context: the split decode.
    assert fresh_kernels.num_compiled == compiled


def test_build_passes_the_step_on(config, layers, prepared):
    step = common([1, 1, 7], [5, 6, 7])
    metadata = TileLangMetadataBuilder(spec(), layers((4, 2, 32)), config, CPU).build(0, step)
    assert metadata.query_start_loc is step.query_start_loc
    assert metadata.seq_lens is step.seq_lens
    assert metadata.block_table is step.block_table_tensor
    assert metadata.slot_mapping is step.slot_mapping
    assert (metadata.num_actual_tokens, metadata.max_query_len, metadata.max_seq_len) == (9, 7, 7)
    metadata.added_by_a_wrapper = True  # vLLM's wrappers do.


def test_the_largest_step_of_the_scheduler_fits(config, layers, prepared):
    builder = TileLangMetadataBuilder(spec(), layers((4, 2, 32)), config, CPU)
    builder.build(0, common([1, 1, 1, 125], [256] * 4))


@pytest.mark.parametrize("causal", [False, torch.tensor([True, True])], ids=["no", "by request"])
def test_steps_that_are_not_causal_are_refused(config, layers, prepared, causal):
    builder = TileLangMetadataBuilder(spec(), layers((4, 2, 32)), config, CPU)
    with pytest.raises(UnsupportedError, match=r"causal: got .*; this group's layers are causal\. Serve"):
        builder.build(0, common([1, 3], [2, 3], causal=causal))


@pytest.mark.parametrize(
    ("kv_spec", "message"),
    [
        (spec(head_size_v=64), "value head size: got 64; it must equal the key head size, 32. Serve"),
        (spec(block_size=24), "page size: got 24; positive multiples of 16 are supported. Pass --block-size 16"),
        (spec(attention_chunk_size=64), "KV-cache spec's attention_chunk_size: got 64; no kernel has it yet. Serve"),
        (spec(non_causal=True), "KV-cache spec's non_causal: got True; no kernel has it yet. Serve"),
        (spec(head_size=272), "head size: got 272; multiples of 16 from 32 to 256, and 512, are supported. Serve"),
        (
            ChunkedLocalAttentionSpec(**SPEC, attention_chunk_size=64),
            "KV-cache spec: got ChunkedLocalAttentionSpec; FullAttentionSpec, SlidingWindowSpec, CrossAttentionSpec, ",
        ),
        (SinkFullAttentionSpec(**SPEC, sink_len=4), "KV-cache spec: got SinkFullAttentionSpec; FullAttentionSpec, "),
        (MLAAttentionSpec(**SPEC), "KV-cache spec: got MLAAttentionSpec; FullAttentionSpec, "),
    ],
    ids=lambda v: v.split(":")[0] if isinstance(v, str) else "",
)
def test_caches_that_no_kernel_serves_are_refused(config, prepared, kv_spec, message):
    with pytest.raises(UnsupportedError) as caught:
        TileLangMetadataBuilder(kv_spec, ["placeholder"], config, CPU)
    assert str(caught.value).startswith(message)


RUN_FEATURES = {
    "attention_config.use_non_causal: got True; only False is supported. Serve": lambda c: setattr(
        c.attention_config, "use_non_causal", True
    ),
    "bidirectional attention within images: got True; only False is supported. Pass --limit-mm-per-prompt": lambda c: (
        setattr(c.model_config, "is_mm_prefix_lm", True)
    ),
    "reference sliding window: got 128; only None is supported. Serve": lambda c: setattr(
        c.model_config, "rswa_window", 128
    ),
    "--kv-sharing-fast-prefill: got True; only False is supported. Leave it unset.": lambda c: setattr(
        c.cache_config, "kv_sharing_fast_prefill", True
    ),
    "--decode-context-parallel-size: got 2; only 1 is supported. Leave it unset.": lambda c: setattr(
        c.parallel_config, "decode_context_parallel_size", 2
    ),
    "--prefill-context-parallel-size: got 2; only 1 is supported. Leave it unset.": lambda c: setattr(
        c.parallel_config, "prefill_context_parallel_size", 2
    ),
    "--kv-transfer-config: got True; only False is supported. Leave it unset.": lambda c: setattr(
        c, "kv_transfer_config", SimpleNamespace(is_kv_transfer_instance=True)
    ),
    "adaptive verification: got True; only False is supported. Set": lambda c: setattr(
        c, "speculative_config", SimpleNamespace(enable_adaptive_verification=True)
    ),
}


@pytest.mark.parametrize(("message", "switch_on"), RUN_FEATURES.items(), ids=lambda v: str(v).split(":", maxsplit=1)[0])
def test_features_of_the_run_are_refused_by_name(run_config, message, switch_on):
    refuse_run(run_config)
    switch_on(run_config)
    with pytest.raises(UnsupportedError) as caught:
        refuse_run(run_config)
    assert str(caught.value).startswith(message)


def test_batch_invariance_sends_decodes_through_the_prefill(config, layers, prepared, monkeypatch):
    names = layers((4, 2, 32))
    (plan,) = TileLangMetadataBuilder(spec(), names, config, CPU).build(0, common([1, 1], [60, 9])).plans.values()
    assert plan.prefill is None
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    (plan,) = TileLangMetadataBuilder(spec(), names, config, CPU).build(0, common([1, 1], [60, 9])).plans.values()
    assert plan.decode is None
    assert plan.prefill is not None


@pytest.mark.parametrize(
    ("kv_spec", "is_paged"), [(CrossAttentionSpec(**SPEC), True), (EncoderOnlyAttentionSpec(**SPEC), False)]
)
def test_layers_that_are_not_causal(config, prepared, kv_spec, is_paged):
    builder = TileLangMetadataBuilder(kv_spec, ["placeholder"], config, CPU)
    assert [(problem.causal, problem.is_paged) for problem in prepared] == [(False, is_paged)]
    builder.build(0, common([1, 3], [2, 3], causal=False))
    with pytest.raises(UnsupportedError, match="causal: got True; this group's layers are not causal"):
        builder.build(0, common([1, 3], [2, 3]))


def test_a_real_config_is_read_as_the_stand_in_is(config):
    refuse_run(config)
