"""Random batches for two families of one kernel, drawn by seed and number: the same on every machine.

Each is drawn by a recipe, a sort of batch in which prefills have gone wrong, for one of the problems in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import Case, Tail, make_problem
from tl_backend.testing.views import KV_LAYOUTS, OUT_VIEWS, Q_VIEWS, page_size_of

Lens = list[tuple[int, int]]  # Query tokens and keys of each request.

FP16, BF16 = "float16", "bfloat16"
# Every head size of the family with pages that hold tiles, that tiles hold, and neither; each feature more than once.
PROBLEMS = (
    make_problem(4, 4, 64, 16, dtype=BF16),
    make_problem(16, 2, 64, 128, dtype=BF16, window=128, sinks_dtype=BF16),
    make_problem(5, 1, 64, 784, dtype=FP16, soft_cap=2.0),
    make_problem(8, 2, 64, 64, dtype=FP16, window=100, sinks_dtype="float32", returns_lse=True),
    make_problem(12, 1, 96, 48, dtype=FP16),
    make_problem(8, 2, 96, 128, dtype=BF16, returns_lse=True),
    make_problem(7, 1, 96, 16, dtype=BF16, window=300),
    make_problem(8, 2, 128, 16, dtype=BF16),
    make_problem(8, 2, 128, 64, dtype=FP16, returns_lse=True),
    make_problem(16, 2, 128, 128, dtype=BF16),
    make_problem(14, 2, 128, 16, dtype=FP16),
    make_problem(10, 2, 128, 256, dtype=BF16, soft_cap=2.0),
    make_problem(3, 3, 128, 784, dtype=FP16, causal=False),
    make_problem(12, 1, 128, 48, dtype=BF16, window=1000, returns_lse=True),
    make_problem(8, 2, 128, 16, dtype=BF16, causal=False, sinks_dtype=BF16, returns_lse=True),
    make_problem(8, 1, 160, 64, dtype=BF16),
    make_problem(5, 1, 160, 16, dtype=FP16, soft_cap=2.0, returns_lse=True),
    make_problem(4, 1, 192, 128, dtype=BF16),
    make_problem(14, 2, 192, 16, dtype=FP16, window=77),
    make_problem(8, 2, 224, 48, dtype=BF16),
    make_problem(7, 1, 224, 256, dtype=FP16, returns_lse=True),
    make_problem(16, 4, 256, 16, dtype=BF16, soft_cap=2.0),
    make_problem(4, 4, 256, 64, dtype=FP16),
    make_problem(12, 1, 256, 128, dtype=BF16, window=512, soft_cap=2.0, sinks_dtype="float32", returns_lse=True),
)
# For a dry run on the C target.
CPU_PROBLEMS = (
    make_problem(4, 2, 32, 16),
    make_problem(5, 1, 48, 48, window=20, sinks_dtype="float32", returns_lse=True),
    make_problem(3, 3, 32, 64, causal=False),
)
MAX_TOKENS, MAX_REQUESTS = 2048, 48
MAX_KEYS = 20_000  # Of a batch, so that 2000 take minutes.
MAX_SLACK = 700


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One batch.

    Attributes:
        seed: of the tensors' values.
        recipe: which of ``RECIPES`` drew the lengths.
        batch_invariant: of the workspace, which then sends one-token requests to the prefill; a case whose first
            requests would be decoded has it.
        slack: keys that the host's bounds have too many for each request; None where the host has no bounds.
        tail: of the block table, as in ``Batch.poison``.
        captured: the launch is captured into a graph, and replayed with fewer keys, too.
    """

    number: int
    seed: int
    problem: AttentionProblem
    recipe: str
    case: Case
    batch_invariant: bool
    slack: tuple[int, ...] | None
    tail: Tail
    captured: bool


@dataclass(frozen=True, kw_only=True)
class Edges:
    """What lengths go wrong at. Attributes: keys, tokens: of a tile; page: tokens of a page."""

    keys: int
    tokens: int
    page: int


def draw(seed: int, number: int, problem: AttentionProblem, *, keys: int, tokens: int) -> Drawn:
    """The batch of this number.

    Args:
        keys, tokens: of a tile of the family under test.
    """
    random = Random(f"{seed} {number}")  # noqa: S311
    recipe = random.choice(list(RECIPES))
    lens = RECIPES[recipe](random, Edges(keys=keys, tokens=tokens, page=page_size_of(problem)))
    lens = _limited(lens)
    if not any(q for q, _ in lens):
        lens[-1] = (1, max(1, lens[-1][1]))
    case = Case(
        query_lens=tuple(q for q, _ in lens),
        seq_lens=tuple(k for _, k in lens),
        kv_layout=random.choice(("NHD", *KV_LAYOUTS)),  # vLLM's.
        q_view=random.choice(("fused", "fused", *Q_VIEWS)),
        out_view=random.choice(OUT_VIEWS),
        padding_rows=random.choice((0, 0, 1, 5)),
        softmax_scale=random.choice((None, None, None, 0.02)),
    )
    slack = random.choice((None, 0, 1, MAX_SLACK))
    return Drawn(
        number=number,
        seed=random.randrange(2**31),
        problem=problem,
        recipe=recipe,
        case=case,
        batch_invariant=case.has_decode or not case.has_prefill or random.random() < 0.25,
        slack=None if slack is None else tuple(random.randint(0, slack) for _ in lens),
        tail=random.choice(("stale", -1, 2**31 - 1)),
        captured=random.random() < 0.15,
    )


