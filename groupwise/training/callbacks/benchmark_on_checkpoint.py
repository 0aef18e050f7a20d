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
from groupwise.core.processes.family import describe_exit
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
REMINDER = 60.0
"""Seconds between two log lines about the evaluations that a finished run waits for."""
NICENESS = 10
"""Nice value of the processes, so that training has priority."""


@dataclass(slots=True)
class _Started:
    """A running evaluation process."""

    step: int
    family: ProcessGroup
    """The process with all its descendants."""
    output: Path
    began: float


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
        if command and not any("{output}" in word for word in command):
            raise ValueError(
                "the command does not say {output}, the JSON file that it is to write."
            )
        if max_processes < 1 or time_limit <= 0:
            raise ValueError("max_processes must be at least 1, and time_limit above 0 seconds.")
        self.label = _checked_label(label)
        self.config = config
        self.max_processes = max_processes
        self.time_limit = time_limit
        self._verbatim: tuple[str, ...] = ()
        """Arguments appended to the command, in which placeholders such as {policy} are not filled in."""
        self._program: tuple[str, ...] | None = None
        """The command that runs lighteval, if `suites` are given; None otherwise."""
        given = {
            "samples": samples_per_prompt,
            "temperature": temperature,
            "top_p": top_p,
            "max_new_tokens": max_new_tokens,
            "concurrency": concurrency,
            "max_questions": max_prompts,
        }
        answering = {key: value for key, value in given.items() if value is not None}
        if suites:
            checked = _checked_suites(suites, serve, {"model": model or "policy", **answering})
            limits = {"endpoint_model": model, "time_limit": time_limit}
            self.command = _evaluation_by_suites(checked, {**limits, **answering})
            self._verbatim = ("--serve", shlex.join(serve))
            if program:
                self._verbatim += ("--program", shlex.join(program))
            self._program = program
            self.time_limit = time_limit * (1 + len(checked))
        elif serve or program or model or answering:
            raise ValueError(
                "`serve`, `model`, `program` and what says how questions are answered belong to `suites`; say it in the command or "
                "in the config."
            )
        else:
            self.command = command or _evaluation(config or "", task_module, overrides)
        self._waiting: list[int] = []
        """Steps of the checkpoints that are ready to be evaluated, in order."""
        self._started: list[_Started] = []

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
        for folder in sorted(self._folder(run).glob("step-*"), key=_step_of):
            step = _step_of(folder)
            if step > run.step or not (folder / FILES).is_dir():
                shutil.rmtree(folder)
            elif (known := self._result(run, step, _weights_in(folder))) is not None:
                self._record(run, step, known)
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
        known = self._result(run, run.step, _weights_of(checkpoint))
        if known is not None:
            self._record(run, run.step, known)
        elif run.step not in self._waiting and run.step not in [s.step for s in self._started]:
            card = model_card(run.folder, checkpoint, run.step)
            place = self._place(run, run.step)
            place.mkdir(parents=True, exist_ok=True)
            atomic_files.write_json(place / WEIGHTS, _weights_of(checkpoint))
            keep_artefact(place / FILES, checkpoint, card, run.tokenizer)
            self._waiting.append(run.step)
        self._poll(run)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """A finished run waits for its evaluations until Ctrl-C. Any other end of a run kills them; a resume starts them again."""
        if end.state == "finished":
            self._wait(run)
        if self._waiting or self._started:
            left = f"{self.label} of {self._unfinished_steps()}"
            run.say(f"{left} is done when the run goes on")
            if end.state == "finished":
                run.leave(left)
        for each in self._started:
            each.family.end()

    def _wait(self, run: RunHandle) -> None:
        last_notice: float | None = None
        while (self._waiting or self._started) and not run.interrupted:
            if last_notice is None or time.monotonic() - last_notice >= REMINDER:
                again = "" if last_notice is None else "still "
                run.say(
                    f"{again}waiting for {self.label}: {self._unfinished_steps()}. Ctrl-C leaves that to --resume"
                )
                last_notice = time.monotonic()
            self._poll(run)
            time.sleep(POLL_INTERVAL)

    def _unfinished_steps(self) -> str:
        steps = sorted([*(each.step for each in self._started), *self._waiting])
        return ", ".join(f"step-{step}" for step in steps)

    # Processes

    def _poll(self, run: RunHandle) -> None:
        """Record the processes that have ended, kill those over the time limit, and start new ones up to `max_processes`."""
        for each in list(self._started):
            if each.family.has_ended:
                self._started.remove(each)
                self._finish(run, each)
            elif time.monotonic() - each.began > self.time_limit:
                self._started.remove(each)
                each.family.end()
                self._report_failure(
                    run, each.step, f"it took longer than {self.time_limit:g} seconds"
                )
        while self._waiting and len(self._started) < self.max_processes:
            self._start(run, self._waiting.pop(0))

    def _start(self, run: RunHandle, step: int) -> None:
        place = self._place(run, step)
        output = place / f"result-{uuid4().hex}.json"
        placeholders = {
            "{policy}": str(place / FILES),
            "{output}": str(output),
            "{step}": str(step),
            "{run}": run.name,
        }
        words = [
            *(_fill_placeholders(word, placeholders) for word in self.command),
            *self._verbatim,
        ]
        log, here = place / LOG, Path.cwd()
        family = ProcessGroup(words, folder=here, log=log, environment={}, niceness=NICENESS)
        logger.info("%s of step-%d begins", self.label, step)
        self._started.append(_Started(step, family, output, time.monotonic()))

    def _finish(self, run: RunHandle, ended: _Started) -> None:
        code = ended.family.end()
        if code != 0 and not (self._program is not None and ended.output.exists()):
            self._report_failure(run, ended.step, describe_exit(code))
            return
        try:
            content = _read_result(ended.output)
        except ValueError as error:
            self._report_failure(run, ended.step, str(error))
            return
        place = self._place(run, ended.step)
        found = {**content, "step": ended.step, "weights": _weights_in(place)}
        add_result(run.folder, f"{self.label}-step-{ended.step}", found)
        self._record(run, ended.step, found)
        if self._program is not None and "failed" in content:  # some suites of several
            self._report_failure(
                run, ended.step, "; ".join(map(": ".join, content["failed"].items()))
            )
        else:
            shutil.rmtree(place)

    def _report_failure(self, run: RunHandle, step: int, reason: str) -> None:
        place = self._place(run, step)
        logger.warning(
            "%s of step-%d failed: %s. The run goes on; what it said is in %s",
            self.label,
            step,
            reason,
            place / LOG,
        )
        shutil.rmtree(place / FILES)

    # Results

    def _record(self, run: RunHandle, step: int, found: Mapping[str, Any]) -> None:
        policy, metrics = f"{run.name}@{step}", _metrics(found)
        run.record_evaluation(EvaluationRecord(step, self.label, policy, metrics))
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:4])
        run.say(f"{self.label} of step-{step}: {numbers}")

    def _result(self, run: RunHandle, step: int, weights: str) -> dict[str, Any] | None:
        """The stored result for these weights at this step, or None."""
        ours = re.compile(
            rf"{re.escape(self.label)}-step-{step}(-\d+)?"
        )  # not one of a longer label
        for file in sorted((run.folder / RESULTS).glob(f"{self.label}-step-{step}*.json")):
            if ours.fullmatch(file.stem):
                content = json.loads(file.read_bytes())
                if content.get("step") == step and content.get("weights") == weights:
                    return content
        return None

    def _folder(self, run: RunHandle) -> Path:
        return run.folder / FOLDER / self.label

    def _place(self, run: RunHandle, step: int) -> Path:
        return self._folder(run) / f"step-{step}"


