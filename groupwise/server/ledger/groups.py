"""Groups: stored when they are sampled, before their client receives them.

The client gets a group's text and token ids; the ledger keeps the full sampling record, with log-probabilities and seeds, and training uses
only that record. `groupwise.server.ledger.rewards` and `plans` move groups to later states; this module opens them, finds them, and ends
those that are not trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from groupwise.api.schemas.problems import Refusal
from groupwise.core.types import Group, Prompt, from_json, to_json
from groupwise.runs.encoding import label
from groupwise.server.ledger.group_states import (
    FREE,
    TABLE,
    State,
    next_state,
    sql_list,
    states_before,
)
from groupwise.server.ledger.runs import require_active
from groupwise.server.ledger.transaction import Row, Transaction


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A sampled group to be stored."""

    id: str
    group: Group
    """The sampled group; its rollouts are not yet scored."""
    sampled_step: int
    """Completed steps when it was sampled."""
    version: int
    fingerprint: str
    """Fingerprint of the weights that sampled it."""
    named: bool = False
    """True if its client named the draw; then the draws before it are trained no later."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group without its sampling record."""

    id: str
    run: str
    draw: int
    state: State
    sampled_step: int
    version: int
    fingerprint: str
    members: int
    prompt: Prompt
    key_id: str
    """Id of the API key that requested it."""
    opened_at: float
    """Seconds since 1970."""
    lease_end: float
    """Server uptime in seconds at which its lease ends."""
    rewards: tuple[float | None, ...] | None
    """One reward per member, None for a member that failed; None instead of the tuple until rewards are accepted."""
    accepted: int | None
    """Position in the order in which the server accepted rewards, starting at 1."""
    reason: str | None
    """Why it is stale or quarantined."""
    plan: int | None
    position: int | None
    """Position in its plan's training order, starting at 0."""
    named: bool = False
    """See `NewGroup.named`."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The contents of a group, which a client may send back instead of its id."""

    prompt: Prompt
    completions: tuple[str, ...]
    completion_tokens: tuple[tuple[int, ...], ...] | None = None
    """None: the client did not send them."""


_FIELDS = tuple(field.name for field in fields(GroupRow))
_COLUMNS = ", ".join(_FIELDS)


def add_groups(
    transaction: Transaction, run: str, groups: Sequence[NewGroup], *, key_id: str, lease: float
) -> list[GroupRow]:
    """Store sampled groups, open for `lease` seconds of uptime.

    Refuses with `draw_taken` if a living group has one of the draws, with `finished` if the run has ended meanwhile.
    """
    require_active(transaction, run)
    for group in groups:
        need_free_draw(transaction, run, group.group.draw)
        transaction.insert(
            "groups",
            id=group.id,
            run=run,
            draw=group.group.draw,
            state="open",
            sampled_step=group.sampled_step,
            version=group.version,
            fingerprint=group.fingerprint,
            members=len(group.group.rollouts),
            prompt=json.dumps(group.group.example.prompt),
            content=content_hash(echo_of(group.group)),
            key_id=key_id,
            opened_at=transaction.now,
            lease_end=transaction.uptime + lease,
            named=group.named,
        )
        transaction.insert("records", id=group.id, record=to_json(group.group))
    return [read_group(transaction, new_group.id) for new_group in groups]


def first_unused_draw(transaction: Transaction, run: str) -> int:
    """The draw after the highest one that a group of the run has had."""
    return transaction.value("SELECT coalesce(max(draw) + 1, 0) FROM groups WHERE run = ?", (run,))


def count_unnamed(transaction: Transaction, run: str) -> int:
    """Number of groups of the run whose clients did not name the draw."""
    return transaction.value("SELECT count(*) FROM groups WHERE run = ? AND NOT named", (run,))


