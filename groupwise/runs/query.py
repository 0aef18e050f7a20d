"""Turns a filter of rollouts into SQL, and chooses which index SQLite uses.

A page shows a few of perhaps a million rollouts. If few rollouts match one of the conditions, SQLite finds these by that condition's
index and checks the other conditions on them alone; the most selective condition leads. Otherwise SQLite scans rollouts in the
order of the page until it is full. SQLite cannot know which case applies, so the SQL decides: a plus before a column
(`+column`) keeps SQLite from using that column's index.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from groupwise.runs.database import Database, Row
from groupwise.runs.encoding import label
from groupwise.runs.records import RolloutFilter
from groupwise.runs.tables import task_label
from groupwise.runs.text_index import terms_of, trigram_query

USUAL_MEMBERS = 8
"""Typical number of members in a group, for estimates."""
PROMPT = "coalesce(prompt_seen, prompt_text)"
"""SQL of the prompt, of a row of `groups`, that is shown and searched; the view `prompts`, from which the index is built, has the same."""
Lead = Literal["draw", "step", "example", "text", "part", "length", "truncated", "reward", "outcome", "task"]  # fmt: skip
_INDEXED: tuple[Lead, ...] = ("draw", "step", "example", "reward", "outcome")
_INDEXED_LATER: tuple[Lead, ...] = ("length", "truncated")
_ORDERED = ("draw", "step", "example", "task")
"""Conditions whose matches are read in the order of a page, or are few."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Facts that the SQL depends on in addition to the filter."""

    lead: Lead | None = None
    """The condition that few rollouts meet; None: rollouts are scanned in the order of the page."""
    indexed: bool = True
    """A full-text index exists."""
    by_column: bool = True
    """Table `rollouts` has a column `task`. Records of an earlier format do not; there the groups of a task are looked up first."""
    several: bool = True
    """A rollout may have the requested part several times, once for each turn."""


