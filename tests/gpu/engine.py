"""vLLM's engine on this GPU: log-probabilities of the TileLang backend against FLASH_ATTN and TRITON_ATTN.

Run ``python -m tests.gpu.engine --out FILE.json`` where vLLM is installed. Each backend answers the same prompts on the
same generated checkpoints. The distance between two backends is the RMS difference of the prompt tokens'
log-probabilities (prefill, chunked) and of the greedy tokens' while both generate the same (decode). FLASH_ATTN and
TRITON_ATTN differ by rounding alone: their distance is the noise. TileLang must be within it, and every planted fault
outside.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engine.faults import FAULTS

PEERS = ("FLASH_ATTN", "TRITON_ATTN")
# Two distances of the same three rounding errors differ by chance; a fault is several times the noise.
NOISE_FACTOR = 1.25
BLOCK_SIZE = 16  # vLLM's default.
MODELS: dict[str, dict[str, Any]] = {
    "llama 32/8 D 128": {"num_layers": 3, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 2048},
    "qwen3 16/8 D 128": {
        "architecture": "qwen3",
        "num_layers": 4,
        "num_q_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "hidden_size": 1024,
    },
}


def distance(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, float]:
    """RMS differences of prompt and of generated log-probabilities, the latter up to the first token that differs."""
    prompt, generated = [], []
    for x, y in zip(a, b, strict=True):
        prompt += [p - q for p, q in zip(x["prompt_logprobs"], y["prompt_logprobs"], strict=True)]
        for s, t, p, q in zip(x["tokens"], y["tokens"], x["logprobs"], y["logprobs"], strict=True):
            if s != t:
                break
            generated.append(p - q)
    return {"prompt": _rms(prompt), "generated": _rms(generated), "compared": len(generated)}


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values)) if values else math.inf


def run_child(model: Path, name: str, backend: str, folder: Path, *, eager: bool) -> dict[str, Any]:
    """Answers of one backend, by fault. A process of its own: one engine each, side by side on the GPU.

    Raises:
        SystemExit: the engine failed; with the end of its log.
    """
    stem = f"{name}-{backend}-{'eager' if eager else 'graphs'}".replace(" ", "_").replace("/", "-")
    task, result, log, fault = (folder / f"{stem}.{end}" for end in ("task", "result", "log", "fault"))
    faults = ["", *FAULTS] if backend == "TILELANG" and eager else [""]
    fault.write_text("")
    task.write_text(json.dumps({"model": str(model), "backend": backend, "eager": eager, "faults": faults}))
    env = os.environ | {"ATTENTION_FAULT_FILE": str(fault), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("w") as out:
        code = subprocess.run(
            [sys.executable, "-m", "tests.gpu.engine_child", str(task), str(result)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            check=False,
        ).returncode
    if code:
        raise SystemExit(f"{stem} failed with {code}:\n{log.read_text()[-4000:]}")
    return json.loads(result.read_text())


def compare(name: str, model: Path, folder: Path, pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """One row a comparison: what it is, its distances, the noise, and whether it is as it must be."""
    jobs = {
        (backend, eager): pool.submit(run_child, model, name, backend, folder, eager=eager)
        for eager in (True, False)
        for backend in (*PEERS, "TILELANG")
    }
    runs = {key: job.result() for key, job in jobs.items()}
    rows = []
    for eager in (True, False):
        # Compilation rounds the rest of the model differently: each mode is compared with itself.
        mode = "eager" if eager else "compiled"
        flash, triton = (runs[backend, eager][""]["answers"] for backend in PEERS)
        noise = distance(triton, flash)
        rows.append({"model": name, "what": f"{mode}, noise: TRITON_ATTN", "ok": True, **noise})
        for fault, run in runs["TILELANG", eager].items():
            d = distance(run["answers"], flash)
            within = all(d[part] <= NOISE_FACTOR * noise[part] for part in ("prompt", "generated"))
            what = f"{mode}, TILELANG {fault}".rstrip()
            rows.append({"model": name, "what": what, "ok": within != bool(fault), "launches": run["launches"], **d})
    return rows


def main() -> int:
    """Compare on all models; exit code 1 if a row is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    from benchmarks.harness import environment
    from benchmarks.workload import compile_all, problem
    from tl_backend.testing.checkpoint import write_checkpoint

    # Engines find them in TileLang's disk cache: twelve of them would each compile the same.
    compile_all(problem(s["num_q_heads"], s["num_kv_heads"], s["head_dim"], BLOCK_SIZE) for s in MODELS.values())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(12) as pool, ThreadPoolExecutor(2) as outer:
        paths = {
            name: write_checkpoint(Path(folder) / str(i), dtype="bfloat16", seed=i, **shape)
            for i, (name, shape) in enumerate(MODELS.items())
        }
        for part in outer.map(lambda item: compare(item[0], item[1], Path(folder), pool), paths.items()):
            rows += part
    for row in rows:
        print(
            f"{'ok  ' if row['ok'] else 'MISS'} {row['model']:18} {row['what']:40} prompt {row['prompt']:.4f}  "
            f"generated {row['generated']:.4f} over {row['compared']} tokens"
        )
    import vllm

    document = {"environment": environment() | {"vllm": vllm.__version__}, "noise_factor": NOISE_FACTOR, "rows": rows}
    out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