def first_missing_draw(transaction: Transaction, run: str) -> int:
    """The lowest draw that waits for its rewards, or that no group has: whatever is not rewarded, trained, held or lost."""
    settled = ("rewarded", "held", "planned", "trained", "stale", "quarantined")
    return transaction.value(
        f"""
        WITH settled AS (SELECT draw FROM groups WHERE run = ? AND state IN ({sql_list(settled)}))
        SELECT coalesce(min(draw) + 1, 0) FROM (SELECT -1 AS draw UNION ALL SELECT draw FROM settled) AS before
        WHERE draw + 1 NOT IN (SELECT draw FROM settled)
        """,
        (run,),
    )


def read_group(transaction: Transaction, group: str) -> GroupRow:
    """Read one group; refuses with `unknown_group` if it is missing."""
    row = transaction.first(f"SELECT {_COLUMNS} FROM groups WHERE id = ?", (label(group),))
    if row is None:
        raise Refusal("unknown_group", f"no group of this server has the id {group[:80]!r}.")
    return _group_row(row)


def read_record(transaction: Transaction, group: str) -> bytes | None:
    """The group as sampled, for `from_json(Group, …)`; None if the record was pruned."""
    return transaction.value("SELECT record FROM records WHERE id = ?", (group,))


def groups_in(transaction: Transaction, run: str, states: Sequence[State]) -> list[GroupRow]:
    """The run's groups in these states, in the order in which their rewards were accepted; groups without rewards are sorted by draw."""
    return [
        _group_row(row)
        for row in transaction.all(
            f"SELECT {_COLUMNS} FROM groups WHERE run = ? AND state IN ({_placeholders(states)}) ORDER BY accepted, draw",
            (run, *states),
        )
    ]


LIVING: tuple[State, ...] = ("open", "rewarded", "held", "planned")
"""States of groups that a step may still train."""


def living_groups(transaction: Transaction, run: str, most: int) -> list[GroupRow]:
    """The run's groups that have not ended, oldest first."""
    return _select_groups(
        transaction,
        f"run = ? AND state IN ({_placeholders(LIVING)}) ORDER BY opened_at, draw LIMIT ?",
        (run, *LIVING, most),
    )


def next_to_expire(transaction: Transaction, run: str) -> GroupRow | None:
    """The open group of the run whose lease ends first."""
    rows = _select_groups(
        transaction, "run = ? AND state = 'open' ORDER BY lease_end LIMIT 1", (run,)
    )
    return rows[0] if rows else None


def count_groups(
    transaction: Transaction, run: str, states: Sequence[State] = tuple(TABLE)
) -> dict[State, int]:
    """Number of the run's groups in each of these states."""
    rows = transaction.all(
        f"SELECT state, count(*) FROM groups WHERE run = ? AND state IN ({_placeholders(states)}) GROUP BY state",
        (run, *states),
    )
    numbers: dict[State, int] = dict(rows)
    return {state: numbers.get(state, 0) for state in states}


def find_by_echo(transaction: Transaction, run: str, echo: Echo) -> GroupRow | None:
    """The group that an echo refers to: the oldest open one with this content, else the one rewarded last, else the newest."""
    rows = transaction.all(
        f"""SELECT {_COLUMNS} FROM groups WHERE content = ? AND run = ?
        ORDER BY state = 'open' AND lease_end > ? DESC,
                 CASE WHEN state = 'open' AND lease_end > ? THEN rowid END,
                 accepted DESC, rowid DESC""",
        (content_hash(echo), run, transaction.uptime, transaction.uptime),
    )
    for row in map(_group_row, rows):
        record = None if echo.completion_tokens is None else read_record(transaction, row.id)
        if record is None:  # tokens are not sent, or no longer stored
            return row
        if echo_of(from_json(Group, record)).completion_tokens == echo.completion_tokens:
            return row
    return None


def give_up(transaction: Transaction, group: str) -> GroupRow:
    """End a group that its client no longer needs; repeating it is harmless.

    Refuses with `group_in_use` if a step has it or it waits for one, with `lease_expired` if it has expired.
    """
    row = read_group(transaction, group)
    if row.state == "given_up":
        return row
    if row.state == "expired":
        raise Refusal("lease_expired", f"the lease of group {row.id} has expired: it is over.")
    if row.state not in states_before("give_up"):
        raise Refusal(
            "group_in_use", f"group {row.id} is {row.state}: it can no longer be given up."
        )
    set_group_state(transaction, [row], next_state(row.state, "give_up"))
    return read_group(transaction, row.id)


