"""The callback `benchmark_on_checkpoint`: evaluates each checkpoint in a separate process while training continues.

A checkpoint's weights are linked (or copied) into a folder of the callback, so they outlive the checkpoint. A process evaluates them as
soon as fewer than `max_processes` are running. The callback polls its processes at the run's events and records the results then; only a
finished run waits for them. After Ctrl-C or a crash, a resume evaluates the rest. A successful evaluation leaves a result that names the
weights by their hash, so no checkpoint is evaluated twice; an interrupted evaluation is repeated on resume.

    benchmarks/LABEL/step-N/files/         the weights, while they are needed
    benchmarks/LABEL/step-N/weights.json   their hash
    benchmarks/LABEL/step-N/result-*.json  the output of the process
    benchmarks/LABEL/step-N/log.txt        the log of the process; kept if it failed
    results/LABEL-step-N.json              the result

Named suites are run by a process of `groupwise eval`, which serves the weights for that time.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
import shutil
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.core.processes.process_tree import describe_exit
from groupwise.core.processes.program import ProcessGroup
from groupwise.core.settings.view import View
from groupwise.engine.models.artefact import keep_artefact, weight_files
from groupwise.engine.models.card import model_card
from groupwise.runs import checkpoints
from groupwise.runs.config import RUN_NAME
from groupwise.runs.curves import OF_TRAINING
from groupwise.runs.folder import RESULTS, add_result
from groupwise.runs.records import EvaluationRecord
from groupwise.training.callbacks.base import Callback, RunEnd, RunHandle

logger = logging.getLogger(__name__)

FOLDER = "benchmarks"
FILES = "files"
WEIGHTS = "weights.json"
LOG = "log.txt"
OPTIONS = {"samples": "--samples-per-prompt", "max_questions": "--max-prompts"}
"""The options of `groupwise eval` whose names differ from this callback's parameters: parameter -> option."""
POLL_INTERVAL = 0.1
"""Seconds between two polls while a finished run waits for its processes."""
REMINDER_INTERVAL = 60.0
"""Seconds between two log lines about the evaluations that a finished run waits for."""
NICENESS = 10
"""Nice value of the processes, so that training has priority."""


@dataclass(slots=True)
class _EvaluationProcess:
    """A running evaluation process."""

    step: int
    group: ProcessGroup
    """The process with all its descendants."""
    output: Path
    started_at: float