def plan_of(db: Database, filters: RolloutFilter, few: int) -> Plan:
    """Choose the leading condition: the one that fewest rollouts meet, if they are fewer than `few`."""
    has_turns = filters.part is not None
    if has_turns and db.lengths_indexed:  # without that index this query would be slow
        query = "SELECT EXISTS (SELECT 1 FROM parts WHERE name = ? AND turn IS NOT NULL)"
        has_turns = bool(db.one(query, (label(filters.part or ""),))[0])
    plan = Plan(None, db.indexed, db.tasks_indexed, has_turns)
    counts: Counter[Lead] = Counter()
    for lead, query, values, rollouts_per_match in _count_matches(
        filters, plan, db.lengths_indexed
    ):
        # Matches that make up `few` rollouts, rounded up.
        limit = -(-few // rollouts_per_match)
        counts[lead] += (
            rollouts_per_match * db.one(f"SELECT count(*) FROM ({query} LIMIT {limit})", values)[0]
        )
    lead = min(counts, key=counts.__getitem__, default=None)
    return replace(plan, lead=lead if lead is not None and counts[lead] < few else None)


def rollout_query(filters: RolloutFilter, plan: Plan) -> tuple[str, Row]:
    """The SQL for the ids of one page of rollouts, and its values. Rollouts that the offset skips are read from the index only."""
    conditions = list(_conditions(filters, plan))
    clauses = [
        condition.clause(plain=not _has_index(condition.name, filters, plan))
        for condition in conditions
    ]
    where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
    query = (
        f"SELECT {_id_column(filters)} FROM {_from_clause(filters, plan)}{where}"
        f" ORDER BY {_order_clause(filters, plan)} LIMIT ? OFFSET ?"
    )
    return query, (
        *(value for condition in conditions for value in condition.values),
        filters.limit,
        filters.offset,
    )


# --- conditions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Condition:
    name: Lead | Literal["order"]
    template: str
    """SQL; `§` marks where `clause` puts the plus or nothing."""
    values: Row

    def clause(self, *, plain: bool) -> str:
        return self.template.replace("§", "+" if plain else "")


def _conditions(filters: RolloutFilter, plan: Plan) -> Iterator[_Condition]:
    outcomes = (filters.outcome,) if isinstance(filters.outcome, str) else filters.outcome
    column, value_lead = _measured_column(filters)
    candidates: tuple[tuple[Lead, str, Any], ...] = (
        ("part", "§part.name = ?", filters.part and label(filters.part)),
        ("step", "§rollouts.step = ?", None if filters.step is None else filters.step - 1),
        ("draw", "§rollouts.draw = ?", None if filters.group is None else filters.group - 1),
        ("example", "§rollouts.example = ?", filters.example),
        ("task", _task_condition(filters, plan), filters.task and task_label(filters.task)),
        (
            "outcome",
            "§outcome IN (SELECT value FROM json_each(?))",
            outcomes and json.dumps(outcomes),
        ),
        ("length", "§completion_tokens >= ?", filters.min_tokens),
        ("length", "§completion_tokens <= ?", filters.max_tokens),
        ("truncated", "§truncated = ?", filters.truncated),
    )
    yield from (
        _Condition(name, text, (value,)) for name, text, value in candidates if value is not None
    )
    if (filters.min_reward, filters.max_reward) != (None, None):
        yield _Condition(value_lead, f"§{column} BETWEEN ? AND ?", _reward_range(filters))
    if filters.committed:
        yield _Condition("order", "+rollouts.step IS NOT NULL", ())
    if filters.order in ("best", "worst"):
        yield _Condition("order", f"§{column} <= 9e999", ())
    if filters.part is not None and plan.several:
        # A multi-turn rollout may have a part several times: keep only the one that comes first in the order of the page.
        value_order = {"best": "another.value > part.value", "worst": "another.value < part.value"}
        order_condition = "another.position < part.position"
        if filters.order in value_order:
            order_condition = f"({value_order[filters.order]} OR (another.value = part.value AND {order_condition}))"
        range_condition, values = "", ()
        if (filters.min_reward, filters.max_reward) != (None, None) or filters.order in value_order:
            range_condition, values = " AND +another.value BETWEEN ? AND ?", _reward_range(filters)
        # One rollout has few parts: the pluses keep SQLite from scanning all parts of that name.
        clause = (
            "NOT EXISTS (SELECT 1 FROM parts AS another WHERE another.rollout = part.rollout AND +another.name = part.name"
            f"{range_condition} AND {order_condition})"
        )
        yield _Condition("order", clause, values)
    if filters.text is not None:
        having = "§{id} IN (SELECT rowid FROM {index} WHERE {index} MATCH ?)"
        yield _Condition("text", *_text_condition(filters, plan, having))


def _reward_range(filters: RolloutFilter) -> tuple[float, float]:
    """The range of rewards, open ends as infinities. A NaN is stored as text, which sorts above every number, so it never matches."""
    least, most = filters.min_reward, filters.max_reward
    return (-math.inf if least is None else least), (math.inf if most is None else most)


def _measured_column(filters: RolloutFilter) -> tuple[str, Lead]:
    """The column that the range and the order apply to, and the condition that it belongs to."""
    return ("reward", "reward") if filters.part is None else ("part.value", "part")


def _task_condition(filters: RolloutFilter, plan: Plan) -> str:
    if _scans_by_task(filters, plan):
        return "§groups.task = ?"
    of_groups = "§rollouts.draw IN (SELECT draw FROM groups WHERE task = ?)"
    return "§rollouts.task = ?" if plan.by_column else of_groups


def _has_index(name: str, filters: RolloutFilter, plan: Plan) -> bool:
    """True if SQLite may use the index of this condition's column."""
    if name == plan.lead:
        return True
    if plan.lead is not None and plan.lead not in _ORDERED:
        return False
    if name == "task":  # its index has the order of a page
        has_other_conditions = (
            plan.lead is not None or filters.step is not None or filters.example is not None
        )
        return not has_other_conditions and (plan.by_column or _scans_by_task(filters, plan))
    if name in ("reward", "part", "order"):
        return filters.order in ("best", "worst") and (
            filters.part is None or _scans_by_value(filters, plan)
        )
    return plan.lead is None and name in ("draw", "step", "example")


# --- where SQLite starts --------------------------------------------------------------------------


def _from_clause(filters: RolloutFilter, plan: Plan) -> str:
    """The tables in the order in which SQLite must read them (CROSS JOIN fixes it): the most selective first."""
    parts = (
        "" if filters.part is None else " CROSS JOIN parts AS part ON part.rollout = rollouts.id"
    )
    if _scans_by_task(filters, plan):
        return f"groups CROSS JOIN rollouts ON rollouts.draw = groups.draw{parts}"
    needs_groups = terms_of(filters.text or "")
    groups = " CROSS JOIN groups ON groups.draw = rollouts.draw" if needs_groups else ""
    if _scans_by_value(filters, plan):
        other_filters = replace(
            filters, part=None, min_reward=None, max_reward=None, limit=0, offset=0
        )
        if other_filters in (
            RolloutFilter(order="best", limit=0),
            RolloutFilter(order="worst", limit=0),
        ):
            return "parts AS part"  # all conditions are about the part itself
        return f"parts AS part CROSS JOIN rollouts ON rollouts.id = part.rollout{groups}"
    return f"rollouts{parts}{groups}"


def _scans_by_task(filters: RolloutFilter, plan: Plan) -> bool:
    """True if the query scans the draws of a task, in their order."""
    narrower = (filters.step, filters.group, filters.example, filters.text)
    task_alone = filters.task is not None and filters.order == "draw" and narrower == (None,) * 4
    return task_alone and plan.lead in (None, "task")


def _scans_by_value(filters: RolloutFilter, plan: Plan) -> bool:
    """True if the query starts from the values of a reward part."""
    if filters.part is None:
        return False
    return plan.lead == "part" or (plan.lead is None and filters.order in ("best", "worst"))


def _id_column(filters: RolloutFilter) -> str:
    return "rollouts.id" if filters.part is None else "part.rollout"


def _order_clause(filters: RolloutFilter, plan: Plan) -> str:
    """Ties are ordered by id in the index's own direction: a page is then read from the index without sorting. Few matches are sorted."""
    column, value_lead = _measured_column(filters)
    by_lead = filters.order in ("best", "worst") and plan.lead == value_lead
    plus = "" if plan.lead is None or plan.lead in _ORDERED or by_lead else "+"
    id = _id_column(filters)
    draw = "groups.draw" if _scans_by_task(filters, plan) else "rollouts.draw"
    return {
        "draw": f"{plus}{draw}, member, attempt",
        "newest": f"{plus}rollouts.id DESC",
        "best": f"{plus}{column} DESC, {id} DESC",
        "worst": f"{plus}{column}, {id}",
    }[filters.order]


# --- text -----------------------------------------------------------------------------------------


def text_query(filters: RolloutFilter, plan: Plan, ids: Sequence[int]) -> tuple[str, Row]:
    """SQL for those of these rollouts that have the text, and its values. Reads the index only between the lowest and highest id."""
    nearby = "json_each(?1) AS near CROSS JOIN rollouts ON rollouts.id = near.value"
    between = f"BETWEEN (SELECT min({{id}}) FROM {nearby}) AND (SELECT max({{id}}) FROM {nearby})"
    having = f"{{id}} IN (SELECT rowid FROM {{index}} WHERE {{index}} MATCH ? AND rowid {between})"
    clause, values = _text_condition(filters, plan, having)
    groups = "CROSS JOIN groups ON groups.draw = rollouts.draw"
    return f"SELECT rollouts.id FROM {nearby} {groups} WHERE {clause}", (json.dumps(ids), *values)


def _text_condition(filters: RolloutFilter, plan: Plan, having: str) -> tuple[str, Row]:
    """SQL: the completion, or the prompt, contains all of the terms. Without terms, every rollout matches."""
    terms = terms_of(filters.text or "")
    match_values = [query] if (query := _index_query(terms, plan)) else []
    text_clauses: list[str] = []
    for index, id, text in (
        ("completion_index", "rollouts.id", "completion"),
        ("prompt_index", "rollouts.draw", PROMPT),
    ):
        # The index comes first: a text is read only if it may contain the terms.
        clauses = [having.format(index=index, id=id)] * len(match_values)
        for term in terms:
            # Compare in lower case if the term has letters. SQLite's own lower() handles ASCII only.
            lowered_sql = f"lowered({text})" if term.upper() != term else text
            clauses.append(f"instr({f'lower({text})' if term.isascii() else lowered_sql}, ?)")
        text_clauses.append(" AND ".join(clauses) or "TRUE")
    return f"(({text_clauses[0]}) OR ({text_clauses[1]}))", (*2 * [*match_values, *terms],)


def _index_query(terms: Sequence[str], plan: Plan) -> str:
    """The MATCH expression for the full-text index; empty if the index cannot narrow the search."""
    return trigram_query(terms) if plan.indexed else ""


# --- how many meet a condition --------------------------------------------------------------------


def _count_matches(
    filters: RolloutFilter, plan: Plan, lengths: bool
) -> Iterator[tuple[Lead, str, Row, int]]:
    """Yields for each condition that may lead: its name, the SQL of its matches, its values, and the number of rollouts per match."""
    conditions = list(_conditions(filters, plan))
    for lead in (*_INDEXED, *(_INDEXED_LATER if lengths else ())):
        yield from _matches_in("rollouts", lead, conditions)
    yield from _matches_in("parts AS part", "part", conditions)
    if filters.task is not None:
        table, rollouts_per_match = ("rollouts", 1) if plan.by_column else ("groups", USUAL_MEMBERS)
        yield (
            "task",
            f"SELECT 1 FROM {table} WHERE task = ?",
            (task_label(filters.task),),
            rollouts_per_match,
        )
    if match_expression := _index_query(terms_of(filters.text or ""), plan):
        for index, rollouts_per_match in (("completion_index", 1), ("prompt_index", USUAL_MEMBERS)):
            yield (
                "text",
                f"SELECT 1 FROM {index} WHERE {index} MATCH ?",
                (match_expression,),
                rollouts_per_match,
            )


def _matches_in(
    table: str, lead: Lead, conditions: Iterable[_Condition]
) -> Iterator[tuple[Lead, str, Row, int]]:
    matching = [condition for condition in conditions if condition.name == lead]
    if matching:
        clauses = " AND ".join(condition.clause(plain=False) for condition in matching)
        values = tuple(value for condition in matching for value in condition.values)
        yield lead, f"SELECT 1 FROM {table} WHERE {clauses}", values, 1
