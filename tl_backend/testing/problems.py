"""The problems that sweeps run. Each list covers every head size, GQA ratio and page size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tl_backend.problem import SUPPORTED_HEAD_DIMS, AttentionProblem
from tl_backend.testing.cases import Case, make_problem
from tl_backend.testing.views import KV_LAYOUTS, OUT_VIEWS, Q_VIEWS


def name(problem: AttentionProblem) -> str:
    """Short, for test ids and tables: "28/4 D128 page16 float16 causal"."""
    mask = "causal" if problem.causal else "full"
    heads = f"{problem.num_q_heads}/{problem.num_kv_heads}"
    features = {
        problem.kv_dtype: problem.is_quantized,
        f"window {problem.window}": problem.window is not None,
        f"cap {problem.soft_cap}": problem.soft_cap is not None,
        "sinks": problem.sinks_dtype is not None,
        "alibi": problem.has_alibi,
        "lse": problem.returns_lse,
    }
    keys = f"page{problem.page_size}" if problem.is_paged else "contiguous"
    words = [heads, f"D{problem.head_dim}", keys, problem.dtype, mask]
    return " ".join(words + [feature for feature, there in features.items() if there])


# For the C target. Ratios above 8 have one kv head, as the models that have them do.
CPU_PROBLEMS = tuple(
    make_problem(heads, kv_heads, head_dim, page_size, causal=causal)
    for heads, kv_heads, head_dim, page_size, causal in (
        (71, 1, 32, 16, True),
        (24, 1, 48, 48, True),
        (17, 1, 64, 4352, True),
        (10, 2, 80, 96, True),
        (12, 1, 96, 128, True),
        (6, 2, 112, 272, True),
        (14, 2, 128, 16, True),
        (4, 2, 144, 544, True),
        (8, 1, 160, 48, True),
        (3, 3, 176, 64, True),
        (6, 1, 192, 64, True),
        (5, 1, 208, 128, False),
        (9, 1, 224, 96, False),
        (2, 1, 240, 272, True),
        (1, 1, 256, 16, False),
        (64, 1, 32, 544, False),
        (32, 1, 48, 128, True),
        (48, 1, 64, 16, False),
        (13, 1, 80, 48, False),
        (15, 1, 32, 64, True),
        (11, 1, 48, 32, False),
        (7, 1, 512, 48, True),
    )
)

# On a GPU: a kv head count for each ratio, so that 1 ... 8 kv heads occur and no problem has more than 72 query heads.
_GPU_RATIOS = ((1, 8), (2, 4), (3, 3), (5, 8), (7, 4), (8, 8), (12, 2), (24, 1), (71, 1))
_GPU_PAGES = (16, 32, 48, 64, 96, 128, 272, 544, 784, 4352)
_GPU_ROWS = 10


def gpu_problems() -> list[AttentionProblem]:
    """160 problems: every head size with every ratio, and with every page size."""
    problems = []
    for column, head_dim in enumerate(SUPPORTED_HEAD_DIMS):
        for row in range(_GPU_ROWS):
            ratio, kv_heads = _GPU_RATIOS[(7 * row + column) % len(_GPU_RATIOS)]
            problems.append(
                make_problem(
                    ratio * kv_heads,
                    kv_heads,
                    head_dim,
                    _GPU_PAGES[(column + 3 * row) % len(_GPU_PAGES)],
                    # Neither the parity nor the half of a row or column, which the other choices follow.
                    dtype=("float16", "bfloat16")[(row // 2 + column // 3) % 2],
                    causal=(row + column // 2) % 3 > 0,
                )
            )
    return problems


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a sweep runs for one problem.

    Attributes:
        cases: its batches.
        kinds: the kernels that these ask for: "prefill", "decode", "decode_split" (with its combine), and "cache_write"
            where that is checked too.
    """

    problem: AttentionProblem
    cases: tuple[Case, ...]
    kinds: tuple[str, ...]


