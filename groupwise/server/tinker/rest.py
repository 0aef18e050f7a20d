"""Answers the lists of the REST client: training runs and sessions from the ledger, checkpoints from the disk.

A training run is a model that a client has trained. It stays listed when its session has ended. There is one account: everyone with a key
sees all of them.
"""

from __future__ import annotations

from datetime import UTC, datetime

from groupwise.server.ledger import training_runs
from groupwise.server.ledger.training_runs import TrainingRunRow
from groupwise.server.ledger.writer import Ledger
from groupwise.server.tinker import requests, responses
from groupwise.server.tinker.checkpoints import Checkpoint, Checkpoints
from groupwise.server.tinker.sessions import NotFound, path_of


class RestLists:
    """See the module."""

    def __init__(self, ledger: Ledger, checkpoints: Checkpoints) -> None:
        self._ledger = ledger
        self._checkpoints = checkpoints

    async def training_run(self, id: str) -> responses.TrainingRun:
        """One training run. NotFound if there never was one of this id."""
        row = await self._ledger.do(training_runs.training_run, id)
        if row is None:
            raise NotFound(
                f"There is no training run {id!r}. list_training_runs tells all of them."
            )
        return await self._describe_run(row)

    async def training_runs(self, page: requests.Page) -> responses.TrainingRunsResponse:
        """A part of all training runs, the newest first."""
        rows, total = await self._ledger.do(training_runs.training_runs, page.limit, page.offset)
        return responses.TrainingRunsResponse(
            training_runs=[await self._describe_run(row) for row in rows],
            cursor=_cursor(page, total),
        )

    async def session(self, id: str) -> responses.GetSessionResponse:
        """One session, also if it has ended. NotFound if there never was one of this id."""
        row = await self._ledger.do(training_runs.session, id)
        if row is None:
            raise NotFound(f"There never was a session {id!r}. list_sessions tells all of them.")
        return responses.GetSessionResponse(
            training_run_ids=row.training_runs,
            sampler_ids=row.samplers,
            user_metadata=row.user_metadata,
            display_name=row.display_name,
        )

    async def sessions(self, page: requests.Page) -> responses.ListSessionsResponse:
        """A part of all sessions, open and ended, the newest first."""
        ids = await self._ledger.do(training_runs.session_ids, page.limit, page.offset)
        return responses.ListSessionsResponse(sessions=ids)

    async def checkpoints_of(self, run: str) -> responses.CheckpointsListResponse:
        """The named checkpoints of a model, oldest first."""
        checkpoints = await self._checkpoints.of_model(run)
        return responses.CheckpointsListResponse(
            checkpoints=[_describe_checkpoint(each) for each in checkpoints]
        )

    async def all_checkpoints(self, page: requests.Page) -> responses.CheckpointsListResponse:
        """A part of what all models have saved under names, the newest first."""
        checkpoints = await self._checkpoints.of_all_models()
        part = checkpoints[page.offset : page.offset + page.limit]
        return responses.CheckpointsListResponse(
            checkpoints=[_describe_checkpoint(each) for each in part],
            cursor=_cursor(page, len(checkpoints)),
        )

    async def storage_usage(self) -> responses.CheckpointStorageUsageResponse:
        """The disk space of all checkpoints."""
        sizes = [each.size_bytes for each in await self._checkpoints.of_all_models()]
        use = responses.StorageUsageOfAccount(
            checkpoint_count=len(sizes), size_bytes=sum(sizes), size_gigabytes=sum(sizes) / 1e9
        )
        return responses.CheckpointStorageUsageResponse(data=[use])

    async def _describe_run(self, row: TrainingRunRow) -> responses.TrainingRun:
        newest = {
            each.stored.kind: _describe_checkpoint(each)
            for each in await self._checkpoints.of_model(row.id)
        }
        return responses.TrainingRun(
            training_run_id=row.id,
            base_model=row.spec["base"],
            model_owner=row.owner,
            lora_rank=row.spec["rank"],
            last_request_time=_time(row.last_request_at),
            last_checkpoint=newest.get("weights"),
            last_sampler_checkpoint=newest.get("sampler_weights"),
            user_metadata=row.user_metadata,
        )


def _describe_checkpoint(checkpoint: Checkpoint) -> responses.Checkpoint:
    stored, note = checkpoint.stored, checkpoint.note
    return responses.Checkpoint(
        checkpoint_id=f"{stored.kind}/{stored.name}",
        checkpoint_type="training" if stored.kind == "weights" else "sampler",
        time=_time(checkpoint.saved_at),
        tinker_path=path_of(stored),
        size_bytes=checkpoint.size_bytes,
        user_metadata=None if note.user_metadata is None else dict(note.user_metadata),
        expires_at=None if note.expires_at is None else _time(note.expires_at),
    )


def _cursor(page: requests.Page, total: int) -> responses.Cursor:
    return responses.Cursor(offset=page.offset, limit=page.limit, total_count=total)


def _time(seconds: float) -> datetime:
    """Seconds since 1970 as the client reads them."""
    return datetime.fromtimestamp(seconds, UTC)
