"""Rewards: accepted once, stored before they are acknowledged; a repeated post gets the same answer.

The natural key of a post is the group and its rewards. The first post counts; the same post again, an hour or a crash later, is a duplicate
and gets the first answer. A group posted with `include: hold` is held: the same rewards with `include: next` release it. Everything else is
refused: different rewards, an unknown group, an expired lease.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.api.schemas.problems import Refusal
from groupwise.runs.encoding import pack_json, unpack_json
from groupwise.server.ledger.group_states import State, next_state
from groupwise.server.ledger.groups import Echo, GroupRow, find_by_echo, read_group
from groupwise.server.ledger.runs import require_active
from groupwise.server.ledger.transaction import Transaction

Include = Literal["next", "hold"]


@dataclass(frozen=True, slots=True)
class Post:
    """A client's rewards for one group."""

    group: str | Echo
    """The group's id, or its content as sent to the client (then it must belong to the run of the post)."""
    rewards: tuple[float | None, ...]
    """A finite number for each member, None for a member that failed."""
    answer: Mapping[str, Any]
    """The answer if the post is accepted now; stored for duplicates."""
    include: Include = "next"
    """`hold`: no step takes the group until it is named or released."""
    field: str = "rewards"
    """Path of the rewards in the request body, for error messages."""


@dataclass(frozen=True, slots=True)
class Posted:
    """The outcome of a post."""

    group: str
    accepted: bool
    """False: it duplicates an accepted post."""
    state: State
    """The group's state after the post."""
    answer: dict[str, Any]
    """The answer to the first post of these rewards."""


def accept_rewards(transaction: Transaction, run: str, post: Post) -> Posted:
    """Accept the rewards of a group of the active run.

    Refuses with `unknown_group`, `invalid_request` (wrong number of rewards), `already_rewarded` (different rewards), `lease_expired`,
    `group_given_up`, `group_stale` (release of a stale group) or `finished` (the group's run has ended). Duplicates are answered in any
    state of the group and its run, unless the group was given up.
    """
    if isinstance(post.group, str):
        group = read_group(transaction, post.group)
    elif (matching_group := find_by_echo(transaction, run, post.group)) is not None:
        group = matching_group
    else:
        raise Refusal(
            "unknown_group",
            f"no group of run {run} has this prompt, these completions and these tokens. "
            "Send `group_id`, or the echo exactly as /completions gave it.",
        )
    if len(post.rewards) != group.members:
        problem = f"group {group.id} has {group.members} completions, but {len(post.rewards)} rewards came."
        raise Refusal(
            "invalid_request",
            f"{problem} Send one for each completion, in order; null where it failed.",
            field=post.field,
            problem=problem,
        )
    if group.state == "given_up":
        raise Refusal(
            "group_given_up", f"group {group.id} was given up; no rewards are taken for it."
        )
    if group.rewards is not None:
        return _accept_again(transaction, group, post)
    return _accept_first(transaction, group, post)


def _accept_first(transaction: Transaction, group: GroupRow, post: Post) -> Posted:
    require_active(transaction, group.run)
    if group.state == "expired" or group.lease_end <= transaction.uptime:
        raise Refusal(
            "lease_expired",
            f"the lease of group {group.id} has expired: its rewards came too late. Ask for completions again; "
            "`lease_seconds` of /start sets the time.",
        )
    state = next_state(group.state, "hold" if post.include == "hold" else "reward")
    rewards = json.dumps(post.rewards, allow_nan=False)
    transaction.execute(
        """UPDATE groups SET state = ?, rewards = ?, answer = ?,
        accepted = (SELECT coalesce(max(accepted), 0) + 1 FROM groups) WHERE id = ?""",
        (state, rewards, pack_json(post.answer), group.id),
    )
    return Posted(group.id, True, state, dict(post.answer))


def _accept_again(transaction: Transaction, group: GroupRow, post: Post) -> Posted:
    """Handle another post for a rewarded group: a duplicate, the release of a held group, or a refusal."""
    if group.rewards != post.rewards:
        raise Refusal(
            "already_rewarded",
            f"other rewards were accepted for group {group.id} before: {json.dumps(group.rewards)}. Those stand.",
        )
    if group.state == "held" and post.include == "next":
        require_active(transaction, group.run)
        state = next_state(group.state, "release")
        transaction.execute(
            "UPDATE groups SET state = ?, answer = ? WHERE id = ?",
            (state, pack_json(post.answer), group.id),
        )
        return Posted(group.id, True, state, dict(post.answer))
    stored = transaction.value("SELECT answer FROM groups WHERE id = ?", (group.id,))
    return Posted(group.id, False, group.state, unpack_json(stored))
