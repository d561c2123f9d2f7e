"""``tl-backend bench``: attention over a sweep of lengths, beside the peers that are there and the roofline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tl_backend.cli.bench_plot import check_can_draw, draw
from tl_backend.cli.bench_table import show
from tl_backend.cli.options import GRAMMAR, device_of, parse_problem
from tl_backend.cli.output import JsonOption, plain, print_json, progress
from tl_backend.errors import InvalidInputError, describe
from tl_backend.problem import AttentionProblem

if TYPE_CHECKING:
    from tl_backend.device import DeviceSpec
    from tl_backend.measure.ceilings import Ceilings
    from tl_backend.measure.rows import Row
    from tl_backend.measure.workload import Workload

# The case of AMD's article on TileLang's FlashAttention: one sequence, 8 heads of 128, 4096 tokens; and its neighbours.
HEADS, HEAD_DIM = 8, 128
SEQ_LENS = (1024, 2048, 4096, 8192, 16384)
DECODE_PAGE = 16  # The block size that vLLM takes by itself.
# The C target is one thread: what is done in seconds, and shows nothing but that it works.
CPU_SEQ_LENS = (64, 128)
CPU_ROUNDS = 3
ANSWER_IS_NO = 1
RESULT_FIELDS = ("environment", "ceilings", "kind", "batch", "problem")


def bench(
    problem: Annotated[
        str | None,
        typer.Option("--problem", metavar="SPEC", help=f"Instead of the options of a shape: {GRAMMAR}."),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, metavar="N", help=f"Query heads. Default: {HEADS}.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, metavar="N", help="Key/value heads. Default: as many.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, metavar="N", help=f"Head size. Default: {HEAD_DIM}.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="Default: bfloat16, on a CPU float32.")] = None,
    page_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"Tokens of a cache's block. Default: contiguous keys; with --decode {DECODE_PAGE}.",
        ),
    ] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="The mask. Default: causal.")] = None,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences.")] = 1,
    seq_lens: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help=f"Keys of a sequence. Default: {','.join(map(str, SEQ_LENS))}."),
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="One new token a sequence, cold L2.")] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Launches of each kernel. Default: 31, and more until ratios are settled."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write what was measured.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE.json", help="Measure nothing: show what --out wrote.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure attention beside torch SDPA, Triton, FA3 and AITER.

    Those are torch's three kernels, vLLM's Triton kernel, FlashAttention-3 of vLLM and AITER, where they are there.

    Every answer is checked against float64 before it is timed. Kernels take turns in one process on the same tensors.
    The roofline is this machine's: TileLang's and torch's matmul and copy, measured on the spot.

    Exits with 1 if this package's answer is wrong or cannot be had.

    \b
    Examples:
      tl-backend bench --full --out attention.json --plot attention.png
      tl-backend bench --problem 32/8,D128,page16,bf16 --decode --seq-lens 2048
      tl-backend bench --from attention.json --plot attention.png
    """  # noqa: D301 click wants the character.
    _check_targets(out, plot)
    if source is not None:
        results = _read(source)
    else:
        shape = {
            "--heads": heads, "--kv-heads": kv_heads, "--head-dim": head_dim, "--dtype": dtype,
            "--page-size": page_size, "--causal/--full": causal,
        }  # fmt: skip
        results = _measure(_problem(problem, shape, decode), batch, seq_lens, decode, rounds)
    if out is not None:
        from tl_backend.measure.results import write_results

        write_results(out, results)
    if plot is not None:
        draw(results, plot)
    if as_json:
        print_json(results)
    else:
        show(results)
    if any(row["problems"] is not None for row in results["rows"]):
        raise typer.Exit(ANSWER_IS_NO)


def _check_targets(out: Path | None, plot: Path | None) -> None:
    """Before anything is measured: what took minutes is not lost because it cannot be written."""
    for option, path in (("--out", out), ("--plot", plot)):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            limit = f"it must be a file that can be written ({error.strerror})"
            raise InvalidInputError(describe(option, value=path, limit=limit, remedy="Name another.")) from error
    if plot is not None:
        check_can_draw()


