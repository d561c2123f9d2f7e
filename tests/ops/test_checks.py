"""Bad input: one message each, with the value, the limit and the remedy."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, TLBackendError, UnsupportedError
from tl_backend.ops import AttentionWorkspace, paged_attention, paged_cache_write, plan_attention, unsupported_reason
from tl_backend.ops.checks import check_current_device, kernel_strides
from tl_backend.testing.cases import make_problem

CPU = torch.device("cpu")
H200 = DeviceSpec.absent("sm_90")


def good() -> dict[str, Any]:
    """A batch of two requests, 8 query heads, 2 kv heads, head size 64, page size 16."""
    return {
        "q": torch.zeros(5, 8, 64),
        "kv_cache": torch.zeros(4, 2, 16, 128),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32),
        "seq_lens": torch.tensor([2, 20], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 20,
    }


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


one = torch.ones(1)
MALFORMED = {
    "q of two dimensions": ({"q": torch.zeros(5, 512)}, r"q shape: got \[5, 512\]; \[T, H, D\]"),
    "q on another device": (
        {"q": torch.zeros(5, 8, 64, device="meta")},
        r"q device: got meta; .* on cpu.*q\.to\('cpu'\)",
    ),
    "q with a strided last dimension": ({"q": torch.zeros(5, 64, 8).transpose(1, 2)}, r"q strides: got \(512, 1, 8\)"),
    "head counts": ({"q": torch.zeros(5, 7, 64)}, r"head counts: got 7 q heads, 2 kv heads; .* multiple of kv heads"),
    "no kv head": ({"kv_cache": torch.zeros(4, 0, 16, 128)}, r"head counts: got 8 q heads, 0 kv heads"),
    "head sizes differ": ({"kv_cache": torch.zeros(4, 2, 16, 96)}, r"kv_cache shape: got \[4, 2, 16, 96\]; .*128"),
    "kv_cache of five dimensions": ({"kv_cache": torch.zeros(2, 4, 2, 16, 64)}, r"kv_cache shape: got"),
    "kv_cache with a strided last dimension": (
        {"kv_cache": torch.zeros(4, 2, 128, 16).transpose(2, 3)},
        r"kv_cache strides: got .* dense last dimension",
    ),
    "out of another shape": ({"out": torch.zeros(5, 8, 32)}, r"out shape: got \[5, 8, 32\]; .*\[5, 8, 64\]"),
    "out with fewer rows": ({"out": torch.zeros(4, 8, 64)}, r"out shape: got \[4, 8, 64\]"),
    "out on another device": ({"out": torch.zeros(5, 8, 64, device="meta")}, r"out device: got meta"),
    "block_table of int64": (
        {"block_table": torch.zeros(2, 3, dtype=torch.int64)},
        r"block_table: got int64 \[2, 3\]; int32 with 2 dimensions.*block_table\.to\(torch\.int32\)",
    ),
    "block_table of one dimension": ({"block_table": int32(0, 0)}, r"block_table: got int32 \[2\]"),
    "block_table with too few rows": (
        {"block_table": int32(0)[None]},
        r"block_table shape: got \[1, 1\]; .*\[2, 'any'\]",
    ),
    "block_table with too many rows": (
        {"block_table": torch.zeros(3, 3, dtype=torch.int32)},
        r"block_table shape: got \[3, 3\]",
    ),
    "block_table transposed": (
        {"block_table": torch.zeros(3, 2, dtype=torch.int32).T},
        r"block_table strides: got \(1, 2\).*block_table\.contiguous",
    ),
    "block_table on another device": (
        {"block_table": torch.zeros(2, 3, dtype=torch.int32, device="meta")},
        r"block_table device: got meta",
    ),
    "cu_seqlens_q of int64": ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, r"cu_seqlens_q: got int64 \[3\]"),
    "cu_seqlens_q too short": ({"cu_seqlens_q": int32(0, 5)}, r"cu_seqlens_q shape: got \[2\]; .*\[R \+ 1\] = \[3\]"),
    "cu_seqlens_q that starts late": ({"cu_seqlens_q": int32(1, 2, 5)}, r"cu_seqlens_q: got 1 \.\.\. 5.*start at 0"),
    "cu_seqlens_q that falls": ({"cu_seqlens_q": int32(0, 3, 2)}, r"cu_seqlens_q: .* shortest step -1"),
    "cu_seqlens_q past the rows of q": (
        {"cu_seqlens_q": int32(0, 2, 6)},
        r"cu_seqlens_q: got 0 \.\.\. 6.*the 5 rows",
    ),
    "seq_lens of int64": ({"seq_lens": torch.tensor([2, 20])}, r"seq_lens: got int64 \[2\]; int32 with 1 dimension"),
    "max_seqlen_q too small": (
        {"max_seqlen_q": 2},
        r"max_seqlen_q: got 2; the longest request has 3 tokens. Pass the longest length",
    ),
    "softmax_scale of zero": ({"softmax_scale": 0.0}, r"softmax_scale: got 0\.0; 1e-30 to 1e\+30. Pass D \*\* -0\.5"),
    "softmax_scale that float32 cannot hold": ({"softmax_scale": 1e38}, r"softmax_scale: got 1e\+38"),
    "a sequence longer than its block table": (
        {"seq_lens": int32(20, 4000)},
        r"seq_lens: got 20 \.\.\. 4000; 0 \.\.\. \d+, which \d+ blocks of 16 hold",
    ),
    "a sequence of negative length": ({"seq_lens": int32(20, -1)}, r"seq_lens: got -1 \.\.\. 20"),
    "no pieces": ({"num_splits": 0}, r"num_splits: got 0; at least 1"),
    "sinks of other heads": ({"sinks": torch.zeros(4)}, r"sinks shape: got \[4\]"),
    "slopes of float64": ({"alibi_slopes": torch.zeros(8).double()}, r"alibi_slopes: got float64 \[8\]; float32"),
    "log-sum-exps of other rows": ({"lse": torch.zeros(8, 4)}, r"lse shape: got \[8, 4\]"),
    "a scale without an 8-bit cache": ({"k_scale": one}, r"k_scale: got \[1\]; a cache of float32 has no scales"),
    "softmax_scale below zero": ({"softmax_scale": -0.125}, r"softmax_scale: got -0\.125"),
    "softmax_scale of NaN": ({"softmax_scale": math.nan}, r"softmax_scale: got nan"),
    "softmax_scale of infinity": ({"softmax_scale": math.inf}, r"softmax_scale: got inf"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed(what: str) -> None:
    changes, message = MALFORMED[what]
    with pytest.raises(InvalidInputError, match=message) as caught:
        paged_attention(**{**good(), **changes})
    assert_house_form(str(caught.value))


def with_head_dim(head_dim: int) -> dict[str, torch.Tensor]:
    return {"q": torch.zeros(5, 8, head_dim), "kv_cache": torch.zeros(4, 2, 16, 2 * head_dim)}


def with_page_size(page_size: int) -> dict[str, torch.Tensor]:
    return {"kv_cache": torch.zeros(4, 2, page_size, 128)}


def with_dtype(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"q": torch.zeros(5, 8, 64, dtype=dtype), "kv_cache": torch.zeros(4, 2, 16, 128, dtype=dtype)}


UNSUPPORTED = {
    **{
        f"head size {d}": (with_head_dim(d), rf"head size: got {d}; multiples of 16 from 32")
        for d in (16, 72, 120, 272)
    },
    **{f"page size {p}": (with_page_size(p), rf"page size: got {p}; .* multiples of 16") for p in (8, 24, 100)},
    "float16 on a CPU": (with_dtype(torch.float16), r"dtype on CPU: got float16; dtypes that run there: float32"),
    "bfloat16 on a CPU": (with_dtype(torch.bfloat16), r"dtype on CPU: got bfloat16"),
    "float64": (with_dtype(torch.float64), r"dtype: got float64; float16, bfloat16, float32 are supported"),
    "a cache of another dtype": (
        {"kv_cache": torch.zeros(4, 2, 16, 128, dtype=torch.float16)},
        r"KV-cache dtype: got float16; .* query dtype, float32",
    ),
    "an output of another dtype": (
        {"out": torch.zeros(5, 8, 64, dtype=torch.float16)},
        r"output dtype: got float16; .* query dtype, float32. Pass an output of that dtype",
    ),
    "kv_cache on another device": (
        {"kv_cache": torch.zeros(4, 2, 16, 128, device="meta")},
        r"device: got meta; cpu, cuda",
    ),
    "a window of no keys": ({"window": 0}, r"sliding window: got 0; at least 1 key"),
    "a window that int32 positions cannot be moved by": (
        {"window": 2**31 - 1},
        r"sliding window: got 2147483647; .* at most 1073741824\. Pass None",
    ),
    "sinks of integers": ({"sinks": torch.zeros(8, dtype=torch.int64)}, r"sinks dtype: got int64; float16, bfloat16"),
    "bfloat16 sinks on a CPU": (
        {"sinks": torch.zeros(8, dtype=torch.bfloat16)},
        r"sinks dtype on CPU: got bfloat16; .* Pass sinks\.float\(\)",
    ),
    "a soft cap whose last digit drowns the logits": ({"soft_cap": 1e6}, r"soft cap: got 1000000\.0; .* to 10000\."),
    "a soft cap that nothing divides by": ({"soft_cap": 1e-39}, r"soft cap: got 1e-39; .* 1e-30 to"),
    "a negative soft cap": ({"soft_cap": -50.0}, r"soft cap: got -50\.0; it must be positive"),
    "an infinite soft cap": ({"soft_cap": math.inf}, r"soft cap: got inf"),
    "causal a tensor": ({"causal": torch.ones(2, dtype=torch.bool)}, r"causal: got a tensor; one bool for the batch"),
    "q_scale": ({"q_scale": one}, r"q_scale: got \[1\]"),
    "out_scale": ({"out_scale": one}, r"out_scale: got \[1\]"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported(what: str) -> None:
    changes, message = UNSUPPORTED[what]
    with pytest.raises(UnsupportedError, match=message) as caught:
        paged_attention(**{**good(), **changes})
    assert_house_form(str(caught.value))


def test_the_good_batch_runs() -> None:
    assert not paged_attention(**good()).any()


def test_a_plan_has_chosen_the_pieces() -> None:
    batch = good()
    workspace = AttentionWorkspace(make_problem(8, 2, 64, 16), CPU, max_num_reqs=2, max_num_tokens=5)
    plan = plan_attention(
        workspace.problem,
        batch["cu_seqlens_q"],
        batch["seq_lens"],
        cu_seqlens_q_cpu=batch["cu_seqlens_q"],
        max_seqlen_q=3,
        max_seqlen_k=20,
        workspace=workspace,
    )
    with pytest.raises(
        InvalidInputError, match=r"num_splits: got 2; a plan has chosen already\. Pass num_splits to plan_att"
    ):
        paged_attention(**batch, plan=plan, num_splits=2)


WRITES = {
    "slots of int32": ({"slot_mapping": int32(0, 1, 2)}, r"slot_mapping: got int32 \[3\]; int64"),
    "slots of two dimensions": (
        {"slot_mapping": torch.zeros(1, 3, dtype=torch.int64)},
        r"slot_mapping: got int64 \[1, 3\]",
    ),
    "fewer keys than slots": ({"key": torch.zeros(2, 2, 64)}, r"key rows: got 2; slot_mapping has 3"),
    "fewer values than slots": ({"value": torch.zeros(2, 2, 64)}, r"value rows: got 2; slot_mapping has 3"),
    "other heads": ({"key": torch.zeros(3, 4, 64)}, r"key shape: got \[3, 4, 64\]; .*\['any', 2, 64\]"),
    "another head size": ({"value": torch.zeros(3, 2, 32)}, r"value shape: got \[3, 2, 32\]"),
    "another dtype": (
        {"key": torch.zeros(3, 2, 64, dtype=torch.float16)},
        r"key dtype: got float16; key has float16, the cache float32. Pass key and value in one dtype",
    ),
    "another device": ({"value": torch.zeros(3, 2, 64, device="meta")}, r"value device: got meta"),
    "a strided last dimension": ({"key": torch.zeros(3, 64, 2).transpose(1, 2)}, r"key strides: got \(128, 1, 2\)"),
    "a cache of five dimensions": (
        {"kv_cache": torch.zeros(2, 4, 2, 16, 64)},
        r"kv_cache shape: got \[2, 4, 2, 16, 64\]",
    ),
    "a page size": ({"kv_cache": torch.zeros(4, 2, 8, 128)}, r"page size: got 8; .*--block-size 16"),
    "a float16 cache on a CPU": (
        {name: torch.zeros(shape, dtype=torch.float16) for name, shape in
         (("key", (3, 2, 64)), ("value", (3, 2, 64)), ("kv_cache", (4, 2, 16, 128)))},
        r"dtype on CPU: got float16",
    ),
    "k_scale": ({"k_scale": one}, r"k_scale: got \[1\]; a cache of float32 has no scales"),
    "v_scale": ({"v_scale": one}, r"v_scale: got \[1\]; a cache of float32 has no scales"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRITES)
def test_bad_cache_write(what: str) -> None:
    changes, message = WRITES[what]
    arguments = {
        "key": torch.zeros(3, 2, 64),
        "value": torch.zeros(3, 2, 64),
        "kv_cache": torch.zeros(4, 2, 16, 128),
        "slot_mapping": torch.tensor([0, 1, 2]),
    }
    with pytest.raises(TLBackendError, match=message) as caught:
        paged_cache_write(**{**arguments, **changes})
    assert_house_form(str(caught.value))


def assert_house_form(message: str) -> None:
    # What: got VALUE; LIMIT. REMEDY.
    assert re.fullmatch(r"[^:]+: got .+; .+\. .+\.", message, re.DOTALL), message


def test_dtypes_of_devices() -> None:
    cpu = DeviceSpec.of(CPU)
    assert unsupported_reason(make_problem(8, 2, 64, 16), cpu) is None
    for dtype in ("float16", "bfloat16"):
        assert unsupported_reason(make_problem(8, 2, 64, 16, dtype=dtype), H200) is None
    assert "Pass --dtype bfloat16" in str(unsupported_reason(make_problem(8, 2, 64, 16), H200))


@pytest.mark.parametrize("extent", [1, 2])
def test_gpu_strides_are_vectors_of_16_bytes(extent: int) -> None:
    """A stride of 1028 float16 elements is no multiple of 16 bytes; where the extent is 1 it means nothing."""
    tensor = torch.zeros(4096, dtype=torch.float16).as_strided((extent, 8, 64), (1028, 64, 1))
    if extent == 1:
        assert kernel_strides("q", tensor, H200) == (64, 8)
    else:
        with pytest.raises(InvalidInputError, match=r"q strides: got \(1028, 64, 1\)"):
            kernel_strides("q", tensor, H200)


def test_gpu_strides_of_8_bit_caches_are_vectors_of_16_bytes_in_units_of_8() -> None:
    """TMA, which Hopper's prefill reads them with, takes no others."""
    cache = torch.zeros(8192, dtype=torch.uint8)
    assert kernel_strides("kv_cache", cache.as_strided((2, 1, 16, 64), (1040, 0, 64, 1)), H200) == (130, 128, 8)
    with pytest.raises(InvalidInputError, match="rows every 16 bytes"):
        kernel_strides("kv_cache", cache.as_strided((2, 1, 16, 64), (1032, 0, 64, 1)), H200)


