"""The command line. Each command has a file that only parses and calls; heavy imports happen when it is called.

`main` is the entry point: it runs one command and returns its exit code. It is also the only place that handles errors: commands raise
them and never print them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from groupwise.cli.check import check
from groupwise.cli.doctor import doctor
from groupwise.cli.evaluate import evaluate
from groupwise.cli.fetch import fetch_model, fetch_tunix
from groupwise.cli.generate import generate
from groupwise.cli.init import init
from groupwise.cli.options import command
from groupwise.cli.output import PROGRAM, Stopped, run_command
from groupwise.cli.rl import rl
from groupwise.cli.serve import serve
from groupwise.cli.sft import sft
from groupwise.cli.web import web

WAYS_TO_BEGIN = """\b
Ways to begin:
  groupwise check -t sort_words                look at a built-in task
  groupwise check -t task.py                   are your task's rewards right?
  groupwise init -t task.py -m MODEL           a config for your task
  groupwise init --from train_grpo.py          one from a script of TRL
  groupwise serve --output-dir served          a server; clients give rewards
"""
"""Printed below the list of commands; click does not wrap what follows its mark."""


class WrappingGroup(TyperGroup):
    """A group whose help wraps long summaries of commands, where click would cut them off."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, found.get_short_help_str(limit=1000))
                    for name, found in commands
                    if found is not None and not found.hidden
                ]
            )


class TopLevelGroup(WrappingGroup):
    """The top-level commands."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:  # typer would lose the signal's number
            raise Stopped(interrupt) from interrupt


class LazyGroup(WrappingGroup):
    """The commands of a group, imported when one of them is needed."""

    module = ""
    """The module whose `app` has the commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._load_commands()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._load_commands()
        return super().get_command(ctx, cmd_name)

    def _load_commands(self) -> None:
        if self.commands:
            return
        from importlib import import_module

        group = typer.main.get_command(import_module(self.module).app)
        assert isinstance(group, TyperGroup), f"{self.module} has several commands"
        self.commands.update(group.commands)


app = typer.Typer(
    name=PROGRAM,
    cls=TopLevelGroup,
    epilog=WAYS_TO_BEGIN,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if not value:
        return
    from importlib import metadata

    try:
        version = metadata.version(PROGRAM)
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    typer.echo(f"{PROGRAM} {version}")
    raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train language models with group-relative reinforcement learning."""


command(app, "rl")(rl)
command(app, "sft")(sft)
command(app, "eval")(evaluate)
command(app, "init")(init)
command(app, "check")(check)
command(app, "doctor")(doctor)
command(app, "generate")(generate)
command(app, "serve")(serve)
command(app, "web")(web)
command(app, "fetch-model")(fetch_model)
command(app, "fetch-tunix")(fetch_tunix)
for name, summary in (
    ("environments", "Environments of other libraries: install, list, remove."),
    ("runs", "Runs: list, show, plot, compare, rescore, replay, export."),
    ("fleet", "Jobs on many machines: up, submit, list, logs, vm."),
    ("launch", "Run a command on another machine: local, ssh, logs, fetch, stop, resume."),
):
    group = type(f"{name}_group", (LazyGroup,), {"module": f"groupwise.cli.{name}.app"})
    app.add_typer(
        typer.Typer(cls=group, no_args_is_help=True, rich_markup_mode=None), name=name, help=summary
    )


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and raises nothing."""
    return run_command(app, PROGRAM, list(sys.argv[1:] if args is None else args))
