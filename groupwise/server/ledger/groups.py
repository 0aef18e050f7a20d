"""Groups: stored when they are sampled, before their client hears of them.

The client gets a group's text and token ids; the ledger keeps the whole record, with log-probabilities and seeds, and trains from that
alone. `groupwise.server.ledger.rewards` and `plans` move groups on; here they are opened, looked up, and ended where nothing comes of
them.
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
from groupwise.server.ledger.group_states import TABLE, State, after, before
from groupwise.server.ledger.runs import need_active
from groupwise.server.ledger.schema import FREE, listed
from groupwise.server.ledger.transaction import Row, Transaction


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A sampled group that is to be kept."""

    id: str
    group: Group
    """Its rollouts are pending."""
    sampled_step: int
    """Steps that were done when it was sampled."""
    version: int
    fingerprint: str
    """Fingerprint of the weights that drew it."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group without its record."""

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
    """The API key that asked for it."""
    opened_at: float
    """Seconds since 1970."""
    lease_end: float
    """The uptime at which its lease is over, in seconds."""
    rewards: tuple[float | None, ...] | None
    """A reward for each member, None for one that failed; None as a whole until they are accepted."""
    accepted: int | None
    """Place in the order in which the server accepted rewards, from 1."""
    reason: str | None
    """Why it is stale or quarantined."""
    plan: int | None
    position: int | None
    """Place in its plan's training order, from 0."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The contents of a group, which a client may send back in place of its id."""

    prompt: Prompt
    completions: tuple[str, ...]
    completion_tokens: tuple[tuple[int, ...], ...] | None = None
    """None: they were not sent."""


_FIELDS = tuple(field.name for field in fields(GroupRow))
_COLUMNS = ", ".join(_FIELDS)


def add_groups(
    transaction: Transaction, run: str, groups: Sequence[NewGroup], *, key_id: str, lease: float
) -> list[GroupRow]:
    """Keep groups that were sampled, open for `lease` seconds of uptime.

    Refused as `draw_taken` if a living group has one of the draws, as `finished` if the run has ended meanwhile.
    """
    need_active(transaction, run)
    for new in groups:
        need_free_draw(transaction, run, new.group.draw)
        transaction.insert(
            "groups",
            id=new.id,
            run=run,
            draw=new.group.draw,
            state="open",
            sampled_step=new.sampled_step,
            version=new.version,
            fingerprint=new.fingerprint,
            members=len(new.group.rollouts),
            prompt=json.dumps(new.group.example.prompt),
            content=content_hash(echo_of(new.group)),
            key_id=key_id,
            opened_at=transaction.now,
            lease_end=transaction.uptime + lease,
        )
        transaction.insert("records", id=new.id, record=to_json(new.group))
    return [read_group(transaction, new.id) for new in groups]


def first_unused_draw(transaction: Transaction, run: str) -> int:
    """The draw after all that groups of the run have had."""
    return transaction.value("SELECT coalesce(max(draw) + 1, 0) FROM groups WHERE run = ?", (run,))


def read_group(transaction: Transaction, group: str) -> GroupRow:
    """One group; refused as `unknown_group` if there is none."""
    row = transaction.first(f"SELECT {_COLUMNS} FROM groups WHERE id = ?", (label(group),))
    if row is None:
        raise Refusal("unknown_group", f"no group of this server has the id {group[:80]!r}.")
    return _group(row)


def read_record(transaction: Transaction, group: str) -> bytes | None:
    """The group as it was sampled, for `from_json(Group, …)`; None if it was pruned."""
    return transaction.value("SELECT record FROM records WHERE id = ?", (group,))


def groups_in(transaction: Transaction, run: str, states: Sequence[State]) -> list[GroupRow]:
    """The run's groups in these states, in the order in which their rewards were accepted, those without by their draws."""
    return [
        _group(row)
        for row in transaction.all(
            f"SELECT {_COLUMNS} FROM groups WHERE run = ? AND state IN ({_marks(states)}) ORDER BY accepted, draw",
            (run, *states),
        )
    ]


LIVING: tuple[State, ...] = ("open", "rewarded", "held", "planned")
"""A step may still learn from them."""


def living(transaction: Transaction, run: str, most: int) -> list[GroupRow]:
    """The run's groups that have not ended, the oldest first."""
    return _rows(
        transaction,
        f"run = ? AND state IN ({_marks(LIVING)}) ORDER BY opened_at, draw LIMIT ?",
        (run, *LIVING, most),
    )


def count_groups(
    transaction: Transaction, run: str, states: Sequence[State] = tuple(TABLE)
) -> dict[State, int]:
    """How many groups of the run are in each of these states."""
    counted = transaction.all(
        f"SELECT state, count(*) FROM groups WHERE run = ? AND state IN ({_marks(states)}) GROUP BY state",
        (run, *states),
    )
    numbers: dict[State, int] = dict(counted)
    return {state: numbers.get(state, 0) for state in states}


