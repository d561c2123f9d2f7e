"""``benchmarks.engine`` without an engine: what it asks for, what it keeps, and how it judges."""

import json
import sys

import pytest

from benchmarks import engine
from tl_backend.measure import results


def row_of(backend: str, median: float, *, mode: str = "eager", **fields) -> dict:
    times = {"2048": {"median": median}, "8192": {"median": 4 * median}}
    return {
        "model": "llama-8b", "mode": mode, "backend": backend, "ttft_ms": times, "block_size": 16,
        "max_num_batched_tokens": 16384, **fields,
    }  # fmt: skip


def test_a_model_is_a_config_with_its_layers_or_fewer(tmp_path) -> None:
    whole = json.loads((engine.write_model("qwen-7b", tmp_path, None) / "config.json").read_text())
    fewer = json.loads((engine.write_model("llama-8b", tmp_path, 3) / "config.json").read_text())
    assert (whole["num_hidden_layers"], fewer["num_hidden_layers"]) == (28, 3)
    assert (whole["num_attention_heads"], whole["num_key_value_heads"]) == (28, 4)
    assert fewer["num_attention_heads"] * fewer["head_dim"] == fewer["hidden_size"] == 4096


def test_times_stand_beside_the_reference_of_the_same_mode() -> None:
    rows = [row_of("FLASH_ATTN", 100.0), row_of("TILELANG", 80.0), row_of("TILELANG", 90.0, mode="default")]
    first, second, third = engine.table(rows)
    assert "2048:    100.0 ms  " in first
    assert "2048:     80.0 ms (1.250 x)" in second
    assert " x)" not in third
    assert engine.misses(rows) == []
    assert engine.misses([*rows, row_of("FLASH_ATTN", 85.0, mode="default")]) == [
        "llama-8b, default, 2048: 90.0 ms, FLASH_ATTN 85.0 ms",
        "llama-8b, default, 8192: 360.0 ms, FLASH_ATTN 340.0 ms",
    ]


def test_an_engine_that_fails_or_hangs_is_told_and_the_others_are_kept(tmp_path, monkeypatch, capsys) -> None:
    answers = {"FLASH_ATTN": {"error": "1: Traceback\nRuntimeError: no"}, "TRITON_ATTN": row_of("TRITON_ATTN", 100.0)}
    monkeypatch.setattr(engine, "run_child", lambda task, folder, timeout_s: answers[task["backend"]])
    monkeypatch.setattr(results, "environment", lambda device: {"gpu": "none"})
    out = tmp_path / "new" / "engine.json"
    command = ["--models", "llama-8b", "--modes", "eager", "--backends", *answers, "--out", str(out)]
    assert engine.main(command) == 1
    assert [row.get("error") is None for row in json.loads(out.read_text())["rows"]] == [False, True]
    assert "FAILED: RuntimeError: no" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "said"),
    [("raise SystemExit('it broke')", "1: it broke"), ("import time; time.sleep(60)", "no answer after 1 s")],
)
def test_a_child_s_end_is_an_error_with_its_log(program: str, said: str, tmp_path, monkeypatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "result").write_text("{}")  # Of an engine before.
    assert engine.run_child({}, tmp_path, 1.0)["error"].startswith(said)


def test_the_block_sizes_of_our_kernels_are_compiled_first(monkeypatch) -> None:
    asked: list = []
    monkeypatch.setattr("benchmarks.program.compile_all", asked.extend)
    engine.compile_first(engine.arguments(["--models", "qwen-7b"]))
    assert {(p.num_q_heads, p.num_kv_heads, p.page_size) for p in asked} == {(28, 4, size) for size in (16, 64, 128)}
