"""Groups whose members are handed out to one call each, and rewarded one by one.

An algorithm compares the members of a group, but an agent requests one completion at a time. So the first call with a name causes a whole
group to be sampled, and each call with that name gets the group's next member, until all are handed out and the next call starts another
group. A completion is named after its group and position: `g-<id>-<position>`. Its reward is stored here, on disk before it is
acknowledged; with the reward of the last member the group itself is rewarded, as if one client had posted all rewards. If the lease ends
first, the group is rewarded with the existing rewards, and members without one count as failed: an acknowledged reward is never lost.

A member may also be a trajectory of several calls; `groupwise.server.ledger.trajectories` opens such groups. Their calls are named
`g-<id>-<position>-<turn>`, and each of these names means the whole trajectory when a reward is posted.

In all other respects it is an ordinary group: it is opened with all of its members, moves along `group_states.TABLE`, and can be rewarded
as a whole by a client that knows all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import EventKind
from groupwise.runs.encoding import pack_json, unpack_json
from groupwise.server.ledger import trajectories
from groupwise.server.ledger.events import add_event
from groupwise.server.ledger.groups import GroupRow, give_up, read_group
from groupwise.server.ledger.rewards import Include, Post, Posted, accept_rewards
from groupwise.server.ledger.runs import read_run, require_active
from groupwise.server.ledger.transaction import Transaction

GRACE = 1.0
"""Seconds by which an expired lease is extended, so that the group can still be rewarded."""

NAMED, UNNAMED = "name:", "same:"
"""How the names of groups in `handed_out` begin: with the client's name, and with a hash of what their calls ask."""

_ID = re.compile(
    r"(?:chatcmpl-|cmpl-|resp_)?(?P<group>g-[A-Za-z0-9]+)(?:-(?P<member>[0-9]{1,9}))?(?P<turn>-[0-9]{1,9})?"
)


@dataclass(frozen=True, slots=True)
class CompletionId:
    """The parsed id of a group, or of one completion of a group."""

    group: str
    member: int | None = None
    """Position in the group, starting at 0."""
    call: str | None = None
    """The id without its prefix, of a call of a trajectory."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Identifies the calls that share groups: same run, API key and name."""

    run: str
    key_id: str
    name: str
    request_hash: str
    """Hash of the prompt and settings that all of these calls share."""


@dataclass(frozen=True, slots=True)
class Member:
    """A group's member, for one call."""

    row: GroupRow
    index: int


def parse_id(id: str) -> CompletionId:
    """Parse the id of a group, of its completion (`chatcmpl-…`), or of one of its members."""
    match = _ID.fullmatch(id)
    if match is None:
        return CompletionId(id)
    member = match["member"]
    call = f"{match['group']}-{member}{match['turn']}" if match["turn"] else None
    return CompletionId(match["group"], None if member is None else int(member), call)


def share_group(transaction: Transaction, group_key: GroupKey, group: str) -> Member:
    """Register a newly opened group to be shared by these calls; its first member goes to the current call."""
    transaction.insert(
        "handed_out",
        id=group,
        run=group_key.run,
        key_id=group_key.key_id,
        name=group_key.name,
        asked=group_key.request_hash,
        given=1,
    )
    return Member(read_group(transaction, group), 0)


def next_member(transaction: Transaction, group_key: GroupKey, oldest: int) -> Member | None:
    """The member for the next call; None if a new group is needed.

    A new group is needed if all members are handed out, the group has ended, or it was sampled before step `oldest`. Refuses with
    `settings_conflict` if the calls that share the group had a different prompt or settings.
    """
    row = transaction.first(
        """SELECT handed_out.id, asked, given FROM handed_out JOIN groups ON groups.id = handed_out.id
        WHERE handed_out.run = ? AND handed_out.key_id = ? AND name = ?
        AND state = 'open' AND lease_end > ? AND sampled_step >= ? AND given < members
        ORDER BY groups.rowid DESC""",
        (group_key.run, group_key.key_id, group_key.name, transaction.uptime, oldest),
    )
    if row is None:
        return None
    group, request_hash, handed_out = row
    if request_hash != group_key.request_hash:
        raise Refusal(
            "settings_conflict",
            f"the group {group_key.name[:80]!r} was begun with another prompt, size or way of sampling, and its members are compared "
            "with each other. Ask the same in each of its calls, or use another name.",
        )
    return Member(read_group(transaction, group), handed_out)


