"""The command line of `groupwise launch`: words before `--` are the launcher's own, those after it are passed to the job unchanged."""

from __future__ import annotations

import difflib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from groupwise.cli.options import Command
from groupwise.cli.output import PROGRAM, collect_garbage_rarely
from groupwise.core.errors import UsageError

SCRIPT = "--script"
COMMAND = "groupwise.behind"
"""The key under which click stores the words after `--`."""
NOT_FOR_JOBS = ("--help", "--dry-run")
"""Options with which a command of groupwise would do nothing."""


@dataclass(frozen=True, slots=True)
class JobCommand:
    """The command that the job runs."""

    script: str | None
    """A Python file of the project; None: a command or program."""
    words: tuple[str, ...]
    """The command of groupwise or the program, with its arguments. If there is a script: the script's arguments."""

    @property
    def verb(self) -> str | None:
        """The command of groupwise; None: a script or another program."""
        from groupwise.jobs.launch.preflight import COMMANDS

        if self.script is not None or not self.words or self.words[0] not in COMMANDS:
            return None
        return self.words[0]

    @property
    def line(self) -> tuple[str, ...]:
        """The command line of the job, in an environment with groupwise."""
        if self.script is not None:
            return ("python", self.script, *self.words)
        return self.words if self.verb is None else (PROGRAM, *self.words)


class LaunchCommand(Command):
    """A command whose line ends with `-- COMMAND ARGUMENTS…` or `--script PATH ARGUMENTS…`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        collect_garbage_rarely()
        launcher_args, job_command = split_command(args)
        if job_command is None:
            from groupwise.jobs.launch.preflight import COMMANDS

            # Without `--`, the options of a command would be taken for the launcher's.
            first = next((n for n, word in enumerate(launcher_args) if word in COMMANDS), None)
            if first is not None:
                corrected = f"{ctx.command_path} " + shlex.join(
                    [*launcher_args[:first], "--", *launcher_args[first:]]
                )
                raise UsageError(
                    f"put the command to run after `--`, and the launcher's own options before it: {corrected}"
                )
        elif job_command.script is not None:
            launcher_args = [*launcher_args, SCRIPT, job_command.script]
        ctx.meta[COMMAND] = job_command
        return super().parse_args(ctx, launcher_args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), f"(-- COMMAND ... | {SCRIPT} PATH ...)"]


def split_command(args: Sequence[str]) -> tuple[list[str], JobCommand | None]:
    """The launcher's own words, and the command to run; None if there is none."""
    for n, word in enumerate(args):
        if word == "--":
            words = args[n + 1 :]
            if words[:1] == [PROGRAM]:  # as in `fleet submit`, where each program is named
                words = words[1:]
            return [*args[:n]], JobCommand(None, tuple(words))
        if word == SCRIPT or word.startswith(f"{SCRIPT}="):
            _, equals, path = word.partition("=")
            arguments = list(args[n + 1 :])
            if not equals:
                path = arguments.pop(0) if arguments else ""
            if not path or path == "--":
                raise UsageError(f"{SCRIPT} needs the path of a Python file of the project.")
            return [*args[:n]], JobCommand(
                path, tuple(arguments[1:] if arguments[:1] == ["--"] else arguments)
            )
    return [*args], None


def job_command(ctx: typer.Context) -> JobCommand:
    """The command to run. Raises UsageError if there is none, or if it looks like a mistake."""
    from groupwise.jobs.hosts.spec import one_word_problem
    from groupwise.jobs.launch.preflight import COMMANDS

    command: JobCommand | None = ctx.meta.get(COMMAND)
    if command is None or (command.script is None and not command.words):
        raise UsageError(
            f"there is nothing to run. Put a command of groupwise behind `--`, as `{ctx.command_path} -- rl --config C.yaml --task-module "
            f"task.py`, or any other program, as `-- python train.py`."
        )
    if command.script is not None:
        return command
    if (problem := one_word_problem(command.words)) is not None:
        raise UsageError(f"{problem}.")
    if command.verb is None:
        first = command.words[0]
        if first.startswith("-"):
            raise UsageError(
                f"`{first}` follows `--`, where a command of groupwise ({', '.join(COMMANDS)}) or a program is expected."
            )
        program: Any = ctx.find_root().command
        if first in program.list_commands(ctx) or difflib.get_close_matches(first, COMMANDS):
            raise UsageError(
                f"`{first}` follows `--`; the commands of groupwise that can be launched are {', '.join(COMMANDS)}. To run a program of "
                f"this name, give its path, as `-- ./{first}`."
            )
        return command
    for word in NOT_FOR_JOBS:
        if word in command.words:
            raise UsageError(
                f"{word} after `--` belongs to the job, which would then do nothing. Put it before `--`, where it belongs to the launcher."
            )
    return command


def new_name(command: JobCommand, now: float | None = None) -> str:
    """A name for a job without one: its command or script, and the current time to the millisecond."""
    source = Path(command.script or command.words[0]).stem
    letters = "".join(
        letter if letter.isascii() and letter.isalnum() else "-" for letter in source
    )[:40]
    moment = time.time() if now is None else now
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(moment))
    return f"{letters.strip('-') or 'job'}-{stamp}-{int(moment * 1000) % 1000:03d}"
