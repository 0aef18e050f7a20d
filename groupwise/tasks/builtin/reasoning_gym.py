"""Problems of the package reasoning-gym: about a hundred generators, from sums to puzzles, each with its own grader.

    task:
      datasets:
        - {name: chain_sum, level: 1}
        - {name: letter_counting, weight: 2, parameters: {max_words: 8}}

The prompt is the package's question, below a system prompt that asks for the answer in `<answer>` tags. The content of the
last pair of tags, or the whole completion without one, goes to the grader of the row's dataset. The grader's number, mostly from 0 to 1,
is the reward. An answer that it cannot read earns 0; an entry that it cannot read is an error.

No question occurs twice, neither in a split nor in two of them, and each split has seeds of its own. Rows carry all that grading
needs: the dataset with its parameters, and the entry as text.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from groupwise.core.atomic_files import write_json
from groupwise.core.cache import cache_folder
from groupwise.core.errors import TaskError
from groupwise.core.plugins import explain
from groupwise.core.reward_call.tags import THINK, after_reasoning
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.core.settings.schema import Strict, setting
from groupwise.core.settings.view import TaskSection
from groupwise.tasks.builtin.reasoning_gym_answers import (
    JUDGED_HERE,
    SIMPLIFIED,
    agrees_at_a_point,
    is_harmless,
)
from groupwise.tasks.builtin.reasoning_gym_problems import RIGHT, SPLITS, dataset_of, entry_of_text
from groupwise.tasks.rewards.extracted import LogExtra, record_answers

KEPT_ABOVE = 5.0
"""Seconds: problems that took longer to make are cached."""
SYSTEM_PROMPT = "Solve the problem. Think as long as you need, then write the answer, and nothing else, between <answer> and </answer>."


class Dataset(Strict):
    """One dataset of the package."""

    name: str = setting(..., "The dataset's name in reasoning-gym.")
    weight: float = setting(1.0, "Its share of the problems, relative to the other datasets.", gt=0)
    level: int | None = setting(
        None, "Level of its curriculum, from 0; null: the defaults of its parameters.", ge=0
    )
    parameters: dict[str, Any] = setting(
        {}, "Fields of the dataset's configuration; they override those of the level."
    )


class TaskConfig(TaskSection):
    """The `task:` section of a config for this task."""

    datasets: list[Dataset] = setting(
        [Dataset(name="chain_sum")], "What the problems are taken from.", min_length=1
    )
    system_prompt: str | None = setting(
        SYSTEM_PROMPT, "System message before each question; null: none."
    )
    train_size: int = setting(1000, "Training problems.", ge=1)
    validation_size: int = setting(128, "Held-out problems of a supervised run.", ge=1)
    eval_size: int = setting(128, "Held-out problems of evaluations.", ge=1)
    seed: int = setting(0, "Seed of the problems; the run has a seed of its own.", ge=0)
    generation_time_limit: float = setting(
        600.0, "Seconds that making the problems may take; some datasets are slow.", gt=0
    )


def get_config_schema() -> type[BaseModel]:
    """The config's `task:` section."""
    return TaskConfig


def get_rl_dataset(config: Any) -> list[dict[str, Any]]:
    """The training rows, with the columns `answer` (None if the package has none), `dataset` and `entry`."""
    return _rows_of_split(TaskConfig.of(config), "train")


def get_eval_dataset(config: Any) -> list[dict[str, Any]]:
    """The test rows. They do not depend on the number of validation or training rows."""
    return _rows_of_split(TaskConfig.of(config), "test")