class BenchmarkOnCheckpoint(Callback):
    """Evaluates checkpoints by `config` (a config of `groupwise eval`, with `task_module` and `overrides`), `command` or `suites`.

    A command is a list of words, in which {policy} is replaced by the folder of the weights, {output} by the JSON file to write, {step}
    by the number of steps and {run} by the run's name. The file contains numbers, or an object `metrics` with numbers, which are
    recorded under `label`. At most `max_processes` evaluations run at once, each for at most `time_limit` seconds; a finished run waits
    for them.

    Suites need `serve`, a list of words that serve the weights; see `groupwise.training.suites.serving`. If the server has several
    models, `model` names the policy. `program` is the command that runs lighteval. The other parameters are sampling options. The time
    limit then applies to the start of the server and to each suite.
    """

    def __init__(
        self,
        label: str = "benchmark",
        command: tuple[str, ...] = (),
        config: str | None = None,
        task_module: str | None = None,
        overrides: tuple[str, ...] = (),
        suites: tuple[str, ...] = (),
        serve: tuple[str, ...] = (),
        endpoint: str | None = None,
        model: str | None = None,
        program: tuple[str, ...] = (),
        samples_per_prompt: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        max_new_tokens: int | None = None,
        concurrency: int | None = None,
        max_prompts: int | None = None,
        max_processes: int = 1,
        time_limit: float = 3600.0,
    ) -> None:
        if endpoint is not None:
            raise ValueError(
                f"{endpoint} serves what it was started with, and not the checkpoints of this run. Give `serve`, a command that serves "
                "the folder {policy} on {port}."
            )
        if [bool(command), bool(config), bool(suites)].count(True) != 1:
            raise ValueError(
                "give either `command`, a list of words, or `config`, a file that `groupwise eval` takes, or `suites` with `serve`."
            )
        if not config and (task_module or overrides):
            raise ValueError("`task_module` and `overrides` belong to `config`.")
        if command and not any("{output}" in argument for argument in command):
            raise ValueError(
                "the command does not contain {output}, the path of the JSON file to write."
            )
        if max_processes < 1 or time_limit <= 0:
            raise ValueError("max_processes must be at least 1, and time_limit above 0 seconds.")
        self.label = _validate_label(label)
        self.config = config
        self.max_processes = max_processes
        self.time_limit = time_limit
        self._verbatim: tuple[str, ...] = ()
        """Arguments appended to the command, in which placeholders such as {policy} are not filled in."""
        self._program: tuple[str, ...] | None = None
        """The command that runs lighteval, if `suites` are given; None otherwise."""
        options = {
            "samples": samples_per_prompt,
            "temperature": temperature,
            "top_p": top_p,
            "max_new_tokens": max_new_tokens,
            "concurrency": concurrency,
            "max_questions": max_prompts,
        }
        sampling_options = {key: value for key, value in options.items() if value is not None}
        if suites:
            suite_names = _resolve_suites(
                suites, serve, {"model": model or "policy", **sampling_options}
            )
            limits = {"endpoint_model": model, "time_limit": time_limit}
            self.command = _suites_command(suite_names, {**limits, **sampling_options})
            self._verbatim = ("--serve", shlex.join(serve))
            if program:
                self._verbatim += ("--program", shlex.join(program))
            self._program = program
            self.time_limit = time_limit * (1 + len(suite_names))
        elif serve or program or model or sampling_options:
            raise ValueError(
                "`serve`, `model`, `program` and what says how questions are answered belong to `suites`; say it in the command or "
                "in the config."
            )
        else:
            self.command = command or _eval_command(config or "", task_module, overrides)
        self._waiting: list[int] = []
        """Steps of the checkpoints that are ready to be evaluated, in order."""
        self._processes: list[_EvaluationProcess] = []

    def claim(self) -> str:
        """Refuse a second callback with this label, because their results would be mixed up."""
        return f"the label {self.label!r}"

    def check(self, config: View) -> None:
        """Raise ValueError if the config file or the program does not exist."""
        if self.config is not None and not Path(self.config).is_file():
            raise ValueError(f"there is no file {self.config!r} (looked in {Path.cwd()}).")
        if shutil.which(self.command[0]) is None:
            raise ValueError(f"there is no program {self.command[0]!r} that could be run.")
        if self._program is not None:
            from groupwise.training.suites.lighteval import find_program

            with _usage_as_value_error():
                find_program(self._program)

    def on_run_begin(self, run: RunHandle) -> None:
        """Record finished results that the run's record lacks, and queue the checkpoints that an earlier process left."""
        for folder in sorted(self._evaluations_folder(run).glob("step-*"), key=_step_of):
            step = _step_of(folder)
            if step > run.step or not (folder / FILES).is_dir():
                shutil.rmtree(folder)
            elif (result := self._find_result(run, step, _stored_weights_hash(folder))) is not None:
                self._record_result(run, step, result)
                shutil.rmtree(folder)
            else:
                self._waiting.append(step)
        self._poll(run)

    def on_step_begin(self, run: RunHandle) -> None:
        """Record evaluations that have ended and start the next ones."""
        self._poll(run)

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> None:
        """Record evaluations that have ended and start the next ones."""
        self._poll(run)

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        """Queue the checkpoint, unless these weights have a result already; then record that."""
        result = self._find_result(run, run.step, _weights_hash(checkpoint))
        if result is not None:
            self._record_result(run, run.step, result)
        elif run.step not in self._waiting and run.step not in [s.step for s in self._processes]:
            card = model_card(run.folder, checkpoint, run.step)
            folder = self._evaluation_folder(run, run.step)
            folder.mkdir(parents=True, exist_ok=True)
            atomic_files.write_json(folder / WEIGHTS, _weights_hash(checkpoint))
            keep_artefact(folder / FILES, checkpoint, card, run.tokenizer)
            self._waiting.append(run.step)
        self._poll(run)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """A finished run waits for its evaluations until Ctrl-C. Any other end of a run kills them; a resume starts them again."""
        if end.state == "finished":
            last_notice: float | None = None
            while (self._waiting or self._processes) and not run.interrupted:
                if last_notice is None or time.monotonic() - last_notice >= REMINDER_INTERVAL:
                    still = "" if last_notice is None else "still "
                    run.say(
                        f"{still}waiting for {self.label}: {self._unfinished_steps()}. Ctrl-C leaves that to --resume"
                    )
                    last_notice = time.monotonic()
                self._poll(run)
                time.sleep(POLL_INTERVAL)
        if self._waiting or self._processes:
            pending_work = f"{self.label} of {self._unfinished_steps()}"
            run.say(f"{pending_work} is done when the run goes on")
            if end.state == "finished":
                run.leave(pending_work)
        for process in self._processes:
            process.group.end()

    def _unfinished_steps(self) -> str:
        steps = sorted([*(process.step for process in self._processes), *self._waiting])
        return ", ".join(f"step-{step}" for step in steps)

    # Processes

    def _poll(self, run: RunHandle) -> None:
        """Record the processes that have ended, kill those over the time limit, and start new ones up to `max_processes`."""
        for process in list(self._processes):
            if process.group.has_ended:
                self._processes.remove(process)
                self._finish_evaluation(run, process)
            elif time.monotonic() - process.started_at > self.time_limit:
                self._processes.remove(process)
                process.group.end()
                self._report_failure(
                    run, process.step, f"it took longer than {self.time_limit:g} seconds"
                )
        while self._waiting and len(self._processes) < self.max_processes:
            step = self._waiting.pop(0)
            folder = self._evaluation_folder(run, step)
            output = folder / f"result-{uuid4().hex}.json"
            placeholders = {
                "{policy}": str(folder / FILES),
                "{output}": str(output),
                "{step}": str(step),
                "{run}": run.name,
            }
            command = [
                *(_fill_placeholders(argument, placeholders) for argument in self.command),
                *self._verbatim,
            ]
            log, cwd = folder / LOG, Path.cwd()
            group = ProcessGroup(command, folder=cwd, log=log, environment={}, niceness=NICENESS)
            logger.info("%s of step-%d begins", self.label, step)
            self._processes.append(_EvaluationProcess(step, group, output, time.monotonic()))

    def _finish_evaluation(self, run: RunHandle, process: _EvaluationProcess) -> None:
        code = process.group.end()
        if code != 0 and not (self._program is not None and process.output.exists()):
            self._report_failure(run, process.step, describe_exit(code))
            return
        try:
            try:
                content = json.loads(process.output.read_bytes())
            except (OSError, ValueError) as problem:
                raise ValueError(f"it wrote no JSON to {{output}} ({problem})") from problem
            if not isinstance(content, dict) or not _finite_metrics(
                cast("dict[str, Any]", content)
            ):
                raise ValueError(
                    "the JSON that it wrote has no numbers, and no object `metrics` with any"
                )
            content = cast("dict[str, Any]", content)
        except ValueError as error:
            self._report_failure(run, process.step, str(error))
            return
        folder = self._evaluation_folder(run, process.step)
        result = {**content, "step": process.step, "weights": _stored_weights_hash(folder)}
        add_result(run.folder, f"{self.label}-step-{process.step}", result)
        self._record_result(run, process.step, result)
        if self._program is not None and "failed" in content:  # some suites of several
            self._report_failure(
                run, process.step, "; ".join(map(": ".join, content["failed"].items()))
            )
        else:
            shutil.rmtree(folder)

    def _report_failure(self, run: RunHandle, step: int, reason: str) -> None:
        folder = self._evaluation_folder(run, step)
        logger.warning(
            "%s of step-%d failed: %s. The run goes on; what it said is in %s",
            self.label,
            step,
            reason,
            folder / LOG,
        )
        shutil.rmtree(folder / FILES)

    # Results

    def _record_result(self, run: RunHandle, step: int, result: Mapping[str, Any]) -> None:
        policy, metrics = f"{run.name}@{step}", _finite_metrics(result)
        run.record_evaluation(EvaluationRecord(step, self.label, policy, metrics))
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:4])
        run.say(f"{self.label} of step-{step}: {numbers}")

    def _find_result(self, run: RunHandle, step: int, weights: str) -> dict[str, Any] | None:
        """The stored result for these weights at this step, or None."""
        # The whole name, so that a longer label does not match.
        pattern = re.compile(rf"{re.escape(self.label)}-step-{step}(-\d+)?")
        for file in sorted((run.folder / RESULTS).glob(f"{self.label}-step-{step}*.json")):
            if pattern.fullmatch(file.stem):
                content = json.loads(file.read_bytes())
                if content.get("step") == step and content.get("weights") == weights:
                    return content
        return None

    def _evaluations_folder(self, run: RunHandle) -> Path:
        return run.folder / FOLDER / self.label

    def _evaluation_folder(self, run: RunHandle, step: int) -> Path:
        return self._evaluations_folder(run) / f"step-{step}"


