"""vLLM's own test of dense attention backends, run for TileLang and others outside its repository and pytest.

Run ``python -m tests.gpu.vllm_dense FOLDER --out FILE.json``. FOLDER is a checkout of vLLM at the tag that is installed
here, or any folder that holds its ``tests/v1/attention/test_attention_backends.py`` and ``utils.py``. Every job is one
call of that file's ``_test_backend_correctness``, unchanged, for one backend and batch; its models are written here as
configurations, so that nothing is downloaded. A process a backend: one that breaks its CUDA context ends alone. Its
results so far and its log lie beside FILE.json, as FILE.BACKEND.json and FILE.BACKEND.log. Exits with 1 if a job of
TILELANG did not pass, those of groups in ``MAY_FAIL`` aside.

On a CPU, with TL_BACKEND_CPU=1, ``--dtype float32`` tries the program on the C target.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tl_backend.errors import describe

FILES = tuple(f"tests/v1/attention/{name}.py" for name in ("test_attention_backends", "utils"))
OURS = "TILELANG"
LAST_JOB_S = 45.0  # What a job that began in time may take beyond it.

_COMMON = {"torch_dtype": "bfloat16", "vocab_size": 32064, "num_hidden_layers": 4, "rms_norm_eps": 1e-6}
_QWEN3 = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
_PHI = _COMMON | {
    "architectures": ["PhiMoEForCausalLM"],
    "model_type": "phimoe",
    "hidden_size": 4096,
    "intermediate_size": 448,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
}
_GEMMA3 = _COMMON | {
    "architectures": ["Gemma3TextModel"],
    "model_type": "gemma3_text",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 2048,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
# The shapes of the models that vLLM's file names. It means tensor_parallel_size to divide the heads, which vLLM 0.33
# does not follow there: the last ones are what a rank has.
MODELS: dict[str, dict[str, Any]] = {"qwen3": _QWEN3, "windowed": _PHI, "encoder": _GEMMA3}
for _ranks in (2, 4):
    for _name in ("qwen3", "windowed"):
        _heads = ("num_attention_heads", "num_key_value_heads")
        MODELS[f"{_name} rank of {_ranks}"] = MODELS[_name] | {key: MODELS[_name][key] // _ranks for key in _heads}

# Batches as vLLM's file parametrises its tests.
_CAUSAL = (
    "small_decode", "small_prefill", "mixed_small", "medium_decode", "medium_prefill", "mixed_medium", "large_decode",
    "large_prefill", "single_decode", "single_prefill",
)  # fmt: skip
_WINDOW = ("small_decode", "small_prefill", "mixed_medium", "large_decode", "large_prefill", "mixed_large")
_ENCODER = ("small_encoder_prefill", "medium_encoder_prefill")
_FEW = ("small_decode", "small_prefill", "mixed_small")
# Beyond vLLM's tests: TileLang takes whole pages of 128 by another path than the rows of smaller ones, and any layout.
_MIXED = ("mixed_small", "mixed_medium")
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
# vLLM's specs for these say less than its layers do: an encoder's window is missing, and a decoder that is not causal
# is called causal, which TileLang refuses.
MAY_FAIL = ("encoder window", "not causal")


@dataclass
class Job:
    """One call, and what came of it.

    Attributes:
        mask: how the reference masks: "causal", "window", "both sides" (a window there), or "none".
        arguments: further ones of ``_test_backend_correctness``; names of its enumerations as strings.
        state: "passed"; "failed"; "skipped"; "compared nothing"; "not run"; "ended the process".
        max_abs, relative_rms: the largest difference that was compared, and the RMS one.
    """

    group: str
    batch: str
    model: str
    mask: str = "causal"
    arguments: dict[str, Any] = field(default_factory=dict)
    state: str = "not run"
    message: str = ""
    max_abs: float | None = None
    relative_rms: float | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.group}, {self.batch}"


def jobs(only: str = "") -> list[Job]:
    """Those that the expression finds, in the order of running."""
    encoder = {"causal": False, "attn_type": "ENCODER_ONLY"}
    groups: list[tuple[str, tuple[str, ...], str, str, dict[str, Any]]] = [
        ("causal", _CAUSAL, "qwen3", "causal", {}),
        ("causal fp8", _CAUSAL, "qwen3", "causal", {"kv_cache_dtype": "fp8"}),
        ("causal fp8_e4m3", _CAUSAL, "qwen3", "causal", {"kv_cache_dtype": "fp8_e4m3"}),
        ("window", _WINDOW, "windowed", "window", {}),
    ]
    for ranks in (2, 4):
        groups.append((f"causal rank of {ranks}", _CAUSAL, f"qwen3 rank of {ranks}", "causal", {}))
        groups.append((f"window rank of {ranks}", _WINDOW, f"windowed rank of {ranks}", "window", {}))
    groups.append(("causal page 128", _CAUSAL, "qwen3", "causal", {"block_size": 128}))
    groups += [
        *((f"layout {name}", _MIXED, "qwen3", "causal", {"layout": name}) for name in LAYOUTS),
        ("encoder window", _ENCODER, "encoder", "both sides", encoder),
        ("not causal", _FEW, "qwen3", "none", {"causal": False}),
    ]
    found = [Job(group, batch, *how) for group, batches, *how in groups for batch in batches]
    return [job for job in found if re.search(only, str(job))]


def folder_problem(folder: Path) -> str | None:
    """Why ``folder`` will not do, or None."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if not missing:
        return None
    return describe(
        "FOLDER",
        value=f"{folder}, without {' and '.join(missing)}",
        limit="it must hold vLLM's test file and what that imports",
        remedy="Name a checkout of vLLM at the tag of the vLLM that is installed.",
    )