def matching(transaction: Transaction, run: str, echo: Echo) -> GroupRow | None:
    """The group of the run that an echo means: the oldest open one of this content, else the one rewarded last, else the newest."""
    rows = transaction.all(
        f"""SELECT {_COLUMNS} FROM groups WHERE content = ? AND run = ?
        ORDER BY state = 'open' AND lease_end > ? DESC,
                 CASE WHEN state = 'open' AND lease_end > ? THEN rowid END,
                 accepted DESC, rowid DESC""",
        (content_hash(echo), run, transaction.uptime, transaction.uptime),
    )
    for row in map(_group, rows):
        record = None if echo.completion_tokens is None else read_record(transaction, row.id)
        if record is None:  # the tokens of one side are unknown
            return row
        if echo_of(from_json(Group, record)).completion_tokens == echo.completion_tokens:
            return row
    return None


def give_up(transaction: Transaction, group: str) -> GroupRow:
    """End a group that its client no longer wants; harmless when repeated.

    Refused as `group_in_use` if a step has it or it waits for one, as `lease_expired` if it is over anyway.
    """
    row = read_group(transaction, group)
    if row.state == "given_up":
        return row
    if row.state == "expired":
        raise Refusal("lease_expired", f"the lease of group {row.id} has expired: it is over.")
    if row.state not in before("give_up"):
        raise Refusal(
            "group_in_use", f"group {row.id} is {row.state}: it can no longer be given up."
        )
    move(transaction, [row], after(row.state, "give_up"))
    return read_group(transaction, row.id)


def expire_overdue(transaction: Transaction) -> list[GroupRow]:
    """End all open groups whose lease is over, of every run; returns them."""
    overdue = _rows(
        transaction, "state = 'open' AND lease_end <= ? ORDER BY lease_end", (transaction.uptime,)
    )
    move(transaction, overdue, after("open", "expire"))
    return overdue


def go_stale(transaction: Transaction, run: str, sampled_before: int) -> list[GroupRow]:
    """End the run's waiting and held groups that were sampled when fewer steps than these were done; returns them as they were."""
    states = before("go_stale")
    outrun = _rows(
        transaction,
        f"run = ? AND state IN ({_marks(states)}) AND sampled_step < ? ORDER BY accepted",
        (run, *states, sampled_before),
    )
    reason = f"sampled before step {sampled_before}"
    for row in outrun:
        move(transaction, [row], after(row.state, "go_stale"), reason)
    return outrun


def prune_records(transaction: Transaction, run: str, before_step: int) -> int:
    """Drop the sampling records of groups that no step will need; returns how many were dropped.

    These are groups trained in steps before this one, of which a checkpoint stands, or ended without training. Quarantined
    records are kept, to be looked at. The rows of the groups stay.
    """
    return transaction.execute(
        # From the records, few of which are left at any time, to their groups.
        f"""DELETE FROM records WHERE id IN (
            SELECT records.id FROM records CROSS JOIN groups ON groups.id = records.id
            LEFT JOIN plans ON plans.id = groups.plan
            WHERE groups.run = ? AND (
                groups.state = 'trained' AND plans.step < ? OR groups.state IN ({listed(_NEVER_TRAINED)})
            )
        )""",
        (run, before_step),
    ).rowcount


_NEVER_TRAINED: tuple[State, ...] = (*FREE, "stale")


def move(
    transaction: Transaction, groups: Iterable[GroupRow], state: State, reason: str | None = None
) -> None:
    """Put groups into a state that `states.after` gave; the database refuses any other."""
    transaction.connection.executemany(
        "UPDATE groups SET state = ?, reason = ? WHERE id = ?",
        [(state, None if reason is None else label(reason), each.id) for each in groups],
    )


def echo_of(group: Group) -> Echo:
    """The echo that a client would send for this group."""
    return Echo(
        group.example.prompt,
        tuple(rollout.completion for rollout in group.rollouts),
        tuple(
            tuple(token for part in rollout.segments for token in part.token_ids)
            for rollout in group.rollouts
        ),
    )


def content_hash(echo: Echo) -> str:
    """SHA-256 (hex) of the texts of an echo, independent of the order of messages' keys."""
    content: list[Any] = [echo.prompt, echo.completions]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def need_free_draw(transaction: Transaction, run: str, draw: int) -> None:
    """Refused as `draw_taken` if a living group of the run has the draw."""
    holder = transaction.value(
        f"SELECT id FROM groups WHERE run = ? AND draw = ? AND state NOT IN ({listed(FREE)})",
        (run, draw),
    )
    if holder is not None:
        raise Refusal(
            "draw_taken",
            f"group {holder} of run {run} has draw {draw}. Leave `draw` out to get the next free one.",
        )


def _rows(transaction: Transaction, condition: str, values: Row) -> list[GroupRow]:
    return [
        _group(row)
        for row in transaction.all(f"SELECT {_COLUMNS} FROM groups WHERE {condition}", values)
    ]


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _group(row: Row) -> GroupRow:
    values = dict(zip(_FIELDS, row, strict=True))
    values["prompt"] = json.loads(values["prompt"])
    if values["rewards"] is not None:
        values["rewards"] = tuple(json.loads(values["rewards"]))
    return GroupRow(**values)
