"""The peer's arguments are those of vLLM's Triton attention: its kernel runs on them and answers right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tl_backend.measure import peers_vllm as module
from tl_backend.measure.peer import NotThereError
from tl_backend.measure.peers_vllm import (
    flash_attention_3_16_bit,
    flash_attention_3_arguments,
    makes_metadata,
    metadata_arguments,
    triton_arguments,
)
from tl_backend.measure.workload import Batch, Workload
from tl_backend.testing.cases import make_problem

ROOT = Path(__file__).parents[2]


def test_the_kernel_answers_right_with_every_feature() -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, str(Path(__file__).with_name("triton_child.py"))]
    env = {**os.environ, "PYTHONPATH": "."}
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    errors = json.loads(child.stdout.splitlines()[-1])
    assert len(errors) == 8
    assert max(errors.values()) < 1e-5, errors


def test_contiguous_keys_that_no_page_divides_are_refused() -> None:
    workload = Workload(name="a test", problem=make_problem(4, 2, 32, None), query_lens=(24,), seq_lens=(24,))
    batch = Batch(workload, torch.device("cpu"))
    with pytest.raises(NotThereError, match="pages are of 16 keys at least"):
        triton_arguments(batch, batch.new_out())


# The arguments in the schemas that FA3's library of vLLM 0.33 registers.
FWD = """
q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k
page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale
is_causal window_size_left window_size_right softcap is_rotary_interleaved scheduler_metadata num_splits pack_gqa
sm_margin s_aux cp_world_size cp_rank cp_tot_seqused_k
"""
METADATA = """
batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v qkv_dtype seqused_k cu_seqlens_q
cu_seqlens_k cu_seqlens_k_new seqused_q leftpad_k page_size max_seqlen_k_new is_causal window_size_left
window_size_right has_softcap num_splits pack_gqa sm_margin
"""


def batch_of(problem) -> Batch:
    workload = Workload(name="a test", problem=problem, query_lens=(20, 7), seq_lens=(20, 40))
    return Batch(workload, torch.device("cpu"))


def test_fa3_s_arguments_stand_where_its_schema_has_them() -> None:
    batch = batch_of(make_problem(4, 2, 32, 16, window=9, soft_cap=2.0, sinks_dtype="bfloat16"))
    out, metadata = batch.new_out(), torch.zeros(1)
    found = dict(zip(FWD.split(), flash_attention_3_arguments(batch, batch.store, out, metadata), strict=True))
    assert found["k"].shape == found["v"].shape == (5, 16, 2, 32)
    assert found["k"].data_ptr() != found["v"].data_ptr()
    given = {name: value for name, value in found.items() if value is not None}
    assert given["out"] is out
    assert given["scheduler_metadata"] is metadata
    assert given["s_aux"] is batch.extras["sinks"]
    assert given["seqused_k"] is batch.seq_lens
    assert given["page_table"] is batch.block_table
    scalars = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
    assert scalars == {
        "max_seqlen_q": 20, "max_seqlen_k": 40, "softmax_scale": 32**-0.5, "is_causal": True, "window_size_left": 8,
        "window_size_right": 0, "softcap": 2.0, "is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0,
        "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip


def test_fa3_s_metadata_is_asked_for_as_vllm_does_and_only_where_it_does() -> None:
    batch = batch_of(make_problem(4, 2, 32, 16))
    found = dict(zip(METADATA.split(), metadata_arguments(batch), strict=True))
    assert (found["seqused_k"], found["cu_seqlens_q"]) == (batch.seq_lens, batch.starts)
    assert {name: value for name, value in found.items() if isinstance(value, int)} == {
        "batch_size": 2, "max_seqlen_q": 20, "max_seqlen_k": 40, "num_heads": 4, "num_heads_k": 2, "headdim": 32,
        "headdim_v": 32, "page_size": 16, "max_seqlen_k_new": 0, "is_causal": True, "window_size_left": -1,
        "window_size_right": -1, "has_softcap": False, "num_splits": 0, "sm_margin": 0,
    }  # fmt: skip
    assert makes_metadata(batch)
    for features in ({"window": 9}, {"soft_cap": 2.0}, {"sinks_dtype": "bfloat16"}):
        assert not makes_metadata(batch_of(make_problem(4, 2, 32, 16, **features)))
    assert not makes_metadata(batch_of(make_problem(4, 2, 32, None)))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", None])
def test_fa3_reads_a_16_bit_copy_of_an_8_bit_cache(kv_dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = []
    monkeypatch.setattr(module, "_flash_attention_3", lambda batch, store, what: stores.append(store))
    batch = batch_of(make_problem(4, 2, 32, 16, kv_dtype=kv_dtype))
    flash_attention_3_16_bit(batch)
    if kv_dtype is None:
        assert stores[0] is batch.store
        return
    plain = Workload(name="16 bit", problem=make_problem(4, 2, 32, 16), query_lens=(20, 7), seq_lens=(20, 40))
    copy = Batch(plain, torch.device("cpu"))
    copy.store[:], copy.block_table, copy.q = stores[0], batch.block_table, batch.q
    torch.testing.assert_close(copy.reference(), batch.reference())
