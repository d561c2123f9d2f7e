"""Seconds until ``vllm serve`` is ready, with empty caches and again with what the first start left, by backend.

Run ``python -m benchmarks.start_up --out FILE.json [--models llama-8b] [--eager]`` where vLLM is installed;
``--device cpu`` tries the program itself with a tiny model. Each backend has caches of its own, of vLLM, torch, Triton
and this package. Once ready, a server answers prompts of many lengths: what compiles then is counted, and has to be
nothing. With compiled graphs vLLM itself watches for it (``--jit-monitor-mode=error``); ``--enforce-eager`` turns that
off.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import BACKENDS, MODELS, OURS, REFERENCE, write_model
from tl_backend.errors import TLBackendError
from tl_backend.ops.compiled import COMPILED, KERNELS_EVENT, LOADED, WHILE_SERVING
from tl_backend.testing.server import VllmServer

LENGTHS = (1, 7, 63, 513, 4097, 30000)
STARTS = ("empty", "warm")
TIMEOUT_S = 900.0
SNAPSHOT_S = 2.0  # Counts are written once a second.
# What keeps compiled code between starts, and where it does so.
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TL_BACKEND_CACHE_DIR": "tl-backend",
    "TILELANG_CACHE_DIR": "tilelang",
}
LOG_LINE = re.compile(r"TileLang kernels: \d+ compiled, \d+ from the kernel cache, ([\d.]+) s")
TINY = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32}
CPU_LENGTHS = (1, 7, 63, 200)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="write this JSON file, after each start")
    add("--models", nargs="+", choices=MODELS, default=["llama-8b"])
    add("--backends", nargs="+", choices=BACKENDS, default=[REFERENCE, OURS])
    add("--layers", type=int, help="so many instead of the model's")
    add("--lengths", nargs="+", type=int, help=f"of the prompts (default: {' '.join(map(str, LENGTHS))})")
    add("--eager", action="store_true", help="--enforce-eager: no graphs, no monitor")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--timeout", type=float, default=TIMEOUT_S, help="seconds of a start (default: %(default)s)")
    return parser.parse_args(argv)


def server_arguments(options: argparse.Namespace) -> list[str]:
    """Of ``vllm serve``."""
    longest = str(max(lengths(options)) + 16)
    if options.device == "cpu":
        return ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", longest]
    watched = ["--enforce-eager"] if options.eager else ["--jit-monitor-mode", "error"]
    dummy = ["--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-prefix-caching"]
    return [*dummy, "--max-model-len", longest, *watched]


def lengths(options: argparse.Namespace) -> tuple[int, ...]:
    """Of the prompts."""
    return tuple(options.lengths or (CPU_LENGTHS if options.device == "cpu" else LENGTHS))


def start(model: Path, backend: str, options: argparse.Namespace, folder: Path, caches: Path) -> dict[str, Any]:
    """One start, and what was compiled before and after it was ready."""
    env = {name: str(caches / cache) for name, cache in CACHES.items()}
    env |= {"TL_BACKEND_LAUNCH_LOG_DIR": str(folder / "launches")} if backend == OURS else {}
    on_cpu = options.device == "cpu"
    if on_cpu:
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1"} | ({"TL_BACKEND_CPU": "1"} if backend == OURS else {})
    name = None if on_cpu and backend != OURS else backend.lower()
    log = folder / "log.txt"
    with VllmServer(model, backend=name, env=env, args=server_arguments(options), log_path=log) as server:
        row: dict[str, Any] = {"ready_s": round(server.wait_healthy(timeout=options.timeout), 1)}
        row["kernels_s"] = sum(map(float, LOG_LINE.findall(log.read_text(errors="replace"))))
        draw = random.Random(0)  # noqa: S311
        for length in lengths(options):
            prompt = [draw.randint(10, 250) for _ in range(length)]
            server.complete(prompt, max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
        time.sleep(SNAPSHOT_S)
    row |= kernels(folder / "launches")
    return row


def kernels(folder: Path) -> dict[str, int]:
    """Where the kernels of all processes came from."""
    found: Counter[str] = Counter()
    for file in folder.glob("launches-*.json"):
        found.update(json.loads(file.read_text())["events"].get(KERNELS_EVENT, {}))
    return {"compiled": found[COMPILED], "loaded": found[LOADED], "compiled_while_serving": found[WHILE_SERVING]}


def rows(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Of every model, backend and start, as they come."""
    for model in ["tiny"] if options.device == "cpu" else options.models:
        for backend in options.backends:
            for which in STARTS:
                place = folder / f"{model}-{backend}-{which}"
                place.mkdir()
                row: dict[str, Any] = {"model": model, "backend": backend, "caches": which}
                try:
                    path = _model(model, place, options.layers)
                    row |= start(path, backend, options, place, folder / f"caches-{model}-{backend}")
                except TLBackendError as error:
                    row["error"] = str(error)
                yield row


def _model(name: str, folder: Path, layers: int | None) -> Path:
    if name != "tiny":
        return write_model(name, folder, layers)
    from tl_backend.testing.checkpoint import write_checkpoint

    return write_checkpoint(folder / name, **TINY, seed=1)


def line(row: dict[str, Any]) -> str:
    """For people."""
    title = f"{row['model']:9} {row['backend']:12} {row['caches']:5}"
    if "error" in row:
        return f"{title} FAILED: {row['error'].splitlines()[0][:300]}"
    text = f"{title} ready after {row['ready_s']:6.1f} s"
    if row["backend"] != OURS:
        return text
    where = f"{row['compiled']} compiled, {row['loaded']} loaded, {row['kernels_s']:.1f} s"
    return f"{text}, kernels: {where}; {row['compiled_while_serving']} compiled while serving"


def faults(found: list[dict[str, Any]]) -> list[str]:
    """What must not be: a start that failed, a warm one that compiles, a compilation while serving."""
    said = []
    for row in found:
        name = f"{row['model']}, {row['backend']}, {row['caches']}"
        if "error" in row:
            said.append(f"{name}: {row['error']}")
        elif row["compiled_while_serving"]:
            said.append(f"{name}: {row['compiled_while_serving']} compiled while serving")
        elif row["caches"] == "warm" and row["compiled"]:
            said.append(f"{name}: {row['compiled']} compiled")
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 1 if ``faults`` finds any."""
    options = arguments(argv)
    import torch

    from tl_backend.measure.results import environment

    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for row in rows(options, Path(name)):
            found.append(row)
            print(line(row), flush=True)
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                facts = {"environment": environment(torch.device(options.device)), "lengths": lengths(options)}
                options.out.write_text(json.dumps({**facts, "eager": options.eager, "rows": found}, indent=1) + "\n")
    said = faults(found)
    print("\n".join(said) or "nothing compiled that should not")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
