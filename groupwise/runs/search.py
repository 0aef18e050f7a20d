"""Searches of the record: rollouts for lists, completed prompts, and the reasons of failures.

A long run has a hundred thousand groups, so the caller always gives the order and the maximum number of rollouts or groups to read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.runs.database import Database, Row
from groupwise.runs.encoding import plain_number, plain_text
from groupwise.runs.query import PROMPT, plan_of, rollout_query, text_query
from groupwise.runs.records import (
    CompletedPrompt,
    FailureKind,
    GroupScore,
    RolloutDetail,
    RolloutFilter,
    RolloutView,
)
from groupwise.runs.tables import read_parts, task_label

INSTRUCTIONS = 400_000
"""Limit for a quick attempt, in instructions of SQLite's virtual machine: some hundredths of a second, or about ten thousand rollouts."""
DEEP = 20_000
"""The quick attempts (`Database.query_within`) are skipped from this offset on: they would take too long."""
COMMON = 20_000
"""A condition that this many rollouts meet is common: scanning in order finds enough matches quickly, so its matches are not collected."""
FEW = 250_000
"""If fewer rollouts than this meet a condition, collecting them is cheaper than scanning all rollouts."""
NEAR = 3
"""Pages of rollouts that are searched for a text before all rollouts with the text are collected."""
AT_ONCE = 500
"""Rollouts of a long list whose texts are in memory at once."""
_VIEW = (
    "rollouts.id, rollouts.step + 1, rollouts.draw + 1, member + 1, attempt, rollouts.example, outcome, reason, reward, advantage,"
    " truncated, completion_tokens, ended_by, rollouts.task"
)
MAX_REASON_CHARACTERS = 300
"""The number of characters of a reason that are compared."""
_PARTICULAR = re.compile(
    r"""(?<!\w)'[^'\n]*'(?!\w)|"[^"\n]*"|`[^`\n]*`|“[^”\n]*”|\b0x[0-9a-fA-F]+|\d+(?:[.,:_]\d+)*"""
)
_UNSCORED = ("failed", "timed_out")


@dataclass(frozen=True, slots=True)
class PromptFilter:
    """Selects groups of committed steps. Groups that replay the completions of an earlier draw are never among them."""

    until: int | None = None
    """The last step to include, counted from 1."""
    example: int | None = None
    task: str | None = None
    oldest: bool = False
    """True: the oldest first; else the newest."""
    limit: int = 1000


def find_rollouts(
    db: Database, filters: RolloutFilter, max_chars: int | None = None
) -> list[RolloutView]:
    """One page of the rollouts that match the filter, with at most `max_chars` characters of each text; see `_truncated_sql`."""
    outcomes = (filters.outcome,) if isinstance(filters.outcome, str) else filters.outcome
    has_range = (filters.min_reward, filters.max_reward) != (None, None)
    needs_reward = filters.part is None and (has_range or filters.order in ("best", "worst"))
    if needs_reward and outcomes is not None and "scored" not in outcomes:
        return []  # rollouts without a score have no reward
    # Skipping that many rollouts takes too long for a quick attempt.
    is_deep = filters.offset >= DEEP
    plan = plan_of(db, filters, FEW if is_deep else COMMON)
    by_groups = filters.task is not None and not plan.by_column  # groups are looked up first
    skip_quick_scan = filters.text is None and (plan.lead is not None or by_groups)
    page: list[int] | None = None
    if not (is_deep or skip_quick_scan or plan.lead == "text"):
        is_frequent = False
        if filters.text is not None:
            # The first rollouts that meet all other conditions are searched for the text. This spares
            # the index from collecting a million texts for a page of thirty, which takes a tenth of a
            # second and more.
            first_filters = replace(filters, text=None, offset=0, limit=NEAR * filters.limit)
            rows = db.query_within(*rollout_query(first_filters, plan), INSTRUCTIONS)
            if rows is None:
                page, is_frequent = None, False
            else:
                ids = [id for (id,) in rows]
                matching_ids = set(_query_ids(db, text_query(filters, plan, ids)))
                matches = [id for id in ids if id in matching_ids]
                end = filters.offset + filters.limit
                is_complete = len(matches) >= end or len(ids) < first_filters.limit
                page, is_frequent = (
                    (matches[filters.offset : end] if is_complete else None),
                    bool(matches),
                )
        else:
            # Scan rollouts in order for a moment. This fills the page if each condition is common, unless few rollouts meet all of them.
            rows = db.query_within(*rollout_query(filters, plan), INSTRUCTIONS)
            page = None if rows is None else [id for (id,) in rows]
        if page is None and plan.lead is None and not is_frequent:
            plan = plan_of(db, filters, FEW)
    return _read_views(
        db, _query_ids(db, rollout_query(filters, plan)) if page is None else page, max_chars
    )


def _query_ids(db: Database, query: tuple[str, Row]) -> list[int]:
    return [id for (id,) in db.all(*query)]


def every_rollout(
    db: Database, filters: RolloutFilter
) -> Generator[tuple[RolloutView, RolloutDetail]]:
    """All rollouts that match the filter, one by one, with their details; the filter's limit and offset are ignored."""
    filters = replace(filters, limit=-1, offset=0)
    query, values = rollout_query(filters, plan_of(db, filters, COMMON))
    for rows in db.stream(query, values, AT_ONCE):
        ids = [id for (id,) in rows]
        detail_rows = db.all(
            "SELECT rollouts.id, origin, again + 1, columns, messages, notes FROM json_each(?) AS chosen"
            " CROSS JOIN rollouts ON rollouts.id = chosen.value CROSS JOIN groups ON groups.draw = rollouts.draw",
            (json.dumps(ids),),
        )
        details = {id: RolloutDetail(*detail) for id, *detail in detail_rows}
        yield from ((view, details[view.id]) for view in _read_views(db, ids))