def get_sft_dataset(config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The training rows, each with its answer as the completion, without reasoning."""
    return [_with_completion(row) for row in get_rl_dataset(config)]


def get_sft_eval_dataset(config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The validation rows, with completions in the same form."""
    return [_with_completion(row) for row in _rows_of_split(TaskConfig.of(config), "validation")]


def get_reward_funcs(config: Any, tokenizer: Any) -> list[Callable[..., list[float]]]:
    """The graders of the package; each row names its own."""
    return [score]


def compute_metrics(
    prompts: Sequence[Any],
    completions: Sequence[CompletionText],
    dataset_rows: Sequence[dict[str, Any]],
    config: Any,
    tokenizer: Any,
) -> dict[str, Any]:
    """Mean score, share of right answers (also by dataset), and share of completions that have answer tags."""
    names = [row["dataset"]["name"] for row in dataset_rows]
    scores = score(
        completions,
        [row["dataset"] for row in dataset_rows],
        [row["entry"] for row in dataset_rows],
    )
    right = [value >= RIGHT for value in scores]
    tagged = [THINK.last_answer(completion_text(c)) is not None for c in completions]
    by_name = {
        f"accuracy/{name}": fmean(r for r, n in zip(right, names, strict=True) if n == name)
        for name in dict.fromkeys(names)
    }
    metrics = {"score": fmean(scores), "accuracy": fmean(right), "tagged": fmean(tagged)}
    return {"metrics": metrics | (by_name if len(by_name) > 1 else {}), "scores": scores}


# --- grading -------------------------------------------------------------------------------------


def score(
    completions: Sequence[CompletionText],
    dataset: Any,
    entry: Any,
    log_extra: LogExtra | None = None,
    **_: Any,
) -> list[float]:
    """Scores by each row's own grader. The answer is the text in the last answer tags, or else all text after the reasoning."""
    answers = [answer_in(completion_text(completion)) for completion in completions]
    record_answers(log_extra, answers)
    rows = zip(answers, dataset, entry, strict=True)
    return [grade_answer(answer, spec, text) for answer, spec, text in rows]


def answer_in(text: str) -> str:
    """The content of the last answer tags; without tags, everything after the reasoning."""
    tagged = THINK.last_answer(text)
    return after_reasoning(text).strip() if tagged is None else tagged


def grade_answer(answer: str, spec: Mapping[str, Any], entry: str) -> float:
    """The grader's score. Raises ValueError if it cannot grade even the entry's own answer."""
    grade, read = _grader(json.dumps(spec, sort_keys=True)), entry_of_text(entry)
    name = str(spec["name"])
    if name in JUDGED_HERE:
        return float(JUDGED_HERE[name](answer, str(read["answer"])))
    if not is_harmless(answer, name):
        return 0.0
    try:
        if name in SIMPLIFIED and not agrees_at_a_point(answer, read["metadata"]):
            return 0.0
        value = float(grade(answer, read))
    except Exception:  # noqa: BLE001 — graders fail on answers in many ways
        read = entry_of_text(entry)  # again: a grader that failed may have changed the first one
        try:
            grade(read["answer"], read)
        except Exception as error:  # a grader may raise anything
            raise ValueError(
                f"the grader cannot grade this entry, not even with its own answer: {explain(error).strip()}"
            ) from error
        return 0.0
    return value if math.isfinite(value) else 0.0


@lru_cache(maxsize=256)
def _grader(spec: str) -> Callable[..., Any]:
    return dataset_of(json.loads(spec)).score_answer


# --- rows ----------------------------------------------------------------------------------------


def _rows_of_split(task_config: TaskConfig, split: str) -> list[dict[str, Any]]:
    """The rows of a split. Earlier splits are made with it, because it must not repeat any of their rows."""
    cached_splits = _cached_splits(task_config.model_dump_json())
    if split not in cached_splits:
        sizes = {
            "test": task_config.eval_size,
            "validation": task_config.validation_size,
            "train": task_config.train_size,
        }
        needed = SPLITS[: SPLITS.index(split) + 1]
        request = {
            "seed": task_config.seed,
            "sizes": {name: sizes[name] for name in needed},
            "datasets": task_config.model_dump()["datasets"],
        }
        cached_splits.update(
            _make_splits(json.dumps(request, sort_keys=True), task_config.generation_time_limit)
        )
    return [_problem_row(task_config, problem) for problem in cached_splits[split]]


@lru_cache(maxsize=4)
def _cached_splits(config_json: str) -> dict[str, list[dict[str, Any]]]:
    """The splits that this process has made for a `task:` section."""
    return {}


def _problem_row(task_config: TaskConfig, problem: Mapping[str, Any]) -> dict[str, Any]:
    question = [{"role": "user", "content": problem["question"]}]
    system = (
        [{"role": "system", "content": task_config.system_prompt}]
        if task_config.system_prompt
        else []
    )
    return {
        "prompt": system + question,
        "answer": problem["answer"],
        "dataset": task_config.datasets[int(problem["source"])].model_dump(exclude={"weight"}),
        "entry": problem["entry"],
    }


def _with_completion(row: dict[str, Any]) -> dict[str, Any]:
    if row["answer"] is None:
        raise TaskError(
            f"The dataset `{row['dataset']['name']}` of reasoning-gym gives no answers, so there is nothing to imitate. Leave it out "
            "of task.datasets for `sft`; `rl` and `eval` need no answers."
        )
    return {**row, "completion": f"<answer>{row['answer']}</answer>"}


def _make_splits(request: str, limit: float) -> dict[str, list[dict[str, Any]]]:
    """The splits for a request; those that took longer than KEPT_ABOVE to make are cached."""
    try:
        version = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    digest = hashlib.sha256(f"{version}\n{request}".encode()).hexdigest()
    cached = cache_folder("reasoning_gym") / f"{digest}.json"
    if cached.is_file():
        return json.loads(cached.read_text(encoding="utf-8"))
    started = time.monotonic()
    splits = _run_generator(request, limit)
    if time.monotonic() - started > KEPT_ABOVE:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_json(cached, splits)
    return splits


def _run_generator(request: str, limit: float) -> dict[str, list[dict[str, Any]]]:
    """Get the problems from a separate process. Raises TaskError if it returns none."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "groupwise.tasks.builtin.reasoning_gym_problems"],
            input=request,
            capture_output=True,
            check=False,
            text=True,
            encoding="utf-8",
            timeout=limit,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"},
        )
    except subprocess.TimeoutExpired as late:
        raise TaskError(
            f"reasoning-gym did not make the problems within {limit:g} s (task.generation_time_limit). Ask for fewer (train_size, "
            "validation_size, eval_size), choose easier ones, or raise the limit; what was finished once is kept."
        ) from late
    if done.returncode:
        raise TaskError(
            f"reasoning-gym failed while it made the problems:\n{done.stderr.strip()[-2000:]}"
        )
    answer = json.loads(done.stdout)
    if "problem" in answer:
        raise TaskError(f"reasoning-gym: {answer['problem']}")
    return answer["rows"]
