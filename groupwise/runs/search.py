"""One page of rollouts: from a filter to SQL that uses the indexes, and from rows to what is shown."""

from __future__ import annotations

import json
from typing import Any

from groupwise.runs.database import Database, Row
from groupwise.runs.encoding import label, plain_number, plain_text
from groupwise.runs.records import RolloutFilter, RolloutView
from groupwise.runs.tables import read_parts
from groupwise.types import RewardPart


def find_rollouts(db: Database, wanted: RolloutFilter) -> list[RolloutView]:
    """One page of the rollouts that the filter asks for."""
    common = db.indexed and wanted.text is not None and _is_common(db, wanted.text)
    query, values = rollout_query(wanted, indexed=db.indexed, common=common)
    rows = db.all(query, values)
    parts = read_parts(db, [row[0] for row in rows])
    return [_view(row, parts.get(row[0], ())) for row in rows]


COMMON = 20_000
"""Texts, from which on a word is so common that rollouts that have it are soon come upon."""
PROMPT = "coalesce(prompt_seen, prompt_text)"
"""The prompt as it is shown and searched, of a row of `groups`; the view `prompts`, which the index is made of, says the same."""
_VIEW = (
    "rollouts.id, rollouts.step, rollouts.draw, member, attempt, rollouts.example, outcome, reason, reward, advantage,"
    f" truncated, completion_tokens, {PROMPT}, completion, ended_by"
)


def rollout_query(wanted: RolloutFilter, *, indexed: bool, common: bool = False) -> tuple[str, Row]:
    """The SQL of one page of rollouts and its values. `indexed`: the full-text index is there. `common`: very many have the text, so that
    rollouts are gone through in order and asked whether they do, instead of all that do being found first."""
    measured = "part.value" if wanted.part is not None else "reward"
    clauses, values = _conditions(wanted, measured, indexed, common)
    where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
    query = (
        f"SELECT {_VIEW} FROM {_source(wanted)} CROSS JOIN groups ON groups.draw = rollouts.draw{where}"
        f" ORDER BY {_order(wanted, measured)} LIMIT ? OFFSET ?"
    )
    return query, (*values, wanted.limit, wanted.offset)


def _source(wanted: RolloutFilter) -> str:
    """The tables in the order in which SQLite is to look into them (CROSS JOIN keeps it): the narrowest first."""
    if wanted.part is None:
        return "rollouts"
    if _by_value(wanted):
        return "parts AS part CROSS JOIN rollouts ON rollouts.id = part.rollout"
    return "rollouts CROSS JOIN parts AS part ON part.rollout = rollouts.id"


def _by_value(wanted: RolloutFilter) -> bool:
    """Whether the values of a part say best where to begin."""
    asked = (wanted.min_reward, wanted.max_reward) != (None, None)
    sorted_so = wanted.order in ("best", "worst")
    return wanted.step is None and wanted.draw is None and (asked or sorted_so)


def _conditions(
    wanted: RolloutFilter, measured: str, indexed: bool, common: bool
) -> tuple[list[str], list[Any]]:
    outcomes = (wanted.outcome,) if isinstance(wanted.outcome, str) else wanted.outcome
    simple: list[tuple[str, Any]] = [
        # The plus keeps SQLite from going through all parts of the name for each rollout.
        (
            "part.name = ?" if _by_value(wanted) else "+part.name = ?",
            wanted.part and label(wanted.part),
        ),
        ("rollouts.step = ?", wanted.step),
        ("rollouts.draw = ?", wanted.draw),
        ("rollouts.example = ?", wanted.example),
        ("outcome IN (SELECT value FROM json_each(?))", outcomes and json.dumps(outcomes)),
        # A NaN is stored as text, which sorts above every number.
        (f"{measured} BETWEEN ? AND 9e999", wanted.min_reward),
        (f"{measured} <= ?", wanted.max_reward),
        ("completion_tokens >= ?", wanted.min_tokens),
        ("completion_tokens <= ?", wanted.max_tokens),
        ("truncated = ?", wanted.truncated),
    ]
    clauses = [clause for clause, value in simple if value is not None]
    values = [value for _, value in simple if value is not None]
    if wanted.order in ("best", "worst"):
        clauses.append(f"{measured} <= 9e999")
    if wanted.text is not None:
        clause, searched = _text_condition(wanted.text, indexed, common)
        clauses.append(clause)
        values += [searched, searched]
    return clauses, values


def _text_condition(words: str, indexed: bool, common: bool) -> tuple[str, str]:
    """Full-text search for the words as a phrase; a plain search where there is no index, or nothing that it holds."""
    if indexed and _can_be_indexed(words):
        phrase = _phrase(words)
        if common:
            return (
                "(EXISTS (SELECT 1 FROM completion_index WHERE completion_index MATCH ? AND rowid = rollouts.id)"
                " OR EXISTS (SELECT 1 FROM prompt_index WHERE prompt_index MATCH ? AND rowid = rollouts.draw))"
            ), phrase
        return (
            "(rollouts.id IN (SELECT rowid FROM completion_index WHERE completion_index MATCH ?)"
            " OR rollouts.draw IN (SELECT rowid FROM prompt_index WHERE prompt_index MATCH ?))"
        ), phrase
    return f"(instr(lower(completion), ?) OR instr(lower({PROMPT}), ?))", words.lower()


def _is_common(db: Database, words: str) -> bool:
    """Whether more texts have these words than should be collected for one page."""
    if not _can_be_indexed(words):
        return False
    found = (
        db.one(
            f"SELECT count(*) FROM (SELECT 1 FROM {index} WHERE {index} MATCH ? LIMIT {COMMON})",
            (_phrase(words),),
        )[0]
        for index in ("completion_index", "prompt_index")
    )
    return any(count == COMMON for count in found)


def _can_be_indexed(words: str) -> bool:
    return any(letter.isalnum() for letter in words)


def _phrase(words: str) -> str:
    return '"' + words.replace('"', " ").replace("\0", " ") + '"'


def _order(wanted: RolloutFilter, measured: str) -> str:
    """Ties go by id in the index's own direction, so that a page is read from it and nothing is sorted."""
    id = "rollouts.id" if wanted.part is None else "part.rollout"
    return {
        "draw": "rollouts.draw, member, attempt",
        "newest": "rollouts.id DESC",
        "best": f"{measured} DESC, {id} DESC",
        "worst": f"{measured}, {id}",
    }[wanted.order]


def _view(row: Row, parts: tuple[RewardPart, ...]) -> RolloutView:
    id, step, draw, member, attempt, example, outcome, reason, reward, advantage, *rest = row
    truncated, completion_tokens, prompt, completion, ended_by = rest
    return RolloutView(
        id,
        step,
        draw,
        member,
        attempt,
        example,
        outcome,
        plain_text(reason),
        plain_number(reward),
        plain_number(advantage),
        parts,
        bool(truncated),
        completion_tokens,
        plain_text(prompt) or "",
        plain_text(completion) or "",
        ended_by,
    )
