"""The layer: what it refuses at construction, and that what vLLM passes to it reaches the kernels.

Legend: L layers, B blocks, H query heads, HK kv heads, N tokens of a block, D head size, T query rows, R requests.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import KVCacheLayout

from tl_backend import ops
from tl_backend.errors import InvalidInputError, UnsupportedError
from tl_backend.ops.reference import paged_attention_reference, paged_cache_write_reference
from tl_backend.vllm_plugin.backend import FP8_SPELLINGS, TileLangBackend
from tl_backend.vllm_plugin.builder import TileLangMetadata
from tl_backend.vllm_plugin.impl import TileLangImpl
from tl_backend.vllm_plugin.layer import problem_of

H, HK, D, N, L, B = 6, 2, 32, 16, 2, 24
SCALE = 0.2
K_SCALE, V_SCALE = torch.tensor(0.013), torch.tensor(0.021)  # As vLLM has them: without a dimension.
LAYER = SimpleNamespace(_k_scale=K_SCALE, _v_scale=V_SCALE)
SINKS = torch.linspace(-1.0, 4.0, H)
SLOPES = [2.0**-i for i in range(1, H + 1)]
WINDOW = 21  # Neither a multiple of a page nor of a tile.
BATCHES = {
    "decode": ([1, 1, 1], [1, 17, 70]),
    "prefill": ([5, 37], [5, 90]),
    "mixed": ([1, 1, 9, 20], [33, 60, 50, 20]),
}


@pytest.fixture(autouse=True)
def float32_model():
    """VLLM sets the default dtype to the model's while it builds the model."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float32)


def make(**changes):
    """As ``Attention.__init__`` calls it: ten positional arguments, then the model's extras."""
    arguments = {
        "num_heads": H,
        "head_size": D,
        "scale": SCALE,
        "num_kv_heads": HK,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": AttentionType.DECODER,
        "kv_sharing_target_layer_name": None,
    }
    positional = [changes.pop(name, value) for name, value in arguments.items()]
    return TileLangImpl(*positional, **changes)


def test_attributes_that_vllm_reads():
    impl = make()
    assert (impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale) == (H, HK, D, SCALE)
    assert impl.kv_cache_dtype == "auto"
    assert make(num_kv_heads=None).num_kv_heads == H


@pytest.mark.parametrize(
    "changes", [{"logits_soft_cap": 0}, {"logits_soft_cap": 0.0}, {"sinks": None}, {"chunk_lookback": -1}]
)
def test_ways_to_say_not_used(changes):
    make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "nvfp4"}, "KV-cache dtype: got nvfp4; it must equal the query dtype, float32. Pass --kv-"),
        ({"kv_cache_dtype": "bfloat16"}, "KV-cache dtype: got bfloat16; it must equal the query dtype, float32. Pass"),
        ({"sliding_window": 0}, "sliding window: got 0; at least 1 key and at most 1073741824. Pass"),
        ({"logits_soft_cap": -50}, "logits soft cap: got -50; it must be positive and finite, 1e-30 to 10000."),
        ({"logits_soft_cap": math.inf}, "logits soft cap: got inf; it must be positive and finite, 1e-30 to 10000."),
        ({"logits_soft_cap": math.nan}, "logits soft cap: got nan; it must be positive and finite, 1e-30 to 10000."),
        ({"head_size": 272}, "head size: got 272; multiples of 16 from 32 to 256, and 512, are supported. Serve"),
        ({"head_size": 72}, "head size: got 72; multiples of 16 from 32 to 256, and 512, are supported. Serve"),
        ({"attn_type": "encoder"}, "attention type: got encoder; decoder, encoder_only, encoder_decoder are supported"),
        (
            {"chunk_lookback": 2},
            "attention argument chunk_lookback: got 2; the TileLang backend does not know it. Serve",
        ),
        (
            {"use_alibi_sqrt": True},
            "attention argument use_alibi_sqrt: got True; the TileLang backend does not know it. Serve",
        ),
    ],
    ids=lambda v: v.split(":")[0] if isinstance(v, str) else "",
)
def test_refusals_have_value_limit_and_remedy(changes, message):
    with pytest.raises(UnsupportedError) as caught:
        make(**changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 48, 64, 128, 256])
