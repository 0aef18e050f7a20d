"""Builds the answer to /activity: living groups with their leases, waiting requests, steps to come, and clients' open sessions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupwise.api.http.shared_state import Seen
from groupwise.api.schemas.activity import (
    MOST_EVENTS,
    MOST_GROUPS,
    PROMPT_SHOWN,
    ActivityAnswer,
    KnownClient,
    LivingGroup,
    PlannedStep,
    Session,
    WaitingRequest,
)
from groupwise.api.schemas.training import EventData
from groupwise.runs.tables import prompt_text
from groupwise.server.ledger import calls, events, groups, plans
from groupwise.server.ledger.groups import GroupRow
from groupwise.server.ledger.plans import PlanRow
from groupwise.server.ledger.transaction import Transaction
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run.active_run import Current
from groupwise.server.run.admission import Admission
from groupwise.server.run.queries import event_data


@dataclass(frozen=True, slots=True)
class _LedgerSnapshot:
    """The ledger's state at one instant."""

    at: float
    uptime: float
    groups: Sequence[GroupRow]
    plans: Sequence[PlanRow]
    events: Sequence[EventData]
    steps: Mapping[str, int]
    """Steps of each model that is trained by verbs."""


class Activity:
    """Activity of the current or last run, and of what clients have open beside it."""

    def __init__(self, current: Current, ledger: Ledger) -> None:
        self._current = current
        self._ledger = ledger

    async def answer(self, sessions: Sequence[Session]) -> ActivityAnswer:
        """Everything but who has asked (`clients`), which the HTTP side knows. `sessions`: as they stand, without their models' steps."""
        row = self._current.latest
        told = await self._ledger.do(_told, None if row is None else row.run)
        conductor = self._current.conductor
        room = None if conductor is None else conductor.admission
        return ActivityAnswer(
            at=told.at,
            run_id=None if row is None else row.run,
            groups=[_group(each, told.uptime) for each in told.groups],
            capacity=None if room is None else room.room.capacity,
            sampling=0 if room is None else room.sampling,
            waiting=[] if room is None else _waiting(room),
            planned=[] if conductor is None else [_planned(each) for each in told.plans],
            events=list(told.events),
            sessions=[_with_steps(each, told.steps) for each in sessions],
        )


def known_clients(seen: Sequence[Seen], now: float) -> list[KnownClient]:
    """Known clients, for people; `now` by the clock that they were noted with."""
    return [
        KnownClient(
            key_id=each.key_id,
            role=each.role.word,
            requests=each.requests,
            refused=each.refused,
            last_request=each.last_request,
            last_problem=each.last_problem,
            idle_seconds=max(0.0, now - each.last),
        )
        for each in seen
    ]


def _told(transaction: Transaction, run: str | None) -> _LedgerSnapshot:
    return _LedgerSnapshot(
        transaction.now,
        transaction.uptime,
        () if run is None else groups.living(transaction, run, MOST_GROUPS),
        () if run is None else plans.plans_ahead(transaction, run),
        [event_data(each) for each in events.newest_events(transaction, MOST_EVENTS)],
        calls.steps_done(transaction),
    )


def _group(row: GroupRow, uptime: float) -> LivingGroup:
    rewards = [each for each in row.rewards or () if each is not None]
    assert row.state in ("open", "rewarded", "held", "planned"), "the others have ended"
    return LivingGroup(
        group_id=row.id,
        state=row.state,
        draw=row.draw,
        members=row.members,
        sampled_step=row.sampled_step,
        key_id=row.key_id,
        prompt=prompt_text(row.prompt)[:PROMPT_SHOWN],
        opened_at=row.opened_at,
        lease_seconds=max(0.0, row.lease_end - uptime) if row.state == "open" else None,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )


def _waiting(room: Admission) -> list[WaitingRequest]:
    now = time.monotonic()
    return [
        WaitingRequest(
            key_id=each.who,
            groups=len(each.draws),
            draws=[draw for draw in each.draws if draw is not None],
            seconds=now - each.since,
        )
        for each in room.in_line()
    ]


def _planned(plan: PlanRow) -> PlannedStep:
    return PlannedStep(step=plan.step, group_ids=list(plan.groups), engines_lost=plan.losses)


def _with_steps(session: Session, steps: Mapping[str, int]) -> Session:
    models = [
        model.model_copy(update={"steps": steps.get(model.id, 0)}) for model in session.models
    ]
    return session.model_copy(update={"models": models})