_PREFILL = (((5, 40, 0, 300, 2), (9, 100, 7, 777, 1025)), ((129, 64, 1, 16), (129, 4161, 1, 17)), ((3, 200), (2, 200)))
_MIXED = (((1, 0, 1, 33, 1, 128), (900, 0, 1, 77, 66, 128)), ((1, 5, 1), (2049, 5, 300)))
_DECODE = (((1, 0, 1, 1, 1), (900, 9, 1, 0, 5000)), ((1,) * 9, (16, 17, 64, 127, 128, 129, 544, 2047, 4352)))
_SPLITS = (2, 3, 8, 5, 16)


def gpu_work() -> list[Work]:
    """The work of every GPU problem.

    Compilation is what takes time, so that a problem asks for one or two kernels of the four kinds, in turn.
    """
    base = [_work(index, problem) for index, problem in enumerate(gpu_problems())]
    return base + _feature_work() + _specialised_work() + _contiguous_work()


# What models combine (Mistral, Gemma 2, gpt-oss, MPT with its own ALiBi), and what none does.
_FEATURES: tuple[dict[str, Any], ...] = (
    {"window": 100},
    {"soft_cap": 2.0},
    {"sinks_dtype": "bfloat16"},
    {"has_alibi": True},
    {"returns_lse": True},
    {"kv_dtype": "float8_e4m3fn"},
    {"kv_dtype": "float8_e4m3fnuz"},
    {"kv_dtype": "float8_e5m2"},
    {"window": 128, "sinks_dtype": "bfloat16"},
    {"window": 1000, "soft_cap": 2.0},
    {"window": 100, "kv_dtype": "float8_e4m3fn", "sinks_dtype": "float32"},
    {"has_alibi": True, "soft_cap": 2.0, "returns_lse": True, "sinks_dtype": "bfloat16", "window": 77},
)
_FEATURE_SHAPES = (
    (32, 8, 128, 16),
    (28, 4, 128, 128),
    (64, 8, 64, 64),
    (16, 8, 256, 16),
    (12, 1, 80, 48),
    (6, 2, 96, 256),
)


