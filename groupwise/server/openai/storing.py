"""Stores completions that are to be rewarded: operations on the ledger, each one transaction with its response and its count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groupwise.api.schemas.idempotency import AnswerKey
from groupwise.api.schemas.keys import Caller
from groupwise.core.types import Group, Rollout, from_json
from groupwise.server.engine.engine_protocol import Sampled
from groupwise.server.ledger import events, groups, members, trajectories
from groupwise.server.ledger.groups import GroupRow, NewGroup
from groupwise.server.ledger.idempotency import RETENTION_SECONDS, StoredResponse, run_idempotent
from groupwise.server.ledger.members import GroupKey, Member
from groupwise.server.ledger.trajectories import SampledTurn
from groupwise.server.ledger.transaction import Transaction
from groupwise.tasks.openai.completed import Completed, CompletionChoice

Render = Callable[[Completed], StoredResponse]
"""Builds the response sent to the client."""
Also = Callable[[Transaction, Completed], None]
"""Stores more of a request, in the transaction that its completions are stored in."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a request's completions are stored: for which caller, with which lease in seconds, and how the response is built."""

    caller: Caller
    lease: float
    render: Render
    also: Also | None = None


@dataclass(frozen=True, slots=True)
class StoredCompletion:
    """The stored result of a request."""

    completed: Completed | None
    """None: the request was answered before, and `answer` is the stored response."""
    answer: StoredResponse


def keep_answer(
    transaction: Transaction, options: StoreOptions, completed: Completed
) -> StoredCompletion:
    """Store the response, if the request has an Idempotency-Key, and what `options.also` stores; the completions form no group."""
    completion = _store_once(transaction, options, lambda: completed)
    assert completion is not None
    return completion


def keep_group(
    transaction: Transaction,
    run: str,
    group: str,
    sampled: Sampled,
    choices: Sequence[CompletionChoice],
    group_key: GroupKey | None,
    options: StoreOptions,
) -> StoredCompletion:
    """Store a sampled group under this id. With `group_key` its members are handed out to one call each, and this call gets the first."""

    def work() -> Completed:
        new_group = NewGroup(
            group, sampled.group, sampled.step, sampled.version, sampled.fingerprint
        )
        (row,) = groups.add_groups(
            transaction, run, [new_group], key_id=options.caller.key_id, lease=options.lease
        )
        events.count(transaction, run, events.COMPLETION_REQUESTS)
        member = (
            None if group_key is None else members.share_group(transaction, group_key, group).index
        )
        prompt = len(sampled.group.rollouts[0].prompt_ids)
        return _completed_answer(transaction, row, member, prompt, choices)

    completion = _store_once(transaction, options, work)
    assert completion is not None
    return completion


def next_member(
    transaction: Transaction, group_key: GroupKey, oldest: int
) -> tuple[Member, Rollout] | None:
    """The member for the next call, and its completion; None if a new group is needed."""
    member = members.next_member(transaction, group_key, oldest)
    if member is None:
        return None
    record = groups.read_record(transaction, member.row.id)
    assert record is not None, "an open group has what it was sampled with"
    return member, from_json(Group, record).rollouts[member.index]


def give_member(
    transaction: Transaction,
    member: Member,
    prompt_tokens: int,
    choice: CompletionChoice,
    options: StoreOptions,
) -> StoredCompletion | None:
    """Hand out the member to a call; None if another call got it, or the group ended, meanwhile."""

    def work() -> Completed | None:
        if not members.hand_out(transaction, member):
            return None
        events.count(transaction, member.row.run, events.COMPLETION_REQUESTS)
        return _completed_answer(transaction, member.row, member.index, prompt_tokens, [choice])

    return _store_once(transaction, options, work)


def keep_turn(
    transaction: Transaction, turn: SampledTurn, choice: CompletionChoice, options: StoreOptions
) -> StoredCompletion:
    """Store a call of a trajectory, and answer it."""

    def work() -> Completed:
        row, sampled = turn.place.row, turn.group
        trajectories.keep_turn(transaction, turn, options.lease)
        events.count(transaction, row.run, events.COMPLETION_REQUESTS)
        return Completed(
            id=turn.place.id,
            group=row.id,
            run=row.run,
            step=turn.step,
            fingerprint=turn.fingerprint,
            created=transaction.now,
            prompt_tokens=len(sampled.rollouts[0].prompt_ids),
            choices=(choice,),
        )

    completion = _store_once(transaction, options, work)
    assert completion is not None
    return completion


def _completed_answer(
    transaction: Transaction,
    row: GroupRow,
    member: int | None,
    prompt_tokens: int,
    choices: Sequence[CompletionChoice],
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


def _store_once(
    transaction: Transaction, options: StoreOptions, work: Callable[[], Completed | None]
) -> StoredCompletion | None:
    completed: Completed | None = None

    def answer() -> StoredResponse | None:
        nonlocal completed
        completed = work()
        if completed is None:
            return None
        if options.also is not None:
            options.also(transaction, completed)
        return options.render(completed)

    response = run_idempotent(transaction, options.caller, answer)
    if completed is not None and (key := options.caller.answer_key) is not None:
        transaction.execute(
            "UPDATE answers SET completion = ? WHERE key_id = ? AND route = ? AND key = ?",
            (completed.id, options.caller.key_id, key.route, key.key),
        )
    return None if response is None else StoredCompletion(completed, response)


def claim_answer(transaction: Transaction, caller: Caller, retry: AnswerKey) -> str | None:
    """The key of an answer that this retry repeats, the newest that was not rewarded; no other retry of the same count gets it. None if
    there is none. If `retry` has a key, it is that one.
    """
    rows = transaction.all(
        """SELECT key, completion FROM answers WHERE key_id = ? AND route = ? AND body_hash = ? AND retries < ?
        AND made_at > ? ORDER BY retries DESC, rowid DESC""",
        (
            *(caller.key_id, retry.route, retry.body_hash, retry.retries),
            transaction.uptime - RETENTION_SECONDS,
        ),
    )
    for key, completion in rows:
        if retry.key in ("", key) and members.awaits_reward(transaction, completion):
            transaction.execute(
                "UPDATE answers SET retries = ? WHERE key_id = ? AND route = ? AND key = ?",
                (retry.retries, caller.key_id, retry.route, key),
            )
            return key
    return None
