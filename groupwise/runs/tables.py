"""Groups as rows: writes `groupwise.core.types.Group`, with everything it contains, to the tables and reads it back.

A group is a row of `groups`; its rollouts are rows of `rollouts`, each with its `segments` and `parts`. Reading
returns exactly what was written, to the last bit of every log-probability.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from groupwise.core.errors import StoreError
from groupwise.core.types import (
    DATASET_COLUMN,
    TASK_COLUMN,
    Example,
    Group,
    Prompt,
    RewardPart,
    Rollout,
    SamplingParams,
    Segment,
)
from groupwise.runs import text_index
from groupwise.runs.database import Database, Row
from groupwise.runs.encoding import (
    label,
    number,
    pack_floats,
    pack_json,
    pack_singles,
    pack_tokens,
    plain_number,
    plain_text,
    text,
    to_signed,
    to_unsigned,
    unpack_floats,
    unpack_json,
    unpack_singles,
    unpack_tokens,
)

LONGEST_TASK = 200
"""Maximum number of characters of a task's name; the schema's migration uses the same number."""


def insert_group(
    db: Database, group: Group, *, step: int | None, position: int, keep_tokens: bool
) -> None:
    """Add a group; call inside a transaction. StoreError if its draw belongs to a step already."""
    (newest_step,) = db.one("SELECT max(step) FROM groups WHERE draw = ?", (group.draw,))
    if newest_step is not None:
        raise StoreError(
            f"{db.path}: draw {group.draw} belongs to step {newest_step} already; each draw is trained once."
        )
    foreign_draws = [rollout.draw for rollout in group.rollouts if rollout.draw != group.draw]
    if foreign_draws:
        raise StoreError(
            f"the group of draw {group.draw} has rollouts of the draws {foreign_draws}."
        )
    prompt_ids = group.rollouts[0].prompt_ids if group.rollouts else ()
    task = task_of(group.example.columns)
    db.insert(
        "groups",
        draw=group.draw,
        step=step,
        position=position,
        example=group.example.index,
        task=task,
        prompt=pack_json(group.example.prompt),
        prompt_text=text(prompt_text(group.example.prompt)),
        prompt_seen=text(group.prompt_seen),
        columns=pack_json(group.example.columns),
        metrics=pack_json(group.metrics),
        prompt_ids=pack_tokens(prompt_ids) if keep_tokens else None,
        origin=group.origin,
        again=group.again,
    )
    for rollout in group.rollouts:
        inserted_id = _insert_rollout(db, rollout, step, group.example.index, task, keep_tokens)
        if keep_tokens and rollout.prompt_ids != prompt_ids:
            packed_ids = pack_tokens(rollout.prompt_ids)
            db.execute("UPDATE rollouts SET prompt_ids = ? WHERE id = ?", (packed_ids, inserted_id))
    if db.indexed:
        text_index.add(db.execute, "draw = ?", (group.draw,))


def _insert_rollout(
    db: Database,
    rollout: Rollout,
    step: int | None,
    example: int,
    task: str | None,
    keep_tokens: bool,
) -> int:
    """Add a rollout with its segments and reward parts; returns its row id."""
    # Tokens that the policy wrote. If it wrote none, because the completions were given (SFT), all tokens.
    by_policy = any(segment.source == "policy" for segment in rollout.segments)
    inserted_id = db.insert(
        "rollouts",
        draw=rollout.draw,
        member=rollout.member,
        attempt=rollout.attempt,
        step=step,
        example=example,
        task=task,
        outcome=rollout.outcome,
        reason=text(rollout.reason),
        reward=number(rollout.reward),
        advantage=number(rollout.advantage),
        truncated=rollout.truncated,
        completion_tokens=rollout.written if by_policy else len(rollout.completion_ids),
        completion=text(rollout.completion),
        notes=pack_json(rollout.notes),
        messages=pack_json(rollout.messages) if rollout.messages is not None else None,
        ended_by=rollout.ended_by,
        teacher_prompt_ids=pack_tokens(rollout.teacher_prompt_ids)
        if keep_tokens and rollout.teacher_prompt_ids is not None
        else None,
    )
    segments = [
        (
            inserted_id,
            position,
            segment.source,
            pack_tokens(segment.token_ids) if keep_tokens else None,
            pack_floats(segment.sampling_logprobs) if keep_tokens else None,
            segment.policy_version,
            text(segment.fingerprint),
            _pack_params(segment.params) if segment.params else None,
            to_signed(segment.seed),
            segment.finish_reason,
            pack_tokens(segment.prompt_ids)
            if keep_tokens and segment.prompt_ids is not None
            else None,
            pack_singles(segment.learner_logprobs) if keep_tokens else None,
            *_pack_teacher(segment, keep_tokens),
        )
        for position, segment in enumerate(rollout.segments)
    ]
    db.insert_many("segments", ("rollout", "position", *_SEGMENT), segments)
    parts = [
        (
            inserted_id,
            position,
            label(part.name),
            part.turn,
            number(part.value),
            number(part.weight),
        )
        for position, part in enumerate(rollout.parts)
    ]
    db.insert_many("parts", ("rollout", "position", "name", "turn", "value", "weight"), parts)
    return inserted_id


def _pack_teacher(
    segment: Segment, keep_tokens: bool
) -> tuple[bytes | None, bytes | None, bytes | None]:
    """The numbers of a teacher's endpoint: of the tokens themselves, and ids and numbers of its most probable ones."""
    if not keep_tokens or segment.teacher_logprobs is None:
        return (None, None, None)
    best = [pair for of_token in segment.teacher_top for pair in of_token]
    if not best:
        return (pack_floats(segment.teacher_logprobs), None, None)
    return (
        pack_floats(segment.teacher_logprobs),
        pack_tokens([token for token, _ in best]),
        pack_floats([logprob for _, logprob in best]),
    )


