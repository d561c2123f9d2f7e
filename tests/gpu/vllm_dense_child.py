"""One backend's process of ``tests.gpu.vllm_dense``: vLLM's test file, called for each job of a task."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from tests.gpu.vllm_dense import OURS, Job


def _causal(b, h, q_idx, kv_idx, *, context_len, window):
    return q_idx + context_len >= kv_idx


def _window(b, h, q_idx, kv_idx, *, context_len, window):
    return (q_idx + context_len >= kv_idx) & (q_idx + context_len - kv_idx < window)


def _both_sides(b, h, q_idx, kv_idx, *, context_len, window):
    return (q_idx + context_len - kv_idx).abs() < window


def _none(b, h, q_idx, kv_idx, *, context_len, window):
    return q_idx >= 0


# For flex_attention; the file binds the context's length.
MASKS = {"causal": _causal, "window": _window, "both sides": _both_sides, "none": _none}


def stand_in_for_pytest() -> ModuleType:
    """What vLLM's files need to be imported, where pytest is absent."""

    class Skipped(Exception):  # noqa: N818
        pass

    def skip(reason: str = "", **options: Any) -> None:
        raise Skipped(reason)

    def decorator(*args: Any, **options: Any) -> Any:
        return lambda function: function

    skip.Exception = Skipped
    module = importlib.util.module_from_spec(ModuleSpec("pytest", None))  # Others ask whether it is there by its spec.
    marks = type("Marks", (), {"__getattr__": lambda self, name: decorator})()
    vars(module).update(skip=skip, mark=marks, fixture=decorator, param=lambda *values, **options: values)
    return module


