"""The program ``tl-backend``: its commands, its version, and how it fails.

Exit codes: 0 fine, 1 the answer is no (a check failed, something is worse or not valid), 2 bad usage or input.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tl_backend import __version__
from tl_backend.cli.bench import bench
from tl_backend.cli.doctor import doctor
from tl_backend.cli.inspect import inspect
from tl_backend.cli.prebuild import prebuild
from tl_backend.cli.table import table_app
from tl_backend.cli.tune import tune
from tl_backend.errors import TLBackendError

BAD_INPUT = 2


class Commands(TyperGroup):
    """Says an expected error in one line on stderr, and exits with 2; a bug keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TLBackendError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(BAD_INPUT) from None


# Help is plain text: rich's markup would take the brackets of a problem's grammar for styles.
app = typer.Typer(
    name="tl-backend",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tl-backend {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """TileLang attention kernels for vLLM: check an environment, look at code, tune and measure."""


for _command in (doctor, tune, bench, inspect, prebuild):
    app.command()(_command)
app.add_typer(table_app, name="table")


def main() -> None:
    """The entry point."""
    app()
