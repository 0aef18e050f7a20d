"""Runs named suites against a service: `groupwise eval --suite math_500`.

lighteval runs each suite in a separate folder. Its result is written before the next suite starts, so a later failure does not lose it.
The service is any OpenAI-compatible endpoint, or a server that is started with a policy's weights and ended afterwards.

    results/NAME.json            the result: see `_result_content`
    results/NAME/log.txt         lighteval's output
    results/NAME/out/            lighteval's own result, with every answer
    results/server-POLICY/       the log of a server

If `output` is given, that file contains all suites, and their folders are next to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from groupwise.api.openai_client.client import Client, Endpoint, checked_url
from groupwise.core import atomic_files
from groupwise.core.errors import RunError, UsageError
from groupwise.core.interruption import run_to_end, sigterm_interrupts
from groupwise.core.processes.process_tree import describe_exit
from groupwise.core.processes.program import ProcessGroup
from groupwise.runs.folder import RESULTS, add_result, result_file
from groupwise.training.evaluation.policies import PolicyWeights, find_policy
from groupwise.training.evaluation.results import FORMAT, check_writable, result_name, write_result
from groupwise.training.evaluation.statistics import Interval, mean_with_interval
from groupwise.training.suites import lighteval
from groupwise.training.suites.lighteval import SUITES, ModelSettings, SuiteScores, chosen_suites
from groupwise.training.suites.serving import Weights, check_command, serving

METRIC = "pass@1"
KIND = "suite"


@dataclass(frozen=True, slots=True)
class SuiteRequest:
    """The requested suites and their options. Raises UsageError for conflicting options."""

    suites: tuple[str, ...]
    endpoint: str | None = None
    """The service to ask; None if `serve` is given."""
    endpoint_model: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    policy: str | None = None
    serve: tuple[str, ...] = ()
    """The command that serves the policy; see `groupwise.training.suites.serving`."""
    program: tuple[str, ...] = ()
    """The command that runs lighteval; if empty, the one from the environment variable, or `lighteval`."""
    samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float | None = None
    max_new_tokens: int = 32768
    concurrency: int = 16
    timeout: float = 900.0
    max_prompts: int | None = None
    time_limit: float = 14400.0
    """Time limit in seconds for each suite, and for the start of a server."""
    output: Path | None = None
    runs_dir: Path = Path("runs")

    def __post_init__(self) -> None:
        object.__setattr__(self, "suites", chosen_suites(self.suites, self.samples_per_prompt))
        if (self.endpoint is None) == (not self.serve):
            raise UsageError(
                "A suite asks a service: give either --endpoint URL, one that is there, or --serve COMMAND, which serves a policy."
            )
        if self.serve:
            check_command(self.serve)
            if self.policy is None:
                raise UsageError("--serve serves a policy: say which one by --policy.")
        elif self.policy is not None:
            raise UsageError(
                f"--policy {self.policy} has no effect on {self.endpoint}, which serves what it was started with. Give --serve COMMAND to "
                "have the policy served."
            )
        if self.time_limit <= 0:
            raise UsageError(f"--time-limit is {self.time_limit:g}; expected more than 0 seconds.")
        if self.endpoint is not None and self.endpoint_model is None:
            raise UsageError("--endpoint-model says which of the endpoint's models is asked.")
        self.model_settings(self.endpoint or "http://127.0.0.1", self.endpoint_model or "policy")

    def model_settings(self, url: str, model: str) -> ModelSettings:
        """The parameters of requests to one service."""
        return ModelSettings(
            checked_url(url),
            model,
            self.samples_per_prompt,
            self.temperature,
            self.top_p,
            self.max_new_tokens,
            self.concurrency,
            self.timeout,
            self.max_prompts,
        )


@dataclass(slots=True)
class SuiteResults:
    """The results of the suites."""

    label: str
    """The name of the endpoint's model, or the policy."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Name of the suite -> result."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Name of the suite -> why it has no result."""
    path: Path | None = None
    """The file with all results, if `output` was given."""

    @property
    def summary(self) -> dict[str, Any]:
        """Summary for people and `--json`."""
        return {
            "policy": self.label,
            "metrics": {
                f"{name}/{METRIC}": result["metrics"][METRIC]
                for name, result in self.results.items()
            },
            "suites": {
                name: {key: value for key, value in result.items() if key != "rows"}
                for name, result in self.results.items()
            },
            **({"failed": self.failed} if self.failed else {}),
            **({"results": str(self.path)} if self.path else {}),
        }

    @property
    def exit_code(self) -> int:
        """1 if a suite failed."""
        return 1 if self.failed else 0


