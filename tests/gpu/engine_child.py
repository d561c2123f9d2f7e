"""One engine of ``tests.gpu.engine``: ``python -m tests.gpu.engine_child TASK.json RESULT.json``."""

import json
import os
import sys
from pathlib import Path

LENGTHS = (1, 7, 63, 513, 1500, 2900)
NUM_TOKENS = 48


def prompt(length: int, seed: int) -> list[int]:
    """Printable bytes, different at every position for every seed."""
    return [32 + (seed * 37 + i * (7 + seed) + i * i // 5) % 95 for i in range(length)]


def main(task: dict) -> dict:
    """``task``: model, backend, eager, kv_cache_dtype, and the faults to go through."""
    from vllm import LLM, SamplingParams

    from tests.engine import faults
    from tl_backend.telemetry import launches

    if task["backend"] == "TRITON_ATTN" and task["kv_cache_dtype"] != "auto":
        keep_queries_16_bit()
    llm = LLM(
        task["model"],
        attention_backend=task["backend"],
        dtype="bfloat16",
        enforce_eager=task["eager"],
        kv_cache_dtype=task["kv_cache_dtype"],
        kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.05,  # Engines share the GPU; vLLM checks at start that so much of it is free.
        max_model_len=4096,
        max_num_batched_tokens=1024,  # The longer prompts are prefilled in chunks.
        max_num_seqs=16,
        seed=0,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    if task["backend"] == "TILELANG":
        faults.plant()
    result = {}
    for fault in task["faults"]:
        Path(os.environ["ATTENTION_FAULT_FILE"]).write_text(fault)
        before = launches.counts()
        outputs = llm.generate([{"prompt_token_ids": prompt(n, n)} for n in LENGTHS], params, use_tqdm=False)
        answers = [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": chosen(output.outputs[0].token_ids, output.outputs[0].logprobs),
                "prompt_logprobs": chosen(output.prompt_token_ids[1:], output.prompt_logprobs[1:]),
            }
            for output in outputs
        ]
        counted = {kernel: n - before.get(kernel, 0) for kernel, n in launches.counts().items()}
        result[fault] = {"answers": answers, "launches": counted, "rows": launches.rows()}
    return result


def keep_queries_16_bit() -> None:
    """Have TRITON_ATTN read an 8-bit cache with 16-bit queries, as TileLang does.

    On CUDA it says of each layer that its queries may be rounded to 8 bits, and vLLM rounds them. Its kernel multiplies
    in the queries' dtype.
    """
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    construct, forward = TritonAttentionImpl.__init__, TritonAttentionImpl.forward

    def init(self, *args, **kwargs) -> None:
        construct(self, *args, **kwargs)
        self.supports_quant_query_input = False

    def checked(self, layer, query, *args, **kwargs):
        if query.element_size() != 2:
            raise RuntimeError(f"queries should have 16 bits, and are {query.dtype}")
        return forward(self, layer, query, *args, **kwargs)

    TritonAttentionImpl.__init__, TritonAttentionImpl.forward = init, checked


def chosen(tokens: list[int], steps: list[dict]) -> list[float]:
    """The log-probability of each step's own token."""
    return [step[token].logprob for token, step in zip(tokens, steps, strict=True)]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
