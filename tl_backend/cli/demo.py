"""``make demo``: a model served on the TileLang kernels, its launches counted, its answer compared with vLLM's own.

Writes a tiny random-weight model, serves it twice on loopback (once with ``--attention-backend tilelang``, once as vLLM
itself would), and exits with 0 only if every layer of every step ran on TileLang and the greedy tokens are equal.
"""

from __future__ import annotations

import argparse
import signal
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tl_backend.cli.demo_launches import LaunchCheckError, check_counts, difference, read_counts
from tl_backend.cli.demo_machine import Machine, find_machine
from tl_backend.errors import TLBackendError
from tl_backend.testing.checkpoint import write_checkpoint
from tl_backend.testing.server import VllmServer

# The seed is chosen so that the text does not repeat itself and no step's best two logits are near: neither float16 nor
# another order of summation can change a token, a wrong kernel can. tests/cli/test_demo_model.py measures the gaps.
SEED = 208
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "num_q_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 32,
    "alphabet": string.ascii_lowercase + " ",
    "seed": SEED,
}
# 249 bytes, so 249 tokens: the prompt fills one CPU page of 128 and most of another, and the answer runs into a third.
PROMPT = (
    "Every attention layer of this model runs on TileLang kernels. Paged prefill reads this prompt, the cache write "
    "puts its keys and values into pages, and paged split-KV decode makes each of the tokens that follow. What comes "
    "next is noise, but exact: "
)
NUM_TOKENS = 32
QUIET_PROGRESS_SECONDS = 10.0
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

console = Console(highlight=False)


@dataclass(frozen=True)
class Answer:
    """What one server gave: the greedy tokens, their text, and the launches that the request caused."""

    tokens: list[int]
    text: str
    launches: dict[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tl_backend.cli.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--log-dir", type=Path, help="keep the servers' logs here")
    options = parser.parse_args(argv)
    # A closed terminal, too, leaves no server behind. A shell starts background jobs with SIGINT ignored.
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="tl-backend-demo-") as folder:
            run(Path(folder), options.log_dir)
    except KeyboardInterrupt:
        console.print("\nInterrupted; what was started has been stopped.")
        return INTERRUPTED
    except (TLBackendError, OSError) as error:
        console.print(f"\n[bold red]Failed.[/] {escape(str(error))}", soft_wrap=True)
        return 1
    return 0


def run(folder: Path, log_dir: Path | None = None) -> None:
    """The demo itself, with its files in ``folder``.

    Raises:
        TLBackendError: something is missing, a server failed, or the answers do not show what they must.
    """
    started = time.monotonic()
    machine = find_machine()
    logs = log_dir or folder
    logs.mkdir(parents=True, exist_ok=True)
    model = write_checkpoint(folder / "model", **MODEL)
    console.print(f"A random Llama of {MODEL['num_layers']} layers, served on: [bold]{escape(machine.name)}[/]")

    console.print("\n[bold]vllm serve --attention-backend tilelang[/]")
    ours = _ask(model, machine, backend="tilelang", env=machine.tilelang_env, folder=folder, logs=logs)
    check_counts(ours.launches, num_layers=MODEL["num_layers"], num_tokens=NUM_TOKENS)
    console.print(_table(ours.launches))

    console.print("\n[bold]vllm serve[/] with its built-in backend")
    theirs = _ask(model, machine, backend=None, env={}, folder=folder, logs=logs)
    if theirs.launches:
        raise LaunchCheckError(f"The reference ran on TileLang: {theirs.launches} launches; 0 are right.")
    compare(ours.tokens, theirs.tokens)
    console.print(
        f"\n[bold green]Done in {time.monotonic() - started:.0f} s.[/] All {MODEL['num_layers']} layers of all steps "
        f"ran on TileLang, none did in the reference, and the {NUM_TOKENS} greedy tokens are equal.",
        soft_wrap=True,
    )


def compare(ours: list[int], theirs: list[int]) -> None:
    """Check that both answers are whole and equal.

    Raises:
        TLBackendError: they are not; the message names the first token that differs.
    """
    for name, tokens in (("TileLang", ours), ("built-in", theirs)):
        if len(tokens) != NUM_TOKENS:
            raise TLBackendError(f"tokens of the {name} backend: got {len(tokens)}; {NUM_TOKENS} were asked for.")
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our != their:
            raise TLBackendError(
                f"token {index} differs: {our} ({chr(our)!r}) on TileLang, {their} ({chr(their)!r}) on the built-in "
                "backend. A kernel is wrong on this machine: please report it with --log-dir's files."
            )


def _ask(
    model: Path, machine: Machine, *, backend: str | None, env: Mapping[str, str], folder: Path, logs: Path
) -> Answer:
    name = backend or "built-in"
    launch_dir = folder / f"launches-{name}"
    launch_dir.mkdir()
    server = VllmServer(
        model,
        backend=backend,
        env={**machine.env, **env, "TL_BACKEND_LAUNCH_LOG_DIR": str(launch_dir)},
        args=machine.args,
        log_path=logs / f"vllm-{name}.log",
    )
    with server:
        with _progress("starting, waiting on /health") as show:
            waited = server.wait_healthy(on_progress=show)
        console.print(f"  ready after {waited:.0f} s")
        before = read_counts(launch_dir)
        console.print("  ", end="")
        tokens, text = _stream(server)
        after = read_counts(launch_dir, after=time.time())
    return Answer(tokens, text, difference(after, before))


def _stream(server: VllmServer) -> tuple[list[int], str]:
    tokens: list[int] = []
    text = ""
    request = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    for chunk in server.stream(PROMPT, **request):
        choice = chunk["choices"][0]
        tokens += choice["token_ids"] or []
        text += choice["text"]
        console.print(choice["text"], end="", style="cyan", markup=False, soft_wrap=True)
    console.print()
    return tokens, text


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float], None]]:
    """A callback for the seconds waited: one live line on a terminal, a line now and then elsewhere."""
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda waited: status.update(f"{what}: {waited:.0f} s")
        return
    shown = 0.0

    def show(waited: float) -> None:
        nonlocal shown
        if waited - shown >= QUIET_PROGRESS_SECONDS:
            shown = waited
            console.print(f"  {what}: {waited:.0f} s")

    yield show


def _table(launches: dict[str, int]) -> Table:
    num_layers = MODEL["num_layers"]
    table = Table("TileLang kernel", title="Launches in the worker", title_justify="left")
    table.add_column("launches", justify="right")
    table.add_column(f"a layer ({num_layers})", justify="right")
    for kernel, count in launches.items():
        table.add_row(kernel, str(count), f"{count / num_layers:g}")
    return table


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
