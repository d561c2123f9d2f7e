"""What the acceptance kit runs on a device: bounded, so that it ends within an hour or so on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.configs.models import shipped_now
from tl_backend.configs.words import parse_problem
from tl_backend.device import DeviceSpec
from tl_backend.measure.workload import Workload
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.prepare import required_kernels
from tl_backend.problem import AttentionProblem
from tl_backend.testing.problems import Work, cpu_work, gpu_work

# Of the sweep's base problems every ninth: each head size still comes once, and every page size, ratio and mask.
EVERY = 9
# One sequence of the article's shape, and the sweep of lengths around it.
ARTICLE = "8/8,D128,contiguous,bfloat16,full"
ARTICLE_LENS = (1024, 2048, 4096, 8192, 16384)
PAGES = (16, 128)
SERVED = "32/8,D128,page{page},bfloat16"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Attributes: work: problems whose answers are checked; tuned: searched; workloads: timed beside the peers."""

    work: tuple[Work, ...]
    tuned: tuple[AttentionProblem, ...]
    workloads: tuple[Workload, ...]


def plan_for(device: DeviceSpec) -> Plan:
    """The plan of a kind of device; a CPU's shows that the kit works."""
    if not device.is_gpu:
        problem = parse_problem("4/2,D32,page16,float32")
        lens = {"prefill 48": ((48,), (48,)), "decode 2 x 96": ((1, 1), (96, 96))}
        workloads = tuple(
            Workload(name=name, problem=problem, query_lens=queries, seq_lens=keys)
            for name, (queries, keys) in lens.items()
        )
        return Plan(work=tuple(cpu_work()), tuned=(problem,), workloads=workloads)
    return Plan(work=_gpu_work(), tuned=tuple(shipped_now().values()), workloads=_workloads())


def kernels_of(work: Work, device: DeviceSpec) -> list[KernelKey]:
    """The kernels that a work's cases launch, with the family's defaults or this device's tables."""
    return [key for key in required_kernels(work.problem, device) if _kind(key) in work.kinds]


def _kind(key: KernelKey) -> str:
    """As ``Work.kinds`` calls it."""
    if key.kind == "decode_combine" or (key.kind == "decode" and key.config.split):
        return "decode_split"
    # Whichever family serves.
    return "prefill" if key.kind in ("prefill_hopper", "prefill_combine") else key.kind


def _gpu_work() -> tuple[Work, ...]:
    """Plain problems and those with features in turn: what a budget cuts off is some of each."""
    works = gpu_work()
    plain = [work for work in works if work.problem.is_paged and not _has_features(work.problem)][::EVERY]
    others = [work for work in works if not work.problem.is_paged or _has_features(work.problem)]
    longer, shorter = sorted((plain, others), key=len, reverse=True)
    mixed = [work for pair in zip(longer, shorter, strict=False) for work in pair]
    return tuple(mixed + longer[len(shorter) :])


def _has_features(problem: AttentionProblem) -> bool:
    return (
        problem.window is not None
        or problem.soft_cap is not None
        or problem.sinks_dtype is not None
        or problem.has_alibi
        or problem.returns_lse
        or problem.is_quantized
    )


def _workloads() -> tuple[Workload, ...]:
    found = [_workload(f"article, {n}", ARTICLE, (n,), (n,)) for n in ARTICLE_LENS]
    for page in PAGES:
        problem = SERVED.format(page=page)
        for name, queries, keys in (
            ("prefill of 8192", (8192,), (8192,)),
            ("prefill of 2048 at context 32768", (2048,), (32768 + 2048,)),
            ("6 prefills of 77 to 3000", (3000, 1024, 777, 512, 129, 77), (3000, 1024, 777, 512, 129, 77)),
            *((f"decode, batch {batch}, context 8192", (1,) * batch, (8192,) * batch) for batch in (1, 8, 64)),
        ):
            found.append(_workload(f"{name}, page {page}", problem, queries, keys))
    return tuple(found)


def _workload(name: str, spec: str, queries: tuple[int, ...], keys: tuple[int, ...]) -> Workload:
    return Workload(name=name, problem=parse_problem(spec), query_lens=queries, seq_lens=keys)
