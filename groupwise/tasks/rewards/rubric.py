"""A weighted set of reward functions, as returned by a task's `get_reward_funcs`, and the scoring of a group with it.

Each function gives one part of the reward. The total of a rollout is Σ weight × value over the parts that apply to it. A part of
weight 0 is only recorded: it neither counts as applying nor fails a rollout.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, cast

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.call import (
    LARGEST,
    FunctionResult,
    RewardCallable,
    call,
    check_columns,
    check_function,
    column_arguments,
    name_of,
)
from groupwise.core.reward_call.request import ORIGIN, GroupScore, MemberScore, ScoreRequest
from groupwise.core.types import RewardPart, number_of

Row = Mapping[str, Any]
"""The columns of one row of a dataset, without its prompt."""

NO_REWARD = "no reward applied: every reward function returned None for this completion"


class Rubric:
    """Reward functions with their weights and unique names.

    `Rubric([f, (g, 0.5)])` weighs f by 1 and g by 0.5; `weights` replaces them all. Raises TaskError for an empty list, anything
    that is not a function, or weights that are not one finite number for each function.
    """

    def __init__(
        self,
        functions: Sequence[RewardCallable | tuple[RewardCallable, float]],
        weights: Sequence[float] | None = None,
        *,
        where: str = "Rubric",
    ) -> None:
        """`where` names the origin of the functions in messages."""
        self.where = where
        if not functions:
            raise TaskError(f"{where}: the list of reward functions is empty; give at least one.")
        pairs: list[tuple[RewardCallable, float]] = []
        for index, item in enumerate(functions):
            entry_name = f"{where}, entry {index}"
            function, weight = cast("tuple[Any, Any]", item if _is_pair(item) else (item, 1.0))
            check_function(function, entry_name)
            pairs.append((function, weight))
        self.functions = tuple(function for function, _ in pairs)
        # `name`, `name_2`, `name_3` … in the order of the list, but never the name of another function.
        names = [name_of(function) for function in self.functions]
        unique: list[str] = []
        for name in names:
            number, candidate = 2, name
            while candidate in unique or (candidate != name and candidate in names):
                candidate, number = f"{name}_{number}", number + 1
            unique.append(candidate)
        self.names = tuple(unique)
        all_weights = tuple(weight for _, weight in pairs) if weights is None else tuple(weights)
        self.weights = checked_weights(all_weights, self.names, where)

    @classmethod
    def of(cls, value: object, weights: Sequence[float] | None = None, *, where: str) -> Rubric:
        """The rubric made of `value`: a rubric, a list of functions or pairs, or one function."""
        if isinstance(value, Rubric):
            rubric = copy.copy(value)
            if rubric.where == type(value).__name__:  # its author did not name an origin
                rubric.where = where
            return rubric if weights is None else rubric.reweighted(weights)
        if isinstance(value, list | tuple):
            return cls(cast("Sequence[RewardCallable]", value), weights, where=where)
        check_function(value, where)
        return cls([cast("RewardCallable", value)], weights, where=where)

    def reweighted(self, weights: Sequence[float]) -> Rubric:
        """The same functions with other weights, in their order. Raises TaskError for weights that do not fit."""
        rubric = copy.copy(self)
        rubric.weights = checked_weights(tuple(weights), self.names, self.where)
        return rubric

    def without(self, names: Collection[str]) -> Rubric:
        """A copy without the parts of these names. Raises TaskError if no part is left, or none with a weight."""
        numbers = [number for number, name in enumerate(self.names) if name not in names]
        if not numbers:
            raise TaskError(f"{self.where}: no other reward is left.")
        rubric = copy.copy(self)
        rubric.functions = tuple(self.functions[number] for number in numbers)
        rubric.names = tuple(self.names[number] for number in numbers)
        weights = tuple(self.weights[number] for number in numbers)
        rubric.weights = checked_weights(weights, rubric.names, self.where)
        return rubric

    def nested_under(self, label: str) -> Rubric:
        """A copy whose parts are called `label/name`."""
        rubric = copy.copy(self)
        rubric.names = tuple(f"{label}/{name}" for name in self.names)
        return rubric

    @property
    def stateful(self) -> bool:
        """True if a function declares (`f.stateful = True`) that it must stay in one process."""
        return any(getattr(function, "stateful", False) is True for function in self.functions)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that define the functions, except those of this package."""
        owners = {_module_of(function) for function in self.functions}
        users = sorted(name for name in owners if not name.startswith("groupwise."))
        modules = [sys.modules.get(name) for name in users]
        return tuple(file for module in modules if (file := getattr(module, "__file__", None)))

    def check_columns(self, columns: Collection[str], *, where: str) -> None:
        """Raise TaskError if a function needs an argument that these dataset columns do not provide."""
        for function in self.functions:
            check_columns(function, columns, where)

    def check_rows(self, rows: Mapping[int, Row]) -> None:
        """Raise TaskError if a function needs a column that one of these rows lacks, or cannot score one of them.

        A reward that needs something of every row has a method `check_row(row)`, which raises ValueError if it is missing.
        """
        if not rows:
            return
        all_rows = list(rows.values())
        columns = set(all_rows[0]).intersection(*all_rows[1:]) | {ORIGIN}
        self.check_columns(columns, where=self.where)
        for name, function in zip(self.names, self.functions, strict=True):
            check = getattr(function, "check_row", None)
            if check is not None:
                where = f"{self.where}: `{name}`"
                problems: list[str] = []
                for index, row in rows.items():
                    try:
                        check(row)
                    except ValueError as reason:
                        problems.append(f"row {number_of(row, index)}: {reason}")
                if problems:
                    lines = [*problems[:3], *(["…"] if len(problems) > 3 else [])]
                    raise TaskError(
                        f"{where} cannot score {len(problems)} of {len(rows)} rows.\n  "
                        + "\n  ".join(lines)
                    )

    def check_machine(self, *, refuse: bool = True) -> list[str]:
        """The rewards' remarks on this machine before a run. Raises TaskError if it lacks something that a reward needs and
        `refuse` is set.

        A reward that needs something of the machine has a method `check_machine()`, which returns a sentence, or raises ValueError.
        """
        messages: list[str] = []
        for name, function in zip(self.names, self.functions, strict=True):
            if check := getattr(function, "check_machine", None):
                try:
                    messages.append(f"`{name}` {check()}")
                except ValueError as problem:
                    if refuse:
                        raise TaskError(f"{self.where}: `{name}` {problem}") from problem
                    messages.append(f"`{name}` {problem}")
        return messages

    @property
    def argument_columns(self) -> list[tuple[str, str]]:
        """Pairs of a function's name and an argument that names a column."""
        functions = zip(self.names, self.functions, strict=True)
        return [
            (name, argument)
            for name, function in functions
            for argument in column_arguments(function)
        ]

    def unfilled_arguments(self, rows: Sequence[Row]) -> list[tuple[str, str]]:
        """Pairs of a function's name and a parameter that is None for all of these rows, because their column is empty or missing."""
        empty = (
            pair for pair in self.argument_columns if all(row.get(pair[1]) is None for row in rows)
        )
        return list(empty) if rows else []

    def unscorable(self, row: Row) -> str | None:
        """The reason why a reward cannot score this row; None if all can. `check_rows` refuses the same rows."""
        for function in self.functions:
            try:
                if check := getattr(function, "check_row", None):
                    check(row)
            except ValueError as reason:
                return str(reason)
        return None

    async def score(
        self, request: ScoreRequest, started: Callable[[str], None] = lambda name: None
    ) -> GroupScore:
        """Score a group. Plain functions run one after the other, async ones together.

        `started` is called with the name of each function just before it runs. Errors of functions are not raised, but fail the
        rollouts.
        """
        functions = zip(self.names, self.functions, strict=True)
        calls = [call(name, function, request, started) for name, function in functions]
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers = [
            _as_function_result(n, r, request) for n, r in zip(self.names, results, strict=True)
        ]
        members = [self._member_score(answers, index) for index in range(len(request.completions))]
        metrics: dict[str, list[float]] = {}
        for answer in answers:
            for key, values in answer.logged.metrics.items():
                metrics.setdefault(key, []).extend(values)
        return GroupScore(tuple(members), {key: fmean(values) for key, values in metrics.items()})

    def _member_score(self, answers: Sequence[FunctionResult], index: int) -> MemberScore:
        parts = tuple(
            RewardPart(name, answer.values[index], weight)
            for name, answer, weight in zip(self.names, answers, self.weights, strict=True)
        )
        reasons = {
            name: reason
            for name, answer in zip(self.names, answers, strict=True)
            if (reason := answer.failures[index]) is not None
        }
        # If several functions record a note of the same name, the last value counts.
        notes: dict[str, Any] = {}
        for answer in answers:
            for key, values in answer.logged.extras.items():
                notes[key] = notes.get(key) if values[index] is None else values[index]
        if reasons:
            notes["failed_rewards"] = reasons
        fatal = [reason for part in parts if part.weight and (reason := reasons.get(part.name))]
        if fatal:
            return MemberScore("failed", "; ".join(fatal), None, parts, notes)
        contributions = [p.weight * p.value for p in parts if p.weight and p.value is not None]
        if not contributions:
            return MemberScore("failed", NO_REWARD, None, parts, notes)
        total = sum(contributions)
        if not abs(total) <= LARGEST:
            reason = (
                f"the weighted total of the rewards is {total}; expected a number up to {LARGEST:g}"
            )
            return MemberScore("failed", reason, None, parts, notes)
        return MemberScore("scored", None, total, parts, notes)