def hand_out(transaction: Transaction, member: Member) -> bool:
    """Record that a call gets the member; False if another call got it, or the group ended, meanwhile."""
    cursor = transaction.execute(
        """UPDATE handed_out SET given = given + 1 WHERE id = ? AND given = ?
        AND (SELECT state FROM groups WHERE groups.id = handed_out.id) = 'open'""",
        (member.row.id, member.index),
    )
    return cursor.rowcount == 1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the rewards of a group are."""

    name: str | None
    """Its client's name for it; None if the client gave none."""
    rewarded: int
    """Number of members that have a reward."""


def progress_of(transaction: Transaction, row: GroupRow) -> Progress:
    """The name of a group, and the number of its rewards."""
    name: str = transaction.value("SELECT name FROM handed_out WHERE id = ?", (row.id,)) or ""
    name = name.removeprefix(trajectories.group_name("")).removeprefix(NAMED)
    rewarded = row.members if row.rewards is not None else len(_member_rewards(transaction, row.id))
    return Progress(None if name.startswith(UNNAMED) else name or None, rewarded)


# --- rewards --------------------------------------------------------------------------------------


def awaits_reward(transaction: Transaction, id: str) -> bool:
    """True if this group, member or call of a trajectory can still be rewarded, and was not."""
    completion = parse_id(id)
    row = read_group(transaction, completion.group)
    is_open = row.state == "open" and row.lease_end > transaction.uptime
    is_active = read_run(transaction, row.run).state == "active"
    return is_open and is_active and completion.member not in _member_rewards(transaction, row.id)


def accept_post(transaction: Transaction, run: str, post: Post) -> Posted:
    """Accept the rewards of a group, or the reward of one member; see `rewards.accept_rewards`, also for the refusals.

    A post for the whole group must agree with rewards already accepted for members; otherwise it is refused with `already_rewarded`.
    """
    if not isinstance(post.group, str):
        return accept_rewards(transaction, run, post)
    completion = parse_id(post.group)
    group_post = replace(post, group=completion.group)
    if completion.call is not None:
        _, member = trajectories.member_of_call(transaction, completion.call)
        return _accept_one(transaction, run, group_post, member)
    if completion.member is not None:
        return _accept_one(transaction, run, group_post, completion.member)
    if trajectories.is_of_trajectories(transaction, completion.group):
        problem = (
            f"group {completion.group} consists of trajectories, which are rewarded one by one"
        )
        raise Refusal(
            "invalid_request",
            f"{problem}. Post the id of one of a trajectory's calls, or `trajectory` and `reward`.",
            field="group_id",
            problem=problem,
        )
    for index, (reward, _) in _member_rewards(transaction, completion.group).items():
        if index < len(post.rewards) and post.rewards[index] != reward:
            raise _already_rewarded(f"{completion.group}-{index}", reward)
    return accept_rewards(transaction, run, group_post)


def _accept_one(transaction: Transaction, run: str, post: Post, member: int) -> Posted:
    row = _handed_out_group(transaction, post, member)
    stored = transaction.first(
        "SELECT reward, answer FROM member_rewards WHERE id = ? AND member = ?", (row.id, member)
    )
    if stored is not None:
        reward, answer = stored
        if reward != post.rewards[0]:
            raise _already_rewarded(f"{row.id}-{member}", reward)
        return Posted(row.id, False, row.state, unpack_json(answer))
    if trajectories.is_of_trajectories(transaction, row.id):
        require_active(transaction, row.run)
        trajectories.check_rewardable(transaction, row, member)
    elif row.rewards is not None and row.rewards[member] == post.rewards[0]:
        return Posted(row.id, False, row.state, dict(post.answer))
    else:
        if row.state == "given_up":
            raise Refusal(
                "group_given_up", f"group {row.id} was given up; no rewards are taken for it."
            )
        if row.rewards is not None:
            raise _already_rewarded(f"{row.id}-{member}", row.rewards[member])
        require_active(transaction, row.run)
        if row.state == "expired" or row.lease_end <= transaction.uptime:
            raise Refusal(
                "lease_expired",
                f"the lease of group {row.id} has expired: this reward came too late. `lease_seconds` of /start sets the time.",
            )
    transaction.insert(
        "member_rewards",
        id=row.id,
        member=member,
        reward=post.rewards[0],
        include=post.include,
        answer=pack_json(post.answer),
    )
    if len(_member_rewards(transaction, row.id)) == row.members:
        row = _reward_group(transaction, run, row)
    return Posted(row.id, True, row.state, dict(post.answer))


