"""The command line. Each command has a file that only parses and calls; heavy imports happen when it is called.

`main` is the entry point: it runs one command and returns its exit code. It is also the only place that handles errors: commands raise
them and never print them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from groupwise.cli.check import check, doctor
from groupwise.cli.evaluate import evaluate
from groupwise.cli.fetch import fetch_model, fetch_tunix
from groupwise.cli.generate import generate
from groupwise.cli.init import init
from groupwise.cli.options import WrappingGroup, command
from groupwise.cli.output import PROGRAM, Stopped, run_command
from groupwise.cli.rl import rl, sft
from groupwise.cli.serve import serve
from groupwise.cli.web import web


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


WAYS_TO_BEGIN = """\
Groupwise trains language models with group-relative reinforcement learning.

Five ways to begin:

  a built-in task, which a small real model learns in ten minutes:
    groupwise init -t sort_words -m smollm2-135m-instruct
    groupwise rl -c sort_words.yaml -t sort_words
  your own task, a Python file; check its rewards first:
    groupwise check -t task.py
  a config of TRL, open-r1 or Unsloth:
    groupwise init --from grpo.yaml
  a server that trains for clients:
    groupwise serve --help
  other machines, or a queue of jobs on many GPUs:
    groupwise launch --help
    groupwise fleet --help

Add model.name=tiny training.max_steps=3 to see in seconds whether a task runs:
that model is a toy and learns nothing.

All commands: groupwise --help. Runs in a browser: groupwise web."""

LIBRARIES = r"(torch|transformers|peft|datasets|huggingface_hub|numba|tokenizers|safetensors)\b"
"""Libraries whose warnings about future releases concern our developers, not users: they are not shown."""

app = typer.Typer(
    name=PROGRAM,
    cls=TopLevelGroup,
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


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train language models with group-relative reinforcement learning."""
    if context.invoked_subcommand is None:
        typer.echo(WAYS_TO_BEGIN)


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
for name, module, summary in (
    ("environments", "environments", "Environments of other libraries: install, list, remove."),
    (
        "runs",
        "runs.app",
        "Runs: list, show, rollouts, plot, compare, rescore, replay, export, push, import.",
    ),
    ("fleet", "fleet.app", "Jobs on many machines: up, submit, list, logs, vm."),
    (
        "launch",
        "launch.app",
        "Run a command on another machine: local, ssh, logs, fetch, stop, resume.",
    ),
):
    group = type(f"{name}_group", (LazyGroup,), {"module": f"groupwise.cli.{module}"})
    app.add_typer(
        typer.Typer(cls=group, no_args_is_help=True, rich_markup_mode=None), name=name, help=summary
    )


def documentation() -> dict[str, str]:
    """docs/commands.md: what each command does, a table for each group of commands."""
    text = COMMANDS
    for words, group in _groups((PROGRAM,), typer.main.get_command(app)):
        text += f"\n## `{' '.join(words)}`\n\n| command | does |\n|---|---|\n"
        for name, one in visible_commands(group):
            text += f"| `{' '.join((*words, name))}` | {one.get_short_help_str(limit=1000)} |\n"
    return {"commands.md": text}


COMMANDS = """# Commands

```console
groupwise --help
groupwise runs export --help
```

The first command lists all commands, the second the arguments and options of one. In the site (`make docs`) this page has them too.
`groupwise-train-grpo` is a program of its own, with [its flags](how-to/init.md#grpo-from-flags).
"""


def visible_commands(group: Any) -> list[tuple[str, Any]]:
    """The commands of a group with their names, as its help lists them."""
    context = typer.Context(group)
    found = ((name, group.get_command(context, name)) for name in group.list_commands(context))
    return [(name, one) for name, one in found if not one.hidden]


def _groups(words: tuple[str, ...], group: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, group
    for name, one in visible_commands(group):
        if isinstance(one, TyperGroup):
            yield from _groups((*words, name), one)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and raises nothing. Without `args`, this is the program itself."""
    if args is None:
        warnings.filterwarnings("ignore", category=FutureWarning, module=LIBRARIES)
    return run_command(app, PROGRAM, list(sys.argv[1:] if args is None else args))
