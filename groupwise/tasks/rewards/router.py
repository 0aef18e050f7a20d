"""Rewards by task: each row is scored by the rewards of its label, so one run can train on several tasks.

A row's label is the value of its column `task`; a row with an unknown label has no rewards at all. If `task` is empty, the label is
the row's `dataset_name`, if the router knows that (every row of a source has one), else the router's default.

A batch may be mixed: each label's rewards see only their own rows, and an error in them fails no other rows. Every part is recorded
under its label, `math/correctness`, and does not apply to the rows of other labels.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, cast

from groupwise.core.errors import TaskError
from groupwise.core.plugins import nearest, printable
from groupwise.core.reward_call.request import GroupScore, MemberScore, ScoreRequest
from groupwise.core.types import DATASET_COLUMN, TASK_COLUMN, RewardPart, number_of
from groupwise.tasks.rewards.rubric import Row, Rubric, checked_weights

LABEL_COLUMNS = (TASK_COLUMN, DATASET_COLUMN)
"""The columns that may hold a row's label, in this order."""


class Router(Rubric):
    """Rubrics by label; itself a rubric, whose parts are those of all labels."""

    def __init__(
        self, rubrics: Mapping[str, Rubric], default: str | None = None, *, where: str = "Router"
    ) -> None:
        """`default` is the label of rows without one. Raises TaskError for an unknown default, or two parts of one name."""
        if not rubrics:
            raise TaskError(f"{where}: there are no labels; give the rewards of at least one.")
        self.where = where
        self._outer_labels: frozenset[str] = frozenset()
        self._set_rubrics({label: rubric.nested_under(label) for label, rubric in rubrics.items()})
        self.default = self._checked_default(default)
        duplicates = [name for name, count in Counter(self.names).items() if count > 1]
        if duplicates:
            raise TaskError(
                f"{where}: two parts are called `{duplicates[0]}`; rename one of the labels."
            )

    @classmethod
    def of(
        cls,
        value: object,
        weights: Sequence[float] | None = None,
        *,
        where: str = "Router",
        default: str | None = None,
    ) -> Router:
        """The router of a mapping from labels to rubrics; each value may be anything that `Rubric.of` accepts."""
        if not isinstance(value, Mapping):
            raise TaskError(
                f"{where}: expected a dict from labels to rewards, got {type(value).__name__}."
            )
        entries = cast("Mapping[str, object]", value).items()
        rubrics = {
            label: Rubric.of(rewards, where=f"{where}, {label}") for label, rewards in entries
        }
        router = cls(rubrics, default, where=where)
        return router if weights is None else router.reweighted(weights)

    def with_default(self, default: str) -> Router:
        """The same router with another default. Raises TaskError for an unknown one."""
        router = copy.copy(self)
        router.default = self._checked_default(default)
        return router

    def reweighted(self, weights: Sequence[float]) -> Router:
        """See `Rubric.reweighted`; the weights are in the order of `names`."""
        remaining = list(checked_weights(tuple(weights), self.names, self.where))
        rubrics: dict[str, Rubric] = {}
        for label, rubric in self.rubrics.items():
            count = len(rubric.names)
            rubrics[label], remaining = rubric.reweighted(remaining[:count]), remaining[count:]
        router = copy.copy(self)
        router._set_rubrics(rubrics)
        return router

    def without(self, names: Collection[str]) -> Router:
        """See `Rubric.without`: each label must keep at least one reward."""
        router = copy.copy(self)
        router._set_rubrics(
            {label: rubric.without(names) for label, rubric in self.rubrics.items()}
        )
        return router

    def nested_under(self, label: str) -> Router:
        """See `Rubric.nested_under`: the rewards become one label of another router, so a row's `task` may name that label and this router
        ignores it.
        """
        router = copy.copy(self)
        router._outer_labels = self._outer_labels | {label}
        router._set_rubrics(
            {
                inner_label: rubric.nested_under(label)
                for inner_label, rubric in self.rubrics.items()
            }
        )
        return router

    def label_of(self, row: Row) -> str | None:
        """The label whose rewards score a row; None if the router has none for it."""
        label, source = (_column_text(row, column) for column in LABEL_COLUMNS)
        if label in self.rubrics:
            return label
        if label is not None and label not in self._outer_labels:
            return None
        return source if source in self.rubrics else self.default

    def check_rows(self, rows: Mapping[int, Row]) -> None:
        """See `Rubric.check_rows`: each label's rewards must be able to score its rows, and every row must have rewards."""
        labels = {index: self.label_of(row) for index, row in rows.items()}
        unrewarded = {index: _label_in(row) for index, row in rows.items() if labels[index] is None}
        if unrewarded:
            first_index = next(iter(unrewarded))
            first = number_of(rows[first_index], first_index)
            counts = Counter(unrewarded.values())
            raise TaskError(
                f"{self.where}: {len(unrewarded)} of {len(rows)} rows have no rewards, row {first} first.\n  "
                + "\n  ".join(
                    f"{n} × {self._unknown_label_message(problem)}"
                    for problem, n in counts.most_common(3)
                )
            )
        for label, rubric in self.rubrics.items():
            rubric.check_rows({index: row for index, row in rows.items() if labels[index] == label})

    def check_machine(self, *, refuse: bool = True) -> list[str]:
        """See `Rubric.check_machine`."""
        messages = [rubric.check_machine(refuse=refuse) for rubric in self.rubrics.values()]
        return list(
            dict.fromkeys(message for rubric_messages in messages for message in rubric_messages)
        )

    def unscorable(self, row: Row) -> str | None:
        """See `Rubric.unscorable`. A label without rewards is an error of the config, not of a row; `check_rows` reports it."""
        label = self.label_of(row)
        return None if label is None else self.rubrics[label].unscorable(row)

    async def score(
        self, request: ScoreRequest, started: Callable[[str], None] = lambda name: None
    ) -> GroupScore:
        """See `Rubric.score`: each row is scored by the rewards of its label; a row without any fails with that reason."""
        labels = {
            column: request.columns[column] for column in LABEL_COLUMNS if column in request.columns
        }
        count = len(request.completions)
        rows = [
            {column: values[index] for column, values in labels.items()} for index in range(count)
        ]
        indices_of_label: dict[str, list[int]] = {}
        members = [
            MemberScore(
                "failed", self._unknown_label_message(_label_in(row)), None, self._all_parts(())
            )
            for row in rows
        ]
        for index, row in enumerate(rows):
            if (label := self.label_of(row)) is not None:
                indices_of_label.setdefault(label, []).append(index)
        scores = await asyncio.gather(
            *(
                self.rubrics[label].score(_subset(request, indices), started)
                for label, indices in indices_of_label.items()
            )
        )
        for indices, score in zip(indices_of_label.values(), scores, strict=True):
            for index, member in zip(indices, score.members, strict=True):
                members[index] = replace(member, parts=self._all_parts(member.parts))
        metrics = [score.metrics for score in scores]
        names = dict.fromkeys(name for rubric_metrics in metrics for name in rubric_metrics)
        averaged = {
            name: fmean(
                rubric_metrics[name] for rubric_metrics in metrics if name in rubric_metrics
            )
            for name in names
        }
        return GroupScore(tuple(members), averaged)

    def _set_rubrics(self, rubrics: Mapping[str, Rubric]) -> None:
        self.rubrics = dict(rubrics)
        all_rubrics = self.rubrics.values()
        self.functions = tuple(function for rubric in all_rubrics for function in rubric.functions)
        self.names = tuple(name for rubric in all_rubrics for name in rubric.names)
        self.weights = tuple(weight for rubric in all_rubrics for weight in rubric.weights)

    def _checked_default(self, default: str | None) -> str | None:
        if default is not None and default not in self.rubrics:
            raise TaskError(
                f"{self.where}: the default is unknown: {self._unknown_label_message(default)}"
            )
        return default

    def _all_parts(self, parts: Sequence[RewardPart]) -> tuple[RewardPart, ...]:
        """One part for each function of all labels; those of other labels do not apply."""
        part_by_name = {part.name: part for part in parts}
        weighted = zip(self.names, self.weights, strict=True)
        return tuple(
            part_by_name.get(name) or RewardPart(name, None, weight) for name, weight in weighted
        )

    def _unknown_label_message(self, label: str | None) -> str:
        known_labels = f"The router has rewards for {', '.join(self.rubrics)}."
        if label is None:
            return (
                f"no label: nothing in the columns {' and '.join(LABEL_COLUMNS)}, and no default. {known_labels} Fill the column "
                f"`{TASK_COLUMN}`, or set rewards.default_task."
            )
        suggestions = nearest(label, self.rubrics)
        hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
        return f"no rewards for the label `{printable(label)}`.{hint} {known_labels}"


def _label_in(row: Row) -> str | None:
    """The row's task label, known or not; None if it has none."""
    labels = (_column_text(row, column) for column in LABEL_COLUMNS)
    return next((label for label in labels if label is not None), None)


def _column_text(row: Row, column: str) -> str | None:
    """A column's text; None if it is blank, None or NaN."""
    value = row.get(column)
    return None if value is None or value != value else str(value).strip() or None


def _subset(request: ScoreRequest, indices: Sequence[int]) -> ScoreRequest:
    """The request for these members alone."""

    def subset(values: Sequence[Any]) -> list[Any]:
        return [values[index] for index in indices]

    return replace(
        request,
        prompts=subset(request.prompts),
        completions=subset(request.completions),
        completion_ids=subset(request.completion_ids),
        columns={name: subset(values) for name, values in request.columns.items()},
    )
