"""vLLM's engine on this GPU: log-probabilities of the TileLang backend against FLASH_ATTN and TRITON_ATTN.

Run ``python -m tests.gpu.engine --out FILE.json [--only EXPRESSION]`` where vLLM is installed. Each engine answers the
same prompts on a generated checkpoint. The distance between two engines is the RMS difference of the prompt tokens'
log-probabilities (prefill, chunked) and of the greedy tokens' while both generate the same (decode). A comparison has
three engines: a reference, a peer that differs from it by rounding alone, whose distance is the noise, and TileLang,
which must be within ``NOISE_FACTOR`` times the noise, while every planted fault is outside ``FAULT_FACTOR`` times it.

- 16-bit caches: the reference is FLASH_ATTN, the peer TRITON_ATTN. On an H200 vLLM 0.33 takes FlashAttention-3 for
  sinks, windows, and soft caps at head size 256, so both serve every model here.
- fp8 caches: both round the queries to 8 bits, too, which TileLang does not, and that difference hides a scale that is
  wrong by a tenth. So the reference is TRITON_ATTN with its queries left in 16 bits, a path that its kernel has, and
  the peer the same compiled: then the layers between the attentions round elsewhere, and so some keys and values go to
  the next of the 8-bit numbers, as they do between two attentions. What this comparison shows is that TileLang reads
  and writes what TRITON_ATTN does; the rounding of queries it leaves out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.engine.faults import CAP_FAULT, FAULTS, SINKS_FAULT, WINDOW_FAULT
from tl_backend.problem import AttentionProblem

# Two distances of the same three rounding errors differ by chance.
NOISE_FACTOR = 1.25
# Faults were 6 to 60 times the noise where these models were computed in float32 with one rounding more or less.
FAULT_FACTOR = 3.0
BLOCK_SIZE = 16  # vLLM's default.
WINDOW = 128
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
    "gpt-oss 16/2 D 64": {
        "architecture": "gpt_oss",
        "num_layers": 4,
        "num_q_heads": 16,
        "num_kv_heads": 2,
        "head_dim": 64,
        "sliding_window": WINDOW,
    },
    # Few layers and flat scores: an 8-bit cache's rounding grows from layer to layer, and would cover the faults.
    "gemma2 8/4 D 256": {
        "architecture": "gemma2",
        "num_layers": 2,
        "num_q_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "hidden_size": 1024,
        "qk_gain": 2.5,
        "sliding_window": WINDOW,
        "soft_cap": 8.0,
    },
}
FAULTS_OF: dict[str, tuple[str, ...]] = {
    "gpt_oss": (*FAULTS, WINDOW_FAULT, SINKS_FAULT),
    "gemma2": (*FAULTS, WINDOW_FAULT, CAP_FAULT),
}


@dataclass(frozen=True)
class Run:
    """One engine: a model of ``MODELS``, a backend, eager or compiled, and vLLM's ``kv_cache_dtype``."""

    model: str
    backend: str
    eager: bool = True
    cache: str = "auto"

    @property
    def faults(self) -> tuple[str, ...]:
        """What to plant. Once a model and cache is enough: compilation leaves the attention as it is."""
        if self.backend != "TILELANG" or not self.eager:
            return ()
        return FAULTS_OF.get(MODELS[self.model].get("architecture", ""), FAULTS)


@dataclass(frozen=True)
class Comparison:
    """Three runs of one model."""

    mode: str
    reference: Run
    peer: Run
    ours: Run

    @property
    def name(self) -> str:
        return f"{self.ours.model}, {self.mode}"


def comparisons() -> list[Comparison]:
    """Every model with a 16-bit cache, the first two compiled as well, and the last with an fp8 cache."""
    found = []
    # Compilation rounds the rest of the model differently: each mode is compared with itself.
    for model, eager in [*((model, True) for model in MODELS), *((model, False) for model in list(MODELS)[:2])]:
        runs = (Run(model, backend, eager) for backend in ("FLASH_ATTN", "TRITON_ATTN", "TILELANG"))
        found.append(Comparison("eager" if eager else "compiled", *runs))
    fp8 = Run(list(MODELS)[-1], "TRITON_ATTN", cache="fp8")
    return [*found, Comparison("fp8 cache", fp8, replace(fp8, eager=False), replace(fp8, backend="TILELANG"))]


def problems(run: Run) -> set[AttentionProblem]:
    """What a run's layers ask of the kernels, and what they ask with a fault."""
    from tl_backend.measure.workload import problem

    shape = MODELS[run.model]
    window = shape.get("sliding_window")
    plain = replace(
        problem(shape["num_q_heads"], shape["num_kv_heads"], shape["head_dim"], BLOCK_SIZE),
        kv_dtype="float8_e4m3fn" if run.cache == "fp8" else "bfloat16",
        soft_cap=shape.get("soft_cap"),
        sinks_dtype="bfloat16" if shape.get("architecture") == "gpt_oss" else None,
    )
    layers = {plain, replace(plain, window=window)}
    faulty = {
        WINDOW_FAULT: {replace(plain, window=window and window + 1)},
        CAP_FAULT: {replace(layer, soft_cap=None) for layer in layers},
        SINKS_FAULT: {replace(layer, sinks_dtype=None) for layer in layers},
    }
    return layers.union(*(faulty.get(fault, set()) for fault in run.faults))


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


