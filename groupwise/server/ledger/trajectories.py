"""Groups whose members are trajectories: several calls of an agent, which get one reward together.

The group is opened, with its draw, when its first trajectory begins, and it stays empty until it closes: its calls are stored in `turns`,
each with what was sampled for it. `close_trajectories` makes one rollout of each trajectory and writes them as the group's sampling
record. In `groupwise.server.ledger.members` a trajectory is a member like any other: its reward is stored there, and with enough
rewards, or at the end of the lease, the group is rewarded.

A trajectory has a name that its client chose, unique in its run and API key; it has one of the group's `members` places from its first
call on. A call with the name `*` (`BY_IDS`) is stored as an unnamed trajectory of its own, which takes none of these places. A reward that
lists the ids of such calls joins them into one trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from groupwise.api.schemas.openai import BY_IDS
from groupwise.api.schemas.problems import Refusal
from groupwise.core.types import Example, Group, Prompt, Rollout, from_json, to_json
from groupwise.runs.encoding import label
from groupwise.server.ledger.group_states import FREE, next_state, sql_list
from groupwise.server.ledger.groups import (
    Echo,
    GroupRow,
    content_hash,
    need_free_draw,
    read_group,
    set_group_state,
)
from groupwise.server.ledger.runs import require_active
from groupwise.server.ledger.transaction import Transaction
from groupwise.tasks.rollouts.trajectory import Turn, join_turns

OVER = "a trajectory that has ended takes no more calls; begin another one, under a name of its own"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a trajectory, as its client sent it."""

    run: str
    key_id: str
    trajectory: str
    """Its name, or `BY_IDS`."""
    group: str | None
    """Name of the group that the trajectory belongs to; None for a trajectory that has begun: its own."""
    size: int
    """Number of rewards after which a new group closes."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a call in the ledger, from before it is sampled."""

    row: GroupRow
    member: int
    turn: int
    """Number of the call in its trajectory, from 0. A call that failed leaves a gap."""

    @property
    def id(self) -> str:
        """Id of the call's completion."""
        return f"{self.row.id}-{self.member}-{self.turn}"


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """What was sampled for a call."""

    place: Place
    group: Group
    """One rollout, with the prompt of the call."""
    step: int
    """Completed steps when it was sampled."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights that sampled it."""
        return self.group.rollouts[0].segments[0].fingerprint or ""


@dataclass(frozen=True, slots=True)
class NewTrajectoryGroup:
    """A group to be opened for a first trajectory."""

    id: str
    draw: int
    prompt: Prompt
    """The prompt of its first call, for people to read."""
    step: int
    """Completed steps."""
    version: int
    fingerprint: str


def group_name(name: str) -> str:
    """The name of a group of trajectories in `handed_out`."""
    return f"trajectories:{name}"


# --- calls ----------------------------------------------------------------------------------------


def place_if_begun(transaction: Transaction, call: Call, lease: float) -> Place | None:
    """The place of the next call of a trajectory that has begun; renews the lease of its group. None if this is its first call.

    Refuses with `already_rewarded`, `lease_expired` or `group_given_up` if the trajectory has ended, and with `settings_conflict` if it
    belongs to another group than the call says.
    """
    trajectory = transaction.first(
        "SELECT id, member FROM trajectories WHERE run = ? AND key_id = ? AND name = ?",
        (call.run, call.key_id, label(call.trajectory)),
    )
    if trajectory is None:
        return None
    group, member = trajectory
    row = read_group(transaction, group)
    name = transaction.value("SELECT name FROM handed_out WHERE id = ?", (group,))
    if call.group is not None and name != group_name(call.group):
        own = name.removeprefix(group_name(""))
        raise Refusal(
            "settings_conflict",
            f"the trajectory {call.trajectory[:80]!r} was begun in the group {own[:80]!r}, not in {call.group[:80]!r}. Each trajectory "
            "has a name of its own.",
        )
    _check_under_way(transaction, row, member, f"the trajectory {call.trajectory[:80]!r}")
    return _next_turn(transaction, row, member, lease)


