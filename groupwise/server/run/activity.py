"""Builds the answer to /activity: living groups with their leases, waiting requests, planned steps, and clients' open sessions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from groupwise.api.http.shared_state import KeyActivity
from groupwise.api.schemas.activity import (
    MAX_EVENTS,
    MAX_GROUPS,
    PROMPT_SHOWN,
    ActivityAnswer,
    KnownClient,
    LivingGroup,
    PlannedStep,
    Session,
    WaitingRequest,
)
from groupwise.runs.tables import prompt_text
from groupwise.server.ledger import calls, events, groups, members, plans
from groupwise.server.ledger.groups import GroupRow
from groupwise.server.ledger.transaction import Transaction
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run.active_run import ActiveRun
from groupwise.server.run.queries import event_data


async def activity_of(
    active_run: ActiveRun, ledger: Ledger, sessions: Sequence[Session]
) -> ActivityAnswer:
    """Activity of the current or last run, and of the clients' open sessions.

    `clients` is left empty; the HTTP layer fills it in. `sessions` are passed without their models' steps, which are added here.
    """
    run = None if active_run.latest is None else active_run.latest.run
    conductor = active_run.conductor
    admission = None if conductor is None else conductor.admission_if_open
    now = time.monotonic()
    waiting = [
        WaitingRequest(
            key_id=request.key_id,
            groups=len(request.draws),
            draws=[draw for draw in request.draws if draw is not None],
            seconds=now - request.since,
        )
        for request in (() if admission is None else admission.queued_requests())
    ]

    def look(transaction: Transaction) -> ActivityAnswer:
        living_groups = () if run is None else groups.living_groups(transaction, run, MAX_GROUPS)
        planned = () if run is None or conductor is None else plans.plans_ahead(transaction, run)
        steps = calls.steps_done(transaction)
        with_steps = [
            session.model_copy(
                update={
                    "models": [
                        model.model_copy(update={"steps": steps.get(model.id, 0)})
                        for model in session.models
                    ]
                }
            )
            for session in sessions
        ]
        return ActivityAnswer(
            at=transaction.now,
            run_id=run,
            groups=[_living_group(transaction, group) for group in living_groups],
            capacity=None if admission is None else admission.limits.capacity,
            sampling=0 if admission is None else admission.sampling,
            waiting=waiting,
            planned=[
                PlannedStep(step=plan.step, group_ids=list(plan.groups), engines_lost=plan.losses)
                for plan in planned
            ],
            events=[event_data(event) for event in events.newest_events(transaction, MAX_EVENTS)],
            sessions=with_steps,
        )

    return await ledger.do(look)


def known_clients(seen: Sequence[KeyActivity], now: float) -> list[KnownClient]:
    """Convert seen clients for the answer; `now` must be read from the clock that stamped `Seen.last`."""
    return [
        KnownClient(
            key_id=client.key_id,
            role=client.role.word,
            requests=client.requests,
            refused=client.refused,
            last_request=client.last_request,
            last_problem=client.last_problem,
            idle_seconds=max(0.0, now - client.last),
        )
        for client in seen
    ]


def _living_group(transaction: Transaction, row: GroupRow) -> LivingGroup:
    progress = members.progress_of(transaction, row)
    rewards = [reward for reward in row.rewards or () if reward is not None]
    assert row.state in ("open", "rewarded", "held", "planned"), "the others have ended"
    return LivingGroup(
        group_id=row.id,
        name=progress.name,
        state=row.state,
        draw=row.draw,
        members=row.members,
        rewarded=progress.rewarded,
        sampled_step=row.sampled_step,
        key_id=row.key_id,
        prompt=prompt_text(row.prompt)[:PROMPT_SHOWN],
        opened_at=row.opened_at,
        lease_seconds=max(0.0, row.lease_end - transaction.uptime) if row.state == "open" else None,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )
