"""Builds the answer to /status from the ledger, the run's conductor and its engine."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence

from groupwise.api.schemas.training import (
    Counters,
    Memory,
    Phase,
    Quarantined,
    StatusAnswer,
    Throughput,
)
from groupwise.server.engine.engine_protocol import Probe
from groupwise.server.ledger import events
from groupwise.server.ledger.runs import RunState
from groupwise.server.run import steps
from groupwise.server.run.conductor import Conductor
from groupwise.server.run.ledger_operations import RunSnapshot

PHASES: Mapping[RunState, Phase] = {
    "active": "recovering",
    "stopped": "stopped",
    "replaced": "stopped",
    "finished": "finished",
    "failed": "failed",
}
"""Phase of a run without a conductor, by its state in the ledger."""
SAMPLED, LEARNED = "perf/sampling_tokens_per_second", "perf/learning_tokens_per_second"
"""Step metrics with the sampling and learning speed."""


def status_of(
    snapshot: RunSnapshot,
    conductor: Conductor | None,
    probe: Probe | None,
    versions: Sequence[int],
    restarts: int,
) -> StatusAnswer:
    """The answer about the current or most recent run."""
    row = snapshot.row
    status = conductor.last_status if conductor else None
    training = row.config["training"]
    return StatusAnswer(
        training_settings=row.settings,
        completion_requests_served=snapshot.counters.get(events.COMPLETION_REQUESTS, 0),
        reward_requests_served=snapshot.counters.get(events.REWARD_REQUESTS, 0),
        phase=conductor.phase if conductor else PHASES[row.state],
        run_id=row.run,
        step=status.step if status else snapshot.step,
        max_steps=training["max_steps"],
        groups_per_step=training["prompts_per_step"],
        model_version=status.version if status else (row.run, snapshot.step),
        fingerprint=status.policy.fingerprint if status else None,
        incarnation=row.incarnation,
        not_repeatable=_why_not_repeatable(snapshot),
        engine_restarts=restarts,
        counters=Counters(
            served=sum(snapshot.groups.values()),
            refused=snapshot.refusals_by_code,
            **snapshot.groups,
        ),
        queue_depth=conductor.admission_if_open.waiting
        if conductor and conductor.admission_if_open
        else 0,
        last_error=(conductor.last_error if conductor else None) or row.reason,
        throughput=Throughput(
            sampled_tokens=probe.sampled_tokens if probe else 0,
            sampled_tokens_per_second=status.metrics.get(SAMPLED) if status else None,
            trained_tokens_per_second=status.metrics.get(LEARNED) if status else None,
            seconds_per_step=status.seconds_per_step if status else None,
        ),
        memory=Memory(
            server_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            engine_bytes=probe.memory if probe else None,
        ),
        versions=[(row.run, step) for step in versions],
        quarantined=[
            Quarantined(step=plan.step, group_ids=list(plan.groups), reason=plan.reason or "")
            for plan in snapshot.quarantined
        ],
        metrics=steps.finite(status.metrics) if status and status.metrics else None,
        last_event_id=snapshot.last_event,
    )


def _why_not_repeatable(snapshot: RunSnapshot) -> str | None:
    """Reasons why the run depends on when its requests arrive."""
    if snapshot.row.settings.get("steps") == "manual":
        return (
            "with `steps: manual` a step takes what its request names or what waits at that moment"
        )
    if snapshot.unnamed:
        return (
            f"{snapshot.unnamed} groups were asked for without `draw`, or over /v1, so their order of arrival decided on their seeds "
            "and on their step"
        )
    return None
