"""The regimes worth a row, each with one batch that stands for it."""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.configs.regime import CONTEXT_LENS, REQUEST_COUNTS, Phase, Regime
from tl_backend.configs.tile import ELEMENT_BYTES
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem

# What stands for the bucket above the last bound.
LONGEST_CONTEXT = 32768
LONGEST_QUERY = 4096
MOST_REQUESTS = 256
# New tokens of a step: the scheduler's budget in vLLM on a large GPU.
STEP_TOKENS = 8192
# Keys and values of one batch. More shows nothing new (100 times an H200's L2) and takes a search's time.
MAX_KV_BYTES = 6 << 30
MAX_KV_BYTES_ON_CPU = 128 << 20
# A launch longer than this would take a search's time. The rates are low guesses: 100 TFLOP/s, and 0.2 GFLOP/s of the C
# target's one core.
MAX_LAUNCH_S = 0.2
FLOPS_PER_S = {"nvidia": 1e14, "amd": 1e14, "cpu": 2e8}

# (phase, new tokens of a request, keys, requests); keys of a prefill are its new tokens.
_PREFILLS: tuple[tuple[Phase, int, int, int], ...] = (
    ("prefill", LONGEST_QUERY, 0, 1),
    ("prefill", 1024, 0, 1),
    ("prefill", LONGEST_QUERY, 0, 2),
    ("prefill", 1024, 0, 8),
    ("prefill", 128, 0, 64),
    ("extend", 2048, LONGEST_CONTEXT, 1),
    ("extend", 1024, 16384, 1),
    ("extend", 1024, 4096, 8),
    ("extend", 128, 4096, 64),
)
_CONTEXTS = (*CONTEXT_LENS, LONGEST_CONTEXT)
_REQUESTS = (*REQUEST_COUNTS, MOST_REQUESTS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A regime and its batch.

    Attributes:
        regime: what a row is held by.
        query_len, seq_len, num_requests: of the batch; all requests are alike. Keys include the new tokens.
    """

    regime: Regime
    query_len: int
    seq_len: int
    num_requests: int

    def __str__(self) -> str:
        """For people, and the key of a journal: "decode, keys <= 1024, requests <= 8 (8 x 1 of 1024)"."""
        return f"{self.regime} ({self.num_requests} x {self.query_len} of {self.seq_len})"


def cases(
    kind: str, problem: AttentionProblem, device: DeviceSpec, *, memory_bytes: int | None = None
) -> tuple[Case, ...]:
    """The cases of a kind that this problem can meet, and that the device can run in reasonable time.

    Args:
        memory_bytes: free on the device; keys and values take at most half of it.
    """
    limit = MAX_KV_BYTES if device.is_gpu else MAX_KV_BYTES_ON_CPU
    limit = limit if memory_bytes is None else min(limit, memory_bytes // 2)
    if kind == "decode":
        wanted: list[tuple[Phase, int, int, int]] = [
            ("decode", 1, keys, requests) for keys in _contexts(problem) for requests in _REQUESTS
        ]
    else:
        wanted = list(_PREFILLS)
    found: dict[Regime, Case] = {}
    for phase, query_len, keys, requests in wanted:
        seq_len = keys or query_len
        fitting = min(requests, limit // (seq_len * kv_bytes_per_token(problem)), max(1, STEP_TOKENS // query_len))
        if fitting < 1:
            continue
        case = Case(
            regime=Regime.of(phase=phase, query_len=query_len, context_len=seq_len, num_requests=fitting),
            query_len=query_len,
            seq_len=seq_len,
            num_requests=fitting,
        )
        # Fewer requests may have fallen into the bucket below, which has a batch of its own.
        meant = Regime.of(phase=phase, query_len=query_len, context_len=seq_len, num_requests=requests)
        if case.regime == meant and launch_seconds(case, problem, device) <= MAX_LAUNCH_S:
            found[case.regime] = case
    return tuple(found.values())


def _contexts(problem: AttentionProblem) -> tuple[int, ...]:
    """Keys that a decode's regime can have: a window bounds them."""
    if problem.window is None:
        return _CONTEXTS
    reached = next((i for i, keys in enumerate(_CONTEXTS) if problem.window <= keys), len(_CONTEXTS) - 1)
    return _CONTEXTS[: reached + 1]


def kv_bytes_per_token(problem: AttentionProblem) -> int:
    """Bytes of one token's key and value in the cache."""
    element = 1 if problem.is_quantized else ELEMENT_BYTES[problem.kv_dtype]
    return problem.num_kv_heads * 2 * problem.head_dim * element


def launch_seconds(case: Case, problem: AttentionProblem, device: DeviceSpec) -> float:
    """A cautious guess: 4 * H * D FLOPs for each pair of a query and a key that it attends to."""
    pairs = case.query_len * case.seq_len - (case.query_len**2 / 2 if problem.causal else 0)
    if problem.window is not None:
        pairs = min(pairs, case.query_len * problem.window)
    flops = 4 * problem.num_q_heads * problem.head_dim * pairs * case.num_requests
    return flops / FLOPS_PER_S[device.vendor]
