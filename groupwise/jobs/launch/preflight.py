"""Tries a command on this machine before another one is used: runs its `--dry-run` in a separate process. A wrong key, a task that cannot
be imported, or an unknown model is then found at once and costs nothing."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.terminal.quantities import counted
from groupwise.jobs.hosts.local import PASSED_VARIABLES

COMMANDS = ("rl", "sft", "eval", "generate")
"""Subcommands of groupwise that may be launched, and are tried here first."""
MAX_CHECKPOINTS = 20
"""How many checkpoints a disk has room for if the config keeps all of them."""
OUTPUT = "--output"
"""The option of `eval` and `generate` for their output folder."""
DRY_RUN_TIMEOUT = 600.0
"""Timeout in seconds: a data set may have to be downloaded."""


@dataclass(frozen=True, slots=True)
class DryRunReport:
    """A command's description of itself, from its `--dry-run`."""

    results: tuple[str, ...]
    """Folders to which it writes, relative to the project or absolute."""
    summary: str
    """A summary for users."""
    needs: tuple[str, ...] = ()
    """Files and folders of this machine that it reads in addition to the task: weights, data configs."""
    model_gb: int | None = None
    """GB of disk that its model and its checkpoints take at most; None: it does not say which model."""


def try_command(
    words: Sequence[str], project: Path, environment: Mapping[str, str]
) -> DryRunReport:
    """Run the command with --dry-run. Raises UsageError with the command's own message if it would fail."""
    command, *arguments = words
    for path in map(Path, _option_values(arguments)):
        if path.is_absolute() and path.is_relative_to(project) and path.exists():
            raise UsageError(
                f"{path} is named by its absolute path, and the job runs in a copy of the project: name it relative to {project}, "
                f"{path.relative_to(project)}."
            )
    # Equivalent to the program `groupwise`: the project is not on the import path (-P).
    dry_run = [sys.executable, "-P", "-m", "groupwise", command, "--dry-run", "--json", *arguments]
    # Leave out variables that are set only in this terminal, because the job does not have them either.
    login = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    try:
        result = subprocess.run(
            dry_run,
            cwd=project,
            env={**login, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DRY_RUN_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"`groupwise {shlex.join(words)}` did not say what it would do within {DRY_RUN_TIMEOUT:.0f} s. "
            "--no-preflight launches it untried."
        ) from None
    if result.returncode:
        message = result.stderr.decode(errors="replace").strip() or f"exit code {result.returncode}"
        raise UsageError(
            f"tried here, `groupwise {shlex.join(words)}` would fail, so nothing was launched. It gets the variables of --env and "
            "--env-file, none that are only set here. --no-preflight launches it untried, for data or packages that only the machine "
            "has. It said:"
            f"\n{message}"
        )
    return _read_description(command, arguments, result.stdout, project)


def first_rank_variables(machines: int, processes: int) -> dict[str, str]:
    """The variables that torchrun will set for the first of `processes` on each of `machines`: a config for another number is then
    rejected."""
    return {
        "RANK": "0",
        "WORLD_SIZE": str(machines * processes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


def results_of(words: Sequence[str]) -> tuple[str, ...]:
    """Folders to which an untried command writes, as far as its words name them."""
    folders = (word.removeprefix("run.dir=") for word in words if word.startswith("run.dir="))
    return (*folders, *_output_paths(words))


def _read_description(
    command: str, arguments: Sequence[str], output: bytes, project: Path
) -> DryRunReport:
    """Parse the description that the command printed as JSON; a task may have printed other text before it."""
    text = output.decode(errors="replace")
    document: dict[str, Any] | None = None
    for match in re.finditer(r"^\{", text, re.MULTILINE):
        with suppress(ValueError):
            document = json.loads(text[match.start() :])
            break
    if document is None:
        raise UsageError(
            "what the command says of itself with --dry-run cannot be read; does the task write to standard output? It said:"
            f"\n{text[-500:]}"
        )
    plan: dict[str, Any] = document.get("plan") or {}
    if command in ("rl", "sft"):
        steps = f", {counted(plan['steps'], 'step')}" if plan.get("steps") is not None else ""
        config = document["config"]
        return DryRunReport(
            (config["run"]["dir"],),
            f"{plan['task']}{steps}",
            _local_paths(project, arguments, config),
            _model_gb(plan, config),
        )
    if command == "eval" and plan:
        summary = f"{plan['prompts']} prompts for {', '.join(plan['policies'])}"
        needs = (*plan["folders"], *_local_paths(project, arguments, document["config"]))
        root, results = project.resolve(), list[str]()
        for folder in plan["results"]:
            target = (project / folder).resolve()
            inside = target.is_relative_to(root)
            results.append(target.relative_to(root).as_posix() if inside else folder)
        return DryRunReport(tuple(results), f"{plan['task']}, {summary}", needs)
    return DryRunReport(_output_paths(arguments), f"`groupwise {command}` says what it would ask")


def _model_gb(plan: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """GB for the weights in float32, downloaded and merged, and for checkpoints: each has the trained weights and two moments of Adam."""
    if "parameters" not in plan:
        return None
    kept = config["run"]["save_total_limit"] or MAX_CHECKPOINTS
    checkpoints = 12 * plan["parameters_trained"] * (kept + 1)  # one more while it is written
    return math.ceil((8 * plan["parameters"] + checkpoints) / 1e9)


def _local_paths(project: Path, words: Sequence[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Existing paths among the words, and what the config names: model and teacher with their adapters, and the algorithm's file."""
    models: list[Mapping[str, str | None]] = [config["model"], config.get("teacher") or {}]
    named = [section.get(key) for section in models for key in ("name", "adapter")]
    algorithm: Mapping[str, str] = config.get("algorithm", {})
    algorithm_file = algorithm.get("type", "").partition(":")[0]
    names = (*named, algorithm_file, *_option_values(words))
    return tuple(name for name in names if name and (project / name).exists())


def _option_values(words: Sequence[str]) -> Iterator[str]:
    """The values of `--option VALUE`, `--option=VALUE` and `key=value`; only the path, if a run's step or a function in a file follows
    it."""
    for word in words:
        _, _, value = word.rpartition("=")
        path, _, _ = value.partition(":")
        yield path.partition("@")[0]


def _output_paths(words: Sequence[str]) -> tuple[str, ...]:
    """Paths given by the output option, without datasets of the hub."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    values = [
        word.removeprefix(f"{OUTPUT}=") if word != OUTPUT else following
        for word, following in pairs
        if word == OUTPUT or word.startswith(f"{OUTPUT}=")
    ]
    return tuple(value for value in values if value and not value.startswith("hub:"))