def _validate_label(label: str) -> str:
    """Raise ValueError if a label cannot be a folder's name, or is one of the names of the run's own evaluations."""
    if not RUN_NAME.fullmatch(label):
        raise ValueError(
            f"label is {label!r}; it names a folder, so use letters, digits, `.`, `_` and `-`, beginning with a letter or digit."
        )
    if OF_TRAINING.fullmatch(label):
        raise ValueError(
            f"label is {label!r}, as the run calls evaluations of its own (before, after, step-N); choose another one."
        )
    return label


def _resolve_suites(
    suites: tuple[str, ...], serve: tuple[str, ...], sampling_options: Mapping[str, Any]
) -> tuple[str, ...]:
    """The full names of the suites. Raises ValueError if a suite cannot be run with these options."""
    if not serve:
        raise ValueError(
            "suites are asked of a server: give `serve`, a list of words that serve the weights, such as "
            '[vllm, serve, "{policy}", --host, 127.0.0.1, --port, "{port}"].'
        )
    from groupwise.training.suites.lighteval import ModelSettings, chosen_suites
    from groupwise.training.suites.serving import check_command

    with _usage_as_value_error():
        check_command(serve)
        questions = ModelSettings(base_url="", **sampling_options)
        return chosen_suites(suites, questions.samples)


