"""Computes an evaluation's metrics from its rows, prompt by prompt.

A row is one sample: its prompt and completion, its reward, whether it succeeded, and its answer. `rows_of` makes the rows of scored
groups. Result files and the record of a run contain these rows, from which every metric can be computed:

    reward                       mean reward
    rewards/NAME/mean            mean of one reward part
    pass@k                       probability that at least one of k samples succeeds, by the unbiased estimator
    avg@n                        fraction of the n samples that succeed
    maj@n                        1 if the most frequent answer of the n samples is right
    completions/mean_length      tokens that the policy wrote
    rollouts/mean_length         tokens after the prompt, if the policy did not write all of them (environment, inserted text)
    completions/clipped_ratio    fraction that the length limit cut off

`measure` gives one value per prompt, as intervals and paired comparisons need. A sample that could not be scored is neither a success nor
a failure: it is left out. If a prompt then has too few samples for a metric, it is left out of that metric and counted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from groupwise.core.types import DATASET_COLUMN, TASK_COLUMN, Example, Group, Rollout
from groupwise.tasks.data.examples import fingerprint
from groupwise.tasks.rewards.extracted import EXTRACTED_ANSWER
from groupwise.training.evaluation.statistics import (
    Interval,
    majority,
    mean_or_none,
    mean_with_interval,
    pass_at_k,
)

Row = Mapping[str, Any]
"""One sample of an evaluation; see `rows_of`."""

DEFAULT_THRESHOLD = 0.999
"""A full reward of 1, with a margin for rounding."""

ANSWER_NOTES = (EXTRACTED_ANSWER, "answer")
"""Names under which reward functions record the answer they read (`log_extra`); the first that occurs is used."""

REWARD = "reward"
LENGTH = "completions/mean_length"
WHOLE_LENGTH = "rollouts/mean_length"
CLIPPED = "completions/clipped_ratio"


@dataclass(frozen=True, slots=True)
class Success:
    """The criterion for a solved prompt."""

    threshold: float = DEFAULT_THRESHOLD
    part: str | None = None
    """The reward part that decides; None: the total."""

    def judge(self, rollout: Rollout) -> bool | None:
        """True if the rollout succeeded; None if it was not scored or the deciding part is missing."""
        if rollout.outcome != "scored":
            return None
        return self.is_reached(rollout.reward, rollout.part_values)

    def is_reached(self, reward: float | None, parts: Mapping[str, float | None]) -> bool | None:
        """True if a reward with these parts is a success; None if the deciding part is missing."""
        value = reward if self.part is None else parts.get(self.part)
        return None if value is None else value >= self.threshold


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric with its value for each prompt."""

    values: dict[str, float]
    """Values by the key of the prompt; see `by_prompt`."""
    left_out: int
    """Number of prompts with too few scored samples."""

    @property
    def interval(self) -> Interval:
        """The mean over the prompts with its 95 % interval."""
        return mean_with_interval(list(self.values.values()))


def distinct_share(completions: Sequence[str]) -> float:
    """Fraction of the completions of one prompt that are distinct."""
    return len(set(completions)) / len(completions)


def rows_of(groups: Iterable[Group], success: Success) -> list[dict[str, Any]]:
    """One row per rollout, in order.

    `key` identifies the example by its content; `task` is the label of its task, if it has one. `answer` is the text that majority voting
    counts: the value that a reward function logged under one of `ANSWER_NOTES`. If none was logged for any example of that label and
    dataset, it is the stripped completion. None means no answer.
    """
    groups = list(groups)
    # For each label and dataset, the name under which rewards log the answer; missing if they log none.
    notes: dict[tuple[str, ...], str] = {}
    for name in ANSWER_NOTES:
        for group in groups:
            if any(name in rollout.notes for rollout in group.rollouts):
                notes.setdefault(_example_origin(group.example), name)
    rows: list[dict[str, Any]] = []
    for group in groups:
        label = label_of(group.example)
        note = notes.get(_example_origin(group.example))
        identity = {"example": group.example.index, "key": key_of(group.example)}
        identity |= {} if label is None else {"task": label}
        rows.extend(
            {
                **identity,
                "sample": rollout.member,
                "prompt": group.example.prompt,
                "completion": rollout.completion,
                "reward": rollout.reward,
                "parts": rollout.part_values,
                "outcome": rollout.outcome,
                "reason": rollout.reason,
                "success": success.judge(rollout),
                "answer": _vote_answer(rollout, note),
                "truncated": rollout.truncated,
                "finish_reason": rollout.finish_reason,
                "tokens": len(rollout.completion_ids),
                "written": rollout.written,
            }
            for rollout in group.rollouts
        )
    return rows


def label_of(example: Example) -> str | None:
    """The label of an example (column `task`), which decides its rewards and appears in the names of its task's metrics."""
    label = example.columns.get(TASK_COLUMN)
    return label.strip() or None if isinstance(label, str) else None


