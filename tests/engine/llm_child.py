"""Runs the scenarios on one ``LLM(...)`` and writes what it generated: ``python llm_child.py TASK.json RESULT.json``.

A program of its own, since vLLM's engine core is spawned from it, and one engine at a time fits the machine.
"""

import json
import sys
from pathlib import Path

BLOCK = 32  # Tokens; both backends take it, and a prefix of a few blocks stays short.
BLOCKS = 24
CHUNK = 64  # Tokens of a step: longer prompts are prefilled in chunks.
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "enable_prefix_caching": True,
    "disable_log_stats": False,  # Preemptions are counted there.
    "seed": 0,
}


def prompt(length, seed):
    """Printable bytes, different at every position for every seed."""
    return [32 + (seed * 37 + i * (7 + seed) + i * i // 5) % 95 for i in range(length)]


def mixed(generate):
    """Prompts of many lengths at once, some shorter and some longer than a block."""
    return generate([prompt(n, n) for n in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 50)], 24)


def chunked(generate):
    """Prompts longer than a step, beside requests that decode meanwhile."""
    return generate([prompt(n, n) for n in (3, 2 * CHUNK + 17, 5, 3 * CHUNK + 1)], 24)


def prefix_hit(generate):
    """A second request finds the first blocks of the first one's prompt in the cache."""
    shared = prompt(3 * BLOCK + 5, 1)
    first = generate([shared + prompt(9, 2)], 16)
    return [*first, *generate([shared + prompt(20, 3), shared + prompt(11, 4)], 16)]


def preempted(generate):
    """More tokens than the cache holds (7 x 5 blocks of 24): some requests lose their blocks and are recomputed."""
    return generate([prompt(60 + n, 10 + n) for n in range(7)], 4 * BLOCK - 60)


def shared_prefix(generate):
    """Sixteen prompts at once whose first nine blocks are one; one has nothing else. Then again, from the cache."""
    shared = prompt(9 * BLOCK, 1)
    prompts = [shared + prompt(3 * n, n + 2) for n in range(16)]
    return [*generate(prompts, 8), *generate(prompts, 8)]


def long_prompt(generate):
    """Longer than 2048 tokens, in chunks, while another request decodes."""
    return generate([prompt(40 * CHUNK + 11, 3), prompt(5, 4)], 8)


def adapters(generate):
    """Three prompts without an adapter; then, in one batch, with one that changes nothing and with one that does.

    Not all nine at once: vLLM's CPU LoRA (0.32) gives a row without an adapter the last one, by torch's index -1.
    """
    prompts = [prompt(n, n) for n in (3, BLOCK, 50)]
    return [*generate(prompts, 8), *generate(prompts * 2, 8, ["zero"] * 3 + ["real"] * 3)]


SCENARIOS = (mixed, chunked, prefix_hit, preempted)
OTHER_SCENARIOS = (shared_prefix, long_prompt, adapters)


def main(task):
    """Run the scenarios.

    ``task``: model, backend, and optionally fault_file with the faults to go through, ``engine``: other settings,
    ``scenarios``: their names, ``adapters``: folders of LoRA adapters by name.
    """
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(task["model"], attention_backend=task["backend"], **ENGINE | task.get("engine", {}))
    folders = task.get("adapters", {})
    requests = {name: LoRARequest(name, number, path) for number, (name, path) in enumerate(folders.items(), start=1)}
    names = task.get("scenarios", [scenario.__name__ for scenario in SCENARIOS])

    def generate(prompts, num_tokens, adapters=None):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
        loras = None if adapters is None else [requests.get(name) for name in adapters]
        prompts = [{"prompt_token_ids": p} for p in prompts]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    step[token].logprob
                    for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
                ],
                "cached": output.num_cached_tokens,
            }
            for output in outputs
        ]

    def preemptions():
        return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")

    result = {}
    for fault in task.get("faults", [""]):
        if "fault_file" in task:  # Engines share it: the one before has left its last fault there.
            Path(task["fault_file"]).write_text(fault)
        runs = {}
        for scenario in (s for s in (*SCENARIOS, *OTHER_SCENARIOS) if s.__name__ in names):
            llm.reset_prefix_cache()
            before = preemptions()
            runs[scenario.__name__] = {"answers": scenario(generate), "preemptions": preemptions() - before}
        result[fault] = runs
    return result


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