def _checked_label(label: str) -> str:
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


def _checked_suites(
    suites: tuple[str, ...], serve: tuple[str, ...], asking: Mapping[str, Any]
) -> tuple[str, ...]:
    """The full names of the suites. Raises ValueError if a suite cannot be run with these options."""
    if not serve:
        raise ValueError(
            "suites are asked of a server: give `serve`, a list of words that serve the weights, such as "
            '[vllm, serve, "{policy}", --host, 127.0.0.1, --port, "{port}"].'
        )
    from groupwise.training.suites.lighteval import Asking, chosen_suites
    from groupwise.training.suites.serving import check_words

    with _usage_as_value_error():
        check_words(serve)
        questions = Asking(base_url="", **asking)
        return chosen_suites(suites, questions.samples)


@contextmanager
def _usage_as_value_error() -> Generator[None]:
    """Convert a UsageError to the ValueError that a callback must raise."""
    try:
        yield
    except UsageError as error:
        raise ValueError(str(error)) from error


def _evaluation_by_suites(suites: tuple[str, ...], given: Mapping[str, object]) -> tuple[str, ...]:
    """The command that runs suites. Options that are None are omitted, so `groupwise eval` uses its defaults."""
    suite_options = [word for suite in suites for word in ("--suite", suite)]
    options = [
        word
        for key, value in given.items()
        if value is not None
        for word in (OPTIONS.get(key, f"--{key.replace('_', '-')}"), str(value))
    ]
    return (
        *(sys.executable, "-P", "-m", "groupwise", "eval", *suite_options, *options),
        *("--policy", "{policy}", "--output", "{output}"),
    )


def _evaluation(
    config: str, task_module: str | None, overrides: tuple[str, ...]
) -> tuple[str, ...]:
    """The `groupwise eval` command for a config file."""
    task = ("--task-module", task_module) if task_module else ()
    return (
        *(sys.executable, "-P", "-m", "groupwise", "eval", "--config", config, *task),
        *("--policy", "{policy}", "--output", "{output}", *overrides),
    )


def _fill_placeholders(word: str, named: Mapping[str, str]) -> str:
    for name, value in named.items():
        word = word.replace(name, value)
    return word


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _weights_in(place: Path) -> str:
    """The hash of the weights that are kept in an evaluation's folder."""
    return json.loads((place / WEIGHTS).read_bytes())


def _weights_of(checkpoint: Path) -> str:
    """The SHA-256 hashes of a checkpoint's safetensors files from its manifest, 16 hex digits each, joined by spaces."""
    files = checkpoints.read(checkpoint).files
    names = [file.name for file in weight_files(checkpoint) if file.suffix == ".safetensors"]
    return " ".join(files[name].sha256[:16] for name in names)


def _read_result(output: Path) -> dict[str, Any]:
    """Read the JSON output of a process. Raises ValueError if it is missing or contains no metrics."""
    try:
        content = json.loads(output.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"it wrote no JSON to {{output}} ({error})") from error
    if not isinstance(content, dict) or not _metrics(cast("dict[str, Any]", content)):
        raise ValueError("the JSON that it wrote has no numbers, and no object `metrics` with any")
    return cast("dict[str, Any]", content)


def _metrics(content: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers in the object `metrics` or, without that object, at the top level."""
    given = content.get("metrics", content)
    found = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and name not in ("step", "format")
    }
