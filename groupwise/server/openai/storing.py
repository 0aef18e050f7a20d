"""Stores completions that are to be rewarded: operations on the ledger, each one transaction with its answer and its count."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groupwise.api.schemas.keys import Caller
from groupwise.core.types import Group, Rollout, from_json
from groupwise.server.engine.engine_protocol import Sampled
from groupwise.server.ledger import counters, groups, members
from groupwise.server.ledger.answers import StoredResponse, once
from groupwise.server.ledger.groups import GroupRow, NewGroup
from groupwise.server.ledger.members import Gathering, Given
from groupwise.server.ledger.transaction import Transaction
from groupwise.server.openai.completed import Completed, Written
from groupwise.server.run.ledger_operations import named

Render = Callable[[Completed], StoredResponse]
"""Builds the response sent to the client."""


def new_group_id() -> str:
    """A new, unused group id."""
    return f"g-{secrets.token_hex(10)}"


@dataclass(frozen=True, slots=True)
class Keeping:
    """How something is kept."""

    caller: Caller
    lease: float
    render: Render


@dataclass(frozen=True, slots=True)
class Kept:
    """The stored result of a request."""

    completed: Completed | None
    """None: the request was answered before, and that answer stands."""
    answer: StoredResponse


@dataclass(frozen=True, slots=True)
class Waiting:
    """The member that the next call gets."""

    given: Given
    rollout: Rollout


def keep_answer(transaction: Transaction, keeping: Keeping, completed: Completed) -> Kept:
    """Completions that are not kept; only the answer is, where the request names itself."""
    return _kept(transaction, keeping, lambda _: completed)


def keep_group(
    transaction: Transaction,
    run: str,
    group: str,
    sampled: Sampled,
    choices: Sequence[Written],
    gathering: Gathering | None,
    keeping: Keeping,
) -> Kept:
    """A group that was sampled, under this id. With `gathering` its members go to one call each, and this call has the first."""

    def work(transaction: Transaction) -> Completed:
        new = NewGroup(group, sampled.group, sampled.step, sampled.version, sampled.fingerprint)
        (row,) = groups.opened(
            transaction, run, [new], key_id=keeping.caller.key_id, lease=keeping.lease
        )
        counters.count(transaction, run, counters.COMPLETION_REQUESTS)
        member = None if gathering is None else members.share(transaction, gathering, group).member
        prompt = len(sampled.group.rollouts[0].prompt_ids)
        return _completed(transaction, row, member, prompt, choices)

    return _kept(transaction, keeping, work)


def next_member(transaction: Transaction, gathering: Gathering, oldest: int) -> Waiting | None:
    """The member that the next call there gets; None if a new group is needed."""
    given = members.next_member(transaction, gathering, oldest)
    if given is None:
        return None
    record = groups.read_record(transaction, given.row.id)
    assert record is not None, "an open group has what it was sampled with"
    return Waiting(given, from_json(Group, record).rollouts[given.member])


def give_member(
    transaction: Transaction, waiting: Waiting, choice: Written, keeping: Keeping
) -> Kept | None:
    """Let a call have the member; None if it is no longer to be had."""
    given = waiting.given

    def work(transaction: Transaction) -> Completed:
        if not members.give(transaction, given):
            raise _Gone
        counters.count(transaction, given.row.run, counters.COMPLETION_REQUESTS)
        prompt = len(waiting.rollout.prompt_ids)
        return _completed(transaction, given.row, given.member, prompt, [choice])

    try:
        return _kept(transaction, keeping, work)
    except _Gone:
        return None


class _Gone(Exception):
    """The group has ended meanwhile."""


def _completed(
    transaction: Transaction,
    row: GroupRow,
    member: int | None,
    prompt_tokens: int,
    choices: Sequence[Written],
) -> Completed:
    return Completed(
        id=row.id if member is None else f"{row.id}-{member}",
        group=row.id,
        run=row.run,
        step=row.sampled_step,
        fingerprint=row.fingerprint,
        created=transaction.now,
        prompt_tokens=prompt_tokens,
        choices=tuple(choices),
    )


def _kept(
    transaction: Transaction, keeping: Keeping, work: Callable[[Transaction], Completed]
) -> Kept:
    made: list[Completed] = []

    def render(transaction: Transaction) -> StoredResponse:
        made.append(work(transaction))
        return keeping.render(made[0])

    answer = once(transaction, named(keeping.caller), render)
    return Kept(made[0] if made else None, answer)