def write_models(folder: Path) -> None:
    """A folder with a configuration for each of ``MODELS``."""
    for name, shape in MODELS.items():
        path = folder / name.replace(" ", "_")
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(shape))


def run_backends(names: list[str], work: list[Job], options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """What each backend's process left: "rows" (its jobs), "exit", and what else there is to say."""
    write_models(scratch / "models")
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"} | os.environ
    fields = {"folder": str(options.folder.resolve()), "models": str(scratch / "models"), "dtype": options.dtype}
    deadline, running, results = time.monotonic() + options.seconds + LAST_JOB_S, {}, {}
    for name in names:
        task, result, log = scratch / name, *(options.out.with_suffix(f".{name}.{end}") for end in ("json", "log"))
        rows = [asdict(job) for job in work]
        task.write_text(json.dumps(fields | {"backend": name, "seconds": options.seconds, "jobs": rows}))
        result.write_text(json.dumps({"rows": rows}))
        command = [sys.executable, "-m", "tests.gpu.vllm_dense_child", str(task), str(result)]
        with log.open("w") as stderr:  # vLLM warns at every configuration.
            running[name] = subprocess.Popen(command, stderr=stderr, env=environment)
    for name, process in running.items():
        code: int | str
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = "out of time"
        result, log = (options.out.with_suffix(f".{name}.{end}") for end in ("json", "log"))
        results[name] = json.loads(result.read_text()) | {"exit": code}
        if code != 0:
            results[name]["error"] = log.read_text(errors="replace")[-1500:]
    return results


def summary(results: dict[str, Any]) -> tuple[str, int]:
    """The table, passed of all by group and backend, what did not pass; and the exit code."""
    groups = list(dict.fromkeys(row["group"] for result in results.values() for row in result["rows"]))
    lines = [f"{'passed of all (largest difference)':36}" + "".join(f"{name:>24}" for name in results)]
    for group in groups:
        cells = []
        for result in results.values():
            rows = [row for row in result["rows"] if row["group"] == group]
            passed = [row["max_abs"] for row in rows if row["state"] == "passed"]
            cells.append(f"{len(passed)}/{len(rows)}" + (f" ({max(passed):.1e})" if passed else ""))
        lines.append(f"{group:36}" + "".join(f"{cell:>24}" for cell in cells))
    for name, result in results.items():
        states = Counter(row["state"] for row in result["rows"])
        lines.append(f"{name}: " + ", ".join(f"{count} {state}" for state, count in states.items()))
        lines += [
            f"{name}: {row['group']}, {row['batch']}: {row['state']}: {row['message']}"
            for row in result["rows"]
            if row["state"] not in ("passed", "not run")
        ]
        lines += [f"{name}: {note}" for note in result.get("compiled", {}).get("notes", ())]
        if result["exit"] != 0:
            lines.append(f"{name}: exit {result['exit']}: {result['error']}")
    ours = [row for row in results.get(OURS, {"rows": []})["rows"] if row["group"] not in MAY_FAIL]
    failed = [row for row in ours if row["state"] != "passed"]
    return "\n".join(lines), 1 if failed or (OURS in results and not ours) else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--backends", default=f"{OURS},TRITON_ATTN", help="vLLM's names, with commas between")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help='jobs "GROUP, BATCH" that it finds')
    parser.add_argument("--seconds", type=float, default=420.0, help="no job begins later")
    parser.add_argument("--dtype", help="of the models, instead of bfloat16")
    options = parser.parse_args(arguments)
    if (problem := folder_problem(options.folder)) is not None:
        parser.error(problem)
    work = jobs(options.only)
    if not work:
        parser.error(f"--only {options.only!r} leaves none of {[str(job) for job in jobs()]}")
    with tempfile.TemporaryDirectory() as scratch:
        results = run_backends(options.backends.split(","), work, options, Path(scratch))
    text, code = summary(results)
    print(text)
    import torch
    import vllm

    from tests.gpu.sweep import machine

    environment = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")) | {"vllm": vllm.__version__}
    document = {"environment": environment, "may_fail": MAY_FAIL, "results": results}
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
