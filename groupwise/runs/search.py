"""One page of rollouts: from a filter to SQL that uses the indexes, and from rows to what is shown."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from groupwise.runs.database import Database, Row
from groupwise.runs.encoding import label, plain_number, plain_text
from groupwise.runs.records import RolloutFilter, RolloutView
from groupwise.runs.tables import read_parts, task_label
from groupwise.runs.words import Wanted, wanted_of
from groupwise.types import RewardPart


def find_rollouts(
    db: Database, wanted: RolloutFilter, most: int | None = None
) -> list[RolloutView]:
    """One page of the rollouts that the filter asks for, with at most so many characters of each text; see `_cut`."""
    return _views(db, [id for (id,) in db.all(*_query(db, wanted))], most)


def draws_of(db: Database, example: int, limit: int, offset: int) -> list[int]:
    """The groups of an example, those that were drawn last first."""
    rows = db.all(
        "SELECT draw FROM groups WHERE example = ? ORDER BY draw DESC LIMIT ? OFFSET ?",
        (example, limit, offset),
    )
    return [draw for (draw,) in rows]


def every_rollout(db: Database, wanted: RolloutFilter) -> Generator[RolloutView]:
    """All rollouts that the filter asks for, as they are found; its limit and offset are not looked at."""
    query, values = _query(db, replace(wanted, limit=-1, offset=0))
    for rows in db.stream(query, values, AT_ONCE):
        yield from _views(db, [id for (id,) in rows])


def _query(db: Database, wanted: RolloutFilter) -> tuple[str, Row]:
    common = db.indexed and wanted.text is not None and _is_common(db, wanted.text)
    by_column = db.tasks_indexed
    matters = wanted.task is not None and (wanted.part is not None or not by_column)
    few = matters and _is_rare(db, wanted.task or "")
    return rollout_query(wanted, indexed=db.indexed, common=common, few=few, by_column=by_column)


def _views(db: Database, ids: Sequence[int], most: int | None = None) -> list[RolloutView]:
    """These rollouts, in this order."""
    texts = ", ".join(_cut(each, most) for each in (PROMPT, "completion"))
    rows = db.all(
        f"SELECT {_VIEW}, {texts} FROM json_each(?) AS chosen CROSS JOIN rollouts ON rollouts.id = chosen.value"
        " CROSS JOIN groups ON groups.draw = rollouts.draw",
        (json.dumps(ids),),
    )
    found, parts = {row[0]: row for row in rows}, read_parts(db, ids)
    return [_view(found[id], parts.get(id, ()), most) for id in ids]


def _cut(text: str, most: int | None) -> str:
    """The beginning of a text, its end where that is not in it, and how long it is; of a short one all."""
    if most is None:
        return f"{text}, '', 0"
    head = most // 2
    return (
        f"CASE WHEN length({text}) > {most} THEN substr({text}, 1, {head}) ELSE {text} END,"
        f" CASE WHEN length({text}) > {most} THEN substr({text}, -{most - head}) ELSE '' END, length({text})"
    )


def _told(head: str | bytes, tail: str | bytes, length: int, most: int | None) -> str:
    """A text of which the middle may not have been read. Half a surrogate pair is kept as bytes, which may be cut within a letter."""
    if most is None or length <= most:
        return plain_text(head) or ""
    start, end = (
        part.decode("utf-8", "replace") if isinstance(part, bytes) else part
        for part in (head, tail)
    )
    return f"{start}\n… {length - most:,} more characters …\n{end}"


AT_ONCE = 500
"""Rollouts of a long list whose texts are in memory together."""
COMMON = 20_000
"""Texts from which on a word, and rollouts from which on a task, is so common that rollouts that have it are soon come upon."""
USUAL_MEMBERS = 8
"""Of a group, about."""
PROMPT = "coalesce(prompt_seen, prompt_text)"
"""The prompt as it is shown and searched, of a row of `groups`; the view `prompts`, which the index is made of, says the same."""
_VIEW = (
    "rollouts.id, rollouts.step, rollouts.draw, member, attempt, rollouts.example, outcome, reason, reward, advantage,"
    " truncated, completion_tokens, ended_by, rollouts.task"
)


def rollout_query(
    wanted: RolloutFilter,
    *,
    indexed: bool,
    common: bool = False,
    few: bool = False,
    by_column: bool = True,
) -> tuple[str, Row]:
    """The SQL of the ids of one page of rollouts, and its values; of what is passed over no more is read than the index has.

    `indexed`: the full-text index is there. `common`: very many have the text, so that rollouts are gone through in order and asked
    whether they do, instead of all that do being found first. `few`: the task has so few that all are collected, instead of the values of
    a part being gone through. `by_column`: rollouts have a column for their task; of an older record, its groups are found first.
    """
    measured = "part.value" if wanted.part is not None else "reward"
    task = (
        _task_condition(wanted, indexed and not common)
        if by_column or _by_task(wanted)
        else _task_of_group(few)
    )
    clauses, values = _conditions(wanted, measured, task, indexed, common, few)
    where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
    query = (
        f"SELECT {_id(wanted)} FROM {_source(wanted, few)}{where}"
        f" ORDER BY {_order(wanted, measured)} LIMIT ? OFFSET ?"
    )
    return query, (*values, wanted.limit, wanted.offset)


def _source(wanted: RolloutFilter, few: bool) -> str:
    """The tables in the order in which SQLite is to look into them (CROSS JOIN keeps it): the narrowest first."""
    parts = "" if wanted.part is None else " CROSS JOIN parts AS part ON part.rollout = rollouts.id"
    if _by_task(wanted):
        return f"groups CROSS JOIN rollouts ON rollouts.draw = groups.draw{parts}"
    groups = " CROSS JOIN groups ON groups.draw = rollouts.draw" if wanted.text is not None else ""
    if _by_value(wanted, few):
        if _only_of_parts(wanted):
            return "parts AS part"
        return f"parts AS part CROSS JOIN rollouts ON rollouts.id = part.rollout{groups}"
    return f"rollouts{parts}{groups}"


def _only_of_parts(wanted: RolloutFilter) -> bool:
    """Whether nothing is asked but of the part itself."""
    rest = replace(wanted, part=None, min_reward=None, max_reward=None, limit=0, offset=0)
    return rest in (RolloutFilter(order="best", limit=0), RolloutFilter(order="worst", limit=0))


def _id(wanted: RolloutFilter) -> str:
    return "rollouts.id" if wanted.part is None else "part.rollout"


def _by_task(wanted: RolloutFilter) -> bool:
    """Whether the draws of a task are gone through, in their order."""
    narrower = (wanted.step, wanted.draw, wanted.example, wanted.text)
    return wanted.task is not None and wanted.order == "draw" and narrower == (None,) * 4


def _by_value(wanted: RolloutFilter, few: bool) -> bool:
    """Whether the values of a part say best where to begin."""
    asked = (wanted.min_reward, wanted.max_reward) != (None, None)
    sorted_so = wanted.order in ("best", "worst")
    narrower = wanted.step is not None or wanted.draw is not None or few or _by_task(wanted)
    return wanted.part is not None and not narrower and (asked or sorted_so)


def _conditions(
    wanted: RolloutFilter, measured: str, task: str, indexed: bool, common: bool, few: bool
) -> tuple[list[str], list[Any]]:
    outcomes = (wanted.outcome,) if isinstance(wanted.outcome, str) else wanted.outcome
    simple: list[tuple[str, Any]] = [
        # The plus keeps SQLite from going through all parts of the name for each rollout.
        (
            "part.name = ?" if _by_value(wanted, few) else "+part.name = ?",
            wanted.part and label(wanted.part),
        ),
        ("rollouts.step = ?", wanted.step),
        ("rollouts.draw = ?", wanted.draw),
        ("rollouts.example = ?", wanted.example),
        (task, wanted.task and task_label(wanted.task)),
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
        clause, searched = _text_condition(wanted_of(wanted.text, indexed=indexed), common)
        clauses.append(clause)
        values += searched
    return clauses, values


def _task_condition(wanted: RolloutFilter, texts_first: bool) -> str:
    """The plus keeps SQLite from its index where a step, an example or a rare text is narrower."""
    if _by_task(wanted):
        return "groups.task = ?"
    narrower = wanted.step is not None or wanted.example is not None
    found_by_text = texts_first and _is_matched(wanted.text)
    return "+rollouts.task = ?" if narrower or found_by_text else "rollouts.task = ?"


def _task_of_group(few: bool) -> str:
    """The plus has rollouts gone through in order, and not all of the task collected and sorted."""
    return f"{'' if few else '+'}rollouts.draw IN (SELECT draw FROM groups WHERE task = ?)"


def _text_condition(words: Wanted, common: bool) -> tuple[str, list[str]]:
    """The completion, or the prompt, has all of these words; without any, every rollout does."""
    completion, prompt = (
        _has(words, index, id, text, common)
        for index, id, text in (
            ("completion_index", "rollouts.id", "completion"),
            ("prompt_index", "rollouts.draw", PROMPT),
        )
    )
    matched = [words.matched] if words.matched else []
    return f"({completion} OR {prompt})", 2 * [*words.plain, *matched]


def _has(words: Wanted, index: str, id: str, text: str, common: bool) -> str:
    found = f"{id} IN (SELECT rowid FROM {index} WHERE {index} MATCH ?)"
    if common:
        found = f"EXISTS (SELECT 1 FROM {index} WHERE {index} MATCH ? AND rowid = {id})"
    plain = [
        f"instr({_small(each, text)}, ?)" for each in words.plain
    ]  # first: cheaper than the index
    clauses = [*plain, *([found] if words.matched else [])]
    return f"({' AND '.join(clauses) or 'TRUE'})"


def _small(word: str, text: str) -> str:
    """A text in small letters, as far as the word has any: SQLite knows those of ASCII alone."""
    if word.isascii():
        return f"lower({text})"
    return f"lowered({text})" if word.upper() != word else text


def _is_common(db: Database, words: str) -> bool:
    """Whether more texts have these words than should be collected for one page."""
    matched = wanted_of(words, indexed=True).matched
    if not matched:
        return False
    found = (
        db.one(
            f"SELECT count(*) FROM (SELECT 1 FROM {index} WHERE {index} MATCH ? LIMIT {COMMON})",
            (matched,),
        )[0]
        for index in ("completion_index", "prompt_index")
    )
    return any(count == COMMON for count in found)


def _is_rare(db: Database, task: str) -> bool:
    """Whether so few rollouts are of a task that all of them may be collected for one page."""
    table, most = ("rollouts", COMMON) if db.tasks_indexed else ("groups", COMMON // USUAL_MEMBERS)
    count = f"SELECT count(*) FROM (SELECT 1 FROM {table} WHERE task = ? LIMIT {most})"
    return db.one(count, (task_label(task),))[0] < most


def _is_matched(words: str | None) -> bool:
    """Whether the full-text index knows something of it."""
    return words is not None and bool(wanted_of(words, indexed=True).matched)


def _order(wanted: RolloutFilter, measured: str) -> str:
    """Ties go by id in the index's own direction, so that a page is read from it and nothing is sorted."""
    id = _id(wanted)
    return {
        "draw": f"{'groups' if _by_task(wanted) else 'rollouts'}.draw, member, attempt",
        "newest": "rollouts.id DESC",
        "best": f"{measured} DESC, {id} DESC",
        "worst": f"{measured}, {id}",
    }[wanted.order]


def _view(row: Row, parts: tuple[RewardPart, ...], most: int | None) -> RolloutView:
    id, step, draw, member, attempt, example, outcome, reason, reward, advantage, *rest = row
    truncated, completion_tokens, ended_by, task, *texts = rest
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
        _told(texts[0], texts[1], texts[2], most),
        _told(texts[3], texts[4], texts[5], most),
        ended_by,
        task,
    )
