"""Whether the bits of a request's output depend on anything but the request: the check of batch invariance."""

from __future__ import annotations

import torch

from tl_backend.ops import AttentionWorkspace, paged_attention, plan_attention
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import Case, make_batch
from tl_backend.testing.poison_judge import PoisonError, num_different
from tl_backend.testing.poison_run import features_of

MAX_TOKENS = 4096


def check_batch_invariance(problem: AttentionProblem, seq_len: int, device: torch.device) -> None:
    """The last request of a batch, whole, alone, cut into chunks of its prompt, and as one decode a token.

    Args:
        seq_len: tokens of that request, all of them new at first.

    Raises:
        PoisonError: an output element has other bits than in the batch.
    """
    others = ((1, 40), (1, 700), (33, 90), (5, 5))
    case = Case(
        query_lens=(*(q for q, _ in others), seq_len), seq_lens=(*(k for _, k in others), seq_len), padding_rows=0
    )
    batch = make_batch(problem, case, device)
    batch.poison(float("nan"), "stale")
    table, first_row = batch.block_table[-1:], sum(case.query_lens[:-1])
    workspace = AttentionWorkspace(problem, device, max_num_reqs=8, max_num_tokens=MAX_TOKENS, batch_invariant=True)

    def attend(q: torch.Tensor, block_table: torch.Tensor, query_lens: list[int], seq_lens: list[int]) -> torch.Tensor:
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        longest_q, longest_k = max(query_lens), max(seq_lens)
        plan = plan_attention(
            problem, starts.to(device), lens,
            cu_seqlens_q_cpu=starts, max_seqlen_q=longest_q, max_seqlen_k=longest_k, workspace=workspace,
        )  # fmt: skip
        return paged_attention(
            q, batch.kv_cache, block_table, starts.to(device), lens,
            max_seqlen_q=longest_q, max_seqlen_k=longest_k, plan=plan, **features_of(batch),
        )  # fmt: skip

    wanted = attend(batch.q, batch.block_table, list(case.query_lens), list(case.seq_lens))[first_row:]
    for size in (seq_len, 1, 13, 64, 100):
        for begin in range(0, seq_len, size):
            end = min(begin + size, seq_len)
            if size == 1 and begin % 29:  # Each is a step of its own: a sample will do.
                continue
            got = attend(batch.q[first_row + begin : first_row + end], table, [end - begin], [end])
            if (changed := num_different(got, wanted[begin:end])) > 0:
                raise PoisonError(
                    f"batch invariance: {changed} output elements of tokens {begin} to {end - 1} changed when they "
                    f"were a step of their own; the limit is 0. {problem}"
                )