def _read_views(
    db: Database, ids: Sequence[int], max_chars: int | None = None
) -> list[RolloutView]:
    """These rollouts, in the order of `ids`."""
    texts = ", ".join(_truncated_sql(column, max_chars) for column in (PROMPT, "completion"))
    rows = db.all(
        f"SELECT {_VIEW}, {texts} FROM json_each(?) AS chosen CROSS JOIN rollouts ON rollouts.id = chosen.value"
        " CROSS JOIN groups ON groups.draw = rollouts.draw",
        (json.dumps(ids),),
    )
    parts = read_parts(db, ids)
    views: dict[int, RolloutView] = {}
    for (
        id,
        step,
        group,
        rollout,
        attempt,
        example,
        outcome,
        reason,
        reward,
        advantage,
        *other_columns,
    ) in rows:
        truncated, completion_tokens, ended_by, task, *texts = other_columns
        views[id] = RolloutView(
            id,
            step,
            group,
            rollout,
            attempt,
            example,
            outcome,
            plain_text(reason),
            plain_number(reward),
            plain_number(advantage),
            parts.get(id, ()),
            bool(truncated),
            completion_tokens,
            _shorten(texts[0], texts[1], texts[2], max_chars),
            _shorten(texts[3], texts[4], texts[5], max_chars),
            ended_by,
            task,
        )
    return [views[id] for id in ids]


def _truncated_sql(text: str, max_chars: int | None) -> str:
    """SQL for the beginning of a text, its end, and its length; of a text of at most `max_chars` characters all of it and an empty end."""
    if max_chars is None:
        return f"{text}, '', 0"
    head = max_chars // 2
    return (
        f"CASE WHEN length({text}) > {max_chars} THEN substr({text}, 1, {head}) ELSE {text} END,"
        f" CASE WHEN length({text}) > {max_chars} THEN substr({text}, -{max_chars - head}) ELSE '' END, length({text})"
    )


def _shorten(head: str | bytes, tail: str | bytes, length: int, max_chars: int | None) -> str:
    """Join a text whose middle was not read. A text with lone surrogates is stored as bytes, which may be cut within a character."""
    if max_chars is None or length <= max_chars:
        return plain_text(head) or ""
    start, end = (
        part.decode("utf-8", "replace") if isinstance(part, bytes) else part
        for part in (head, tail)
    )
    return f"{start}\n… {length - max_chars:,} more characters …\n{end}"


def failure_kinds(db: Database, limit: int, newest: int) -> list[FailureKind]:
    """The most frequent reasons among the newest rollouts without a score, at most `limit`.

    Reasons are of one kind if they differ only in numbers and quoted parts.
    """
    rows: list[tuple[int, str]] = []
    for outcome in _UNSCORED:
        reasons = db.all(
            f"SELECT id, CAST(substr(coalesce(reason, 'no reason given'), 1, {MAX_REASON_CHARACTERS}) AS BLOB) FROM rollouts"
            " WHERE outcome = ? ORDER BY id DESC LIMIT ?",
            (outcome, newest),
        )
        rows += [(id, reason.decode("utf-8", "replace")) for id, reason in reasons]
    reasons_by_kind: dict[str, list[tuple[int, str]]] = {}
    for id, reason in sorted(rows, reverse=True)[:newest]:
        # Replace the parts that are specific to one rollout.
        reasons_by_kind.setdefault(_PARTICULAR.sub("…", reason), []).append((id, reason))
    kinds = [
        FailureKind(kind, len(examples), examples[0][1], examples[0][0])
        for kind, examples in reasons_by_kind.items()
    ]
    return sorted(kinds, key=lambda kind: (-kind.count, kind.reason))[:limit]


def find_completed_prompts(db: Database, filters: PromptFilter) -> list[CompletedPrompt]:
    """The groups that match the filter. Those of a task are sorted by draw, which is nearly the order of steps and has an index."""
    conditions: list[tuple[str, Any]] = [
        ("step < ?", filters.until),
        ("example = ?", filters.example),
        ("task = ?" if filters.example is None else "+task = ?", filters.task and task_label(filters.task)),
    ]  # fmt: skip
    clauses = [clause for clause, value in conditions if value is not None]
    values = [value for _, value in conditions if value is not None]
    by_task = filters.task is not None and filters.example is None
    columns = ("draw",) if by_task else ("step", "position")
    order = ", ".join(f"{column}{'' if filters.oldest else ' DESC'}" for column in columns)
    rows = db.all(
        f"SELECT draw, step + 1, example, prompt_text FROM groups WHERE {'+' if by_task else ''}step >= 0 AND again IS NULL"
        f"{''.join(f' AND {clause}' for clause in clauses)} ORDER BY {order} LIMIT ?",
        (*values, filters.limit),
    )
    return [
        CompletedPrompt(draw, step, example, plain_text(prompt) or "")
        for draw, step, example, prompt in rows
    ]


def read_scores(db: Database, draws: Iterable[int]) -> dict[int, GroupScore]:
    """Rewards of these groups' members, by draw; NaN rewards are ignored."""
    rows = db.all(
        "SELECT draw, avg(reward), max(reward) FROM json_each(?) AS chosen CROSS JOIN rollouts ON rollouts.draw = chosen.value"
        " AND +outcome = 'scored' AND +reward <= 9e999 GROUP BY chosen.value",
        (json.dumps(list(draws)),),
    )
    return {draw: GroupScore(plain_number(mean), plain_number(best)) for draw, mean, best in rows}
