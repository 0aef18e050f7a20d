"""Plans: which groups step n trains, in which order, with which parameters.

A plan is stored before the engine receives it. If an engine ends, its successor therefore gets the same plans again, starting at its last
checkpoint. `mark_trained` copies the result of a committed step from the engine's own record. A plan that ends the engine repeatedly is
quarantined with its groups; its step number can then be used by another plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.api.schemas.problems import Refusal
from groupwise.core import atomic_files
from groupwise.runs.encoding import label, pack_json, unpack_json
from groupwise.server.ledger.group_states import MoveError, next_state, states_before
from groupwise.server.ledger.groups import GroupRow, read_group, set_group_state
from groupwise.server.ledger.runs import require_active
from groupwise.server.ledger.transaction import Transaction

PlanState = Literal["planned", "trained", "quarantined"]


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a step."""

    fingerprint_out: str
    version_out: int
    policy_path: str
    metrics: Mapping[str, float | None]
    """Metrics of the step; None in place of a number that is not finite."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The plan of a step."""

    id: int
    run: str
    step: int
    """Index, starting at 0."""
    state: PlanState
    parameters: dict[str, Any]
    """Optimiser parameters, as requested."""
    losses: int
    """Number of engines lost while this step was taken, since it was last trained."""
    groups: tuple[str, ...]
    """Group ids in training order."""
    reason: str | None
    """Why it was quarantined."""
    trained: Trained | None


_COLUMNS = "id, run, step, state, parameters, losses, reason, fingerprint_out, version_out, policy_path, metrics"


def make_plan(
    transaction: Transaction,
    run: str,
    step: int,
    groups: Sequence[str],
    parameters: Mapping[str, Any],
) -> PlanRow:
    """Create the plan of a step of the active run from its rewarded and held groups, in this order.

    Refuses with `unknown_group` (also for a group of another run), `invalid_request` (no rewards yet), `group_in_use` (already in a plan,
    or named twice), or with the way in which the group ended; with `finished` if the run has ended. A second living plan of a step is a bug
    in the caller: MoveError.
    """
    require_active(transaction, run)
    if (existing := plan_of_step(transaction, run, step)) is not None:
        raise MoveError(
            f"step {step + 1} of run {run} has a plan already, of {len(existing.groups)} groups; it is {existing.state}."
        )
    plan = transaction.insert(
        "plans", run=run, step=step, parameters=pack_json(parameters), made_at=transaction.now
    )
    for position, group in enumerate(groups):
        row = _trainable_group(transaction, run, group)
        transaction.execute(
            "UPDATE groups SET state = ?, plan = ?, position = ? WHERE id = ?",
            (next_state(row.state, "plan"), plan, position, row.id),
        )
    return _read_plan(transaction, plan)


def count_loss(transaction: Transaction, run: str, step: int) -> int:
    """Count that an engine was lost while taking this step; returns the count since the step was last trained."""
    plan = _require_plan(transaction, run, step)
    transaction.execute("UPDATE plans SET losses = losses + 1 WHERE id = ?", (plan.id,))
    return plan.losses + 1


def mark_trained(transaction: Transaction, run: str, step: int, trained: Trained) -> PlanRow:
    """Store the result of a step that the engine has committed; a repeated step gets its new result."""
    plan = _require_plan(transaction, run, step)
    transaction.execute(
        """UPDATE plans SET state = 'trained', losses = 0, fingerprint_out = ?, version_out = ?, policy_path = ?,
        metrics = ?, trained_at = ? WHERE id = ?""",
        (
            trained.fingerprint_out,
            trained.version_out,
            trained.policy_path,
            pack_json(atomic_files.without_nan(trained.metrics)),
            transaction.now,
            plan.id,
        ),
    )
    if plan.state == "planned":
        set_group_state(transaction, groups_of(transaction, plan), next_state("planned", "train"))
    return _read_plan(transaction, plan.id)


def quarantine(transaction: Transaction, run: str, step: int, reason: str) -> PlanRow:
    """Quarantine the plan of a step and its groups; the step number can be used again. MoveError if it was trained before."""
    plan = _require_plan(transaction, run, step)
    if plan.state != "planned":
        raise MoveError(
            f"the plan of step {step + 1} of run {run} is {plan.state}: it cannot be quarantined."
        )
    transaction.execute(
        "UPDATE plans SET state = 'quarantined', reason = ? WHERE id = ?", (label(reason), plan.id)
    )
    set_group_state(
        transaction, groups_of(transaction, plan), next_state("planned", "quarantine"), reason
    )
    return _read_plan(transaction, plan.id)