def test_gpu_tensors_start_at_a_vector() -> None:
    tensor = torch.zeros(4096, dtype=torch.float16)
    offset = next(n for n in range(8) if (tensor.data_ptr() + 2 * n) % 16 == 0) + 4
    with pytest.raises(InvalidInputError, match=r"address % 16 = 8"):
        kernel_strides("q", tensor[offset : offset + 1024].view(2, 8, 64), H200)


def test_tensors_on_another_device_than_the_current_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES.md P7: kernels launch on the current device. vLLM gives each worker its own."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for index in (0, 1):
        tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
        if index == 0:
            check_current_device(tensor)
            continue
        message = r"device: got cuda:1; kernels launch on the current device, 0\. Call torch\.cuda\.set_device\(1\)"
        with pytest.raises(InvalidInputError, match=message):
            check_current_device(tensor)


def test_both_operations_ask_for_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for module in ("attention", "cache_write"):
        monkeypatch.setattr(f"tl_backend.ops.{module}.check_current_device", asked.append)
    arguments = good()
    paged_attention(**arguments)
    paged_cache_write(
        torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), arguments["kv_cache"], torch.zeros(1, dtype=torch.int64)
    )
    assert [tensor.shape for tensor in asked] == [arguments["q"].shape, arguments["kv_cache"].shape]
