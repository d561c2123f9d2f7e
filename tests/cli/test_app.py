"""The program: help that shows how, a version, and failures that scripts can tell apart."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tl_backend import __version__
from tl_backend.cli import app as program
from tl_backend.cli.output import plain, print_json
from tl_backend.errors import InvalidInputError, describe

HEAVY = ("torch", "tilelang", "tvm", "vllm", "matplotlib")


def commands() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [
        (command.name or command.callback.__name__,) for command in program.app.registered_commands
    ]
    for group in program.app.registered_groups:
        found += [
            (str(group.name), str(c.name or c.callback.__name__)) for c in group.typer_instance.registered_commands
        ]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_has_an_example_and_json(command: tuple[str, ...]) -> None:
    answer = CliRunner().invoke(program.app, [*command, "--help"])
    assert answer.exit_code == 0
    words = " ".join(answer.output.split())
    assert f"tl-backend {' '.join(command)}" in words.partition("xample")[2]
    assert "--json" in words


def test_version() -> None:
    answer = CliRunner().invoke(program.app, ["--version"])
    assert (answer.exit_code, answer.output) == (0, f"tl-backend {__version__}\n")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom tl_backend.cli.app import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        f"print(sorted({set(HEAVY)} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_the_module_runs_as_the_program() -> None:
    answer = subprocess.check_output([sys.executable, "-m", "tl_backend.cli", "--version"], text=True)
    assert answer == f"tl-backend {__version__}\n"


@pytest.fixture
def broken() -> typer.Typer:
    """The program's root with commands that fail, at the top and in a group."""
    app, group = typer.Typer(cls=program.Commands, pretty_exceptions_enable=False), typer.Typer()

    @group.command("bad")
    @app.command("bad")
    def bad() -> None:
        raise InvalidInputError(describe("thing", value="1\n2", limit="one line", remedy="Mend it."))

    @app.command("bug")
    def bug() -> None:
        raise ZeroDivisionError("a bug")

    app.add_typer(group, name="group")
    return app


@pytest.mark.parametrize("command", [["bad"], ["group", "bad"]])
def test_an_expected_error_is_one_line_on_stderr(broken: typer.Typer, command: list[str]) -> None:
    answer = CliRunner().invoke(broken, command)
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert answer.stderr == "error: thing: got 1 2; one line. Mend it.\n"


def test_a_bug_keeps_its_traceback(broken: typer.Typer) -> None:
    answer = CliRunner().invoke(broken, ["bug"])
    assert isinstance(answer.exception, ZeroDivisionError)


def test_unknown_commands_and_options_are_bad_usage() -> None:
    assert CliRunner().invoke(program.app, ["no-such-command"]).exit_code == 2
    assert CliRunner().invoke(program.app, ["--no-such-option"]).exit_code == 2


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": (1, float("inf")), 3: {"é"}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1, None], "3": ["é"]}
    with pytest.raises(TypeError, match="object has no form"):
        plain([object()])