def expire_overdue(transaction: Transaction) -> list[GroupRow]:
    """End all open groups, of every run, whose lease has expired; returns them."""
    overdue = _select_groups(
        transaction, "state = 'open' AND lease_end <= ? ORDER BY lease_end", (transaction.uptime,)
    )
    set_group_state(transaction, overdue, next_state("open", "expire"))
    return overdue


def mark_stale(transaction: Transaction, run: str, sampled_before: int) -> list[GroupRow]:
    """End the run's waiting and held groups that were sampled at a step before `sampled_before`; returns them with their earlier states."""
    states = states_before("go_stale")
    outrun = _select_groups(
        transaction,
        f"run = ? AND state IN ({_placeholders(states)}) AND sampled_step < ? ORDER BY accepted",
        (run, *states, sampled_before),
    )
    reason = f"sampled after fewer than {sampled_before} steps"
    for row in outrun:
        set_group_state(transaction, [row], next_state(row.state, "go_stale"), reason)
    return outrun


def prune_records(transaction: Transaction, run: str, before_step: int) -> int:
    """Delete the sampling records of groups that no step will need; returns the number of deleted records.

    These are groups trained in a step that a checkpoint covers (`before_step`), and groups that ended without training. Records of
    quarantined groups are kept for inspection. The rows of the groups stay.
    """
    return transaction.execute(
        # Start from the records, because few of them exist at any time.
        f"""DELETE FROM records WHERE id IN (
            SELECT records.id FROM records CROSS JOIN groups ON groups.id = records.id
            LEFT JOIN plans ON plans.id = groups.plan
            WHERE groups.run = ? AND (
                groups.state = 'trained' AND plans.step < ? OR groups.state IN ({sql_list(_NEVER_TRAINED)})
            )
        )""",
        (run, before_step),
    ).rowcount


_NEVER_TRAINED: tuple[State, ...] = (*FREE, "stale")


def set_group_state(
    transaction: Transaction, groups: Iterable[GroupRow], state: State, reason: str | None = None
) -> None:
    """Set the state of groups, as computed by `group_states.next_state`; the database refuses impossible transitions."""
    transaction.connection.executemany(
        "UPDATE groups SET state = ?, reason = ? WHERE id = ?",
        [(state, None if reason is None else label(reason), group.id) for group in groups],
    )


def echo_of(group: Group) -> Echo:
    """The echo that a client would send for this group."""
    return Echo(
        group.example.prompt,
        tuple(rollout.completion for rollout in group.rollouts),
        tuple(
            tuple(token for segment in rollout.segments for token in segment.token_ids)
            for rollout in group.rollouts
        ),
    )


def content_hash(echo: Echo) -> str:
    """SHA-256 (hex) of the texts of an echo; the order of keys in messages does not matter."""
    content: list[Any] = [echo.prompt, echo.completions]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def need_free_draw(transaction: Transaction, run: str, draw: int) -> None:
    """Refuse with `draw_taken` if a living group of the run has the draw."""
    holder = transaction.value(
        f"SELECT id FROM groups WHERE run = ? AND draw = ? AND state NOT IN ({sql_list(FREE)})",
        (run, draw),
    )
    if holder is not None:
        raise Refusal(
            "draw_taken",
            f"group {holder} of run {run} has draw {draw}. Leave `draw` out to get the next free one.",
        )


def _select_groups(transaction: Transaction, condition: str, values: Row) -> list[GroupRow]:
    return [
        _group_row(row)
        for row in transaction.all(f"SELECT {_COLUMNS} FROM groups WHERE {condition}", values)
    ]


def _placeholders(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _group_row(row: Row) -> GroupRow:
    values = dict(zip(_FIELDS, row, strict=True))
    values["prompt"] = json.loads(values["prompt"])
    if values["rewards"] is not None:
        values["rewards"] = tuple(json.loads(values["rewards"]))
    values["named"] = bool(values["named"])
    return GroupRow(**values)
