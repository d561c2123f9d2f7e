"""Runs vLLM's Triton attention on a CPU, in Triton's interpreter, with the arguments that the peer gives it.

A program of its own: the interpreter is chosen when Triton is imported, and vLLM's CPU build hides Triton, for which a
stand-in of its module is put in place before. Prints the error of each case as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import types
import warnings

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language

from tl_backend.measure.answers import Answers
from tl_backend.measure.peers_vllm import triton_arguments
from tl_backend.measure.workload import Batch, Workload
from tl_backend.testing.cases import make_problem

MIXED = ((20, 7), (20, 40))
CASES = {
    "paged": (make_problem(4, 2, 32, 16), *MIXED),
    "contiguous": (make_problem(4, 2, 32, None), (32, 16), (32, 48)),
    "full": (make_problem(4, 2, 32, None, causal=False), (32,), (32,)),
    "decode": (make_problem(4, 2, 80, 16), (1, 1), (100, 40)),
    "window, cap": (make_problem(4, 2, 32, 16, window=9, soft_cap=2.0), *MIXED),
    # Not both: its ALiBi shifts the logits of a row, which a sink notices.
    "sinks": (make_problem(4, 2, 32, 16, sinks_dtype="float32"), *MIXED),
    "ALiBi": (make_problem(4, 2, 32, 16, has_alibi=True), *MIXED),
    "8-bit cache": (make_problem(4, 2, 32, 16, kv_dtype="float8_e4m3fn"), *MIXED),
}


def main() -> None:
    stand_in = types.ModuleType("vllm.triton_utils")
    vars(stand_in).update(triton=triton, tl=triton.language, HAS_TRITON=True, tldevice=None, gl=None, gluon=None)
    sys.modules["vllm.triton_utils"] = stand_in
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    warnings.simplefilter("ignore")  # The interpreter divides what it masks.
    errors = {}
    for name, (problem, query_lens, seq_lens) in CASES.items():
        workload = Workload(name=name, problem=problem, query_lens=query_lens, seq_lens=seq_lens)
        batch = Batch(workload, torch.device("cpu"))
        out = batch.new_out()
        unified_attention(**triton_arguments(batch, out))
        errors[name] = Answers(batch).error(out)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