def plan_of_step(transaction: Transaction, run: str, step: int) -> PlanRow | None:
    """The plan of a step that is planned or trained (not quarantined)."""
    plan_id = transaction.value(
        "SELECT id FROM plans WHERE run = ? AND step = ? AND state <> 'quarantined'", (run, step)
    )
    return None if plan_id is None else _read_plan(transaction, plan_id)


def plans_ahead(transaction: Transaction, run: str) -> list[PlanRow]:
    """Plans that are not trained yet, in order."""
    rows = transaction.all(
        "SELECT id FROM plans WHERE run = ? AND state = 'planned' ORDER BY step", (run,)
    )
    return [_read_plan(transaction, plan) for (plan,) in rows]


def plans_from(transaction: Transaction, run: str, step: int) -> list[PlanRow]:
    """The living plans of a run from a step on, in order. An engine that resumes at `step` has to take them again."""
    rows = transaction.all(
        "SELECT id FROM plans WHERE run = ? AND step >= ? AND state <> 'quarantined' ORDER BY step",
        (run, step),
    )
    return [_read_plan(transaction, plan) for (plan,) in rows]


def quarantined_plans(transaction: Transaction, run: str) -> list[PlanRow]:
    """Quarantined plans, in the order of their creation."""
    rows = transaction.all(
        "SELECT id FROM plans WHERE run = ? AND state = 'quarantined' ORDER BY id", (run,)
    )
    return [_read_plan(transaction, plan) for (plan,) in rows]


def plan_of(transaction: Transaction, group: str) -> PlanRow | None:
    """The plan that a group is or was part of; None if there is none."""
    plan = read_group(transaction, group).plan
    return None if plan is None else _read_plan(transaction, plan)


def last_trained_step(transaction: Transaction, run: str) -> int | None:
    """The last trained step of the run; None before the first."""
    return transaction.value(
        # Uses the index of living plans, read from its end.
        """SELECT step FROM plans WHERE run = ? AND state <> 'quarantined' AND trained_at IS NOT NULL
        ORDER BY step DESC LIMIT 1""",
        (run,),
    )


def groups_of(transaction: Transaction, plan: PlanRow) -> list[GroupRow]:
    """The groups of a plan, in the order of training."""
    return [read_group(transaction, group) for group in plan.groups]


def _trainable_group(transaction: Transaction, run: str, group: str) -> GroupRow:
    row = read_group(transaction, group)
    if row.run != run:
        raise Refusal("unknown_group", f"group {group} is of run {row.run}, not of {run}.")
    if row.state in states_before("plan"):
        return row
    if row.state in _PROBLEM_CODES:
        raise Refusal(
            _PROBLEM_CODES[row.state], f"group {group} is {row.state}: no step can train it."
        )
    if row.state == "open":
        problem = f"group {group} has no rewards yet; post them first."
        raise Refusal("invalid_request", problem, field="group_ids")
    raise Refusal("group_in_use", f"group {group} is {row.state}: a step has it already.")


_PROBLEM_CODES = {
    "expired": "lease_expired",
    "given_up": "group_given_up",
    "stale": "group_stale",
    "quarantined": "group_quarantined",
}


def _require_plan(transaction: Transaction, run: str, step: int) -> PlanRow:
    plan = plan_of_step(transaction, run, step)
    if plan is None:
        raise MoveError(f"step {step + 1} of run {run} has no plan; make one first.")
    return plan


def _read_plan(transaction: Transaction, id: int) -> PlanRow:
    row = transaction.first(f"SELECT {_COLUMNS} FROM plans WHERE id = ?", (id,))
    assert row is not None
    _, run, step, state, parameters, losses, reason, fingerprint, version, path, metrics = row
    groups = transaction.all("SELECT id FROM groups WHERE plan = ? ORDER BY position", (id,))
    return PlanRow(
        id,
        run,
        step,
        state,
        unpack_json(parameters),
        losses,
        tuple(group for (group,) in groups),
        reason,
        None if fingerprint is None else Trained(fingerprint, version, path, unpack_json(metrics)),
    )
