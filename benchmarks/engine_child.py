"""One engine of ``benchmarks.engine``: ``python -m benchmarks.engine_child TASK.json RESULT.json``."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# A prompt's tokens are none of the special ones.
FIRST_TOKEN, LAST_TOKEN = 10, 30_000
KV_CACHE_BYTES = 12 << 30
NUM_SEQS = 4


def main(task: dict[str, Any]) -> dict[str, Any]:
    """``task``: model, backend, eager, lengths, runs, block_size, and further arguments of the engine if any."""
    from tl_backend.vllm_plugin.register import NAME, register

    register()
    from vllm import LLM, SamplingParams

    from tl_backend.telemetry import launches

    begun = time.perf_counter()
    options: dict[str, Any] = {
        "attention_backend": task["backend"],
        "enforce_eager": task["eager"],
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "max_model_len": max(task["lengths"]) + 16,
        "max_num_seqs": NUM_SEQS,  # It also says for how many sizes graphs are captured.
        "seed": 0,
    }
    if task["block_size"] is not None:
        options["block_size"] = task["block_size"]
    llm = LLM(task["model"], **options | task.get("engine", {}))
    start_s = time.perf_counter() - begun
    config = llm.llm_engine.vllm_config
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    draw = random.Random(0)  # noqa: S311
    last = min(LAST_TOKEN, config.model_config.get_vocab_size() - 1)
    times: dict[int, list[float]] = {length: [] for length in task["lengths"]}
    for run in range(task["runs"] + 1):
        for length in task["lengths"]:
            prompt = {"prompt_token_ids": [draw.randint(FIRST_TOKEN, last) for _ in range(length)]}
            asked = time.perf_counter()
            outputs = llm.generate([prompt], params, use_tqdm=False)
            took = time.perf_counter() - asked
            assert len(outputs[0].outputs[0].token_ids) == 1
            if run:  # The first one may compile.
                times[length].append(took * 1e3)
    counts = launches.counts()
    if task["backend"] == NAME and not any(kernel.startswith("prefill") for kernel in counts):
        raise RuntimeError(f"the engine did not run on this package's kernels: it launched {counts}")
    return {
        "ttft_ms": {
            str(length): {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}
            for length, values in times.items()
        },
        "start_s": round(start_s, 1),
        "layers": config.model_config.hf_text_config.num_hidden_layers,
        "block_size": config.cache_config.block_size,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "launches": counts,
        "sources": launches.rows(),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
