"""Records the conductor's steps: operations on the ledger, each one transaction.

A plan is made from rewarded groups when a step is due, or from the groups that a client names. Then it is tried, and trained or
quarantined. Each change is committed with its event, so clients never see an event whose change is not on disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import EventKind
from groupwise.core.types import Group, from_json
from groupwise.runs.records import StepRecord
from groupwise.server.engine.engine_protocol import StepDone, scored_group
from groupwise.server.ledger import events, groups, plans, runs, trajectories
from groupwise.server.ledger.group_states import State
from groupwise.server.ledger.plans import PlanRow, Trained
from groupwise.server.ledger.transaction import Transaction
from groupwise.server.run.admission import Traffic

UNDER_WAY: tuple[State, ...] = ("open", "rewarded", "planned")
"""States of groups that a step may still train. Held groups are not counted, because they wait for their client."""
LOST: tuple[State, ...] = ("stale", "quarantined")
"""States of groups that no step will train."""
MAX_LOSSES = 2
"""Number of engines that a plan may end before it is quarantined."""
LEARNING_RATE = "learning_rate"
"""Plan parameter that overrides the schedule's learning rate."""


def count_traffic(transaction: Transaction, run: str) -> Traffic:
    """Count the groups that a step may still train, and those that none will."""
    counts = groups.count_groups(transaction, run, (*UNDER_WAY, *LOST))
    return Traffic(
        steps_done=next_step(transaction, run),
        under_way=sum(counts[state] for state in UNDER_WAY),
        lost=sum(counts[state] for state in LOST),
    )


def next_step(transaction: Transaction, run: str) -> int:
    """Index of the next step: the number of trained steps."""
    last_step = plans.last_trained_step(transaction, run)
    return 0 if last_step is None else last_step + 1


def pending_plan(transaction: Transaction, run: str) -> PlanRow | None:
    """The plan to be trained next; None if there is none."""
    return plans.plan_of_step(transaction, run, next_step(transaction, run))


def plan_when_due(
    transaction: Transaction, run: str, size: int | None, staleness: int
) -> PlanRow | None:
    """The plan of the next step: a waiting one, or a new one as soon as `size` groups are rewarded; None: no step is due.

    Without `size` no plan is made automatically. Groups that have become too old for the policy are marked as stale first. If more groups
    are rewarded than a step takes, those with the lowest draws come first; the new plan is sorted by draw, not by the order
    of the rewards. A step that would make a group of trajectories under way too old waits for it, at most until its lease ends. If
    clients named the draws, a step waits for the draws before its own that are not rewarded yet: it learns from the same groups, in
    whatever order clients answer.
    """
    waiting = pending_plan(transaction, run)
    if waiting is not None:
        return waiting
    step = next_step(transaction, run)
    _mark_stale(transaction, run, step - staleness)
    if size is None:
        return None
    rewarded = sorted(groups.groups_in(transaction, run, ("rewarded",)), key=lambda row: row.draw)
    if len(rewarded) < size or trajectories.step_must_wait(transaction, run, step - staleness):
        return None
    chosen = rewarded[:size]
    if all(row.named for row in chosen):
        missing = groups.first_missing_draw(transaction, run)
        if missing < chosen[-1].draw:
            return None
    return plans.make_plan(transaction, run, step, [row.id for row in chosen], {})


def plan_of_named(
    transaction: Transaction,
    run: str,
    group_ids: Sequence[str] | None,
    most: int,
    staleness: int,
    parameters: Mapping[str, Any],
) -> PlanRow | None:
    """Make a plan from the groups that a client names, in its order; None if another plan is waiting.

    Without names, take up to `most` rewarded groups; refuses with `nothing_to_train` if there are none.
    """
    if pending_plan(transaction, run) is not None:
        return None
    step = next_step(transaction, run)
    _mark_stale(transaction, run, step - staleness)
    if group_ids is None:
        rewarded = groups.groups_in(transaction, run, ("rewarded",))
        group_ids = [row.id for row in sorted(rewarded, key=lambda row: row.draw)][:most]
        if not group_ids:
            raise Refusal("nothing_to_train")
    return plans.make_plan(transaction, run, step, group_ids, parameters)


def _mark_stale(transaction: Transaction, run: str, sampled_before: int) -> None:
    stale = groups.mark_stale(transaction, run, sampled_before)
    if stale:
        data = {"message": "too old to be trained", "data": {"stale": [row.id for row in stale]}}
        events.add_event(transaction, run, EventKind.GROUPS, data)


