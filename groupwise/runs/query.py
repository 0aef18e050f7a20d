"""Turns a filter of rollouts into SQL: where SQLite begins, and what it then asks of each rollout.

A page shows some of maybe a million. Where a condition is met by few, these are found by its index, and the rest is asked of them alone:
the narrowest condition leads. Where none is, rollouts are gone through in the order of the page until it is full. SQLite itself cannot
know which of both is the case, so the SQL says it: a plus before a column keeps SQLite from that column's index.
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
"""Usual number of members of a group."""
PROMPT = "coalesce(prompt_seen, prompt_text)"
"""The prompt as it is shown and searched, of a row of `groups`; the view `prompts`, which the index is made of, says the same."""
Lead = Literal["draw", "step", "example", "text", "part", "length", "truncated", "reward", "outcome", "task"]  # fmt: skip
_INDEXED: tuple[Lead, ...] = ("draw", "step", "example", "reward", "outcome")
_INDEXED_LATER: tuple[Lead, ...] = ("length", "truncated")
_ORDERED = ("draw", "step", "example", "task")
"""Conditions whose rollouts come in the order of a page, or are few."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Facts that the SQL depends on beside the filter."""

    lead: Lead | None = None
    """The condition that few rollouts meet; None: rollouts are gone through in order."""
    indexed: bool = True
    """There is a full-text index."""
    by_column: bool = True
    """Rollouts have a column for their task; of an earlier format, the groups of a task are found first."""
    several: bool = True
    """A rollout may have the part that is asked for several times."""