def find_place(transaction: Transaction, call: Call, oldest: int, lease: float) -> Place | None:
    """The place of a call in an open group; None if a new group has to be opened for it.

    A trajectory that has begun stays in its group, and is refused as `place_if_begun` says. A new one joins the open group of the
    call's name that has a place and was opened at step `oldest` or later. Refuses with `settings_conflict` if that group has another size.
    """
    if (place := place_if_begun(transaction, call, lease)) is not None:
        return place
    assert call.group is not None, "a trajectory begins in a group"
    group_id = transaction.value(
        """SELECT groups.id FROM handed_out JOIN groups ON groups.id = handed_out.id
        WHERE handed_out.run = ? AND handed_out.key_id = ? AND handed_out.name = ?
        AND state = 'open' AND lease_end > ? AND sampled_step >= ? AND members > (
            SELECT count(*) FROM trajectories WHERE trajectories.id = groups.id
            AND trajectories.name IS NOT NULL)
        ORDER BY groups.rowid DESC""",
        (call.run, call.key_id, group_name(call.group), transaction.uptime, oldest),
    )
    if group_id is None:
        return None
    row = read_group(transaction, group_id)
    if row.members != call.size:
        raise Refusal(
            "settings_conflict",
            f"the group {call.group[:80]!r} was begun for {row.members} trajectories, not {call.size}. Give the same size in each of its "
            "calls, or use another name.",
        )
    return _begin_trajectory(transaction, call, row, lease)


def open_group(
    transaction: Transaction, call: Call, new: NewTrajectoryGroup, lease: float
) -> Place:
    """Open a group for the first of its trajectories; returns the place of the call. Refuses with `draw_taken`, or `finished`."""
    assert call.group is not None, "a trajectory begins in a group"
    require_active(transaction, call.run)
    need_free_draw(transaction, call.run, new.draw)
    transaction.insert(
        "groups",
        id=new.id,
        run=call.run,
        draw=new.draw,
        state="open",
        sampled_step=new.step,
        version=new.version,
        fingerprint=new.fingerprint,
        members=call.size,
        prompt=json.dumps(new.prompt),
        content=content_hash(Echo(new.prompt, (new.id,))),  # no client can echo it
        key_id=call.key_id,
        opened_at=transaction.now,
        lease_end=transaction.uptime + lease,
    )
    transaction.insert(
        "handed_out",
        id=new.id,
        run=call.run,
        key_id=call.key_id,
        name=group_name(call.group),
        asked="",  # trajectories of a group may ask different things
        given=1,
    )
    return _begin_trajectory(transaction, call, read_group(transaction, new.id), lease, member=0)


def _begin_trajectory(
    transaction: Transaction, call: Call, row: GroupRow, lease: float, member: int | None = None
) -> Place:
    if member is None:
        member = transaction.value("SELECT given FROM handed_out WHERE id = ?", (row.id,))
        transaction.execute("UPDATE handed_out SET given = given + 1 WHERE id = ?", (row.id,))
    transaction.insert(
        "trajectories",
        id=row.id,
        member=member,
        run=call.run,
        key_id=call.key_id,
        name=None if call.trajectory == BY_IDS else label(call.trajectory),
    )
    assert member is not None, "a group is given out from its beginning"
    return _next_turn(transaction, row, member, lease)


def _next_turn(transaction: Transaction, row: GroupRow, member: int, lease: float) -> Place:
    renew_lease(transaction, row, lease)
    where = (row.id, member)
    turn = transaction.value("SELECT turns FROM trajectories WHERE id = ? AND member = ?", where)
    transaction.execute(
        "UPDATE trajectories SET turns = turns + 1 WHERE id = ? AND member = ?", where
    )
    return Place(row, member, turn)


def renew_lease(transaction: Transaction, row: GroupRow, lease: float) -> None:
    """Let the lease of an open group last at least this many seconds from now."""
    transaction.execute(
        "UPDATE groups SET lease_end = max(lease_end, ?) WHERE id = ? AND state = 'open'",
        (transaction.uptime + lease, row.id),
    )