def _as_function_result(
    name: str, result: FunctionResult | BaseException, request: ScoreRequest
) -> FunctionResult:
    """The result of a function. An async function that cancels itself returns an exception here that `call` does not catch."""
    if isinstance(result, FunctionResult):
        return result
    reason = f"reward `{name}` raised {type(result).__name__}"
    count = len(request.completions)
    return FunctionResult((None,) * count, (reason,) * count)


def _is_pair(item: object) -> bool:
    return isinstance(item, list | tuple) and len(cast("Sequence[Any]", item)) == 2


def checked_weights(
    weights: tuple[Any, ...], names: tuple[str, ...], where: str
) -> tuple[float, ...]:
    """The weights as floats. Raises TaskError unless they are finite numbers, one for each name, and not all 0."""
    if len(weights) != len(names):
        raise TaskError(
            f"{where}: {len(weights)} weights for {len(names)} reward functions. "
            f"Give one for each of {', '.join(names)}."
        )
    for name, weight in zip(names, weights, strict=True):
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight):
            raise TaskError(
                f"{where}: the weight of `{name}` is {weight!r}; expected a finite number."
            )
    if not any(weights):
        raise TaskError(f"{where}: every weight is 0, so nothing would be rewarded.")
    return tuple(float(weight) for weight in weights)


def _module_of(function: RewardCallable) -> str:
    """Module that defines a function, or the class of a callable object; empty if there is none."""
    inner: Any = inspect.unwrap(function)
    return (inner if inspect.isroutine(inner) else type(inner)).__module__ or ""
