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
    several = filters.part is not None
    if several and db.lengths_indexed:  # without that index this query would be slow
        query = "SELECT EXISTS (SELECT 1 FROM parts WHERE name = ? AND turn IS NOT NULL)"
        several = bool(db.one(query, (label(filters.part or ""),))[0])
    plan = Plan(None, db.indexed, db.tasks_indexed, several)
    counts: Counter[Lead] = Counter()
    for lead, query, values, each in _count_matches(filters, plan, db.lengths_indexed):
        # Matches that make up `few` rollouts, rounded up.
        most = -(-few // each)
        counts[lead] += each * db.one(f"SELECT count(*) FROM ({query} LIMIT {most})", values)[0]
    lead = min(counts, key=counts.__getitem__, default=None)
    return replace(plan, lead=lead if lead is not None and counts[lead] < few else None)


def rollout_query(filters: RolloutFilter, plan: Plan) -> tuple[str, Row]:
    """The SQL for the ids of one page of rollouts, and its values. Rollouts that the offset skips are read from the index only."""
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
    """SQL; `§` marks where `clause` puts the plus or nothing."""
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
        # A multi-turn rollout may have a part several times: keep only the one that comes first in the order of the page.
        nearer = {"best": "another.value > part.value", "worst": "another.value < part.value"}
        before = "another.position < part.position"
        if filters.order in nearer:
            before = f"({nearer[filters.order]} OR (another.value = part.value AND {before}))"
        within, values = "", ()
        if (filters.min_reward, filters.max_reward) != (None, None) or filters.order in nearer:
            within, values = " AND +another.value BETWEEN ? AND ?", _range(filters)
        # One rollout has few parts: the pluses keep SQLite from scanning all parts of that name.
        clause = (
            "NOT EXISTS (SELECT 1 FROM parts AS another WHERE another.rollout = part.rollout AND +another.name = part.name"
            f"{within} AND {before})"
        )
        yield _Condition("order", clause, values)
    if filters.text is not None:
        having = "§{id} IN (SELECT rowid FROM {index} WHERE {index} MATCH ?)"
        yield _Condition("text", *_text(filters, plan, having))


def _range(filters: RolloutFilter) -> tuple[float, float]:
    """The range of rewards, open ends as infinities. A NaN is stored as text, which sorts above every number, so it never matches."""
    least, most = filters.min_reward, filters.max_reward
    return (-math.inf if least is None else least), (math.inf if most is None else most)


def _measured_column(wanted: RolloutFilter) -> tuple[str, Lead]:
    """The column that the range and the order apply to, and the condition that it belongs to."""
    return ("reward", "reward") if wanted.part is None else ("part.value", "part")


def _task(filters: RolloutFilter, plan: Plan) -> str:
    if _by_task(filters, plan):
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
        others = plan.lead is not None or filters.step is not None or filters.example is not None
        return not others and (plan.by_column or _by_task(filters, plan))
    if name in ("reward", "part", "order"):
        return filters.order in ("best", "worst") and (
            filters.part is None or _by_value(filters, plan)
        )
    return plan.lead is None and name in ("draw", "step", "example")


# --- where SQLite starts --------------------------------------------------------------------------


def _source(filters: RolloutFilter, plan: Plan) -> str:
    """The tables in the order in which SQLite must read them (CROSS JOIN fixes it): the most selective first."""
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
    """True if the query scans the draws of a task, in their order."""
    narrower = (filters.step, filters.draw, filters.example, filters.text)
    task_alone = filters.task is not None and filters.order == "draw" and narrower == (None,) * 4
    return task_alone and plan.lead in (None, "task")


def _by_value(filters: RolloutFilter, plan: Plan) -> bool:
    """True if the query starts from the values of a reward part."""
    if filters.part is None:
        return False
    return plan.lead == "part" or (plan.lead is None and filters.order in ("best", "worst"))


def _id(filters: RolloutFilter) -> str:
    return "rollouts.id" if filters.part is None else "part.rollout"


def _order(filters: RolloutFilter, plan: Plan) -> str:
    """Ties are ordered by id in the index's own direction: a page is then read from the index without sorting. Few matches are sorted."""
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
    """SQL for those of these rollouts that have the text, and its values. Reads the index only between the lowest and highest id."""
    near = "json_each(?1) AS near CROSS JOIN rollouts ON rollouts.id = near.value"
    between = f"BETWEEN (SELECT min({{id}}) FROM {near}) AND (SELECT max({{id}}) FROM {near})"
    having = f"{{id}} IN (SELECT rowid FROM {{index}} WHERE {{index}} MATCH ? AND rowid {between})"
    clause, values = _text(filters, plan, having)
    groups = "CROSS JOIN groups ON groups.draw = rollouts.draw"
    return f"SELECT rollouts.id FROM {near} {groups} WHERE {clause}", (json.dumps(ids), *values)


def _text(filters: RolloutFilter, plan: Plan, having: str) -> tuple[str, Row]:
    """SQL: the completion, or the prompt, contains all of the terms. Without terms, every rollout matches."""
    terms = terms_of(filters.text or "")
    matched = [query] if (query := _index_query(terms, plan)) else []
    either: list[str] = []
    for index, id, text in (
        ("completion_index", "rollouts.id", "completion"),
        ("prompt_index", "rollouts.draw", PROMPT),
    ):
        # The index comes first: a text is read only if it may contain the terms.
        clauses = [having.format(index=index, id=id)] * len(matched)
        for term in terms:
            # Compare in lower case if the term has letters. SQLite's own lower() handles ASCII only.
            small = f"lowered({text})" if term.upper() != term else text
            clauses.append(f"instr({f'lower({text})' if term.isascii() else small}, ?)")
        either.append(" AND ".join(clauses) or "TRUE")
    return f"(({either[0]}) OR ({either[1]}))", (*2 * [*matched, *terms],)


def _index_query(terms: Sequence[str], plan: Plan) -> str:
    """The MATCH expression for the full-text index; empty if the index cannot narrow the search."""
    return trigram_query(terms) if plan.indexed else ""


# --- how many meet a condition --------------------------------------------------------------------


def _count_matches(
    wanted: RolloutFilter, plan: Plan, lengths: bool
) -> Iterator[tuple[Lead, str, Row, int]]:
    """Yields for each condition that may lead: its name, the SQL of its matches, its values, and the number of rollouts per match."""
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