def keep_turn(transaction: Transaction, turn: SampledTurn, lease: float) -> None:
    """Store what was sampled for a call. Refuses, as `find_place` does, if the trajectory has ended."""
    place = turn.place
    row = read_group(transaction, place.row.id)
    require_active(transaction, row.run)
    _check_under_way(transaction, row, place.member, f"the trajectory of call {place.id}")
    renew_lease(transaction, row, lease)
    transaction.insert(
        "turns",
        call=place.id,
        id=row.id,
        member=place.member,
        position=place.turn,
        step=turn.step,
        record=to_json(turn.group),
    )


def withdraw(transaction: Transaction, place: Place) -> bool:
    """Undo a trajectory whose first call failed, and give up its group if it has no other. True if the group was given up."""
    where = (place.row.id, place.member)
    if transaction.value("SELECT count(*) FROM turns WHERE id = ? AND member = ?", where):
        return False
    turns = transaction.value("SELECT turns FROM trajectories WHERE id = ? AND member = ?", where)
    if turns != 1:  # another call of it is being sampled, or it is gone
        return False
    transaction.execute("DELETE FROM trajectories WHERE id = ? AND member = ?", where)
    row = read_group(transaction, place.row.id)
    if row.state != "open" or is_of_trajectories(transaction, row.id):
        return False
    set_group_state(transaction, [row], next_state(row.state, "give_up"))
    return True


def _check_under_way(transaction: Transaction, row: GroupRow, member: int, what: str) -> None:
    rewarded = transaction.value(
        "SELECT count(*) FROM member_rewards WHERE id = ? AND member = ?", (row.id, member)
    )
    if rewarded:
        raise Refusal("already_rewarded", f"{what} has its reward: {OVER}.")
    check_open(transaction, row, what)


def check_open(transaction: Transaction, row: GroupRow, what: str) -> None:
    """Refuse with `group_given_up` or `lease_expired` if the group takes no more calls and rewards."""
    if row.state == "given_up":
        raise Refusal(
            "group_given_up", f"{what} ended when its group {row.id} was given up: {OVER}."
        )
    if row.rewards is not None:
        raise Refusal(
            "lease_expired",
            f"{what} has ended without a reward, because its group {row.id} was closed: {OVER}.",
        )
    if row.state != "open" or row.lease_end <= transaction.uptime:
        raise Refusal(
            "lease_expired",
            f"{what} has ended, because its group {row.id} had neither a call nor a reward for the time of a lease (`lease_seconds` of "
            f"/start): {OVER}.",
        )


# --- rewards --------------------------------------------------------------------------------------


def is_of_trajectories(transaction: Transaction, group: str) -> bool:
    """True if the members of the group are trajectories."""
    return bool(
        transaction.value("SELECT EXISTS (SELECT 1 FROM trajectories WHERE id = ?)", (group,))
    )


def member_named(
    transaction: Transaction, run: str, key_id: str, trajectory: str
) -> tuple[str, int]:
    """Group and member of a trajectory; refuses with `unknown_group`."""
    group_and_member = transaction.first(
        "SELECT id, member FROM trajectories WHERE run = ? AND key_id = ? AND name = ?",
        (run, key_id, label(trajectory)),
    )
    if group_and_member is None:
        raise Refusal(
            "unknown_group",
            f"no call of run {run} with this API key named the trajectory {trajectory[:80]!r}. Its calls say `store: true` and "
            'metadata {"trajectory": …}, or send the headers X-Groupwise-Store and X-Groupwise-Trajectory.',
        )
    return group_and_member


def check_rewardable(transaction: Transaction, row: GroupRow, member: int) -> None:
    """Refuse the reward of a trajectory that has ended, or has no answered call yet."""
    check_open(transaction, row, f"the trajectory {row.id}-{member}")
    calls = transaction.value(
        "SELECT count(*) FROM turns WHERE id = ? AND member = ?", (row.id, member)
    )
    if not calls:
        raise _wrong_calls(
            f"no call of the trajectory {row.id}-{member} has been answered", "trajectory"
        )