def _handed_out_group(transaction: Transaction, post: Post, member: int) -> GroupRow:
    """The group of a member that was handed out to a call."""
    group = str(post.group)
    handed_out = transaction.value("SELECT given FROM handed_out WHERE id = ?", (group,))
    if handed_out is None or member >= handed_out:
        raise Refusal("unknown_group", f"no completion has the id {group}-{member}.")
    if len(post.rewards) != 1:
        problem = f"{group}-{member} is one completion, but {len(post.rewards)} rewards came."
        raise Refusal("invalid_request", problem, field=post.field)
    return read_group(transaction, group)


def _reward_group(transaction: Transaction, run: str, row: GroupRow) -> GroupRow:
    """Reward the group with its members' rewards; members without one count as failed."""
    member_rewards = _member_rewards(transaction, row.id)
    order: Sequence[int] = range(row.members)
    if trajectories.is_of_trajectories(transaction, row.id):
        closed = trajectories.close_trajectories(transaction, row)
        order = closed.members
        if closed.without_reward:
            names = closed.without_reward
            message = (
                f"{len(names)} trajectories of group {row.id} had no reward when it closed, and count as failed: "
                f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
            )
            data = {"failed": [row.id], "trajectories": list(names)}
            add_event(transaction, row.run, EventKind.GROUPS, {"message": message, "data": data})
    rewards = tuple(
        member_rewards[index][0] if index in member_rewards else None for index in order
    )
    is_held = any(include == "hold" for _, include in member_rewards.values())
    include: Include = "hold" if is_held else "next"
    answer = {
        "model_version": [row.run, row.sampled_step],
        "status": "held" if is_held else "accepted",
    }
    accept_rewards(transaction, run, Post(row.id, rewards, answer, include))
    return read_group(transaction, row.id)


def close_group(transaction: Transaction, group: str) -> GroupRow:
    """Close an open group of trajectories: reward it with the rewards that came, or give it up if there are none."""
    row = read_group(transaction, group)
    if not _member_rewards(transaction, group):
        return give_up(transaction, group)
    return _reward_group(transaction, row.run, _with_lease(transaction, row))


def settle_overdue(transaction: Transaction) -> list[GroupRow]:
    """Reward open groups whose lease has expired with their members' rewards, if any member has one; returns them.

    Call this before `expire_overdue`, which ends groups without rewards.
    """
    group_ids = transaction.all(
        """SELECT DISTINCT groups.id FROM groups JOIN member_rewards ON member_rewards.id = groups.id
        JOIN runs ON runs.run = groups.run
        WHERE groups.state = 'open' AND lease_end <= ? AND runs.state = 'active'""",
        (transaction.uptime,),
    )
    groups: list[GroupRow] = []
    for (group,) in group_ids:
        row = _with_lease(transaction, read_group(transaction, group))
        groups.append(_reward_group(transaction, row.run, row))
    return groups


def _with_lease(transaction: Transaction, row: GroupRow) -> GroupRow:
    """The group, with a lease of at least `GRACE` seconds: `accept_rewards` refuses one whose lease has expired."""
    trajectories.renew_lease(transaction, row, GRACE)
    return read_group(transaction, row.id)


def _member_rewards(
    transaction: Transaction, group: str
) -> dict[int, tuple[float | None, Include]]:
    rows = transaction.all(
        "SELECT member, reward, include FROM member_rewards WHERE id = ?", (group,)
    )
    return {member: (reward, include) for member, reward, include in rows}


def _already_rewarded(completion: str, reward: float | None) -> Refusal:
    return Refusal(
        "already_rewarded",
        f"another reward was accepted for {completion} before: {'null' if reward is None else reward}. That one stands.",
    )