def _problem(spec: str | None, shape: dict[str, Any], decode: bool) -> AttentionProblem:
    given = [option for option, value in shape.items() if value is not None]
    if spec is not None:
        if given:
            raise InvalidInputError(
                describe(
                    "--problem", value=f"also {', '.join(given)}", limit="it says all of a shape", remedy="Drop one."
                )
            )
        found = parse_problem(spec)
    else:
        heads, head_dim = shape["--heads"] or HEADS, shape["--head-dim"] or HEAD_DIM
        dtype = shape["--dtype"] or device_of().dtypes[-1]
        found = AttentionProblem(
            num_q_heads=heads,
            num_kv_heads=shape["--kv-heads"] or heads,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=dtype,
            kv_dtype=dtype,
            out_dtype=dtype,
            page_size=shape["--page-size"] or (DECODE_PAGE if decode else None),
            causal=shape["--causal/--full"] is not False,
        )
    if decode and not found.is_paged:
        raise InvalidInputError(
            describe("--decode", value="contiguous keys", limit="a decode reads a cache", remedy="Name a page size.")
        )
    return found


def _lengths(text: str | None, device: DeviceSpec) -> tuple[int, ...]:
    if text is None:
        return SEQ_LENS if device.is_gpu else CPU_SEQ_LENS
    try:
        lengths = tuple(int(word) for word in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise InvalidInputError(
            describe("--seq-lens", value=repr(text), limit="positive numbers with commas", remedy="Pass 1024,4096.")
        )
    return lengths


def _measure(
    problem: AttentionProblem, batch: int, seq_lens: str | None, decode: bool, rounds: int | None
) -> dict[str, Any]:
    import torch

    from tl_backend.measure.ceilings import ceilings
    from tl_backend.measure.peers_aiter import import_first
    from tl_backend.measure.results import document
    from tl_backend.measure.workload import Workload
    from tl_backend.ops.checks import check_supported

    spec = device_of()
    device = torch.device("cuda" if spec.is_gpu else "cpu")
    check_supported(problem, spec)
    workloads = [
        Workload(name=str(n), problem=problem, query_lens=(1 if decode else n,) * batch, seq_lens=(n,) * batch)
        for n in _lengths(seq_lens, spec)
    ]
    import_first()
    if spec.is_gpu:
        _compile(problem, spec, decode)
    console = progress()
    with console.status("measuring the roofline"):
        ceiling = ceilings(device, problem.dtype)
    return {
        **document(_rows(workloads, device, ceiling, decode, rounds), ceiling, device),
        "kind": "decode" if decode else "prefill",
        "batch": batch,
        "problem": plain(problem),
    }


def _rows(workloads: list[Workload], device: Any, ceiling: Ceilings, decode: bool, rounds: int | None) -> list[Row]:
    from tl_backend.measure.rows import measure_row
    from tl_backend.measure.timing import MAX_ROUNDS, ROUNDS

    on_cpu = device.type == "cpu"
    first = rounds or (CPU_ROUNDS if on_cpu else ROUNDS)
    most = first if on_cpu or rounds else MAX_ROUNDS
    rows = []
    with progress().status("") as status:
        for done, workload in enumerate(workloads):
            status.update(f"measuring {workload.name} keys, {done + 1} of {len(workloads)}")
            rows.append(measure_row(workload, device, ceiling, cold=decode, rounds=first, max_rounds=most))
    return rows


def _compile(problem: AttentionProblem, spec: DeviceSpec, decode: bool) -> None:
    """Side by side. What does not compile is told by the row that needs it."""
    from rich.progress import Progress

    from tl_backend.measure.ceilings import ceiling_kernels
    from tl_backend.ops.prepare import load_kernels, required_kernels

    phase = "decode" if decode else "prefill"  # Kernels of any family, and their combines.
    keys = [key for key in required_kernels(problem, spec) if key.kind.startswith(phase)]
    keys += ceiling_kernels(spec, problem.dtype)
    with Progress(console=progress(), transient=True) as bar:
        task = bar.add_task("compiling", total=len(keys))
        load_kernels(keys, on_progress=lambda done, total, kind: bar.update(task, completed=done))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        return {key: found[key] for key in (*RESULT_FIELDS, "rows")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            describe(
                f"results {path}",
                value=f"{type(error).__name__}: {error}",
                limit="a file that tl-backend bench --out wrote is needed",
                remedy="Measure again.",
            )
        ) from error
