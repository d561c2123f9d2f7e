"""A vLLM plugin for tests only: plants a fault in the attention of the process that loads it.

The comparison of tokens with vLLM's own backend proves something only if it fails on each of these. The file named by
``ATTENTION_FAULT_FILE`` says which fault is on, and is read at every call, so that one engine shows all of them. The
file ``problems`` beside it tells what the engine's layers are, as (head size, page size, window).
"""

import json
import os
from dataclasses import replace
from pathlib import Path

FAULTS = ("permuted q heads", "scale x 1.1", "mask off by one")
# Of layers that have these.
WINDOW_FAULT, CAP_FAULT, SINKS_FAULT = "window longer by one", "no soft cap", "no sinks"


def plant():
    """Wrap the operations that the implementation and the builder call. Loaded once a process."""
    from tl_backend import ops

    attention, contiguous, make_plan = ops.paged_attention, ops.varlen_attention, ops.plan_attention
    file = Path(os.environ["ATTENTION_FAULT_FILE"])

    def seen_lens(seq_lens):
        """Off by one: each token sees the keys before it, but not its own."""
        return (seq_lens - 1).clamp(min=0) if file.read_text() == "mask off by one" else seq_lens

    workspaces, problems = {}, {}

    def plan_attention(problem, cu_seqlens_q, seq_lens, *, workspace, **rest):
        fault, right = file.read_text(), problem
        if problem not in problems:
            problems[problem] = (problem.head_dim, problem.page_size, problem.window)
            file.with_name("problems").write_text(json.dumps(list(problems.values())))
        if fault == WINDOW_FAULT and problem.window is not None:
            problem = replace(problem, window=problem.window + 1)
        if fault == CAP_FAULT:
            problem = replace(problem, soft_cap=None)
        if fault == SINKS_FAULT:
            problem = replace(problem, sinks_dtype=None)
        if problem != right:
            limits = {"max_num_reqs": workspace.max_num_reqs, "max_num_tokens": workspace.max_num_tokens}
            if right not in workspaces or workspaces[right].problem != problem:
                workspaces[right] = ops.AttentionWorkspace(problem, workspace.work.device, **limits)
            workspace = workspaces[right]
        return make_plan(problem, cu_seqlens_q, seen_lens(seq_lens), workspace=workspace, **rest)

    def seen_queries(q, softmax_scale):
        fault = file.read_text()
        if fault == "permuted q heads":
            q = q.roll(1, dims=1)
        return q, softmax_scale * (1.1 if fault == "scale x 1.1" else 1.0)

    def varlen_attention(q, *tensors, softmax_scale, **rest):
        q, softmax_scale = seen_queries(q, softmax_scale)
        return contiguous(q, *tensors, softmax_scale=softmax_scale, **rest)

    def paged_attention(q, kv_cache, block_table, cu_seqlens_q, seq_lens, *, softmax_scale, **rest):
        q, softmax_scale = seen_queries(q, softmax_scale)
        if file.read_text() == SINKS_FAULT:
            rest["sinks"] = None
        return attention(
            q, kv_cache, block_table, cu_seqlens_q, seen_lens(seq_lens), softmax_scale=softmax_scale, **rest
        )

    ops.plan_attention, ops.paged_attention, ops.varlen_attention = plan_attention, paged_attention, varlen_attention
