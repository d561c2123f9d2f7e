"""Time to the first token in vLLM on this GPU, by attention backend, with dummy weights of real models' shapes.

Run ``python -m benchmarks.engine --out FILE.json [--models llama-8b] [--modes eager] [--backends FLASH_ATTN TILELANG]``
where vLLM is installed. Each engine is a process of its own, which takes about a minute to start; fewer ``--layers``
start faster. One prompt at a time, one token, no prefix cache, vLLM's own chunks. What is done is kept, whatever
happens to the engines that follow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "TILELANG")
REFERENCE, OURS = "FLASH_ATTN", "TILELANG"
MODES = ("eager", "default")
LENGTHS = (2048, 8192, 32768)
# Block sizes whose kernels are compiled before: vLLM's default, and what backends prefer.
BLOCK_SIZES = (16, 64, 128)
TIMEOUT_S = 400
# As in the models' config.json.
_COMMON = {
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    "qwen-7b": {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="write this JSON file, after each engine")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: compiled, with CUDA graphs")
    add("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    add("--lengths", nargs="+", type=int, default=list(LENGTHS), help="of the prompts")
    add("--layers", type=int, help="so many instead of the model's")
    add("--runs", type=int, default=5, help="of each length, after one that is not counted (default: %(default)s)")
    add("--block-size", type=int, help="of the cache; default: what vLLM and the backend choose")
    add("--timeout", type=float, default=TIMEOUT_S, help="seconds of an engine (default: %(default)s)")
    return parser.parse_args(argv)


def write_model(name: str, folder: Path, layers: int | None) -> Path:
    """A folder with a config.json: all that an engine with dummy weights needs."""
    path = folder / name
    path.mkdir()
    config = dict(MODELS[name])
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def run_child(task: dict[str, Any], folder: Path, timeout_s: float) -> dict[str, Any]:
    """What an engine found, or an error: the end of its log."""
    files = {name: folder / name for name in ("task", "result", "log")}
    files["task"].write_text(json.dumps(task))
    files["result"].unlink(missing_ok=True)
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", "benchmarks.engine_child", str(files["task"]), str(files["result"])]
    with files["log"].open("w") as log:
        try:
            code: int | str = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=env, check=False, timeout=timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"no answer after {timeout_s:.0f} s"
    if code or not files["result"].exists():
        return {"error": f"{code}: {files['log'].read_text(errors='replace')[-3000:]}"}
    found: dict[str, Any] = json.loads(files["result"].read_text())
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line an engine: medians in milliseconds, and how many times as fast as ``REFERENCE`` in the same mode it is."""
    references = {(row["model"], row["mode"]): row for row in rows if row["backend"] == REFERENCE and "ttft_ms" in row}
    found = []
    for row in rows:
        title = f"{row['model']:9} {row['mode']:8} {row['backend']:12}"
        if "error" in row:
            found.append(f"{title} FAILED: {row['error'].strip().splitlines()[-1][:300]}")
            continue
        reference, words = references.get((row["model"], row["mode"])), []
        for length, times in row["ttft_ms"].items():
            word = f"{int(length):6}: {times['median']:8.1f} ms"
            if reference is not None and reference is not row and length in reference["ttft_ms"]:
                word += f" ({reference['ttft_ms'][length]['median'] / times['median']:.3f} x)"
            words.append(word)
        found.append(
            f"{title} {'  '.join(words)}  block {row['block_size']}, chunks of {row['max_num_batched_tokens']}"
        )
    return found


def misses(rows: list[dict[str, Any]]) -> list[str]:
    """Where this package's first token comes later than ``REFERENCE``'s."""
    times = {(row["model"], row["mode"], row["backend"]): row["ttft_ms"] for row in rows if "ttft_ms" in row}
    return [
        f"{model}, {mode}, {length}: {own['median']:.1f} ms, {REFERENCE} {reference[length]['median']:.1f} ms"
        for (model, mode, backend), found in times.items()
        if backend == OURS and (reference := times.get((model, mode, REFERENCE))) is not None
        for length, own in found.items()
        if length in reference and own["median"] > reference[length]["median"]
    ]


def compile_first(options: argparse.Namespace) -> None:
    """Our kernels side by side, so that engines load them from the disk cache."""
    from benchmarks.program import compile_all
    from tl_backend.measure.workload import problem

    shapes = [(MODELS[name]["num_attention_heads"], MODELS[name]["num_key_value_heads"]) for name in options.models]
    sizes = BLOCK_SIZES if options.block_size is None else (options.block_size,)
    try:
        compile_all(problem(*heads, 128, size) for heads in shapes for size in sizes)
    except SystemExit as error:  # An engine that needs it says so.
        print(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 1 if an engine failed."""
    options = arguments(argv)
    import torch

    from tl_backend.measure.results import environment

    if OURS in options.backends:
        compile_first(options)
    rows: list[dict[str, Any]] = []
    facts = environment(torch.device("cuda"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {model: write_model(model, folder, options.layers) for model in options.models}
        for model in options.models:
            for mode in options.modes:
                for backend in options.backends:
                    begun = time.perf_counter()
                    task = {
                        "model": str(paths[model]), "backend": backend, "eager": mode == "eager",
                        "lengths": options.lengths, "runs": options.runs, "block_size": options.block_size,
                    }  # fmt: skip
                    row = {"model": model, "mode": mode, "backend": backend}
                    row |= run_child(task, folder, options.timeout)
                    rows.append(row | {"seconds": round(time.perf_counter() - begun, 1)})
                    print(f"{table(rows)[-1]}  {rows[-1]['seconds']:.0f} s", flush=True)
                    if options.out is not None:
                        options.out.parent.mkdir(parents=True, exist_ok=True)
                        document = {"environment": facts, "layers": options.layers, "rows": rows}
                        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(["", *table(rows)]))
    late = misses(rows)
    print(f"later than {REFERENCE}: {'; '.join(late) or 'none'}")
    for row in rows:
        if "error" in row:
            print(f"\n{row['model']}, {row['mode']}, {row['backend']} failed with {row['error']}")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
