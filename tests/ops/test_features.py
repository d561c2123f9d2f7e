"""Window, soft cap, sinks, ALiBi, log-sum-exp and 8-bit caches, alone and in pairs, under the poison harness."""

import math
from itertools import combinations

import pytest
import torch

from tl_backend.problem import FLOAT8_DTYPES
from tl_backend.testing.cases import Case, make_problem
from tl_backend.testing.poison import check_attention
from tl_backend.testing.poison_writes import check_cache_write

CPU = torch.device("cpu")
FEATURES = {
    "window 100": {"window": 100},  # No multiple of a tile.
    "soft cap": {"soft_cap": 2.0},  # Below the logits, so that it bends them.
    "sinks": {"sinks_dtype": "float32"},
    "ALiBi": {"has_alibi": True},
    "e4m3fn": {"kv_dtype": "float8_e4m3fn"},
}
PAIRS = [*((name,) for name in FEATURES), *combinations(FEATURES, 2)]
# Head counts, head size, page size: gathered pages and whole tiles, ratios that are powers of two and not.
SHAPES = ((8, 2, 32, 16), (7, 1, 48, 32), (12, 1, 80, 48), (3, 3, 64, 64))
MIXED = Case(query_lens=(1, 0, 1, 1, 40, 7, 2), seq_lens=(300, 9, 1, 0, 100, 777, 3), kv_layout="NHD")
DECODES = Case(query_lens=(1, 1, 0, 1, 1), seq_lens=(300, 1, 9, 0, 129), num_splits=3)


@pytest.mark.parametrize("index", range(len(PAIRS)), ids=lambda index: " + ".join(PAIRS[index]))
def test_features(index: int) -> None:
    """The log-sum-exp is checked beside every second one: its kernels are others. Alone, without a causal mask too."""
    for causal in (True, False) if len(PAIRS[index]) == 1 else (True,):
        _check(index, causal)


def _check(index: int, causal: bool) -> None:
    features = {key: value for name in PAIRS[index] for key, value in FEATURES[name].items()}
    shape = SHAPES[(index + 2 * causal) % len(SHAPES)]
    problem = make_problem(*shape, causal=causal, returns_lse=index % 2 == 0, **features)
    check_attention(problem, MIXED, CPU)
    if causal:
        check_attention(problem, DECODES, CPU)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 4096])
def test_a_window_holds_exactly_its_keys(window: int) -> None:
    """CASES.md A27, A28: the edge counts from each token, not from a packed row, and the token itself is inside."""
    check_attention(make_problem(12, 1, 32, 16, window=window), MIXED, CPU)


def test_the_window_of_a_model_at_its_edge() -> None:
    """CASES.md A27: 12 query heads of a kv head, 4096 keys, contexts just below, at and beyond them."""
    seq_lens = (4095, 4096, 4097, 8191)
    problem = make_problem(12, 1, 32, 16, window=4096)
    check_attention(problem, Case(query_lens=(1, 1, 1, 1), seq_lens=seq_lens, num_splits=1), CPU)
    check_attention(problem, Case(query_lens=(3, 3, 3, 3), seq_lens=seq_lens), CPU)


@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("sink", [-math.inf, -1e4, 0.0, 10.0, 80.0])
def test_sinks_far_from_the_logits(sink: float, kv_dtype: str) -> None:
    """CASES.md A32: decoded whole and in pieces, and prefilled. A sink of 80 leaves outputs of 1e-32."""
    problem = make_problem(8, 2, 32, 16, sinks_dtype="float32", kv_dtype=kv_dtype)
    mixed = {"query_lens": (1, 0, 1, 1, 20, 2), "seq_lens": (300, 9, 1, 0, 100, 3), "sinks": (sink,)}
    for num_splits in (1, 3):
        check_attention(problem, Case(**mixed, num_splits=num_splits), CPU)


@pytest.mark.parametrize("kv_dtype", FLOAT8_DTYPES)
def test_8_bit_caches(kv_dtype: str) -> None:
    problem = make_problem(8, 2, 32, 32, kv_dtype=kv_dtype)
    check_attention(problem, MIXED, CPU)
    check_attention(problem, DECODES, CPU)
    check_cache_write(problem, [3, -1, 17, 64, 5 * 32, 2**40 + 17], CPU)


def test_a_soft_cap_is_stable_at_any_magnitude() -> None:
    case = Case(query_lens=(5, 1), seq_lens=(100, 33), softmax_scale=1e4)
    check_attention(make_problem(4, 2, 32, 16, soft_cap=30.0), case, CPU)