def names_of(transaction: Transaction, groups: Sequence[str]) -> list[str]:
    """Names of the trajectories in these groups."""
    rows = transaction.all(
        f"SELECT name FROM trajectories WHERE name IS NOT NULL AND id IN ({', '.join('?' * len(groups))}) ORDER BY name",
        tuple(groups),
    )
    return [name for (name,) in rows]


def member_of_call(transaction: Transaction, call: str) -> tuple[str, int]:
    """Group and member of a call; refuses with `unknown_group`."""
    group, member, _ = _owner_of_call(transaction, call)
    return group, member


def member_of_calls(
    transaction: Transaction, calls: Sequence[str], trajectory: str | None
) -> tuple[str, int]:
    """Group and member of the trajectory that consists of exactly these calls, in this order.

    Calls of no named trajectory become one. Of a named trajectory, calls that are not listed (answers that its agent did not use)
    are left out. Refuses with `unknown_group`, and with `invalid_request` if the calls belong to different trajectories or groups.
    """
    owners = [_owner_of_call(transaction, call) for call in calls]
    groups = list(dict.fromkeys(group for group, _, _ in owners))
    members = list(dict.fromkeys(member for _, member, _ in owners))
    names = {name for _, _, name in owners}
    if len(groups) > 1:
        raise _wrong_calls(
            f"the calls belong to the groups {' and '.join(groups[:2])}; the first was full before the trajectory was rewarded. Run at "
            "most as many trajectories of a group at once as it has places, or name each",
            "completion_ids",
        )
    if len(members) > 1 and names != {None}:
        raise _wrong_calls("the calls belong to different trajectories", "completion_ids")
    if trajectory is not None and names != {label(trajectory)}:
        raise _wrong_calls(f"the calls are not those of {trajectory[:80]!r}", "completion_ids")
    group, member = groups[0], members[0]
    rewarded = transaction.value(
        f"SELECT count(*) FROM member_rewards WHERE id = ? AND member IN ({', '.join('?' * len(members))})",
        (group, *members),
    )
    if rewarded:
        rows = transaction.all(
            "SELECT call FROM turns WHERE id = ? AND member = ? ORDER BY position",
            (group, members[0]),
        )
        if len(members) > 1 or [call for (call,) in rows] != list(calls):
            raise Refusal(
                "already_rewarded",
                f"a trajectory with one of these calls, but not exactly these, was rewarded before: {', '.join(call for (call,) in rows)}.",
            )
    elif read_group(transaction, group).rewards is None:
        _set_calls(transaction, group, members, calls)
    return group, member


def _owner_of_call(transaction: Transaction, call: str) -> tuple[str, int, str | None]:
    owner = transaction.first(
        """SELECT turns.id, turns.member, name FROM turns
        JOIN trajectories ON trajectories.id = turns.id AND trajectories.member = turns.member WHERE call = ?""",
        (call,),
    )
    if owner is None:
        raise Refusal(
            "unknown_group",
            f"no call of a trajectory has the id {call[:80]!r}. Calls whose ids are listed later say `store: true` and "
            f'metadata {{"trajectory": "{BY_IDS}", "group": …}}.',
        )
    return owner


def _set_calls(
    transaction: Transaction, group: str, members: Sequence[int], calls: Sequence[str]
) -> None:
    for member in members[1:]:
        transaction.execute(
            "UPDATE turns SET member = ? WHERE id = ? AND member = ?", (members[0], group, member)
        )
        transaction.execute("DELETE FROM trajectories WHERE id = ? AND member = ?", (group, member))
    where = (group, members[0])
    for (call,) in transaction.all("SELECT call FROM turns WHERE id = ? AND member = ?", where):
        if call not in calls:
            transaction.execute("DELETE FROM turns WHERE call = ?", (call,))
    for position, call in enumerate(calls):
        transaction.execute("UPDATE turns SET position = ? WHERE call = ?", (position, call))