def evaluate_suites(
    request: SuiteRequest, on_progress: Callable[[str], None] = lambda text: None
) -> SuiteResults:
    """Run all suites, one after the other. Raises UsageError before any work; a failed suite is part of the result."""
    program = lighteval.find_program(request.program)
    policy = _resolve_policy(request)
    results_folder = _results_folder(request, policy)
    for name in request.suites:
        check_writable(results_folder.parent, result_name(name, policy.label), request.output)
    outcome = SuiteResults(policy.label)
    with sigterm_interrupts():
        if request.endpoint is not None:
            assert request.endpoint_model is not None, "it was checked"
            model_settings = request.model_settings(request.endpoint, request.endpoint_model)
            run_to_end(
                _check_endpoint(
                    Endpoint(
                        model_settings.base_url, model_settings.model, request.api_key_env, 30.0
                    )
                )
            )
            _run_suites(request, model_settings, program, policy, outcome, None, on_progress)
        else:
            folder = _new_folder(results_folder, _folder_name(request, "server", policy))
            on_progress(f"the server begins; its log is {folder / 'server.txt'}")
            assert policy.folder is not None, "it was found"
            with serving(
                request.serve,
                Weights.of(policy.folder, policy.run),
                folder,
                model=request.endpoint_model,
                api_key_env=request.api_key_env,
                time_limit=request.time_limit,
            ) as (server, url, model):
                _run_suites(
                    request,
                    request.model_settings(url, model),
                    program,
                    policy,
                    outcome,
                    server,
                    on_progress,
                )
    if request.output is not None and outcome.results:
        content = {"kind": KIND, **outcome.summary, "finished_at": time.time()}
        rows = {name: result["rows"] for name, result in outcome.results.items()}
        outcome.path = write_result(
            {**content, "rows": rows}, results_folder.parent, "", request.output
        )
    return outcome


def plan(request: SuiteRequest) -> dict[str, Any]:
    """The plan of `evaluate_suites` for `--dry-run`. Sends no request, and starts and writes nothing."""
    program = lighteval.find_program(request.program)
    policy = _resolve_policy(request)
    results_folder = _results_folder(request, policy)
    model = request.endpoint_model or "MODEL"
    model_settings = request.model_settings(request.endpoint or "http://127.0.0.1:PORT", model)
    folders = {
        name: results_folder / _folder_name(request, name, policy) for name in request.suites
    }
    return {
        **({"serve": list(request.serve)} if request.serve else {}),
        "key": f"the environment variable {request.api_key_env}",
        "time_limit": request.time_limit,
        "suites": {
            name: {
                "command": lighteval.command(program, SUITES[name], model_settings, folder),
                lighteval.MODEL: lighteval.model_file(model_settings, folder),
                "results": str(request.output or result_file(results_folder.parent, folder.name)),
            }
            for name, folder in folders.items()
        },
    }


