"""Computes an evaluation's measures from its rows, prompt by prompt.

A row is one sample: its prompt and completion, its reward, whether it succeeded, and its answer. `rows_of` makes the rows of scored
groups. Result files and the record of a run hold these rows, and every metric can be computed from them:

    reward                       mean reward
    rewards/NAME/mean            one part of it
    pass@k                       chance that one of k samples succeeds, by the unbiased estimator
    avg@n                        share of the n samples that succeed
    maj@n                        1 if the answer that most of the n samples gave is right
    completions/mean_length      tokens that the policy wrote
    rollouts/mean_length         tokens after the prompt, if the policy did not write all of them (environment, inserted text)
    completions/clipped_ratio    share that the length limit cut off

`measure` gives one value for each prompt, which is what intervals and paired comparisons need. A sample that could not be scored is
neither a success nor a failure: it is left out, and a prompt that is left with too few samples for a metric is left out of that
metric and counted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from groupwise.core.types import DATASET_COLUMN, TASK_COLUMN, Example, Group, Rollout
from groupwise.tasks.data.examples import fingerprint
from groupwise.tasks.rewards.extracted import EXTRACTED_ANSWER
from groupwise.training.evaluation.statistics import (
    Interval,
    majority,
    mean_with_interval,
    pass_at_k,
)

Row = Mapping[str, Any]
"""One sample of an evaluation; see `rows_of`."""

DEFAULT_THRESHOLD = 0.999
"""A full reward of 1, in spite of rounding."""

ANSWER_NOTES = (EXTRACTED_ANSWER, "answer")
"""Names under which reward functions record the answer they read (`log_extra`); the first that occurs is used."""

REWARD = "reward"
LENGTH = "completions/mean_length"
WHOLE_LENGTH = "rollouts/mean_length"
CLIPPED = "completions/clipped_ratio"


@dataclass(frozen=True, slots=True)
class Success:
    """The criterion for solving a prompt."""

    threshold: float = DEFAULT_THRESHOLD
    part: str | None = None
    """The reward part that decides; None: the total."""

    def judge(self, rollout: Rollout) -> bool | None:
        """True if it succeeded; None if that is not known."""
        if rollout.outcome != "scored":
            return None
        return self.reached(rollout.reward, rollout.part_values)

    def reached(self, reward: float | None, parts: Mapping[str, float | None]) -> bool | None:
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
    """Share of the completions of one prompt that are different."""
    return len(set(completions)) / len(completions)


def rows_of(groups: Iterable[Group], success: Success) -> list[dict[str, Any]]:
    """One row for each rollout, in order.

    `key` names the example by its content, `task` is the label of its task, where it has one. `answer` is what majority voting
    counts: what a reward function recorded as one of `ANSWER_NOTES`, or, if none did for any example of that label and dataset, the
    completion without the space around it; None is no answer.
    """
    groups = list(groups)
    # The name under which the rewards of each origin record answers; origins that record none are missing.
    notes: dict[tuple[str, ...], str] = {}
    for name in ANSWER_NOTES:
        for group in groups:
            if any(name in rollout.notes for rollout in group.rollouts):
                notes.setdefault(_origin(group.example), name)
    rows: list[dict[str, Any]] = []
    for group in groups:
        label = label_of(group.example)
        note = notes.get(_origin(group.example))
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
                "answer": _answer(rollout, note),
                "truncated": rollout.truncated,
                "finish_reason": rollout.finish_reason,
                "tokens": len(rollout.completion_ids),
                "written": rollout.written,
            }
            for rollout in group.rollouts
        )
    return rows


def label_of(example: Example) -> str | None:
    """The column `task` of an example: it decides its rewards, and the name of its task's metrics."""
    label = example.columns.get(TASK_COLUMN)
    return label.strip() or None if isinstance(label, str) else None


def key_of(example: Example) -> str:
    """A name for an example made from its prompt and columns: equal in two evaluations if it is the same example."""
    return fingerprint([example])[:16]


