"""What a device reaches: the roofline's two lines, measured with this package's own matmul and copy.

torch's matmul and copy are measured beside them, and the higher of two is the ceiling: a roofline that a library can
pass would flatter every row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from tl_backend.configs.copy import copy_configs
from tl_backend.configs.gemm import GemmProblem, gemm_configs
from tl_backend.device import DeviceSpec
from tl_backend.measure.timing import Launch, relative_rms, time_ms
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.copy import copy, copy_key
from tl_backend.ops.gemm import gemm, gemm_key

# A GPU is full, and a launch's cost is nothing beside it; a CPU has to be done with it in a moment.
MATMUL_SIZE = {"cuda": 8192, "cpu": 128}
COPY_BYTES = {"cuda": 4 << 30, "cpu": 1 << 20}
TOLERANCE = 4e-3  # relative RMS of a bf16 product, whose elements are rounded to 2^-9 of themselves, against float64
CHECKED_ROWS = 64
TORCH = "torch"


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The two lines of a roofline.

    Attributes:
        matmul_tflops: random data of ``dtype``.
        copy_tbps: TB/s, bytes read plus written.
        dtype: of the matmul.
        matmul, copy: the figure of each program that was measured, and what of its configs was the best.
        errors: of those that failed.
    """

    matmul_tflops: float
    copy_tbps: float
    dtype: str
    matmul: dict[str, float]
    copy: dict[str, float]
    best: dict[str, str]
    errors: dict[str, str] = field(default_factory=dict)

    def least_ms(self, flops: float, num_bytes: float) -> float:
        """The milliseconds below which nothing here can do so much work and move so many bytes."""
        return max(flops / self.matmul_tflops, num_bytes / self.copy_tbps) / 1e9


def ceiling_kernels(device: DeviceSpec, dtype: str) -> list[KernelKey]:
    """Every kernel that ``ceilings`` asks for: to compile them side by side before."""
    problem = _matmul_problem(device, dtype)
    return [
        *(gemm_key(problem, config, device) for config in gemm_configs(problem, device)),
        *(copy_key(config, device) for config in copy_configs(device)),
    ]


def _matmul_problem(device: DeviceSpec, dtype: str) -> GemmProblem:
    size = MATMUL_SIZE["cuda" if device.is_gpu else "cpu"]
    return GemmProblem(m=size, n=size, k=size, dtype=dtype)


def ceilings(device: torch.device, dtype: str | None = None, *, own: bool = True) -> Ceilings:
    """What the device reaches now. A kernel that fails or answers wrong costs itself, and is named.

    Args:
        dtype: of the matmul. Default: bfloat16 on a GPU, float32 on a CPU.
        own: whether this package's programs are measured, too, and not torch's alone.
    """
    dtype = dtype or DeviceSpec.of(device).dtypes[-1]
    errors: dict[str, str] = {}
    tflops, tbps = _matmul_tflops(device, dtype, errors, own), _copy_tbps(device, errors, own)
    return Ceilings(
        matmul_tflops=max(tflops.values()),
        copy_tbps=max(tbps.values()),
        dtype=dtype,
        matmul=_by_program(tflops),
        copy=_by_program(tbps),
        best={name: _best(rates) for name, rates in (("matmul", tflops), ("copy", tbps))},
        errors=errors,
    )


def _matmul_tflops(device: torch.device, dtype: str, errors: dict[str, str], own: bool) -> dict[str, float]:
    spec = DeviceSpec.of(device)
    problem = _matmul_problem(spec, dtype)
    a, b = (torch.randn(problem.m, problem.k, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    rows = torch.randperm(problem.m)[:CHECKED_ROWS].to(device)
    want = a[rows].double() @ b.double().T

    def wrong() -> str | None:
        error = relative_rms(out[rows], want)
        return None if error <= TOLERANCE else f"its product is off by {error:.1e}; {TOLERANCE:.0e} is the limit"

    launches: dict[str, Launch] = {TORCH: lambda: torch.mm(a, b.T, out=out)}
    for config in gemm_configs(problem, spec) if own else ():
        launches[str(config)] = partial(gemm, a, b, out=out, config=config)
    return {name: problem.flops / ms / 1e9 for name, ms in _times(launches, out, wrong, device, errors).items()}


def _copy_tbps(device: torch.device, errors: dict[str, str], own: bool) -> dict[str, float]:
    source = torch.randint(256, (COPY_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def wrong() -> str | None:
        return None if torch.equal(source, target) else "what it copied differs"

    launches: dict[str, Launch] = {TORCH: lambda: target.copy_(source)}
    for config in copy_configs(DeviceSpec.of(device)) if own else ():
        launches[str(config)] = partial(copy, source, target, config=config)
    return {name: 2 * len(source) / ms / 1e9 for name, ms in _times(launches, target, wrong, device, errors).items()}


def _times(
    launches: dict[str, Launch],
    out: torch.Tensor,
    wrong: Callable[[], str | None],
    device: torch.device,
    errors: dict[str, str],
) -> dict[str, float]:
    """Median milliseconds of each launch whose answer is right; what is wrong with the others goes to ``errors``."""
    right = {}
    for name, launch in launches.items():
        out.zero_()
        try:
            launch()
            problem = wrong()
        except Exception as error:  # noqa: BLE001
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            right[name] = launch
        else:
            errors[name] = problem
    return {name: statistics.median(times) for name, times in time_ms(right, device).items()}


def _by_program(rates: dict[str, float]) -> dict[str, float]:
    """The best of this package's configs, and torch."""
    own = [rate for name, rate in rates.items() if name != TORCH]
    return ({"tilelang": max(own)} if own else {}) | {name: rate for name, rate in rates.items() if name == TORCH}


def _best(rates: dict[str, float]) -> str:
    own = {name: rate for name, rate in rates.items() if name != TORCH}
    return max(own, key=own.__getitem__) if own else "none"
