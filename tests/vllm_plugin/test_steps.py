"""Steps through vLLM's own attention layer and our builder, without an engine: CASES.md (b)."""

import pytest
import torch

from tests.vllm_plugin.steps import Step
from tl_backend.testing.poison_judge import num_different, relative_rms

SHAPE = (4, 2, 32)
TOLERANCE = 1e-5


@pytest.fixture
def step(config, layers):
    return Step(config, layers(SHAPE), [1, 1, 6], [40, 3, 50])


def test_a_step_through_vllms_layer(step):
    assert relative_rms(step.run(), step.expected()) <= TOLERANCE


def test_the_check_above_sees_a_write_that_is_left_out(step, monkeypatch):
    monkeypatch.setattr(type(step.layers[0].impl), "do_kv_cache_update", lambda *args: None)
    assert not step.run().isfinite().all()


def padded_tokens(step):
    """Rows of a piecewise graph: more of them than tokens, counted as tokens."""
    return step.common(num_actual_tokens=16, slot_mapping=_padded(step.slots, 8))


def flat_tail(step):
    """Requests of a full graph: as many starts as it was captured for, the last ones equal, their lengths 0."""
    starts = torch.tensor([0, 1, 2, 8, 8]).int()
    return step.common(
        num_reqs=4,
        num_actual_tokens=16,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([40, 3, 50, 0]).int(),
        block_table_tensor=torch.cat([step.block_table, torch.full((1, step.block_table.shape[1]), 2**31 - 1).int()]),
        slot_mapping=_padded(step.slots, 8),
    )


def extra_rows(step):
    """Persistent buffers passed whole: rows past the requests hold what earlier steps left there."""
    return step.common(
        seq_lens=torch.tensor([40, 3, 50, 77, 10**6]).int(),
        seq_lens_cpu_upper_bound=torch.tensor([40, 3, 50, 77, 10**6]).int(),
        block_table_tensor=torch.cat([step.block_table, torch.full((2, step.block_table.shape[1]), -1).int()]),
        max_seq_len=256,
    )


def _padded(slots, count):
    return torch.cat([slots, torch.full((count,), -1)])


@pytest.mark.parametrize("shape", [padded_tokens, flat_tail, extra_rows], ids=lambda shape: shape.__name__)
def test_padded_counts_flat_tails_and_extra_rows_change_no_bit(step, shape):
    """CASES.md B3, B4: vLLM has passed padded and unpadded counts, before and after the metadata is built."""
    wanted = step.run()
    got = step.run(shape(step), padding=8)
    assert num_different(got[:8], wanted) == 0
    assert not got[8:].any()


def test_building_twice_is_building_once(step):
    """CASES.md B4. The workspace serves both: a plan that consumed what it was made from would show."""
    metadata = flat_tail(step)
    wanted = step.run(metadata, padding=8)
    step.builder.build(0, metadata)
    assert num_different(step.run(metadata, padding=8), wanted) == 0


def test_a_sharing_layer_reads_the_other_layers_cache_and_leaves_it_alone(config, layers):
    """CASES.md B16: keys and values that the sharing layer is handed are not those of its cache."""
    layers(SHAPE)
    target = {"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"}
    step = Step(config, layers((*SHAPE, target)), [1, 6], [40, 50])
    step.run(layer=0)
    before = step.layers[0].kv_cache.clone()
    assert relative_rms(step.run(layer=1), step.expected(layer=1)) <= TOLERANCE
    assert num_different(step.layers[0].kv_cache, before) == 0
    step.layers[1].kv_sharing_target_layer_name = None  # What it would be if vLLM did not skip the write.
    step.run(layer=1)
    assert num_different(step.layers[0].kv_cache, before) > 0


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("max_model_len", [9416, 17, 1])
def test_odd_lengths_of_the_longest_context(make_config, add_layers, max_model_len, block_size):
    """CASES.md B26: a context of that length, decoded and as the last chunk of a prefill."""
    config = make_config(max_model_len=max_model_len, block_size=block_size)
    chunk = min(max_model_len, 100)
    step = Step(config, add_layers(config, SHAPE), [1, chunk], [max_model_len, max_model_len])
    assert relative_rms(step.run(), step.expected()) <= TOLERANCE


@pytest.mark.parametrize("window", [4096, 40])
def test_a_window_longer_than_any_context(config, layers, window):
    """CASES.md B27: 40 is shorter, and must differ."""
    step = Step(config, layers((*SHAPE, {"per_layer_sliding_window": window})), [1, 6], [256, 200])
    out = step.run()
    assert (relative_rms(out, step.expected()) <= TOLERANCE) == (window > 256)
    assert relative_rms(out, step.expected(window=window)) <= TOLERANCE
