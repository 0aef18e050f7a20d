"""Finds the prompts that a run has answered, and what the answers earned: the start of every comparison of answers.

A long run has asked a hundred thousand times. So the caller says how many groups are looked at, and which come first; rewards are asked
for those alone that it chose.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from groupwise.runs.database import Database
from groupwise.runs.encoding import plain_number, plain_text
from groupwise.runs.records import GroupAsked, GroupScore
from groupwise.runs.tables import task_label


@dataclass(frozen=True, slots=True)
class AskedFilter:
    """Selects groups of committed steps. Groups whose completions were sampled for an earlier draw are never among them."""

    until: int | None = None
    """The last step."""
    example: int | None = None
    task: str | None = None
    oldest: bool = False
    """First those that were asked first, instead of last."""
    limit: int = 1000


def find_asked(db: Database, wanted: AskedFilter) -> list[GroupAsked]:
    """The groups that the filter asks for; those of a task by their draws, which are in the order of steps but for some near each other."""
    conditions: list[tuple[str, Any]] = [
        ("step <= ?", wanted.until),
        ("example = ?", wanted.example),
        ("task = ?" if wanted.example is None else "+task = ?", wanted.task and task_label(wanted.task)),
    ]  # fmt: skip
    clauses = [clause for clause, value in conditions if value is not None]
    values = [value for _, value in conditions if value is not None]
    by_task = wanted.task is not None and wanted.example is None
    columns = ("draw",) if by_task else ("step", "position")
    order = ", ".join(f"{column}{'' if wanted.oldest else ' DESC'}" for column in columns)
    rows = db.all(
        f"SELECT draw, step, example, prompt_text FROM groups WHERE {'+' if by_task else ''}step >= 0 AND again IS NULL"
        f"{''.join(f' AND {clause}' for clause in clauses)} ORDER BY {order} LIMIT ?",
        (*values, wanted.limit),
    )
    return [
        GroupAsked(draw, step, example, plain_text(prompt) or "")
        for draw, step, example, prompt in rows
    ]


def read_scores(db: Database, draws: Iterable[int]) -> dict[int, GroupScore]:
    """Rewards of these groups' members, by draw; a NaN is no reward."""
    rows = db.all(
        "SELECT draw, avg(reward), max(reward) FROM json_each(?) AS chosen CROSS JOIN rollouts ON rollouts.draw = chosen.value"
        " AND +outcome = 'scored' AND +reward <= 9e999 GROUP BY chosen.value",
        (json.dumps(list(draws)),),
    )
    return {draw: GroupScore(plain_number(mean), plain_number(best)) for draw, mean, best in rows}
