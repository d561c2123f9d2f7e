"""The layer: what it refuses at construction, and that what vLLM passes to it reaches the kernels.

Legend: L layers, B blocks, H query heads, HK kv heads, N tokens of a block, D head size, T query rows, R requests.
"""

import pytest
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import KVCacheLayout

from tl_backend import ops
from tl_backend.errors import InvalidInputError, UnsupportedError
from tl_backend.ops.reference import paged_attention_reference
from tl_backend.vllm_plugin.backend import TileLangBackend
from tl_backend.vllm_plugin.builder import TileLangMetadata
from tl_backend.vllm_plugin.impl import TileLangImpl
from tl_backend.vllm_plugin.layer import problem_of

H, HK, D, N, L, B = 6, 2, 32, 16, 2, 24
SCALE = 0.2


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


@pytest.mark.parametrize("changes", [{"logits_soft_cap": 0.0}, {"sinks": None}, {"chunk_lookback": -1}])
def test_ways_to_say_not_used(changes):
    make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alibi_slopes": [0.5] * H}, "ALiBi: got True; no kernel has it yet. Serve"),
        ({"sliding_window": 128}, "sliding window: got 128; no kernel has it yet. Serve"),
        ({"logits_soft_cap": 50.0}, "logits soft cap: got 50.0; no kernel has it yet. Serve"),
        ({"sinks": torch.zeros(H)}, "attention sinks: got True; no kernel has it yet. Serve"),
        ({"kv_cache_dtype": "fp8"}, "KV-cache dtype: got fp8; it must equal the query dtype, float32. Pass --kv-cache"),
        ({"head_size": 72}, "head size: got 72; multiples of 16 from 32 to 256 are supported. Serve"),
        ({"attn_type": "encoder"}, "attention type: got encoder; decoder is supported. Serve"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type: got encoder_only; decoder is supported. Serve"),
        (
            {"chunk_lookback": 2},
            "attention argument chunk_lookback: got 2; the TileLang backend does not know it. Serve",
        ),
    ],
    ids=lambda v: v.split(":")[0] if isinstance(v, str) else "",
)
def test_refusals_have_value_limit_and_remedy(changes, message):
    with pytest.raises(UnsupportedError) as caught:
        make(**changes)
    assert str(caught.value).startswith(message)


def test_head_counts_that_do_not_fit():
    with pytest.raises(InvalidInputError, match=r"head counts: got 6 q heads, 4 kv heads; .* multiple .*\. Check"):
        make(num_kv_heads=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_that_the_cpu_target_lacks(dtype):
    torch.set_default_dtype(dtype)
    with pytest.raises(UnsupportedError, match=rf"got {str(dtype)[6:]}; float32 .*\. Pass --dtype float32"):
        make()


def test_the_profiling_run_has_no_metadata():
    output = torch.full((3, H, D), torch.nan)
    result = make().forward(None, torch.randn(3, H, D), None, None, torch.tensor([]), None, output)
    assert result is output
    assert torch.equal(output, torch.zeros(3, H, D))


def test_quantized_output_is_refused():
    with pytest.raises(UnsupportedError, match="fused output quantization: got an output scale"):
        make().forward(None, None, None, None, None, object(), None, output_scale=torch.ones(1))


def cache_of_layer(layout, layer):
    """As vLLM allocates it: one buffer in the layout's order, of which a layer gets its logical view. Poisoned."""
    extents = dict(enumerate((L, B, HK, N, 2 * D)))
    physical = torch.full([extents[axis] for axis in layout.stride_order], torch.nan)
    return physical.permute([layout.stride_order.index(axis) for axis in range(5)])[layer]


def step(impl, kv_cache, query_lens, seq_lens, seed=0):
    """Run one step through cache write and attention, after filling the contexts; returns output and reference."""
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
    slots = []
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        positions = torch.arange(seq_len)
        all_slots = block_table[request, positions // N].long() * N + positions % N
        context = all_slots[: seq_len - query_len]
        old = torch.randn(2, len(context), HK, D, generator=gen)
        impl.do_kv_cache_update(None, old[0], old[1], kv_cache, context)
        slots.append(all_slots[seq_len - query_len :])
    if impl.kv_sharing_target_layer_name is None:
        impl.do_kv_cache_update(None, key, value, kv_cache, torch.cat([*slots, torch.tensor([-1, -1])]))
    else:  # The layer that owns the cache has written.
        make().do_kv_cache_update(None, torch.randn_like(key), torch.randn_like(value), kv_cache, torch.cat(slots))
    seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
    problem = problem_of(impl.shape, dtype=torch.float32, page_size=N)
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
    assert impl.forward(None, query, None, None, kv_cache, metadata, output=output) is output
    return output, paged_attention_reference(query, kv_cache, block_table, starts, seq_lens, softmax_scale=SCALE)


def relative_rms(actual, expected):
    return ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()


@pytest.mark.parametrize("layout", TileLangBackend.supported_kv_cache_layouts(), ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1, 1, 1], [1, 17, 40]), ([5, 37], [5, 90]), ([1, 1, 9, 20], [33, 2, 50, 20])],
    ids=["decode", "prefill", "mixed"],
)
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
