"""The named suites and lighteval, the separate program that runs them: how to find it, its command, and its results.

Pitfalls of lighteval, and the remedies:

    a missing answer                 it counts as wrong, and the program succeeds: so its log is searched, and the suite fails
    cached answers                   litellm caches them in the current folder, lighteval in the home folder, both by the model's name: so
                                     each suite has its own folder for both, and no checkpoint gets the marks of another one
    `o1` in a model's name           temperature and limits would be omitted: such a name is refused
    the number of questions          lighteval does not report it; the file with all answers contains it
    lighteval's release              not reported either: see `inside_lighteval`
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from groupwise.core import atomic_files
from groupwise.core.errors import RunError, UsageError
from groupwise.core.extras import require_packages
from groupwise.core.loopback import no_proxy_variables
from groupwise.core.plugins import nearest
from groupwise.training.suites import inside_lighteval

PROGRAM = "lighteval"
PROGRAM_VARIABLE = "GROUPWISE_LIGHTEVAL"
"""The environment variable with the command that runs lighteval."""
PACKAGES = ("lighteval[litellm]==0.13.0", "huggingface_hub<2", "xxhash<4")
"""The packages to install. Newer releases of the last two break lighteval, although its own pins allow them."""
MODEL, OUTPUT, RELEASES = "model.yaml", "out", "releases.json"
UNANSWERED = b"eturning empty response"
"""Part of lighteval's log line for each request that it gives up."""
UNASKABLE = "o1"
TOLERANCE = 1e-6
"""Tolerance between the mean of the individual marks and the reported value."""


ALL = "all"


@dataclass(frozen=True, slots=True)
class Suite:
    """A named suite. Its value is the fraction of right answers, `pass@1`, whatever lighteval's name for it."""

    task: str
    """The name of the task in lighteval 0.13."""
    metric: str
    """lighteval's name for the fraction of right answers, without the parameters that may follow it."""
    repeatable: bool = True
    """False if lighteval takes only one answer per question, as for code, although its metric's name says 16."""


SUITES = {
    "math_500": Suite("math_500", "pass@k"),
    "aime24": Suite("aime24", "pass@k"),
    "aime25": Suite("aime25", "pass@k"),
    "gpqa_diamond": Suite("gpqa:diamond", "gpqa_pass@k"),
    "lcb": Suite("lcb:codegeneration", "codegen_pass@1", repeatable=False),
    "lcb_v4": Suite("lcb:codegeneration_v4", "codegen_pass@1", repeatable=False),
}
"""`lcb` and `lcb_v4` are the parts `v4_v5` and `v4` of LiveCodeBench."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The service to ask, and the parameters of the requests."""

    base_url: str
    model: str
    samples: int = 1
    """Number of answers per question."""
    temperature: float = 0.0
    top_p: float | None = None
    max_new_tokens: int = 32768
    """Longest answer in tokens; the default is the limit of lighteval's own tasks."""
    concurrency: int = 16
    timeout: float = 900.0
    """Seconds for one request."""
    max_questions: int | None = None
    """Limit on the questions of each suite, for a trial; None: all."""

    def __post_init__(self) -> None:
        numbers = (self.samples, self.max_new_tokens, self.concurrency, self.max_questions or 1)
        if min(numbers) < 1 or self.timeout <= 0 or self.temperature < 0:
            raise UsageError(
                "Samples, tokens, requests at once and questions are at least 1 (or not given), a time above 0, a temperature at least 0."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p:g}; expected more than 0 and at most 1.")
        if UNASKABLE in self.model:
            raise UsageError(
                f"lighteval takes every model with {UNASKABLE} in its name for one of OpenAI's that has no temperature, and would leave "
                f"out temperature and limits for {self.model!r}. Serve it under another name (of vLLM: --served-model-name policy)."
            )
        if self.samples > 1 and self.temperature == 0:
            raise UsageError(
                f"{self.samples} answers to each question would all be the same one: they need a temperature above 0."
            )


@dataclass(frozen=True, slots=True)
class SuiteScores:
    """The result of a suite."""

    value: float
    stderr: float | None
    """The standard error that lighteval reports; None for a single question."""
    scores: dict[str, float]
    """The mark of each question, by its number in the dataset."""
    version: int | None
    """Version of the task."""
    dataset: str
    releases: dict[str, str]


def chosen_suites(names: Sequence[str], samples: int = 1) -> tuple[str, ...]:
    """The names without duplicates, with `all` replaced by all suites. Raises UsageError for unknown names, and for too many samples."""
    # In the order given.
    suites = dict.fromkeys(
        suite for name in names for suite in (SUITES if name == ALL else (name,))
    )
    for name in suites:
        if name not in SUITES:
            suggestions = nearest(name, list(SUITES))
            hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
            raise UsageError(
                f"There is no suite {name!r}.{hint} There are {', '.join(SUITES)}, and {ALL}."
            )
        if samples > 1 and not SUITES[name].repeatable:
            raise UsageError(
                f"{name} takes one answer to each problem, not {samples}: lighteval runs its tests on one. Leave the number of samples out "
                "for it, and ask the other suites by a command of their own."
            )
    return tuple(suites)