@contextmanager
def _usage_as_value_error() -> Generator[None]:
    """Convert a UsageError to the ValueError that a callback must raise."""
    try:
        yield
    except UsageError as error:
        raise ValueError(str(error)) from error


def _suites_command(
    suites: tuple[str, ...], option_values: Mapping[str, object]
) -> tuple[str, ...]:
    """The command that runs suites. Options that are None are omitted, so `groupwise eval` uses its defaults."""
    suite_options = [argument for suite in suites for argument in ("--suite", suite)]
    options = [
        argument
        for key, value in option_values.items()
        if value is not None
        for argument in (OPTIONS.get(key, f"--{key.replace('_', '-')}"), str(value))
    ]
    return (
        *(sys.executable, "-P", "-m", "groupwise", "eval", *suite_options, *options),
        *("--policy", "{policy}", "--output", "{output}"),
    )


def _eval_command(
    config: str, task_module: str | None, overrides: tuple[str, ...]
) -> tuple[str, ...]:
    """The `groupwise eval` command for a config file."""
    task = ("--task-module", task_module) if task_module else ()
    return (
        *(sys.executable, "-P", "-m", "groupwise", "eval", "--config", config, *task),
        *("--policy", "{policy}", "--output", "{output}", *overrides),
    )


def _fill_placeholders(argument: str, placeholders: Mapping[str, str]) -> str:
    for name, value in placeholders.items():
        argument = argument.replace(name, value)
    return argument


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _stored_weights_hash(folder: Path) -> str:
    """The hash of the weights that are kept in an evaluation's folder."""
    return json.loads((folder / WEIGHTS).read_bytes())


def _weights_hash(checkpoint: Path) -> str:
    """The SHA-256 hashes of a checkpoint's safetensors files from its manifest, 16 hex digits each, joined by spaces."""
    files = checkpoints.read(checkpoint).files
    names = [file.name for file in weight_files(checkpoint) if file.suffix == ".safetensors"]
    return " ".join(files[name].sha256[:16] for name in names)


def _finite_metrics(content: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers in the object `metrics` or, without that object, at the top level."""
    metrics = content.get("metrics", content)
    values = cast("dict[str, Any]", metrics) if isinstance(metrics, dict) else {}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and name not in ("step", "format")
    }
