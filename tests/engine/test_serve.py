"""``vllm serve --attention-backend tilelang`` on the CPU: greedy tokens equal vLLM's own backend's. Qwen3, GQA 2."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.faults import FAULTS

ARGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-batched-tokens", "256"]
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8  # 592 tokens: three chunks


def ask(server, cache_salt="none"):
    """Prompts of many lengths at the same time; then one whose first blocks of 128 tokens are in the cache."""
    options = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}

    def answer(prompt):
        choice = server.complete(prompt, cache_salt=cache_salt, **options)["choices"][0]
        return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}

    prompts = ["a", "Call me Ishmael.", TEXT[:127], TEXT[:128], TEXT[:129], TEXT[::-1]]
    with ThreadPoolExecutor(len(prompts)) as pool:
        mixed = list(pool.map(answer, prompts))
    return {"mixed": mixed, "prefix_hit": [answer(TEXT), answer(TEXT + "Winston"), answer(TEXT + "The hallway")]}


@pytest.fixture(scope="module")
def builtin(run_server, qwen3_model):
    answers, launches = run_server(qwen3_model, None, ask, args=ARGS)
    assert launches == {}
    return answers


def test_tokens_equal_the_builtin_backends(run_server, qwen3_model, builtin, compare):
    answers, launches = run_server(qwen3_model, "tilelang", ask, {"TL_BACKEND_CPU": "1"}, ARGS)
    assert min(launches[kernel] for kernel in ("prefill", "decode", "cache_write")) > 0
    for scenario, expected in builtin.items():
        assert compare(answers[scenario], expected) == []


def test_planted_faults_show(run_server, qwen3_model, builtin, compare, fault_env):
    """In every prompt, and in the tokens of some. A salt for each fault keeps its cache from the next."""

    def ask_with_each_fault(server):
        answers = {}
        for fault in FAULTS:
            Path(fault_env["ATTENTION_FAULT_FILE"]).write_text(fault)
            answers[fault] = ask(server, cache_salt=fault)
        return answers

    env = {"TL_BACKEND_CPU": "1"} | fault_env
    answers, _ = run_server(qwen3_model, "tilelang", ask_with_each_fault, env, ARGS)
    for fault in FAULTS:
        for scenario, expected in builtin.items():
            messages = compare(answers[fault][scenario], expected)
            assert len(messages) == len(expected), (fault, scenario)
            assert any("tokens" in message for message in messages), (fault, scenario)