def _wrong_calls(problem: str, field: str) -> Refusal:
    return Refusal("invalid_request", f"{problem}.", field=field, problem=problem)


# --- closing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClosedTrajectories:
    """The trajectories of a group that has just closed, in the order of its members."""

    members: tuple[int, ...]
    """Their numbers before the group was closed, as `member_rewards` has them."""
    without_reward: tuple[str, ...]
    """Names of those that have no reward."""


def close_trajectories(transaction: Transaction, row: GroupRow) -> ClosedTrajectories:
    """Write the sampling record of a group, with one rollout for each of its trajectories that has calls.

    They are sorted by name, so that a step does not depend on the order of the calls. Calls that no reward has listed are left out.
    """
    rewarded = {
        member
        for (member,) in transaction.all(
            "SELECT member FROM member_rewards WHERE id = ?", (row.id,)
        )
    }
    trajectories = transaction.all(
        "SELECT member, name FROM trajectories WHERE id = ? ORDER BY name IS NULL, name, member",
        (row.id,),
    )
    rollouts: list[Rollout] = []
    members: list[int] = []
    without_reward: list[str] = []
    first: Group | None = None
    for member, name in trajectories:
        rows = transaction.all(
            "SELECT record FROM turns WHERE id = ? AND member = ? ORDER BY position",
            (row.id, member),
        )
        sampled = [from_json(Group, record) for (record,) in rows]
        if not sampled or (name is None and member not in rewarded):
            continue
        first = first or sampled[0]
        turns = [Turn(group.example.prompt, group.rollouts[0]) for group in sampled]
        rollouts.append(join_turns(row.draw, len(rollouts), turns, first.example.prompt))
        members.append(member)
        if name is not None and member not in rewarded:
            without_reward.append(name)
    assert first is not None, "a group closes with at least one reward, whose trajectory has calls"
    example = Example(row.draw, first.example.prompt, first.example.columns)
    group = replace(first, draw=row.draw, example=example, rollouts=tuple(rollouts))
    transaction.insert("records", id=row.id, record=to_json(group))
    transaction.execute("UPDATE turns SET record = NULL WHERE id = ?", (row.id,))
    transaction.execute("UPDATE groups SET members = ? WHERE id = ?", (len(members), row.id))
    return ClosedTrajectories(tuple(members), tuple(without_reward))


def open_groups_named(transaction: Transaction, run: str, key_id: str, name: str) -> list[str]:
    """Ids of the open groups of trajectories with this name, oldest first. Refuses with `unknown_group` if there was never one."""
    rows = transaction.all(
        """SELECT groups.id, state FROM handed_out JOIN groups ON groups.id = handed_out.id
        WHERE handed_out.run = ? AND handed_out.key_id = ? AND handed_out.name = ? ORDER BY groups.rowid""",
        (run, key_id, group_name(name)),
    )
    if not rows:
        raise Refusal(
            "unknown_group",
            f"no call of run {run} with this API key named the group {name[:80]!r}. GET /activity lists the open groups.",
        )
    return [group for group, state in rows if state == "open"]


def step_must_wait(transaction: Transaction, run: str, oldest: int) -> bool:
    """True if a group of trajectories under way was begun at step `oldest` or before: the next step would make it too old."""
    return bool(
        transaction.value(
            """SELECT EXISTS (SELECT 1 FROM groups WHERE run = ? AND state = 'open' AND sampled_step <= ? AND lease_end > ?
            AND id IN (SELECT id FROM trajectories))""",
            (run, oldest, transaction.uptime),
        )
    )


def prune_turns(transaction: Transaction, run: str) -> None:
    """Delete what was sampled for trajectories whose group ended without being trained."""
    transaction.execute(
        f"""UPDATE turns SET record = NULL WHERE record IS NOT NULL AND id IN (
            SELECT id FROM groups WHERE run = ? AND state IN ({sql_list(FREE)}))""",
        (run,),
    )