def key_of(example: Example) -> str:
    """A key of an example from its prompt and columns: equal in two evaluations if the example is the same."""
    return fingerprint([example])[:16]


def by_prompt(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The samples of each prompt by its key; the second of two equal examples is `KEY#2`.

    Rows without a key, from other programs, are identified by their prompt.
    """
    by_example: dict[int, list[Row]] = {}
    for row in rows:
        by_example.setdefault(row["example"], []).append(row)
    samples_by_key: dict[str, list[Row]] = {}
    occurrences: dict[str, int] = {}
    for samples in by_example.values():
        key = samples[0].get("key") or prompt_key(samples[0])
        occurrences[key] = occurrences.get(key, 0) + 1
        samples_by_key[key if occurrences[key] == 1 else f"{key}#{occurrences[key]}"] = samples
    return samples_by_key


def prompt_key(row: Row) -> str:
    """A key of a row's prompt, which ignores its other columns."""
    return hashlib.sha256(json.dumps(row["prompt"], sort_keys=True).encode()).hexdigest()[:16]


def metric_names(rows: Sequence[Row], ks: Sequence[int]) -> list[str]:
    """The metrics that can be computed from these rows; `pass@k` for the given k."""
    samples = max((len(group) for group in by_prompt(rows).values()), default=0)
    sample_metrics = [f"avg@{samples}", f"maj@{samples}"] if samples > 1 else []
    parts = dict.fromkeys(f"rewards/{name}/mean" for row in rows for name in row["parts"])
    names = [REWARD, *(f"pass@{k}" for k in ks), *sample_metrics, *parts, LENGTH, CLIPPED]
    if any(_written_tokens(row) != row["tokens"] for row in rows):
        names.append(WHOLE_LENGTH)
    return [name for name in names if (result := measure(name, rows)) and result.values]


def measure(name: str, rows: Iterable[Row]) -> Measure | None:
    """The metric's value for each prompt; None if the metric is not computed from rows."""
    compute = _compute_of(name)
    if compute is None:
        return None
    values = {key: compute(samples) for key, samples in by_prompt(rows).items()}
    known_values = {key: value for key, value in values.items() if value is not None}
    return Measure(known_values, len(values) - len(known_values))


def is_share(name: str) -> bool:
    """True if the metric is a success rate, for which more is better."""
    return re.fullmatch(r"(pass|avg|maj)@\d+", name) is not None


Compute = Callable[[Sequence[Row]], float | None]


def _compute_of(name: str) -> Compute | None:
    """The function that computes a prompt's value from its samples; None if the metric is not computed from rows."""
    if match := re.fullmatch(r"pass@(\d+)", name):
        return partial(_pass_at_k, k=int(match[1]))
    if match := re.fullmatch(r"rewards/(.+)/mean", name):
        part = match[1]
        return lambda rows: mean_or_none(
            row["parts"].get(part) for row in rows if row["outcome"] == "scored"
        )
    return _SIMPLE.get(re.sub(r"@\d+$", "@", name))


def _written_tokens(row: Row) -> float | None:
    return row.get("written", row["tokens"])  # files of other programs may lack the distinction


def _rows_with_verdict(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("success") is not None]


def _pass_at_k(rows: Sequence[Row], k: int) -> float | None:
    judged_rows = _rows_with_verdict(rows)
    if len(judged_rows) < k:
        return None
    return pass_at_k(len(judged_rows), sum(row["success"] for row in judged_rows), k)


def _majority_vote(rows: Sequence[Row]) -> float | None:
    judged_rows = _rows_with_verdict(rows)
    if not judged_rows:
        return None
    return majority(
        [row.get("answer") for row in judged_rows], [row["success"] for row in judged_rows]
    )


_SIMPLE: dict[str, Compute] = {
    REWARD: lambda rows: mean_or_none(row["reward"] for row in rows),
    "avg@": lambda rows: mean_or_none(row["success"] for row in _rows_with_verdict(rows)),
    "maj@": _majority_vote,
    LENGTH: lambda rows: mean_or_none(map(_written_tokens, rows)),
    WHOLE_LENGTH: lambda rows: mean_or_none(row["tokens"] for row in rows),
    CLIPPED: lambda rows: mean_or_none(row.get("truncated") for row in rows),
}


def _example_origin(example: Example) -> tuple[str, ...]:
    """Label and dataset of an example, which may decide its rewards."""
    return tuple(str(example.columns.get(column)) for column in (TASK_COLUMN, DATASET_COLUMN))


def _vote_answer(rollout: Rollout, note: str | None) -> str | None:
    """The answer as text that is equal for equal answers: 3 and 3.0 are the same number."""
    value = rollout.completion if note is None else rollout.notes.get(note)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and not isinstance(value, str):
        value = json.dumps(value, sort_keys=True)
    return value.strip() or None if value is not None else None
