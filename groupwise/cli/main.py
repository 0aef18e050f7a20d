"""The command line. Each verb has a file that only parses and calls; everything heavy is imported when it is called.

`main` is the entry point: it runs one command and returns its exit code. It is also the boundary for errors, so that commands
raise and never print them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from groupwise.cli.check import check
from groupwise.cli.doctor import doctor
from groupwise.cli.evaluate import evaluate
from groupwise.cli.fetch_model import fetch_model
from groupwise.cli.generate import generate
from groupwise.cli.init import init
from groupwise.cli.output import PROGRAM, Stopped, report_error, report_stop
from groupwise.cli.rl import rl
from groupwise.cli.serve import serve
from groupwise.cli.sft import sft

LATER = frozenset({"fleet", "launch", "web"})
"""Commands of parts that are not in this version."""


class Verbs(TyperGroup):
    """The top-level commands; one that comes later is refused as such."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in LATER:
            ctx.fail(f"`{PROGRAM} {args[0]}` is not in this version.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:  # typer would forget which signal it was
            raise Stopped(interrupt) from interrupt


class RunsGroup(TyperGroup):
    """The commands of `groupwise runs`, imported when one of them is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._load()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._load()
        return super().get_command(ctx, cmd_name)

    def _load(self) -> None:
        if self.commands:
            return
        from groupwise.cli.runs import app as runs_app

        group = typer.main.get_command(runs_app)
        assert isinstance(group, TyperGroup), "groupwise.cli.runs has several commands"
        self.commands.update(group.commands)


app = typer.Typer(
    name=PROGRAM,
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {_version()}")
        raise typer.Exit


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version(PROGRAM)
    except metadata.PackageNotFoundError:
        return "(not installed)"


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Say which version."
        ),
    ] = False,
) -> None:
    """Train language models with group-relative reinforcement learning."""


app.command("rl")(rl)
app.command("sft")(sft)
app.command("eval")(evaluate)
app.command("init")(init)
app.command("check")(check)
app.command("doctor")(doctor)
app.command("generate")(generate)
app.command("serve")(serve)
app.command("fetch-model")(fetch_model)
app.add_typer(
    typer.Typer(cls=RunsGroup, no_args_is_help=True, rich_markup_mode=None),
    name="runs",
    help="Runs: list, show, plot, compare, rescore, replay, export.",
)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and raises nothing."""
    given = list(sys.argv[1:] if args is None else args)
    as_json = "--json" in given
    try:
        code = typer.main.get_command(app).main(
            args=given, prog_name=PROGRAM, standalone_mode=False
        )
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has left. Nothing more can be said to it, also not by Python as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Stopped as stopped:
        return report_stop(stopped, as_json=as_json)
    except Exception as error:  # noqa: BLE001 - the boundary: each failure gets a message and a code
        return report_error(error, as_json=as_json)
    return code if isinstance(code, int) else 0