def shortened(drawn: Drawn) -> list[int]:
    """Keys of each request for a replay: no more than the batch has, and as many as its queries."""
    random = Random(f"{drawn.seed} shortened")  # noqa: S311
    lens = zip(drawn.case.query_lens, drawn.case.seq_lens, strict=True)
    return [random.choice((k, random.randint(q, k))) if q < k else k for q, k in lens]


def _spread(random: Random, low: int, high: int) -> int:
    """Small numbers as often as large ones."""
    return round(math.exp(random.uniform(math.log(low), math.log(high))))


def _ragged(random: Random, edges: Edges) -> Lens:
    lens = []
    for _ in range(random.randint(2, 10)):
        query = random.choice((0, 1, *[_spread(random, 2, 400) for _ in range(4)]))
        context = random.choice((0, *[_spread(random, 1, 3000) for _ in range(2)]))
        lens.append((query, query + context))
    return lens


def _empty(random: Random, edges: Edges) -> Lens:
    """Requests without queries around few that have some; some have no keys either."""
    lens = [(0, random.choice((0, _spread(random, 1, 500)))) for _ in range(random.randint(5, 30))]
    for _ in range(random.randint(1, 3)):
        query = _spread(random, 1, 150)
        lens[random.randrange(len(lens))] = (query, query + random.choice((0, _spread(random, 1, 800))))
    return lens


def _one_token(random: Random, edges: Edges) -> Lens:
    """One query token each; half of the batches begin with a longer request, so that none of them is a decode."""
    lens = [(1, _spread(random, 1, 2000)) for _ in range(random.randint(3, MAX_REQUESTS - 1))]
    first = random.randint(2, 70)
    return [(first, first + random.randint(0, 300)), *lens] if random.random() < 0.5 else lens


def _one_iteration(random: Random, edges: Edges) -> Lens:
    """No request has more keys than a tile: pipelines of one iteration."""
    keys = [random.choice((1, edges.keys, random.randint(1, edges.keys))) for _ in range(random.randint(1, 12))]
    return [(random.choice((1, count, random.randint(1, count))), count) for count in keys]


def _edges(random: Random, edges: Edges) -> Lens:
    """Keys and query tokens at multiples of tiles and pages, one less, one more."""
    lens = []
    for _ in range(random.randint(1, 8)):
        unit = random.choice((edges.keys, edges.keys, edges.page))
        keys = max(1, random.randint(1, 6) * unit + random.choice((-1, 0, 0, 1)))
        tokens = max(1, random.randint(1, 3) * edges.tokens + random.choice((-1, 0, 0, 1)))
        lens.append((min(keys, tokens), keys))
    return lens


def _long(random: Random, edges: Edges) -> Lens:
    """A long context with few new tokens: fewer tiles than multiprocessors, so that the keys are split."""
    query = random.randint(2, 64)
    lens = [(query, query + _spread(random, 2500, 9000))]
    for _ in range(random.randint(0, 3)):
        query = random.randint(0, 20)
        lens.append((query, query + random.randint(0, 400)))
    return lens


def _prefill(random: Random, edges: Edges) -> Lens:
    return [(length, length) for length in (_spread(random, 1, 700) for _ in range(random.randint(1, 4)))]


def _chunks(random: Random, edges: Edges) -> Lens:
    queries = [random.randint(64, 400) for _ in range(random.randint(1, 3))]
    return [(query, query + _spread(random, 500, 4000)) for query in queries]


def _keyless(random: Random, edges: Edges) -> Lens:
    """More queries than keys, or no keys: rows that see none."""
    queries = [random.randint(1, 2 * edges.tokens) for _ in range(random.randint(2, 6))]
    return [(query, random.choice((0, random.randint(0, query), query + 50))) for query in queries]


RECIPES: dict[str, Callable[[Random, Edges], Lens]] = {
    "ragged": _ragged,
    "empty": _empty,
    "one token": _one_token,
    "one iteration": _one_iteration,
    "edges": _edges,
    "long": _long,
    "prefill": _prefill,
    "chunks": _chunks,
    "keyless": _keyless,
}


def _limited(lens: Lens) -> Lens:
    """As many requests as the limits allow, one at least."""
    found: Lens = []
    tokens = keys = 0
    for query, length in lens[:MAX_REQUESTS]:
        tokens, keys = tokens + query, keys + length
        if found and (tokens > MAX_TOKENS or keys > MAX_KEYS):
            break
        found.append((query, length))
    return found