def find_program(program: Sequence[str] = ()) -> tuple[str, ...]:
    """The command that runs lighteval: given, from the environment, or by its name. Raises a UsageError that explains the installation."""
    words = tuple(program) or tuple(shlex.split(os.environ.get(PROGRAM_VARIABLE, ""))) or (PROGRAM,)
    executable = shutil.which(words[0])
    if executable is None:
        main_package, *extra_packages = (f"'{package}'" for package in PACKAGES)
        raise UsageError(
            f"There is no program {words[0]!r}. Suites are run by lighteval, which needs an environment of its own:\n"
            f"  uv tool install {main_package} {' '.join(f'--with {package}' for package in extra_packages)}\n"
            f"or\n  pipx install {main_package} && pipx inject lighteval {' '.join(extra_packages)}\n"
            f"Where it is not on the PATH, --program or the environment variable {PROGRAM_VARIABLE} says how it is run."
        )
    require_packages("Reading lighteval's results", "train", "pyarrow")
    return (os.path.abspath(executable), *words[1:])


def command(
    program: Sequence[str], suite: Suite, model_settings: ModelSettings, folder: Path
) -> list[str]:
    """The command line that runs a suite in `folder`."""
    repeat_suffix = f"@k=1@n={model_settings.samples}" if suite.repeatable else ""
    limit = (
        ()
        if model_settings.max_questions is None
        else ("--max-samples", str(model_settings.max_questions))
    )
    return [
        *(*program, "endpoint", "litellm", str(folder / MODEL), f"{suite.task}{repeat_suffix}|0"),
        *("--output-dir", str(folder / OUTPUT), "--save-details"),
        *("--custom-tasks", inside_lighteval.__file__, *limit),
    ]


def model_file(model_settings: ModelSettings, folder: Path) -> dict[str, Any]:
    """The content of lighteval's YAML file about the model."""
    generation = {
        "temperature": model_settings.temperature,
        "top_p": model_settings.top_p,
        "max_new_tokens": model_settings.max_new_tokens,
    }
    return {
        "model_parameters": {
            "model_name": f"openai/{model_settings.model}",
            "provider": "openai",
            "base_url": model_settings.base_url,
            "concurrent_requests": model_settings.concurrency,
            "timeout": model_settings.timeout,
            # Otherwise lighteval would ask OpenRouter for it.
            "max_model_length": model_settings.max_new_tokens,
            "cache_dir": str(folder / "cache"),
            "generation_parameters": {k: v for k, v in generation.items() if v is not None},
        }
    }


def environment(base_url: str, key: str | None, folder: Path) -> dict[str, str]:
    """Variables for lighteval, added to this process's environment. The client requires a key, so a missing one becomes a placeholder."""
    return {
        **no_proxy_variables(base_url),
        "OPENAI_API_KEY": key or "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_COLOR": "1",
        inside_lighteval.VARIABLE: str(folder / RELEASES),
    }


def prepare(model_settings: ModelSettings, folder: Path) -> None:
    """Write the model file into the suite's folder."""
    atomic_files.write_json(folder / MODEL, model_file(model_settings, folder))


def read_scores(suite: Suite, folder: Path, log: Path) -> SuiteScores:
    """Read the result. Raises RunError unless it is complete."""
    files = list((folder / OUTPUT / "results").rglob("results_*.json"))
    if len(files) != 1:
        raise RunError(f"it left {len(files) or 'no'} results in {folder / OUTPUT / 'results'}")
    try:
        content = json.loads(files[0].read_bytes())
    except ValueError as problem:
        raise RunError(f"its result, {files[0]}, is not JSON ({problem})") from problem
    content = cast("dict[str, Any]", content)
    try:
        results = content["results"].items()
        task, metrics = next(pair for pair in results if pair[0] == f"{suite.task}|0")
        name = next(
            n for n in metrics if n.split(":")[0] == suite.metric and not n.endswith("_stderr")
        )
        value, stderr = metrics[name], metrics.get(f"{name}_stderr")
        config = content["config_tasks"][task]
        scores = _scores(folder, name)
        version, dataset = config["version"], str(config["hf_repo"])
    except (KeyError, TypeError, StopIteration, AttributeError, ValueError) as error:
        raise RunError(
            f"its result is not what lighteval 0.13 writes ({type(error).__name__}: {error})"
        ) from error
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_fraction = is_number and 0 <= value <= 1
    if not is_fraction or not scores or abs(fmean(scores.values()) - value) > TOLERANCE:
        raise RunError(f"its result says {value!r}, which is not the mean of its single marks")
    if missing := log.read_bytes().count(UNANSWERED):
        raise RunError(
            f"{missing} of {len(scores)} questions got no answer, which lighteval counts as wrong answers. The log says why; longer "
            "limits than the service has are a frequent reason, and too many requests at once"
        )
    return SuiteScores(
        float(value),
        float(stderr) if isinstance(stderr, float) and math.isfinite(stderr) else None,
        scores,
        version,
        dataset,
        _releases(folder),
    )


def tidy(folder: Path) -> None:
    """Delete the caches of answers; the result keeps its own copies."""
    for name in ("cache", ".litellm_cache"):
        shutil.rmtree(folder / name, ignore_errors=True)


def details(folder: Path) -> Path:
    """The file with all answers. Raises ValueError unless there is exactly one."""
    (file,) = (folder / OUTPUT / "details").rglob("details_*.parquet")
    return file


def _scores(folder: Path, metric: str) -> dict[str, float]:
    from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

    table = cast("Any", parquet).read_table(details(folder), columns=["doc", "metric"])
    return {str(row["doc"]["id"]): float(row["metric"][metric]) for row in table.to_pylist()}


def _releases(folder: Path) -> dict[str, str]:
    try:
        return json.loads((folder / RELEASES).read_bytes())
    except (OSError, ValueError):  # another release of lighteval may not load our file
        return {}