def groups_to_train(transaction: Transaction, plan: PlanRow) -> tuple[Group, ...]:
    """The groups of a plan with their rewards, in its order.

    Raises Refusal `unknown_checkpoint` if their sampling records were dropped because a later checkpoint existed.
    """
    scored: list[Group] = []
    for row in plans.groups_of(transaction, plan):
        record = groups.read_record(transaction, row.id)
        if record is None:
            raise Refusal(
                "unknown_checkpoint",
                f"step {plan.step + 1} of run {plan.run} would have to be taken again, but its groups were dropped when a checkpoint after "
                "it stood. Restore the run's checkpoints from a copy.",
            )
        assert row.rewards is not None, "a planned group has no rewards"
        scored.append(scored_group(from_json(Group, record), row.rewards))
    return tuple(scored)


def note_trained(transaction: Transaction, plan: PlanRow, done: StepDone) -> bool:
    """Store the result of a step; False if the step was taken again with a different result.

    Sampling records that no checkpoint needs any more are dropped.
    """
    previous = plan.trained
    exact = previous is None or previous.fingerprint_out == done.record.fingerprint_out
    trained = Trained(
        done.record.fingerprint_out, done.record.version_out, done.policy.path, finite(done.metrics)
    )
    plans.mark_trained(transaction, plan.run, plan.step, trained)
    if previous is None:
        _add_step_event(transaction, plan, done.metrics)
    for message in done.warnings:
        events.add_event(transaction, plan.run, EventKind.WARNING, {"message": message})
    groups.prune_records(transaction, plan.run, done.oldest_checkpoint)
    trajectories.prune_turns(transaction, plan.run)
    return exact


def _add_step_event(transaction: Transaction, plan: PlanRow, metrics: Mapping[str, float]) -> None:
    data = {"group_ids": list(plan.groups)}
    event = {"step": plan.step, "metrics": finite(metrics), "data": data}
    events.add_event(transaction, plan.run, EventKind.STEP, event)


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics for JSON: values that are not finite become None."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def note_checkpoint(transaction: Transaction, run: str, step: int) -> None:
    """Announce an automatic checkpoint once, even if its steps are taken again."""
    data = _checkpoint_event(step, f"{run}@{step}")
    events.add_event_once(transaction, run, EventKind.CHECKPOINT, data)


def note_named_checkpoint(transaction: Transaction, run: str, step: int, name: str) -> None:
    """Announce a named checkpoint."""
    events.add_event(transaction, run, EventKind.CHECKPOINT, _checkpoint_event(step, name))


def _checkpoint_event(step: int, address: str) -> dict[str, Any]:
    message = f"start with resume_from: {address} to continue from here"
    return {"step": step, "message": message, "data": {"address": address}}


def note_committed(
    transaction: Transaction, run: str, manifest: StepRecord, metrics: Mapping[str, float]
) -> bool:
    """Record a step that the engine had committed before it was lost and that is missing in the ledger; True if it was recorded."""
    plan = plans.plan_of_step(transaction, run, manifest.step)
    if plan is None or plan.trained is not None:
        return False
    trained = Trained(manifest.fingerprint_out, manifest.version_out, "", finite(metrics))
    plans.mark_trained(transaction, run, manifest.step, trained)
    _add_step_event(transaction, plan, metrics)
    return True


def quarantine_failing(transaction: Transaction, run: str, reason: str) -> PlanRow | None:
    """Quarantine the pending plan, with its groups, if it has ended too many engines; None if it has not."""
    plan = pending_plan(transaction, run)
    if plan is None or plan.losses < MAX_LOSSES:
        return None
    quarantined = plans.quarantine(transaction, run, plan.step, reason)
    data = {"step": plan.step, "message": reason, "data": {"group_ids": list(plan.groups)}}
    events.add_event(transaction, run, EventKind.QUARANTINED, data)
    return quarantined


def note_recovery(transaction: Transaction, run: str, exact: bool, why: str | None) -> None:
    """Record that the engine has recovered; if repeated steps gave different results, the run gets a new incarnation."""
    if exact:
        events.add_event(transaction, run, EventKind.RECOVERED, {})
        return
    transaction.execute("UPDATE runs SET incarnation = incarnation + 1 WHERE run = ?", (run,))
    incarnation = runs.read_run(transaction, run).incarnation
    data = {"message": why, "data": {"incarnation": incarnation}}
    events.add_event(transaction, run, EventKind.RECOVERED_INEXACT, data)


def end_run(
    transaction: Transaction,
    run: str,
    state: runs.RunState,
    kind: EventKind,
    step: int,
    reason: str | None = None,
) -> None:
    """Record that the run has ended, and why."""
    runs.set_run_state(transaction, run, state, reason)
    events.add_event(transaction, run, kind, {"step": step, "message": reason})