def _run_suites(
    request: SuiteRequest,
    model_settings: ModelSettings,
    program: Sequence[str],
    policy: PolicyWeights,
    outcome: SuiteResults,
    server: ProcessGroup | None,
    on_progress: Callable[[str], None],
) -> None:
    results_folder = _results_folder(request, policy)
    key = Endpoint(model_settings.base_url, model_settings.model, request.api_key_env).key()
    for name in request.suites:
        try:
            if server is not None and server.has_ended:
                raise RunError(
                    f"the server has ended. Its log is {server.log}, and ends:\n{server.last_output()}"
                )
            folder = _new_folder(results_folder, _folder_name(request, name, policy))
            on_progress(f"{name} begins; its log is {folder / 'log.txt'}")
            suite, log = SUITES[name], folder / "log.txt"
            lighteval.prepare(model_settings, folder)
            words = lighteval.command(program, suite, model_settings, folder)
            environment = lighteval.environment(model_settings.base_url, key, folder)
            started_at = time.monotonic()
            with ProcessGroup(
                words, folder=folder, log=log, environment=environment, secret=key
            ) as group:
                code = group.wait(request.time_limit)
            lighteval.tidy(folder)
            if code is None:
                raise RunError(
                    f"it took longer than {request.time_limit:g} seconds. Its log is {log}"
                )
            if code != 0:
                raise RunError(
                    f"lighteval failed ({describe_exit(code)}). Its log is {log}, and ends:\n{group.last_output()}"
                )
            try:
                suite_scores = lighteval.read_scores(suite, folder, log)
            except RunError as problem:
                raise RunError(f"{problem}. Its log is {log}") from problem
            content = _result_content(
                name, model_settings, suite_scores, folder, time.monotonic() - started_at
            )
        except RunError as error:
            outcome.failed[name] = str(error)
            on_progress(f"{name} failed: {error}")
            continue
        content = {"policy": policy.label, **content}
        if request.output is None:
            marked = {"format": FORMAT, "kind": KIND, **content}
            content["results"] = str(add_result(results_folder.parent, folder.name, marked))
        outcome.results[name] = content


def _result_content(
    name: str,
    model_settings: ModelSettings,
    suite_scores: SuiteScores,
    folder: Path,
    seconds: float,
) -> dict[str, Any]:
    interval = mean_with_interval(list(suite_scores.scores.values()))
    return {
        "suite": name,
        "suite_version": suite_scores.version,
        "task": SUITES[name].task,
        "dataset": suite_scores.dataset,
        "program": ", ".join(
            f"{package} {release}" for package, release in suite_scores.releases.items()
        ),
        "endpoint": model_settings.base_url,
        "model": model_settings.model,
        "prompts": len(suite_scores.scores),
        "samples_per_prompt": model_settings.samples,
        "samples": len(suite_scores.scores) * model_settings.samples,
        "metrics": {METRIC: suite_scores.value},
        "stderr": {METRIC: suite_scores.stderr},
        "intervals_95": {METRIC: [interval.low, interval.high]},
        "temperature": model_settings.temperature,
        "top_p": model_settings.top_p,
        "max_new_tokens": model_settings.max_new_tokens,
        "max_prompts": model_settings.max_questions,
        "seconds": seconds,
        "finished_at": time.time(),
        "details": str(lighteval.details(folder)),
        "log": str(folder / "log.txt"),
        "rows": [
            {"example": number, "score": score} for number, score in suite_scores.scores.items()
        ],
    }


def interval_of(result: dict[str, Any]) -> Interval:
    """The value of a suite's result with its 95 % interval over the questions."""
    low, high = result["intervals_95"][METRIC]
    return Interval(result["metrics"][METRIC], low, high, result["prompts"])


def _resolve_policy(request: SuiteRequest) -> PolicyWeights:
    if request.policy is None:
        assert request.endpoint_model is not None, "it was checked"
        return PolicyWeights(request.endpoint_model)
    policy = find_policy(request.policy, request.runs_dir)
    if policy.folder is None:
        raise UsageError(
            "--policy base says no model to serve here. Serve it yourself and give --endpoint, or name a folder that holds it."
        )
    return policy


def _results_folder(request: SuiteRequest, policy: PolicyWeights) -> Path:
    """The folder of the results, which also contains the suites' folders."""
    if request.output is not None:
        return request.output.absolute().parent
    return (policy.run or request.runs_dir.parent).absolute() / RESULTS


def _folder_name(request: SuiteRequest, suite: str, policy: PolicyWeights) -> str:
    return f"{request.output.stem}-{suite}" if request.output else result_name(suite, policy.label)


def _new_folder(parent: Path, name: str) -> Path:
    """Create a folder with a name that no folder or result has yet: `NAME`, `NAME-2` …"""
    with atomic_files.explaining_disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = parent / (name if number == 1 else f"{name}-{number}")
            if folder.with_name(f"{folder.name}.json").exists():
                continue
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    raise AssertionError("unreachable")


async def _check_endpoint(endpoint: Endpoint) -> None:
    async with Client(endpoint) as client:
        await client.reach()