def run_child(run: Run, model: Path, folder: Path) -> dict[str, Any]:
    """Answers of one engine, by fault. A process of its own: they run side by side on the GPU.

    An engine that failed has no answers, but the end of its log as "error".
    """
    stem = f"{run.model}-{run.backend}-{'eager' if run.eager else 'compiled'}-{run.cache}"
    stem = stem.replace(" ", "_").replace("/", "-")
    task, result, log, fault = (folder / f"{stem}.{end}" for end in ("task", "result", "log", "fault"))
    fault.write_text("")
    fields = {"model": str(model), "backend": run.backend, "eager": run.eager, "kv_cache_dtype": run.cache}
    task.write_text(json.dumps(fields | {"faults": ["", *run.faults]}))
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
        return {"error": f"{stem} failed with {code}:\n{log.read_text()[-4000:]}"}
    return json.loads(result.read_text())


def rows_of(comparison: Comparison, runs: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for the noise, one for TileLang and one for each fault: distances to the reference, and whether it is ok.

    Args:
        comparison: three of the runs.
        runs: what ``run_child`` returned for each.
    """
    all_three = (comparison.reference, comparison.peer, comparison.ours)
    if errors := [runs[run]["error"] for run in all_three if "error" in runs[run]]:
        nothing = {"prompt": math.inf, "generated": math.inf, "compared": 0}
        model, mode = comparison.ours.model, comparison.mode
        return [{"model": model, "what": f"{mode}, an engine failed", "ok": False, "errors": errors, **nothing}]
    reference = runs[comparison.reference][""]["answers"]
    noise = distance(runs[comparison.peer][""]["answers"], reference)
    model, mode, backend = comparison.ours.model, comparison.mode, comparison.peer.backend
    # No noise, no answers: then nothing was compared.
    some = 0 < noise["prompt"] < math.inf and 0 < noise["generated"] < math.inf
    rows = [{"model": model, "what": f"{mode}, noise: {backend}", "ok": some, **noise}]
    for fault, run in runs[comparison.ours].items():
        d = distance(run["answers"], reference)
        if fault:
            ok = d["prompt"] > FAULT_FACTOR * noise["prompt"]
        else:
            ok = all(d[part] <= NOISE_FACTOR * noise[part] for part in ("prompt", "generated"))
        what = f"{mode}, TILELANG {fault}".rstrip()
        rows.append({"model": model, "what": what, "ok": ok, "launches": run["launches"], "rows": run["rows"], **d})
    return rows


def main() -> int:
    """Compare on all models; exit code 1 if a row is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", default="", metavar="EXPRESSION", help='comparisons in whose name, "MODEL, MODE", this is found'
    )
    args = parser.parse_args()
    import torch

    from benchmarks.program import compile_all
    from tl_backend.measure.results import environment
    from tl_backend.testing.checkpoint import write_checkpoint

    chosen = [comparison for comparison in comparisons() if re.search(args.only, comparison.name)]
    if not chosen:
        parser.error(f"--only {args.only!r} leaves none of {[comparison.name for comparison in comparisons()]}")
    needed = dict.fromkeys(run for c in chosen for run in (c.reference, c.peer, c.ours))
    # Engines find them in TileLang's disk cache: several of them would each compile the same.
    compile_all(problem for run in needed if run.backend == "TILELANG" for problem in problems(run))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(12) as pool:
        paths = {
            name: write_checkpoint(Path(folder) / str(i), dtype="bfloat16", seed=i, **shape)
            for i, (name, shape) in enumerate(MODELS.items())
        }
        jobs: dict[Run, Future[dict[str, Any]]] = {
            run: pool.submit(run_child, run, paths[run.model], Path(folder)) for run in needed
        }
        runs = {run: job.result() for run, job in jobs.items()}
    rows = [row for comparison in chosen for row in rows_of(comparison, runs)]
    for row in rows:
        print(
            f"{'ok  ' if row['ok'] else 'MISS'} {row['model']:18} {row['what']:48} prompt {row['prompt']:.4f}  "
            f"generated {row['generated']:.4f} over {row['compared']} tokens"
        )
        for error in row.get("errors", ()):
            print(error)
    import vllm

    document = {
        "environment": environment(torch.device("cuda")) | {"vllm": vllm.__version__},
        "noise_factor": NOISE_FACTOR,
        "fault_factor": FAULT_FACTOR,
        # JSON has no infinity: where nothing was compared, there is no distance.
        "rows": [{key: None if value == math.inf else value for key, value in row.items()} for row in rows],
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
