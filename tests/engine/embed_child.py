"""Embeds prompts with one ``LLM(...)`` of an encoder model: ``python embed_child.py TASK.json RESULT.json``."""

import json
import os
import sys
from pathlib import Path

from llm_child import prompt  # Its folder is the first on the path of a program.

ENGINE = {
    "runner": "pooling",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
}
LENGTHS = (1, 2, 31, 64, 100, 300)  # One step, in which no request may see another.


def main(task):
    """``task``: model, backend, and optionally fault_file with the faults to go through. Embeddings by fault."""
    from vllm import LLM

    llm = LLM(task["model"], attention_backend=task["backend"], **ENGINE)
    result = {}
    for fault in task.get("faults", [""]):
        if "fault_file" in task:
            Path(task["fault_file"]).write_text(fault)
        outputs = llm.embed([{"prompt_token_ids": prompt(n, n)} for n in LENGTHS], use_tqdm=False)
        result[fault] = [output.outputs.embedding for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    return result


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
    # Past the destructors of vLLM's libraries: after the engine had ended and the result was written, one run of four
    # ended with "terminate called without an active exception".
    sys.stdout.flush()
    os._exit(0)