def _unpack_top(
    packed: Sequence[bytes | None], tokens: int
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The most probable tokens at each of so many places, from their ids and numbers; empty if none were stored."""
    ids, logprobs = packed
    pairs = tuple(zip(unpack_tokens(ids), unpack_floats(logprobs) or (), strict=True))
    each = len(pairs) // max(1, tokens)
    return tuple(pairs[start : start + each] for start in range(0, len(pairs), each or 1))


def delete_groups(db: Database, condition: str, values: Row) -> int:
    """Delete groups with their rollouts, segments and parts; call inside a transaction. Returns the number of rollouts."""
    draw_condition = f"draw IN (SELECT draw FROM groups WHERE {condition})"
    if db.indexed:
        text_index.remove(db.execute, draw_condition, values)
    deleted = db.execute(f"DELETE FROM rollouts WHERE {draw_condition}", values)
    db.execute(f"DELETE FROM groups WHERE {condition}", values)
    return deleted.rowcount


def read_groups(db: Database, condition: str, values: Row = ()) -> list[Group]:
    """The groups that meet a condition, which may end with ORDER BY."""
    rows = db.all(
        "SELECT draw, example, prompt, columns, metrics, prompt_ids, prompt_seen, origin, again"
        " FROM groups WHERE " + condition,
        values,
    )
    return [
        Group(
            draw=draw,
            example=Example(example, unpack_json(prompt), unpack_json(columns)),
            rollouts=_read_rollouts(db, draw, unpack_tokens(prompt_ids)),
            metrics=unpack_json(metrics),
            prompt_seen=plain_text(prompt_seen),
            origin=origin,
            again=again,
        )
        for draw, example, prompt, columns, metrics, prompt_ids, prompt_seen, origin, again in rows
    ]


def read_parts(db: Database, rollouts: Sequence[int]) -> dict[int, tuple[RewardPart, ...]]:
    """The reward parts of rollouts, by row id; a rollout without parts is left out."""
    rows = db.all(
        "SELECT rollout, name, value, weight, turn FROM parts"
        " WHERE rollout IN (SELECT value FROM json_each(?)) ORDER BY rollout, position",
        (json.dumps(list(rollouts)),),
    )
    return {
        rollout: tuple(
            RewardPart(
                plain_text(name) or "", plain_number(value), plain_number(weight) or 0.0, turn
            )
            for _, name, value, weight, turn in members
        )
        for rollout, members in groupby(rows, key=lambda row: row[0])
    }


def prompt_text(prompt: Prompt) -> str:
    """A prompt for people: text unchanged, messages one after another with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(
        f"{message.get('role', '')}: {_content_text(message.get('content'))}" for message in prompt
    )


def task_of(columns: Mapping[str, Any]) -> str | None:
    """The task of a mixture that an example belongs to: its label, or else its dataset's name; None if it has neither."""
    names = (columns.get(column) for column in (TASK_COLUMN, DATASET_COLUMN))
    name = next(
        (candidate for candidate in names if isinstance(candidate, str) and candidate), None
    )
    return None if name is None else task_label(name)


def task_label(task: str) -> str:
    """A task as stored in the tables, shortened: the user's column may contain long texts."""
    return label(task[:LONGEST_TASK])


RESTRICTIONS = ("min_tokens", "top_k", "top_p", "min_p", "processing")
"""Sampling parameters that are left out of the record if they are off."""

_SEGMENT = (
    "source",
    "token_ids",
    "logprobs",
    "policy_version",
    "fingerprint",
    "params",
    "seed",
    "finish_reason",
    "prompt_ids",
    "learner_logprobs",
    "teacher_logprobs",
    "teacher_top_ids",
    "teacher_top_logprobs",
)


def _read_rollouts(db: Database, draw: int, prompt_ids: tuple[int, ...]) -> tuple[Rollout, ...]:
    rows = db.all(
        "SELECT id, member, attempt, prompt_ids, completion, outcome, reason, reward, notes, advantage,"
        " messages, ended_by, teacher_prompt_ids FROM rollouts WHERE draw = ? ORDER BY id",
        (draw,),
    )
    parts = read_parts(db, [row[0] for row in rows])
    return tuple(
        Rollout(
            draw=draw,
            member=member,
            attempt=attempt,
            prompt_ids=prompt_ids if own_prompt is None else unpack_tokens(own_prompt),
            segments=_read_segments(db, id),
            completion=plain_text(completion) or "",
            outcome=outcome,
            reason=plain_text(reason),
            reward=plain_number(reward),
            parts=parts.get(id, ()),
            notes=unpack_json(notes),
            advantage=plain_number(advantage),
            messages=None if messages is None else tuple(unpack_json(messages)),
            ended_by=ended_by,
            teacher_prompt_ids=None if taught is None else unpack_tokens(taught),
        )
        for id, member, attempt, own_prompt, completion, outcome, reason, reward, notes, advantage, messages, ended_by, taught in rows
    )


def _read_segments(db: Database, rollout: int) -> tuple[Segment, ...]:
    rows = db.all(
        f"SELECT {', '.join(_SEGMENT)} FROM segments WHERE rollout = ? ORDER BY position",
        (rollout,),
    )
    return tuple(
        Segment(
            source=source,
            token_ids=unpack_tokens(token_ids),
            sampling_logprobs=unpack_floats(logprobs),
            policy_version=version,
            fingerprint=plain_text(fingerprint),
            params=_unpack_params(params),
            seed=to_unsigned(seed),
            finish_reason=reason,
            prompt_ids=None if prompt_ids is None else unpack_tokens(prompt_ids),
            learner_logprobs=unpack_singles(learnt),
            teacher_logprobs=unpack_floats(teacher),
            teacher_top=_unpack_top(top, len(token_ids or b"") // 4),
        )
        for source, token_ids, logprobs, version, fingerprint, params, seed, reason, prompt_ids, learnt, teacher, *top in rows
    )


def _pack_params(params: SamplingParams) -> str:
    """The parameters as JSON, without the restrictions that are off, which most are."""
    values = asdict(params)
    disabled = {name for name in RESTRICTIONS if not values[name]}
    return pack_json({name: value for name, value in values.items() if name not in disabled})


def _unpack_params(stored: str | None) -> SamplingParams | None:
    if stored is None:
        return None
    values: dict[str, Any] = unpack_json(stored)
    for name in ("stop_token_ids", "stop"):
        values[name] = tuple(values[name])
    return SamplingParams(**values)


def _content_text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else pack_json(content)
