"""The task made of a notebook's rows and rewards: `groupwise.rl` trains on it, using objects of the notebook itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from groupwise.core.reward_call.tags import Tags
from groupwise.core.reward_call.text import CompletionText
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.datasets import refuse_shared
from groupwise.notebook.rewards import grades, is_numeric
from groupwise.notebook.rows import kind_of
from groupwise.runs.notebook_names import FACTS
from groupwise.tasks.data.chat import Row, Rows
from groupwise.tasks.rewards.formats import SoftFormat
from groupwise.tasks.rewards.overlap import RubricOverlap
from groupwise.tasks.rewards.rubric import Rubric

NUMERIC_METRICS = ("accuracy", "within_10_percent", "format_rate")
RUBRIC_METRICS = ("format_rate", "rubric_overlap")
"""Metrics measured in addition to the rewards, for data with rubrics."""


class NotebookTask:
    """See `groupwise.tasks.contract`."""

    def __init__(
        self,
        config: TrainingConfig,
        dataset: str,
        train: Rows | Sequence[Row],
        test: Rows | Sequence[Row],
        rewards: Rubric,
        callbacks: Sequence[object] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """`dataset`: the name of the data. `facts`: stored with a run; later trainings compare them to decide whether they would be
        the same.

        Raises UsageError if a question is in both the train and the test part.
        """
        refuse_shared(train, test)
        self.facts_of_the_notebook: dict[str, Any] = {
            "dataset": dataset,
            "rewards": dict(zip(rewards.names, rewards.weights, strict=True)),
            FACTS: facts or {},
        }
        """Stored with the run; model cards take the names of data and rewards from here."""
        self._config = config
        self._train = train
        self._test = test
        self._rewards = rewards
        self._callbacks = callbacks

    def get_rl_dataset(self, config: Any) -> Rows | Sequence[Row]:
        """The train part."""
        return self._train

    def get_eval_dataset(self, config: Any) -> Rows | Sequence[Row]:
        """The test part."""
        return self._test

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> Rubric:
        """The notebook's rewards."""
        return self._rewards

    def get_rl_callbacks(self, config: Any, tokenizer: Any, output_dir: str) -> list[object]:
        """The notebook's callbacks."""
        return list(self._callbacks)

    def compute_metrics(
        self,
        prompts: Sequence[Any],
        completions: Sequence[CompletionText],
        dataset_rows: Sequence[Row],
        config: Any,
        tokenizer: Any,
    ) -> dict[str, Any]:
        """Shares of completions in the layout, of right answers, and of those within 10 %; for rubrics the mean of
        `rubric_overlap`.

        The share within 10 % is omitted if no gold answer is a number.
        """
        tags = self._config.tags
        layout = SoftFormat(tags.reasoning, tags.answer, right=1.0)
        metrics = {"format_rate": fmean(layout(completions))}
        if kind_of(dataset_rows) == "rubric":
            overlaps = RubricOverlap()(
                prompts=prompts,
                completions=completions,
                rubric=[row["rubric"] for row in dataset_rows],
                reference=[row["reference"] for row in dataset_rows],
            )
            valid_overlaps = [value for value in overlaps if value is not None]
            return {
                "metrics": {
                    **metrics,
                    "rubric_overlap": fmean(valid_overlaps) if valid_overlaps else 0.0,
                }
            }
        answers = [row["answer"] for row in dataset_rows]
        row_grades = grades(tags, completions, tolerant=True, answer=answers)
        metrics["accuracy"] = fmean(grade >= RIGHT for grade in row_grades)
        metrics["within_10_percent"] = fmean(grade >= NEAR for grade in row_grades)
        return {"metrics": {name: metrics[name] for name in metric_names(tags, dataset_rows)}}


def metric_names(tags: Tags, rows: Sequence[Row]) -> tuple[str, ...]:
    """Metrics measured for such rows in addition to the rewards."""
    if kind_of(rows) == "rubric":
        return RUBRIC_METRICS
    if any(is_numeric(tags, row["answer"]) for row in rows):
        return NUMERIC_METRICS
    return tuple(name for name in NUMERIC_METRICS if name != "within_10_percent")


RIGHT, NEAR = 1.5, 0.5
"""The lowest grades of `math_answer` for a correct answer, and for one that is off by at most 10 %."""