def plan_of(db: Database, filters: RolloutFilter, few: int) -> Plan:
    """Choose the condition to begin with: the one that fewest rollouts meet, if they are less than `few`."""
    several = filters.part is not None
    if several and db.lengths_indexed:  # else it is not quickly known
        query = "SELECT EXISTS (SELECT 1 FROM parts WHERE name = ? AND turn IS NOT NULL)"
        several = bool(db.one(query, (label(filters.part or ""),))[0])
    plan = Plan(None, db.indexed, db.tasks_indexed, several)
    counts: Counter[Lead] = Counter()
    for lead, query, values, each in _count_matches(filters, plan, db.lengths_indexed):
        most = -(-few // each)
        counts[lead] += each * db.one(f"SELECT count(*) FROM ({query} LIMIT {most})", values)[0]
    lead = min(counts, key=counts.__getitem__, default=None)
    return replace(plan, lead=lead if lead is not None and counts[lead] < few else None)


def rollout_query(filters: RolloutFilter, plan: Plan) -> tuple[str, Row]:
    """The SQL of the ids of one page of rollouts, and its values; of what is passed over no more is read than the index has."""
    conditions = list(_conditions(filters, plan))
    clauses = [each.clause(plain=not _has_index(each.name, filters, plan)) for each in conditions]
    where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
    query = f"SELECT {_id(filters)} FROM {_source(filters, plan)}{where} ORDER BY {_order(filters, plan)} LIMIT ? OFFSET ?"
    return query, (
        *(value for each in conditions for value in each.values),
        filters.limit,
        filters.offset,
    )


# --- conditions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Condition:
    name: Lead | Literal["order"]
    template: str
    """SQL with a place for the plus."""
    values: Row

    def clause(self, *, plain: bool) -> str:
        return self.template.replace("§", "+" if plain else "")


def _conditions(filters: RolloutFilter, plan: Plan) -> Iterator[_Condition]:
    outcomes = (filters.outcome,) if isinstance(filters.outcome, str) else filters.outcome
    measured, of_value = _measured_column(filters)
    candidates: tuple[tuple[Lead, str, Any], ...] = (
        ("part", "§part.name = ?", filters.part and label(filters.part)),
        ("step", "§rollouts.step = ?", filters.step),
        ("draw", "§rollouts.draw = ?", filters.draw),
        ("example", "§rollouts.example = ?", filters.example),
        ("task", _task(filters, plan), filters.task and task_label(filters.task)),
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
        yield _Condition(of_value, f"§{measured} BETWEEN ? AND ?", _range(filters))
    if filters.order in ("best", "worst"):
        yield _Condition("order", f"§{measured} <= 9e999", ())
    if filters.part is not None and plan.several:
        # A rollout of several turns may have a part several times: it is found by that which comes first in the order of the page.
        nearer = {"best": "another.value > part.value", "worst": "another.value < part.value"}
        before = "another.position < part.position"
        if filters.order in nearer:
            before = f"({nearer[filters.order]} OR (another.value = part.value AND {before}))"
        within, values = "", ()
        if (filters.min_reward, filters.max_reward) != (None, None) or filters.order in nearer:
            within, values = " AND +another.value BETWEEN ? AND ?", _range(filters)
        # Those of the rollout are few: the pluses keep SQLite from going through all of the name.
        clause = (
            "NOT EXISTS (SELECT 1 FROM parts AS another WHERE another.rollout = part.rollout AND +another.name = part.name"
            f"{within} AND {before})"
        )
        yield _Condition("order", clause, values)
    if filters.text is not None:
        having = "§{id} IN (SELECT rowid FROM {index} WHERE {index} MATCH ?)"
        yield _Condition("text", *_text(filters, plan, having))


def _range(filters: RolloutFilter) -> tuple[float, float]:
    """A NaN is stored as text, which sorts above every number."""
    least, most = filters.min_reward, filters.max_reward
    return (-math.inf if least is None else least), (math.inf if most is None else most)


def _measured_column(wanted: RolloutFilter) -> tuple[str, Lead]:
    """The column that the range and the order are about, and the condition that it belongs to."""
    return ("reward", "reward") if wanted.part is None else ("part.value", "part")


def _task(filters: RolloutFilter, plan: Plan) -> str:
    if _by_task(filters, plan):
        return "§groups.task = ?"
    of_groups = "§rollouts.draw IN (SELECT draw FROM groups WHERE task = ?)"
    return "§rollouts.task = ?" if plan.by_column else of_groups


def _has_index(name: str, filters: RolloutFilter, plan: Plan) -> bool:
    """True if SQLite may look a condition up by its column's index."""
    if name == plan.lead:
        return True
    if plan.lead is not None and plan.lead not in _ORDERED:
        return False
    if name == "task":  # whose index has the order of a page
        others = plan.lead is not None or filters.step is not None or filters.example is not None
        return not others and (plan.by_column or _by_task(filters, plan))
    if name in ("reward", "part", "order"):
        return filters.order in ("best", "worst") and (
            filters.part is None or _by_value(filters, plan)
        )
    return plan.lead is None and name in ("draw", "step", "example")


# --- where it begins ------------------------------------------------------------------------------


def _source(filters: RolloutFilter, plan: Plan) -> str:
    """The tables in the order in which SQLite is to look into them (CROSS JOIN keeps it): the narrowest first."""
    parts = (
        "" if filters.part is None else " CROSS JOIN parts AS part ON part.rollout = rollouts.id"
    )
    if _by_task(filters, plan):
        return f"groups CROSS JOIN rollouts ON rollouts.draw = groups.draw{parts}"
    reads = terms_of(filters.text or "")
    groups = " CROSS JOIN groups ON groups.draw = rollouts.draw" if reads else ""
    if _by_value(filters, plan):
        rest = replace(filters, part=None, min_reward=None, max_reward=None, limit=0, offset=0)
        if rest in (RolloutFilter(order="best", limit=0), RolloutFilter(order="worst", limit=0)):
            return "parts AS part"  # all conditions are about the part itself
        return f"parts AS part CROSS JOIN rollouts ON rollouts.id = part.rollout{groups}"
    return f"rollouts{parts}{groups}"


def _by_task(filters: RolloutFilter, plan: Plan) -> bool:
    """True if the draws of a task are gone through, in their order."""
    narrower = (filters.step, filters.draw, filters.example, filters.text)
    task_alone = filters.task is not None and filters.order == "draw" and narrower == (None,) * 4
    return task_alone and plan.lead in (None, "task")


def _by_value(filters: RolloutFilter, plan: Plan) -> bool:
    """True if the values of a part say where to begin."""
    if filters.part is None:
        return False
    return plan.lead == "part" or (plan.lead is None and filters.order in ("best", "worst"))


def _id(filters: RolloutFilter) -> str:
    return "rollouts.id" if filters.part is None else "part.rollout"


def _order(filters: RolloutFilter, plan: Plan) -> str:
    """Ties go by id in the index's own direction, so that a page is read from it and nothing is sorted; of few all are."""
    measured, of_value = _measured_column(filters)
    by_lead = filters.order in ("best", "worst") and plan.lead == of_value
    plus = "" if plan.lead is None or plan.lead in _ORDERED or by_lead else "+"
    id = _id(filters)
    draw = "groups.draw" if _by_task(filters, plan) else "rollouts.draw"
    return {
        "draw": f"{plus}{draw}, member, attempt",
        "newest": f"{plus}rollouts.id DESC",
        "best": f"{plus}{measured} DESC, {id} DESC",
        "worst": f"{plus}{measured}, {id}",
    }[filters.order]


# --- text -----------------------------------------------------------------------------------------


def text_query(filters: RolloutFilter, plan: Plan, ids: Sequence[int]) -> tuple[str, Row]:
    """The SQL of which of these rollouts have the text, and its values; the index is looked through from the first of them to the last."""
    near = "json_each(?1) AS near CROSS JOIN rollouts ON rollouts.id = near.value"
    between = f"BETWEEN (SELECT min({{id}}) FROM {near}) AND (SELECT max({{id}}) FROM {near})"
    having = f"{{id}} IN (SELECT rowid FROM {{index}} WHERE {{index}} MATCH ? AND rowid {between})"
    clause, values = _text(filters, plan, having)
    groups = "CROSS JOIN groups ON groups.draw = rollouts.draw"
    return f"SELECT rollouts.id FROM {near} {groups} WHERE {clause}", (json.dumps(ids), *values)


def _text(filters: RolloutFilter, plan: Plan, having: str) -> tuple[str, Row]:
    """The completion, or the prompt, has all of these words; without any, every rollout does."""
    terms = terms_of(filters.text or "")
    matched = [query] if (query := _index_query(terms, plan)) else []
    either: list[str] = []
    for index, id, text in (
        ("completion_index", "rollouts.id", "completion"),
        ("prompt_index", "rollouts.draw", PROMPT),
    ):
        # The index comes first, so that a text is read only if it may have the terms.
        clauses = [having.format(index=index, id=id)] * len(matched)
        for term in terms:
            # The text in small letters, as far as the term has any: SQLite knows those of ASCII alone.
            small = f"lowered({text})" if term.upper() != term else text
            clauses.append(f"instr({f'lower({text})' if term.isascii() else small}, ?)")
        either.append(" AND ".join(clauses) or "TRUE")
    return f"(({either[0]}) OR ({either[1]}))", (*2 * [*matched, *terms],)


def _index_query(terms: Sequence[str], plan: Plan) -> str:
    """What is looked up in the full-text index; empty if that cannot narrow the search."""
    return trigram_query(terms) if plan.indexed else ""


# --- how many meet a condition --------------------------------------------------------------------


def _count_matches(
    wanted: RolloutFilter, plan: Plan, lengths: bool
) -> Iterator[tuple[Lead, str, Row, int]]:
    """Yields for each condition that may lead: its name, the SQL of its matches, its values, and how many rollouts a match stands for."""
    asked = list(_conditions(wanted, plan))
    for lead in (*_INDEXED, *(_INDEXED_LATER if lengths else ())):
        yield from _counted_in("rollouts", lead, asked)
    yield from _counted_in("parts AS part", "part", asked)
    if wanted.task is not None:
        table, each = ("rollouts", 1) if plan.by_column else ("groups", USUAL_MEMBERS)
        yield "task", f"SELECT 1 FROM {table} WHERE task = ?", (task_label(wanted.task),), each
    if matched := _index_query(terms_of(wanted.text or ""), plan):
        for index, each in (("completion_index", 1), ("prompt_index", USUAL_MEMBERS)):
            yield "text", f"SELECT 1 FROM {index} WHERE {index} MATCH ?", (matched,), each


def _counted_in(
    table: str, lead: Lead, conditions: Iterable[_Condition]
) -> Iterator[tuple[Lead, str, Row, int]]:
    mine = [each for each in conditions if each.name == lead]
    if mine:
        clauses = " AND ".join(each.clause(plain=False) for each in mine)
        values = tuple(value for each in mine for value in each.values)
        yield lead, f"SELECT 1 FROM {table} WHERE {clauses}", values, 1
