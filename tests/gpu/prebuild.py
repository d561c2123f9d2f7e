"""The kernels of the programs of this folder and of ``benchmarks``, compiled where no GPU is, to be carried to one.

Run ``python -m tests.gpu.prebuild sweep sanitize prefill engine --arch h200 --out FOLDER`` and name FOLDER in
``TL_BACKEND_CACHE_DIR`` beside the GPU: the programs find their kernels there, as long as TileLang, tvm-ffi, nvcc and
the kernels' sources are the same. ``--count`` says how many there are. Exits with 1 if one does not compile.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from benchmarks.prefill_cases import CASES, PAGES
from tests.gpu import launch_all, sweep
from tests.gpu.families import of_family
from tl_backend.cli.options import device_of
from tl_backend.device import DeviceSpec
from tl_backend.measure.ceilings import ceiling_kernels
from tl_backend.measure.workload import problem
from tl_backend.ops.build import build_kernels
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.driver_stub import linkable_driver
from tl_backend.ops.kernel_store import KernelStore
from tl_backend.ops.prepare import required_kernels

# Without a table, as those programs run.
DEFAULTS_ALONE = {"TL_BACKEND_TABLES": "0"}
ENGINE_HEADS, ENGINE_PAGES = ((32, 8), (28, 4)), (16, 128)


def _sweep(device: DeviceSpec) -> list[KernelKey]:
    """Of ``tests.gpu.sweep --family hopper``."""
    with mock.patch.dict(os.environ, DEFAULTS_ALONE):
        found = of_family("hopper", *sweep.everything(_torch(device)), device)
        return sweep.keys(*found, device)


def _sanitize(device: DeviceSpec) -> list[KernelKey]:
    with mock.patch.dict(os.environ, DEFAULTS_ALONE):
        return launch_all.keys(launch_all.launches(_torch(device)), device)


def _prefill(device: DeviceSpec) -> list[KernelKey]:
    problems = [case.workload(page).problem for case in CASES for page in PAGES]
    keys = [key for one in problems for key in required_kernels(one, device) if key.kind.startswith("prefill")]
    return [*keys, *ceiling_kernels(device, device.dtypes[-1])]


def _engine(device: DeviceSpec) -> list[KernelKey]:
    shapes = [(*heads, 128, page) for heads in ENGINE_HEADS for page in ENGINE_PAGES]
    return [key for shape in shapes for key in required_kernels(problem(*shape), device)]


GROUPS: dict[str, Callable[[DeviceSpec], list[KernelKey]]] = {
    "sweep": _sweep,
    "sanitize": _sanitize,
    "prefill": _prefill,
    "engine": _engine,
}


def _torch(device: DeviceSpec) -> torch.device:
    return torch.device("cuda" if device.is_gpu else "cpu")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    parser.add_argument("--arch", required=True, help="sm_90, or a device such as h200")
    parser.add_argument("--out", type=Path, help="folder; default: the cache of TL_BACKEND_CACHE_DIR")
    parser.add_argument("--processes", type=int, help="that compile side by side; default: all cores")
    parser.add_argument("--count", action="store_true", help="compile nothing")
    options = parser.parse_args(arguments)
    device, failed = device_of(options.arch), 0
    store = None if options.out is None else KernelStore(options.out)
    for group in options.groups:
        keys = list(dict.fromkeys(GROUPS[group](device)))
        print(f"{group}: {len(keys)} kernels", flush=True)
        if options.count:
            continue
        with linkable_driver(device):
            built = build_kernels(keys, store=store, processes=options.processes, on_progress=_progress)
        for key, outcome in built.items():
            if isinstance(outcome, str):
                failed += 1
                print(f"FAILED {key.kind} of {key.problem} with {key.config}: {outcome}")
    return 1 if failed else 0


def _progress(done: int, total: int, kind: str) -> None:
    if done % 10 == 0 or done == total:
        print(f"compiled {done} of {total} {kind}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
