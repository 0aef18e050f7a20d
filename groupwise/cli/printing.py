"""Shared by the commands that show runs: their arguments, tables for people, JSON for programs.

A model's text may contain anything; it is shown as plain text without control characters, in the terminal's encoding.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.cells import cell_len

from groupwise.cli.options import TYPED_WORDS, option
from groupwise.core.terminal.quantities import counted
from groupwise.core.terminal.text import clean, one_line, shorten

MIN_WIDTH = 40
"""Smallest width in columns of wrapped text, even in a narrower terminal."""
ABSENT = ("0", "false", "null")
"""Values that `print_plan` leaves out, because the run does not use that part. `--json` has them."""
DRY_RUN = ("--dry-run", "--dry_run")
RUNS = Path("runs")
RunsDir = Annotated[Path, option("DIR", "Folder that holds the runs.", "--dir")]


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """For the completion in a shell: the runs in the folder that the command line names."""
    folder = Path(context.params.get("dir") or RUNS)
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path.name for path in found if path.is_dir() and path.name.startswith(incomplete))


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Name of a run, or path of its folder.", autocompletion=run_names
    ),
]


def print_section(title: str, pairs: Sequence[tuple[str, Any]]) -> None:
    """Print a title with pairs below it; nothing if there are no pairs."""
    if pairs:
        print_text(f"\n{one_line(title)}")
        print_pairs([(f"  {name}", value) for name, value in pairs])


def print_plan(summary: Mapping[str, Any]) -> None:
    """Print what a dry run found: numbers, the settings that are not defaults, sections, then texts as the model would see them."""
    from groupwise.runs.folder import flatten

    plan: Mapping[str, Any] = summary.get("plan", summary)
    print_pairs([(name, value) for name, value in plan.items() if _is_short(value)])
    if "config" in summary:
        print_settings(summary["config"])
    for name, value in plan.items():
        if isinstance(value, dict):
            parts = flatten(cast("dict[str, Any]", value)).items()
            print_section(name, [pair for pair in parts if pair[1] not in ABSENT])
        elif value and not _is_short(value):
            print_text(f"\n{name}")
            for entry in cast("list[Any]", value) if isinstance(value, list) else [value]:
                text = entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)
                if _is_short(text):
                    print_text("\n".join(f"  {line}" for line in fold(text, 2)))
                else:
                    print_text(indent(text, "  │ "))
    if "warm_up" in summary:
        print_text("\n━━ the warm-up ━━\n")
        print_plan(summary["warm_up"])


def _is_short(value: object) -> bool:
    return not isinstance(value, dict | list) and "\n" not in str(value)


def print_settings(config: Mapping[str, Any]) -> None:
    """Print the settings of a config that are not defaults."""
    from groupwise.runs.folder import flatten
    from groupwise.training.sft_config import settings_that_differ

    settings = flatten(settings_that_differ(config))
    print_section("configuration, without defaults (all: --json)", [*settings.items()])


def print_warnings(warnings: Iterable[tuple[int, str, str, str]]) -> None:
    """Print the signals of reward hacking that began or ended: number of steps done, name, kind, message."""
    lines = [
        (f"after {counted(step, 'step')}", f"{name} {kind}: {message}")
        for step, name, kind, message in warnings
    ]
    print_section("warnings", lines)


def print_advice(advice: Sequence[Mapping[str, Any]]) -> None:
    """Print the advice that is based on the metrics of the last steps."""
    if advice:
        print_text("\nwhat the numbers say")
    for item in advice:
        for text, margin in ((item["says"], "  "), (item["do"], "    ")):
            print_text("\n".join(margin + line for line in fold(str(text), len(margin))))


def print_held_out(held_out: Mapping[str, Any]) -> None:
    """Print the evaluations of a run side by side, and whether the reward rises."""
    from groupwise.cli.output import measured_value

    columns = {"base": "base model", "before": "before", "after": "after"}
    shown = [name for name in columns if name in held_out]  # the base only of a warmed-up run
    print_text(f"\nthe same {counted(held_out['prompts'], 'held-out prompt')}, with 95 % intervals")
    rows = [
        (f"  {metric}", *(measured_value(held_out[name][metric]) for name in shown))
        for metric in held_out["after"]
    ]
    print_table([("  metric", *(columns[name] for name in shown)), *rows])
    verdict = "rises" if held_out["rises"] else "has not clearly risen"
    print_text(f"  change in reward: {measured_value(held_out['change'])}; it {verdict}")


def print_next(*commands: tuple[str, str]) -> None:
    """Print the commands that are useful now, each with its purpose below it; none in a job, whose folder its reader is not in."""
    from groupwise.jobs.hosts.spec import ATTEMPT_VARIABLE

    if ATTEMPT_VARIABLE in os.environ:
        return
    print_text("\nnext")
    for line, purpose in commands:
        print_text(f"  {line}\n    {one_line(purpose)}")


def command_line(words: str, config: Path | None, task: str | None, *more: str) -> str:
    """A command with the config and the task that another one was given."""
    options = [] if config is None else ["-c", str(config)]
    options += [] if task is None else ["-t", task]
    return " ".join([f"groupwise {words}", *(shlex.quote(word) for word in (*options, *more))])


def command_to_do_it(context: typer.Context) -> str:
    """The command line that was typed, without its `--dry-run`."""
    words = list(context.meta[TYPED_WORDS])
    words.remove(next(word for word in words if word in DRY_RUN))
    return f"{context.command_path} {shlex.join(words)}".rstrip()


def command_to_configure(task: str) -> tuple[str, str]:
    """The command that writes a config for a task."""
    line = command_line("init", None, task, "-m", "smollm2-135m-instruct")
    return line, "a config for this task, a model and this machine"


def command_to_compare(a: str, b: str) -> tuple[str, str]:
    """The command that shows the prompts whose answers differ most between two policies."""
    line = command_line("runs compare", None, None, a, b, "--rows", "5")
    return line, "the prompts that changed most"


def commands_after_run(folder: Path) -> list[tuple[str, str]]:
    """Commands that are useful after a run: its numbers, what there is to read, and its weights, if it has saved any."""
    from groupwise.runs import checkpoints
    from groupwise.runs.folder import CHECKPOINTS, FINAL

    commands = [command_to_show(folder), *commands_to_read(folder)]
    if (folder / FINAL).is_dir() or checkpoints.complete(folder / CHECKPOINTS):
        commands.append(command_to_export(folder))
    return commands


def command_to_resume(folder: Path) -> tuple[str, str] | None:
    """The command that continues an unfinished run with its own config; None if its clients lead it, or if it began in another folder."""
    from groupwise.runs.folder import CONFIG, RECORD, read_config
    from groupwise.runs.store import Store

    facts = Store.facts(folder / RECORD)
    if facts.get("task_module") is None:
        return None
    if Path(read_config(folder)["run"]["dir"]).resolve() != folder.parent.resolve():
        return None
    words = ("-c", str(folder / CONFIG), "-t", facts["task_module"], "--resume")
    return f"groupwise {facts['kind']} {shlex.join(words)}", "the rest of the training"


def command_to_show(folder: Path) -> tuple[str, str]:
    """The command `groupwise runs show` for a run."""
    line = f"groupwise runs show {shlex.quote(folder.name)}{dir_option(folder.parent)}"
    return line, "its numbers, evaluations and warnings"


def command_to_export(folder: Path) -> tuple[str, str]:
    """The command `groupwise runs export` for a run."""
    name = shlex.quote(folder.name)
    line = (
        f"groupwise runs export {name} --to merged --output {name}-model{dir_option(folder.parent)}"
    )
    return line, "the weights as a model for others to load"


def commands_to_read(folder: Path) -> list[tuple[str, str]]:
    """Commands that show what a run did: its best and worst rollout, its evaluations side by side, its page."""
    from groupwise.runs.find import best_and_worst
    from groupwise.runs.schema import RECORD
    from groupwise.runs.store import Store

    name, place = shlex.quote(folder.name), dir_option(folder.parent)
    commands: list[tuple[str, str]] = []
    found = best_and_worst(folder)
    for order, view in found.items():
        line = f"groupwise runs rollouts {name} --{order}{place}"
        which = f"its {order} rollout" if len(found) > 1 else "all its rollouts earned the same"
        earned = f"{which}: reward {view.reward:.3f}, in step {view.step}"
        commands.append((line, f"{earned}, example {view.example}"))
    with Store.open(folder / RECORD, readonly=True) as store:
        evaluations = {evaluation for _, evaluation, _ in store.evaluations_with_rows()}
    if {"before", "after"} <= evaluations:
        line = f"groupwise runs compare {shlex.quote(f'{folder.name}@0')} {name}{place}"
        commands.append((line, "the held-out prompts, before and after the training"))
    return [*commands, (f"groupwise web{place}", "curves and rollouts in a browser")]


def commands_after_sft(folder: Path, task: str | None) -> list[tuple[str, str]]:
    """Commands that are useful after a supervised run: its curve, and reinforcement learning from its weights."""
    run = str(folder) if dir_option(folder.parent) else folder.name
    line = command_line("rl", None, task, "--config", "C.yaml", "--init-from", run)
    return [
        (f"groupwise runs plot {shlex.quote(run)}", "the curve of its loss"),
        (line, "reinforcement learning from these weights, with a config of rl"),
    ]


def dir_option(runs: Path) -> str:
    """The option `--dir` for this folder of runs; empty if it is where commands look by themselves."""
    return "" if runs.resolve() == RUNS.resolve() else f" --dir {shlex.quote(str(runs))}"


def print_pairs(pairs: Sequence[tuple[str, Any]]) -> None:
    """Print names and values in two columns; pairs without a value are left out."""
    lines = [
        (one_line(name), one_line(str(value))) for name, value in pairs if value not in (None, "")
    ]
    width = max((cell_len(name) for name, _ in lines), default=0)
    for name, value in lines:
        margin = width + 2
        folded = fold(value, margin) if " " in value else [value]  # a path is copied in one piece
        text = f"\n{' ' * margin}".join(folded)
        print_text(f"{name}{' ' * (width - cell_len(name))}  {text}")


def indent(text: str, margin: str) -> str:
    """Untrusted text, cleaned, with a margin before each line."""
    return "\n".join(margin + line for line in clean(text).split("\n"))


def fold(text: str, indent: int, stream: TextIO | None = None) -> list[str]:
    """The lines of a text, cleaned and, in a terminal, wrapped to the width that remains after `indent` columns.

    `stream` is where they will be shown; None: stdout.
    """
    lines = clean(text).split("\n")
    if not (stream or sys.stdout).isatty():
        return lines
    width = max(MIN_WIDTH, shutil.get_terminal_size().columns - indent)
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]
    ]


def print_table(rows: Sequence[Sequence[str]], least: Mapping[int, int] | None = None) -> None:
    """Print cells in columns, the header first.

    `least`: columns that are shortened if the table is too wide for the terminal, each to this width at least, and left out if that is
    not enough; the first one first.
    """
    cells_of_rows = [[one_line(cell) for cell in row] for row in rows]
    shown = [*range(len(cells_of_rows[0]))]
    widths = [max(cell_len(row[column]) for row in cells_of_rows) for column in shown]
    if least and sys.stdout.isatty():
        terminal = shutil.get_terminal_size().columns
        smallest = [min(width, least.get(column, width)) for column, width in enumerate(widths)]
        for column in least:
            if sum(smallest[each] + 2 for each in shown) - 2 > terminal:
                shown.remove(column)
        too_wide = sum(widths[each] + 2 for each in shown) - 2 - terminal
        for column in [each for each in least if each in shown]:
            less = max(0, min(too_wide, widths[column] - smallest[column]))
            widths[column] -= less
            too_wide -= less
            for row in cells_of_rows:
                row[column] = shorten(row[column], widths[column])
    for row in cells_of_rows:
        cells = (row[each] + " " * (widths[each] - cell_len(row[each])) for each in shown)
        print_text("  ".join(cells).rstrip())


def round_number(value: Any) -> str:
    """A number with four significant digits; from ten thousand on, a whole number with commas."""
    if value is None:
        return ""
    if isinstance(value, float) and 9_999.5 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def moment(seconds: float | None) -> str:
    """Seconds since 1970 as local time."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def print_text(text: str) -> None:
    """Print a text, with `?` for characters that the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "replace").decode(encoding))