def by_prompt(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The samples of each prompt, by its key; the second of two equal examples is `KEY#2`.

    Rows without a key, of other programs, are told apart by their prompt.
    """
    by_example: dict[int, list[Row]] = {}
    for row in rows:
        by_example.setdefault(row["example"], []).append(row)
    found: dict[str, list[Row]] = {}
    seen: dict[str, int] = {}
    for samples in by_example.values():
        key = samples[0].get("key") or prompt_key(samples[0])
        seen[key] = seen.get(key, 0) + 1
        found[key if seen[key] == 1 else f"{key}#{seen[key]}"] = samples
    return found


def prompt_key(row: Row) -> str:
    """A key of a row's prompt, which ignores its other columns."""
    return hashlib.sha256(json.dumps(row["prompt"], sort_keys=True).encode()).hexdigest()[:16]


def metric_names(rows: Sequence[Row], ks: Sequence[int]) -> list[str]:
    """The metrics that these rows have values for, `pass@k` for the given k."""
    samples = max((len(each) for each in by_prompt(rows).values()), default=0)
    repeated = [f"avg@{samples}", f"maj@{samples}"] if samples > 1 else []
    parts = dict.fromkeys(f"rewards/{name}/mean" for row in rows for name in row["parts"])
    names = [REWARD, *(f"pass@{k}" for k in ks), *repeated, *parts, LENGTH, CLIPPED]
    if any(_written_tokens(row) != row["tokens"] for row in rows):
        names.append(WHOLE_LENGTH)
    return [name for name in names if (found := measure(name, rows)) and found.values]


def measure(name: str, rows: Iterable[Row]) -> Measure | None:
    """The metric's value for each prompt; None for a metric that is not computed from rows."""
    compute = _compute_of(name)
    if compute is None:
        return None
    values = {key: compute(samples) for key, samples in by_prompt(rows).items()}
    known = {key: value for key, value in values.items() if value is not None}
    return Measure(known, len(values) - len(known))


def is_share(name: str) -> bool:
    """True if the metric is a share of successes, of which more is better."""
    return re.fullmatch(r"(pass|avg|maj)@\d+", name) is not None


Compute = Callable[[Sequence[Row]], float | None]


def _compute_of(name: str) -> Compute | None:
    """The function that computes a prompt's value from its samples; None for a metric that is not computed from rows."""
    if match := re.fullmatch(r"pass@(\d+)", name):
        return partial(_pass_at_k, k=int(match[1]))
    if match := re.fullmatch(r"rewards/(.+)/mean", name):
        part = match[1]
        return lambda rows: _mean(
            row["parts"].get(part) for row in rows if row["outcome"] == "scored"
        )
    return _SIMPLE.get(re.sub(r"@\d+$", "@", name))


def _written_tokens(row: Row) -> float | None:
    return row.get("written", row["tokens"])  # other programs need not tell them apart


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _rows_with_verdict(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("success") is not None]


def _pass_at_k(rows: Sequence[Row], k: int) -> float | None:
    judged = _rows_with_verdict(rows)
    if len(judged) < k:
        return None
    return pass_at_k(len(judged), sum(row["success"] for row in judged), k)


def _majority_vote(rows: Sequence[Row]) -> float | None:
    judged = _rows_with_verdict(rows)
    if not judged:
        return None
    return majority([row.get("answer") for row in judged], [row["success"] for row in judged])


_SIMPLE: dict[str, Compute] = {
    REWARD: lambda rows: _mean(row["reward"] for row in rows),
    "avg@": lambda rows: _mean(row["success"] for row in _rows_with_verdict(rows)),
    "maj@": _majority_vote,
    LENGTH: lambda rows: _mean(map(_written_tokens, rows)),
    WHOLE_LENGTH: lambda rows: _mean(row["tokens"] for row in rows),
    CLIPPED: lambda rows: _mean(row.get("truncated") for row in rows),
}


def _origin(example: Example) -> tuple[str, ...]:
    """Key that decides an example's rewards, if not all have the same."""
    return tuple(str(example.columns.get(column)) for column in (TASK_COLUMN, DATASET_COLUMN))


def _answer(rollout: Rollout, note: str | None) -> str | None:
    """The answer as text, equal for equal answers: 3 and 3.0 are one number."""
    value = rollout.completion if note is None else rollout.notes.get(note)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and not isinstance(value, str):
        value = json.dumps(value, sort_keys=True)
    return value.strip() or None if value is not None else None