def test_a_bad_block_size_is_refused_before_the_model_loads(block_size):
    """CASES.md B14. On the CPU platform nothing else says so by name."""
    with set_current_vllm_config(VllmConfig(cache_config=CacheConfig(block_size=block_size))):
        if block_size % 16 == 0:
            make()
            return
        message = f"page size: got {block_size}; positive multiples of 16 .* Pass --block-size 16"
        with pytest.raises(UnsupportedError, match=message):
            make()


def test_head_counts_that_do_not_fit():
    with pytest.raises(InvalidInputError, match=r"head counts: got 6 q heads, 4 kv heads; .* multiple .*\. Check"):
        make(num_kv_heads=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_that_the_cpu_target_lacks(dtype):
    torch.set_default_dtype(dtype)
    with pytest.raises(UnsupportedError, match=rf"got {str(dtype)[6:]}; .*: float32\. Pass --dtype float32"):
        make()


def test_the_profiling_run_has_no_metadata():
    output = torch.full((3, H, D), torch.nan)
    result = make().forward(None, torch.randn(3, H, D), None, None, torch.tensor([]), None, output)
    assert result is output
    assert torch.equal(output, torch.zeros(3, H, D))


def test_quantized_output_is_refused():
    with pytest.raises(UnsupportedError, match="fused output quantization: got an output scale"):
        make().forward(None, None, None, None, None, object(), None, output_scale=torch.ones(1))


def cache_of_layer(layout, layer, stored_as=torch.float32):
    """As vLLM allocates it: one buffer in the layout's order, of which a layer gets its logical view. Poisoned.

    8-bit caches come as uint8.
    """
    extents = dict(enumerate((L, B, HK, N, 2 * D)))
    shape = [extents[axis] for axis in layout.stride_order]
    physical = torch.full(shape, torch.nan)
    if stored_as != torch.float32:
        physical = physical.to(stored_as).view(torch.uint8)
    return physical.permute([layout.stride_order.index(axis) for axis in range(5)])[layer]


def step(impl, kv_cache, query_lens, seq_lens, seed=0, stored_as=torch.float32, **features):
    """Run one step through cache write and attention, after filling the contexts; returns output and reference.

    ``features`` go to the reference.
    """
    gen = torch.Generator().manual_seed(seed)
    num_reqs, rows = len(query_lens), sum(query_lens)
    max_blocks = max(-(-s // N) for s in seq_lens)
    block_table = torch.full((num_reqs, max_blocks), -1, dtype=torch.int32)
    free = (torch.randperm(B - 1, generator=gen) + 1).tolist()  # Block 0 is vLLM's null block.
    for request, seq_len in enumerate(seq_lens):
        for i in range(-(-seq_len // N)):
            block_table[request, i] = free.pop()
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    # Padded as vLLM pads: query and key have more rows than tokens; slots of padding are -1.
    qkv = torch.randn(rows + 3, (H + 2 * HK) * D, generator=gen)
    query, key, value = (x.unflatten(-1, (-1, D)) for x in qkv.split([H * D, HK * D, HK * D], dim=-1))
    expected_cache = kv_cache.clone().view(stored_as)
    scales = {"k_scale": K_SCALE, "v_scale": V_SCALE} if stored_as != torch.float32 else {}

    def write(key, value, slots, writer=impl):
        writer.do_kv_cache_update(LAYER, key, value, kv_cache, slots)
        paged_cache_write_reference(key, value, expected_cache, slots, **scales)

    slots = []
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        positions = torch.arange(seq_len)
        all_slots = block_table[request, positions // N].long() * N + positions % N
        context = all_slots[: seq_len - query_len]
        write(*torch.randn(2, len(context), HK, D, generator=gen), context)
        slots.append(all_slots[seq_len - query_len :])
    if impl.kv_sharing_target_layer_name is None:
        write(key, value, torch.cat([*slots, torch.tensor([-1, -1])]))
    else:  # The layer that owns the cache has written.
        write(torch.randn_like(key), torch.randn_like(value), torch.cat(slots), writer=make())
    seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
    expected = paged_attention_reference(
        query, expected_cache, block_table, starts, seq_lens, softmax_scale=SCALE, **features, **scales
    )
    if impl.shape.window is not None:  # vLLM frees blocks that no query of the step sees: they become the null block.
        kv_cache[0] = torch.nan if stored_as == torch.float32 else 0x70
        for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens.tolist(), strict=True)):
            first_seen = max(0, seq_len - query_len - impl.shape.window + 1)
            block_table[request, : first_seen // N] = 0
    problem = problem_of(impl.shape, page_size=N)
    workspace = ops.AttentionWorkspace(problem, torch.device("cpu"), max_num_reqs=8, max_num_tokens=256)
    limits = {"max_seqlen_q": max(query_lens), "max_seqlen_k": int(seq_lens.max())}
    plan = ops.plan_attention(problem, starts, seq_lens, cu_seqlens_q_cpu=starts, workspace=workspace, **limits)
    metadata = TileLangMetadata(
        num_actual_tokens=rows,
        max_query_len=limits["max_seqlen_q"],
        query_start_loc=starts,
        max_seq_len=limits["max_seqlen_k"],
        seq_lens=seq_lens,
        block_table=block_table,
        slot_mapping=torch.cat(slots),
        plans={impl.shape: plan},
    )
    output = torch.full((rows + 3, H, D), torch.nan)
    assert impl.forward(LAYER, query, None, None, kv_cache, metadata, output=output) is output
    return output, expected


def relative_rms(actual, expected):
    return ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()


@pytest.mark.parametrize("layout", TileLangBackend.supported_kv_cache_layouts(), ids=lambda layout: layout.name)
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES.values(), ids=BATCHES)
def test_a_step_on_every_declared_layout(layout, query_lens, seq_lens):
    """Strided queries, padded rows, stale block-table tails, a cache that is NaN where nothing was written."""
    output, expected = step(make(), cache_of_layer(layout, 1), query_lens, seq_lens)
    error = relative_rms(output, expected)
    assert error <= 1e-5, f"{error} > 1e-5"
    assert torch.equal(output[sum(query_lens) :], torch.zeros(3, H, D))


def test_a_layer_that_shares_anothers_cache():
    """VLLM binds the other layer's cache to it and skips the write."""
    impl = make(kv_sharing_target_layer_name="model.layers.0.self_attn.attn")
    output, expected = step(impl, cache_of_layer(KVCacheLayout.LBHNC, 0), [1, 6], [20, 30])
    assert relative_rms(output, expected) <= 1e-5


def test_the_check_above_sees_a_wrong_scale_or_head():
    output, expected = step(make(), cache_of_layer(KVCacheLayout.LBHNC, 0), [1, 6], [20, 30])
    assert relative_rms(output.roll(1, dims=1), expected) > 1e-3
    output, expected = step(make(scale=1.1 * SCALE), cache_of_layer(KVCacheLayout.LBHNC, 0), [1, 6], [20, 30])
    assert relative_rms(output, expected) > 1e-3


def impl_and_reference(features):
    """The layer's arguments and the reference's for the same features."""
    names = {"window": "sliding_window", "soft_cap": "logits_soft_cap"}
    arguments = {names.get(name, name): value for name, value in features.items()}
    if "alibi_slopes" in features:
        features = features | {"alibi_slopes": torch.tensor(features["alibi_slopes"])}
    return make(**arguments), features


@pytest.mark.parametrize(
    "features",
    [
        {"window": WINDOW},
        {"window": 1},
        {"window": 1000},
        {"soft_cap": 2.0},
        {"sinks": SINKS},
        {"alibi_slopes": SLOPES},
        {"window": WINDOW, "soft_cap": 2.0, "sinks": SINKS, "alibi_slopes": SLOPES},
    ],
    ids=lambda features: " ".join(f"{name}{value if name == 'window' else ''}" for name, value in features.items()),
)
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES.values(), ids=BATCHES)
def test_a_step_with_each_feature(features, query_lens, seq_lens):
    """What the backend declares (window, sinks), and what no selector knows (soft cap, ALiBi)."""
    assert TileLangBackend.supports_sliding_window()
    assert TileLangBackend.supports_sink()
    impl, expected_features = impl_and_reference(features)
    output, expected = step(impl, cache_of_layer(KVCacheLayout.LBHNC, 1), query_lens, seq_lens, **expected_features)
    error = relative_rms(output[: sum(query_lens)], expected[: sum(query_lens)])
    assert error <= 1e-5, f"{error} > 1e-5"
    if features != {"window": 1000}:
        _, without = step(make(), cache_of_layer(KVCacheLayout.LBHNC, 1), query_lens, seq_lens)
        assert relative_rms(without, expected) > 1e-2


@pytest.mark.parametrize("e4m3", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("spelling", FP8_SPELLINGS)
@pytest.mark.parametrize("features", [{}, {"window": WINDOW, "soft_cap": 2.0, "sinks": SINKS}], ids=["plain", "all"])
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES.values(), ids=BATCHES)
def test_a_step_on_each_8_bit_cache(monkeypatch, e4m3, spelling, features, query_lens, seq_lens):
    """VLLM hands it over as uint8, and the scales as buffers of the layer."""
    monkeypatch.setattr(type(current_platform), "fp8_dtype", lambda *_: e4m3)
    stored_as = torch.float8_e5m2 if spelling == "fp8_e5m2" else e4m3
    impl = impl_and_reference(features | {"kv_cache_dtype": spelling})[0]
    kv_cache = cache_of_layer(KVCacheLayout.LBNHC, 1, stored_as)
    assert kv_cache.dtype == torch.uint8
    output, expected = step(impl, kv_cache, query_lens, seq_lens, stored_as=stored_as, **features)
    error = relative_rms(output, expected)
    assert error <= 1e-5, f"{error} > 1e-5"


@pytest.mark.parametrize("layout", TileLangBackend.supported_kv_cache_layouts(), ids=lambda layout: layout.name)
def test_an_8_bit_cache_on_every_declared_layout(layout):
    stored_as = torch.float8_e4m3fn
    kv_cache = cache_of_layer(layout, 1, stored_as)
    output, expected = step(make(kv_cache_dtype="fp8"), kv_cache, *BATCHES["mixed"], stored_as=stored_as)
    assert relative_rms(output, expected) <= 1e-5


def test_the_check_above_sees_wrong_scales(monkeypatch):
    """They are the layer's, read at each launch: calibration fills them in after construction."""
    impl, kv_cache = make(kv_cache_dtype="fp8"), cache_of_layer(KVCacheLayout.LBHNC, 1, torch.float8_e4m3fn)
    for scale in ("_k_scale", "_v_scale"):
        with monkeypatch.context() as patch:
            forward = impl.forward

            def wrong(layer, *rest, scale=scale, forward=forward, **named):
                return forward(SimpleNamespace(**vars(layer) | {scale: torch.tensor(0.03)}), *rest, **named)

            patch.setattr(impl, "forward", wrong)
            output, expected = step(impl, kv_cache, *BATCHES["mixed"], stored_as=torch.float8_e4m3fn)
        assert relative_rms(output, expected) > 1e-1, scale


def test_sinks_are_read_at_launch():
    """VLLM constructs the layer before it loads the weights, in place."""
    sinks = torch.full((H,), torch.nan)
    impl = make(sinks=sinks)
    sinks.copy_(SINKS)
    output, expected = step(impl, cache_of_layer(KVCacheLayout.LBHNC, 1), *BATCHES["mixed"], sinks=SINKS)
    assert relative_rms(output, expected) <= 1e-5


def test_slopes_come_back_when_vllm_reloads_weights():
    """CASES.md B17: sleep of level 2 discards what was allocated beside the weights, buffers of modules aside."""
    impl, features = impl_and_reference({"alibi_slopes": SLOPES})
    impl._slopes.fill_(torch.nan)
    impl.process_weights_after_loading(torch.float32)
    output, expected = step(impl, cache_of_layer(KVCacheLayout.LBHNC, 1), *BATCHES["mixed"], **features)
    assert relative_rms(output, expected) <= 1e-5
    make().process_weights_after_loading(torch.float32)
