"""All states that a run can be started or resumed from: the automatic checkpoints of every run, and those that clients saved by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import CheckpointAnswer, CheckpointsAnswer
from groupwise.core.errors import CheckpointError, StoreError
from groupwise.server.ledger import runs
from groupwise.server.ledger.runs import RunRow
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run import ledger_operations, steps
from groupwise.server.run.active_run import ENDED, ActiveRun
from groupwise.server.run.engine_errors import await_engine
from groupwise.server.run.named_checkpoints import NamedCheckpoints, StartCheckpoint


class Checkpoints:
    """Checkpoints of one server."""

    def __init__(self, active_run: ActiveRun, ledger: Ledger) -> None:
        self._active_run = active_run
        self._ledger = ledger
        self._named = NamedCheckpoints(active_run.config.folder)

    async def list_checkpoints(self) -> CheckpointsAnswer:
        """All checkpoints: the automatic ones of every run, then the named ones."""
        rows = await self._ledger.do(runs.list_runs)

        def look() -> list[CheckpointAnswer]:
            automatic = [
                CheckpointAnswer(
                    run_id=row.run, step=checkpoint.step, address=f"{row.run}@{checkpoint.step}"
                )
                for row in rows
                for checkpoint in self._named.automatic(row)
            ]
            return [*automatic, *self._named.list_checkpoints()]

        return CheckpointsAnswer(checkpoints=await asyncio.to_thread(look))

    async def save(self, name: str, caller: Caller) -> CheckpointAnswer:
        """Save the run's current state under a name: after the step in progress, or as the run ended."""
        row = self._active_run.any_run()
        # Saved for this same request by a server that ended before it could answer.
        checkpoint = self._named.saved_by_request(name, caller)
        if checkpoint is None:
            self._named.refuse_taken(name)
        while checkpoint is None:
            path = await self._newest_state(row)
            try:
                checkpoint = await asyncio.to_thread(self._named.keep, name, path, row, caller)
            except (StoreError, CheckpointError):
                if path.is_dir():
                    raise  # the folder was not pruned meanwhile, so the checkpoint is damaged
        await self._ledger.do(ledger_operations.keep_checkpoint, checkpoint, caller)
        self._active_run.changed.notify()
        return checkpoint

    async def _newest_state(self, row: RunRow) -> Path:
        """Path of the run's newest state on disk; an active run is saved first."""
        conductor = self._active_run.conductor
        if conductor is not None and conductor.phase not in ENDED:
            checkpoint = await await_engine(
                conductor.engine.save(), conductor, self._active_run.config.sampling_time_limit
            )
            await self._ledger.do(steps.note_checkpoint, row.run, checkpoint.step)
            return Path(checkpoint.path)
        automatic = self._named.automatic(row)
        if not automatic:
            raise Refusal("unknown_checkpoint", f"the run {row.run} has no checkpoint.")
        return automatic[-1].path

    def beginning(self, name: str, rows: Mapping[str, RunRow]) -> StartCheckpoint:
        """The checkpoint that a new run starts from: a named one, or `run@step`. Refuses with `unknown_checkpoint`."""
        start = self._named.find(name)
        run, _, step = name.rpartition("@")
        if start is None and run in rows:
            by_step = {
                str(checkpoint.step): checkpoint for checkpoint in self._named.automatic(rows[run])
            }
            if step in by_step:
                start = StartCheckpoint(
                    by_step[step].path, rows[run].settings, run, by_step[step].step
                )
        if start is not None:
            return start
        raise Refusal(
            "unknown_checkpoint",
            f"there is neither a checkpoint nor a run {name!r}. GET /checkpoints lists the checkpoints; runs that can be continued: "
            f"{', '.join(rows) or 'none yet'}.",
        )
