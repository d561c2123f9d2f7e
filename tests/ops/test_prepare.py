"""Preparing a problem leaves nothing to compile."""

from __future__ import annotations

import torch

from tl_backend.device import DeviceSpec
from tl_backend.ops import paged_cache_write, prepare
from tl_backend.ops.compiled import KERNELS
from tl_backend.ops.prepare import required_kernels
from tl_backend.testing.cases import Case, make_problem
from tl_backend.testing.poison import check_attention

CPU = torch.device("cpu")


def test_nothing_compiles_after_prepare() -> None:
    problem = make_problem(6, 3, 32, 16)
    seen = []
    kinds = prepare(problem, CPU, on_progress=lambda *progress: seen.append(progress))
    assert kinds == ["prefill", "decode", "decode", "decode_combine", "cache_write"]
    assert seen == [*((done, 5, kind) for done, kind in enumerate(kinds)), (5, 5, "")]
    before = KERNELS.num_compiled
    for num_splits in (1, 4):
        check_attention(problem, Case(query_lens=(1, 1, 9), seq_lens=(1, 50, 9), num_splits=num_splits), CPU)
    paged_cache_write(
        torch.zeros(1, 3, 32), torch.zeros(1, 3, 32), torch.zeros(1, 3, 16, 64), torch.zeros(1, dtype=torch.int64)
    )
    assert KERNELS.num_compiled == before


def test_what_never_decodes_compiles_no_decode() -> None:
    device, paged, contiguous = DeviceSpec.of(CPU), make_problem(6, 3, 32, 16), make_problem(6, 3, 32, None)
    assert [key.kind for key in required_kernels(paged, device, batch_invariant=True)] == ["prefill", "cache_write"]
    assert [key.kind for key in required_kernels(contiguous, device)] == ["prefill"]


def test_problems_that_differ_only_in_queries_share_the_cache_write() -> None:
    device = DeviceSpec.of(CPU)
    one, other = (set(required_kernels(make_problem(heads, 2, 64, 16), device)) for heads in (4, 8))
    assert {key.kind for key in one & other} == {"cache_write"}