class Backend:
    """vLLM's test file, imported for one backend."""

    def __init__(self, name: str, folder: Path, models: Path, dtype: str | None) -> None:
        if importlib.util.find_spec("pytest") is None:
            sys.modules["pytest"] = stand_in_for_pytest()
        from tl_backend.vllm_plugin.register import refusal, register

        register()
        if name == OURS and (reason := refusal()):
            raise SystemExit(reason)
        import tests

        tests.__path__.append(str(folder / "tests"))  # vLLM's package has our tests' name.
        import torch

        from tests.v1.attention import test_attention_backends as file

        self.torch, self.file, self.models = torch, file, models
        self.name, self.member, self.dtype = name, file.AttentionBackendEnum[name], dtype
        self._make_reference_eager()
        if name == OURS:
            # vLLM builds a model's layers under its dtype; the file does not, and TileLangImpl takes it from there.
            original = file.try_get_attention_backend

            def with_dtype(wanted: Any) -> tuple[Any, Any]:
                builder, impl = original(wanted)

                class Impl(impl):
                    def __init__(inner, *args: Any, **options: Any) -> None:  # noqa: N805
                        before = torch.get_default_dtype()
                        torch.set_default_dtype(self.layer_dtype)
                        try:
                            super().__init__(*args, **options)
                        finally:
                            torch.set_default_dtype(before)

                return builder, Impl

            file.try_get_attention_backend = with_dtype

    def _make_reference_eager(self) -> None:
        """The reference is flex_attention, which takes a second a call through torch.compile."""
        flex, flag = self.torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
        if not hasattr(flex, flag):
            return
        setattr(flex, flag, True)
        try:
            x = self.torch.randn(1, 4, 8, 64, device=self.file.DEVICE_TYPE)
            mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device=self.file.DEVICE_TYPE)
            flex.flex_attention(x, x, x, block_mask=mask, enable_gqa=True)
        except Exception as error:  # noqa: BLE001
            print(f"flex_attention is compiled: {type(error).__name__}: {_first_lines(error)}", flush=True)
            setattr(flex, flag, False)

    def arguments(self, job: Job) -> tuple[Any, str, Any, dict[str, Any]]:
        """Batch, model, mask and keywords."""
        file, options = self.file, dict(job.arguments)
        if "layout" in options:
            options["layout"] = file.KVCacheLayout[options["layout"]]
        if "attn_type" in options:
            options["attn_type"] = file.AttentionType[options["attn_type"]]
        if self.dtype is not None:
            options["model_dtype"] = getattr(self.torch, self.dtype)
        batch, model = file.BATCH_SPECS[job.batch], str(self.models / job.model.replace(" ", "_"))
        config = file.ModelConfig(
            model=model, max_model_len=max(batch.seq_lens), dtype=options.get("model_dtype", "auto")
        )
        self.layer_dtype, window = file._convert_dtype_to_torch(config.dtype), config.get_sliding_window()
        assert (window is not None) == (job.mask in ("window", "both sides")), f"{job.model}: window {window}"
        return batch, model, partial(MASKS[job.mask], window=window), options

    def compile_first(self, work: list[Job]) -> dict[str, Any]:
        """The kernels of all jobs, side by side. The problems are what builders ask for."""
        from tl_backend import ops
        from tl_backend.device import DeviceSpec
        from tl_backend.ops.prepare import load_kernels, required_kernels

        file, device, problems, notes = self.file, self.torch.device(f"{self.file.DEVICE_TYPE}:0"), [], []
        distinct = {(job.model, repr(job.arguments | {"layout": ""})): job for job in work}
        with mock.patch.object(ops, "prepare", lambda group, *args, **options: problems.extend(group)):
            for job in distinct.values():
                try:
                    _, model, _, options = self.arguments(job)
                    config = file.create_vllm_config(
                        model_name=model,
                        max_model_len=64,
                        dtype=options.get("model_dtype") or "auto",
                        block_size=options.get("block_size", 16),
                        num_gpu_blocks=64,
                    )
                    config.cache_config.cache_dtype = options.get("kv_cache_dtype", "auto")
                    attn_type = options.get("attn_type", file.AttentionType.DECODER)
                    spec = file.create_standard_kv_cache_spec(config, attn_type)
                    builder, _ = file.try_get_attention_backend(self.member)
                    with file.set_current_vllm_config(config):
                        builder(spec, ["placeholder"], config, device)
                except Exception as error:  # noqa: BLE001, PERF203
                    notes.append(f"{job}: {type(error).__name__}: {_first_lines(error)}")
        begin = time.monotonic()
        keys = [key for problem in dict.fromkeys(problems) for key in required_kernels(problem, DeviceSpec.of(device))]
        errors = load_kernels(keys)
        seconds = round(time.monotonic() - begin, 1)
        return {"kernels": len(set(keys)), "s": seconds, "errors": list(errors.values()), "notes": notes}

    def run(self, job: Job) -> None:
        """Fills in the job's result."""
        begin = time.monotonic()
        pytest = self.file.pytest
        try:
            batch, model, mask, options = self.arguments(job)
            cache = options.get("kv_cache_dtype", "auto")
            if cache != "auto" and not self.member.get_class().supports_kv_cache_dtype(cache):
                pytest.skip(f"{self.name} does not support {cache}")  # The file passes over it without a word.
            with self._recorded(job):
                self.file._test_backend_correctness(batch, model, [self.member], mask, **options)
            job.state = "passed" if job.max_abs is not None else "compared nothing"
        except pytest.skip.Exception as reason:
            job.state, job.message = "skipped", str(reason)
        except Exception as error:  # noqa: BLE001
            job.state, job.message = "failed", f"{type(error).__name__}: {_first_lines(error)}"
        job.seconds = round(time.monotonic() - begin, 2)

    @contextlib.contextmanager
    def _recorded(self, job: Job) -> Iterator[None]:
        """What assert_close is asked, as numbers."""
        compare = self.torch.testing.assert_close

        def recording(actual: Any, expected: Any, **options: Any) -> None:
            difference = (actual.double() - expected.double()).abs()
            job.max_abs = float(difference.max())
            job.relative_rms = float(difference.norm() / expected.double().norm())
            compare(actual, expected, **options)

        with mock.patch.object(self.torch.testing, "assert_close", recording):
            yield


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " / ".join(lines[:6])[:600]


def main(task: Path, result: Path) -> None:
    """Run the jobs of a task, and save the results after each."""
    todo = json.loads(task.read_text())
    deadline = time.monotonic() + todo["seconds"]
    work = [Job(**fields) for fields in todo["jobs"]]
    document: dict[str, Any] = {}

    def save() -> None:
        # As a whole: the process may be ended at any time.
        part = result.with_suffix(".part")
        part.write_text(json.dumps(document | {"rows": [asdict(job) for job in work]}))
        part.replace(result)

    backend = Backend(todo["backend"], Path(todo["folder"]), Path(todo["models"]), todo["dtype"])
    from vllm.config import VllmConfig, set_current_vllm_config

    if backend.name == OURS:
        with set_current_vllm_config(VllmConfig()):
            document["compiled"] = backend.compile_first(work)
    for job in work:
        if time.monotonic() > deadline:
            break
        job.state = "ended the process"
        save()
        with set_current_vllm_config(VllmConfig()):
            backend.run(job)
        numbers = "" if job.max_abs is None else f"{job.max_abs:.1e} {job.relative_rms:.1e}"
        print(
            f"{backend.name:12} {job.state:8} {job!s:40} {job.seconds:6.1f} s {numbers} {job.message[:160]}", flush=True
        )
        save()
    save()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    # Without destructors: a broken CUDA context makes them complain.
    sys.stdout.flush()
    os._exit(0)
