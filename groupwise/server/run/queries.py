"""Reads the state of server and run for clients: the status, the event stream, and the files of a version."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Mapping, Sequence

from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import (
    Counters,
    EventData,
    Memory,
    Phase,
    Quarantined,
    StatusAnswer,
    Throughput,
    TokenizerAnswer,
)
from groupwise.core.waiting import wait_at_most
from groupwise.server.engine.engine_protocol import Probe
from groupwise.server.ledger import events, runs
from groupwise.server.ledger.runs import RunState, Tokenizer, tokenizer_answer
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run import ledger_operations, steps
from groupwise.server.run.active_run import ActiveRun
from groupwise.server.run.conductor import Conductor
from groupwise.server.run.downloads import OpenVersion
from groupwise.server.run.engine_supervisor import EngineSupervisor
from groupwise.server.run.ledger_operations import RunSnapshot
from groupwise.server.run.named_checkpoints import NamedCheckpoints
from groupwise.server.run.periodic_tasks import PeriodicTasks
from groupwise.server.run.policy_versions import LATEST

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


def event_data(event: events.Event) -> EventData:
    """Convert an event to the form that clients receive."""
    return EventData(id=event.id, kind=event.kind, at=event.at, run_id=event.run, **event.data)


class Queries:
    """Queries about the current or last run."""

    def __init__(
        self,
        active_run: ActiveRun,
        ledger: Ledger,
        supervisor: EngineSupervisor,
        periodic: PeriodicTasks,
    ) -> None:
        self._supervisor = supervisor
        self._periodic = periodic
        self._active_run = active_run
        self._ledger = ledger

    async def status(self) -> StatusAnswer:
        """Status of server and run."""
        row, conductor = self._active_run.latest, self._active_run.conductor
        if row is None:
            return StatusAnswer(phase="idle")
        versions = await asyncio.to_thread(lambda: self._active_run.versions(row).steps())
        # Read the ledger last, right before the phase, so that the two match.
        snapshot = await self._ledger.do(ledger_operations.snapshot_of, row.run)
        return status_of(
            snapshot, conductor, self._periodic.probed, versions, self._supervisor.restarts
        )

    async def events(self, after: int | None, limit: int) -> list[EventData]:
        """Up to `limit` events after this one, oldest first. None: no past events."""
        if after is None:
            return []
        rows = await self._ledger.do(events.events_after, after, limit)
        return [event_data(event) for event in rows]

    async def last_event(self) -> int:
        """The id of the newest event."""
        return await self._ledger.do(events.last_event)

    async def next_event(self, after: int, seconds: float) -> None:
        """Wait until there is an event after this one, the time is over, or the server shuts down."""
        deadline = time.monotonic() + seconds
        while True:
            beat = self._active_run.changed.next_event
            if self._active_run.shutting_down or await self.last_event() > after:
                return
            if not await wait_at_most(deadline - time.monotonic(), beat):
                return

    async def open_version(self, version: str | None) -> OpenVersion:
        """Open the files of a version, which may name a checkpoint, another run, or the current run."""
        row, version_in_run = self._active_run.any_run(), version
        if version is not None and version != LATEST and not version.isdecimal():
            rows = {row.run: row for row in await self._ledger.do(runs.list_runs)}
            checkpoint = await asyncio.to_thread(
                NamedCheckpoints(self._active_run.config.folder).find, version
            )
            if checkpoint is not None and checkpoint.run in rows:
                row, version_in_run = rows[checkpoint.run], str(checkpoint.step)
            else:
                row = rows.get(version.rpartition("@")[0], row)

        def opened() -> OpenVersion:
            return self._active_run.versions(row).open(version_in_run)

        return await asyncio.to_thread(opened)

    async def tokenizer(self) -> TokenizerAnswer:
        """The data that a client needs to render and tokenise like the server."""
        row, status = self._active_run.any_run(), self._active_run.last_status
        tokenizer = Tokenizer.of(status.opened) if status else row.tokenizer
        if tokenizer is None:  # the run was started by an older version of the server
            conductor = self._active_run.conductor
            raise conductor.refusal() if conductor else Refusal("not_started")
        folder = self._active_run.tokenizer_folder(tokenizer.hash)
        return await asyncio.to_thread(tokenizer_answer, folder, tokenizer)


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