def _feature_work() -> list[Work]:
    """Each set of features twice, on two shapes: once all kinds of requests together, once decodes in pieces."""
    found = []
    for index in range(2 * len(_FEATURES)):
        features = _FEATURES[index % len(_FEATURES)]
        shape = _FEATURE_SHAPES[(index + index // len(_FEATURES)) % len(_FEATURE_SHAPES)]
        dtype = ("bfloat16", "float16")[index // len(_FEATURES)]
        problem = make_problem(*shape, dtype=dtype, causal=index % 5 != 4, **features)
        lens, kinds, num_splits = (
            (_MIXED, ("prefill", "decode"), 1)
            if (index + index // len(_FEATURES)) % 2 == 0
            else (_DECODE, ("decode_split",), 3)
        )
        cases = tuple(Case(query_lens=q, seq_lens=k, kv_layout="NHD", num_splits=num_splits) for q, k in lens)
        found.append(
            Work(problem=problem, cases=cases, kinds=(*kinds, "cache_write") if problem.is_quantized else kinds)
        )
    return found


# What a family of its own for one head size must combine: each head size twice, with groups that fill its tiles and
# others, pages of every sort, and each feature.
_SPECIALISED = (
    make_problem(64, 8, 64, 16, dtype="bfloat16", window=128, sinks_dtype="bfloat16"),
    make_problem(7, 1, 64, 784, dtype="float16", causal=False, returns_lse=True),
    make_problem(32, 8, 96, 128, dtype="bfloat16", returns_lse=True),
    make_problem(10, 2, 96, 48, dtype="float16", window=1000, soft_cap=2.0),
    make_problem(32, 8, 128, 16, dtype="bfloat16"),
    make_problem(28, 4, 128, 64, dtype="float16", sinks_dtype="float32", returns_lse=True),
    make_problem(12, 1, 128, 256, dtype="bfloat16", soft_cap=2.0),
    make_problem(3, 3, 128, 48, dtype="float16", window=77),
    make_problem(8, 1, 160, 128, dtype="bfloat16", soft_cap=2.0, sinks_dtype="bfloat16", returns_lse=True),
    make_problem(12, 1, 160, 16, dtype="float16"),
    make_problem(16, 2, 192, 64, dtype="bfloat16", window=100, returns_lse=True),
    make_problem(5, 1, 192, 784, dtype="float16", causal=False),
    make_problem(8, 2, 224, 16, dtype="bfloat16", window=128, sinks_dtype="bfloat16"),
    make_problem(4, 4, 224, 256, dtype="float16", soft_cap=2.0),
    make_problem(16, 8, 256, 16, dtype="bfloat16", window=1000, soft_cap=2.0),
    make_problem(7, 1, 256, 128, dtype="float16", sinks_dtype="float32", returns_lse=True),
)
# None begins with a decode. Few tokens at many keys, which a prefill splits; one token behind a longer request.
_LONG = (((17,), (4161,)), ((9, 3, 0, 40), (2500, 3, 200, 2049)))
_BEHIND = (((5, 1, 0, 1, 300), (9, 700, 7, 1, 1025)), ((128, 127, 129, 1), (128, 255, 512, 64)))


def _specialised_work() -> list[Work]:
    """Prefills alone."""
    return [
        Work(
            problem=problem,
            cases=tuple(
                _case(index, number, query_lens, seq_lens)
                for number, (query_lens, seq_lens) in enumerate((*_LONG, *_BEHIND))
            ),
            kinds=("prefill",),
        )
        for index, problem in enumerate(_SPECIALISED)
    ]


_CONTIGUOUS = (
    make_problem(12, 12, 64, None, dtype="float16", causal=False),
    make_problem(32, 8, 128, None, dtype="bfloat16"),
    make_problem(28, 4, 128, None, dtype="float16", window=100, soft_cap=2.0),
    make_problem(10, 2, 80, None, dtype="bfloat16", causal=False, window=77),
    make_problem(16, 8, 256, None, dtype="float16", sinks_dtype="bfloat16", returns_lse=True),
    make_problem(71, 1, 48, None, dtype="bfloat16", causal=False, has_alibi=True),
    make_problem(8, 2, 512, None, dtype="bfloat16", causal=False, returns_lse=True),
)


def _contiguous_work() -> list[Work]:
    """Keys and values that lie in no cache."""
    cases = tuple(Case(query_lens=q, seq_lens=k, q_view="padded") for q, k in (*_PREFILL, *_MIXED[:1]))
    return [Work(problem=problem, cases=cases, kinds=("prefill",)) for problem in _CONTIGUOUS]


def cpu_work() -> list[Work]:
    """A handful for the C target, of every kind."""
    small = (make_problem(8, 2, 64, 16), make_problem(14, 2, 32, 48), make_problem(3, 3, 48, 272, causal=False))
    contiguous = make_problem(12, 12, 64, None, causal=False)
    return [
        *(_work(index, problem) for index, problem in zip((0, 13, 26), small, strict=True)),
        Work(problem=contiguous, cases=(Case(query_lens=(5, 40), seq_lens=(9, 100)),), kinds=("prefill",)),
    ]


def _case(
    index: int, number: int, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], num_splits: int | None = None
) -> Case:
    """The layouts take turns, by the problem's index and the case's number."""
    return Case(
        query_lens=query_lens,
        seq_lens=seq_lens,
        kv_layout=KV_LAYOUTS[(index + number) % len(KV_LAYOUTS)],
        q_view=Q_VIEWS[(index // 2 + number) % len(Q_VIEWS)],
        out_view=OUT_VIEWS[(index + number) % len(OUT_VIEWS)],
        num_splits=num_splits,
    )


def _work(index: int, problem: AttentionProblem) -> Work:
    lens, kinds, num_splits = (
        (_PREFILL, ("prefill",), None),
        (_MIXED, ("prefill", "decode"), 1),
        (_DECODE, ("decode_split",), _SPLITS[index % len(_SPLITS)]),
        (_DECODE, ("decode",), 1),
    )[(index % _GPU_ROWS // 2 + index // _GPU_ROWS) % 4]
    cases = tuple(
        _case(index, number, query_lens, seq_lens, num_splits) for number, (query_lens, seq_lens) in enumerate(lens)
    )
    return Work(problem=problem, cases=cases, kinds=(*kinds, "cache_write") if index % 13 == 0 else kinds)
