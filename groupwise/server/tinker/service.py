"""The service behind the Tinker API, assembled from its parts; `routes.py` has the HTTP.

    sessions.py   open sessions, models and samplers
    training.py   the calls of a model, one after another in the client's order
    sampling.py   the calls of samplers, in any order
    checkpoints.py  what models have saved, until it expires or is deleted
    rest.py       lists of sessions, training runs and checkpoints
    futures.py    ids and later answers of all calls

All of it is in the ledger before clients get an id, and a new process restores it (`open`): answers stay available, and waiting calls are
done.

The lists of the REST client are answered from the ledger (training runs and sessions) and from the disk (checkpoints). A training run is
a model that a client has trained. It stays listed when its session has ended. There is one account: everyone with a key sees all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import time
import zipfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from groupwise.api.http.route import SMALL_BODY
from groupwise.api.http.strict_json import parse
from groupwise.api.schemas.training import TinkerStatus
from groupwise.core.errors import UsageError
from groupwise.server.engine.saved_adapters import SavedFolders
from groupwise.server.engine.tinker_protocol import TinkerEngine
from groupwise.server.ledger import calls, training_runs
from groupwise.server.ledger.calls import CallRow, Outcome
from groupwise.server.ledger.training_runs import TrainingRunRow
from groupwise.server.ledger.writer import Ledger
from groupwise.server.tinker import requests, responses, translate
from groupwise.server.tinker.checkpoints import Checkpoint, Checkpoints
from groupwise.server.tinker.futures import AnswerGone, Futures, Limits, TooManyCalls
from groupwise.server.tinker.sampling import SamplingCalls
from groupwise.server.tinker.sessions import NotFound, SessionRegistry, path_of
from groupwise.server.tinker.training import FORWARD_BACKWARD, TrainingCalls

BodyT = TypeVar("BodyT", bound=requests.Body)

KEEP_EVERY = 10
"""Number of updates between two kept states of a model. It is recreated from the last kept state."""
ACCEPTED_WITHIN = 10.0
"""Seconds that a client waits for its call to be written to the ledger."""
TOKENIZER_FILES = frozenset(
    (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "config.json",
    )
)
"""Files of a model's folder that AutoTokenizer reads."""
REFUSED = "refused"
"""The kind of refused calls that have nevertheless used a number of their model."""


logger = logging.getLogger(__name__)


class StoringEngine(TinkerEngine, Protocol):
    """An engine whose models save their weights in folders that this process can read."""

    @property
    def folders(self) -> SavedFolders:
        """The saved weights."""
        ...


class TinkerService:
    """Sessions, models and calls of all clients that train through the Tinker API on this server."""

    def __init__(
        self,
        engine: StoringEngine,
        ledger: Ledger,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        keep_every: int = KEEP_EVERY,
    ) -> None:
        """`clock` measures the silence of sessions, `wall_clock` when checkpoints expire. `keep_every`: number of updates after which a
        model's state is kept.
        """
        self._engine = engine
        self._ledger = ledger
        self.futures = Futures(ledger, limits)
        self.registry = SessionRegistry(engine, self.futures, ledger, clock)
        self.checkpoints = Checkpoints(engine.folders, self.registry.is_sampled, wall_clock)
        self.rest = RestLists(ledger, self.checkpoints)
        self.training = TrainingCalls(
            self.registry, engine, ledger, self.checkpoints, keep_every=keep_every
        )
        self.sampling = SamplingCalls(self.registry, engine, self.futures, ledger, self.checkpoints)

    async def open(self) -> None:
        """Restore the sessions and models of earlier processes, and continue their calls; call before the first request."""
        self.registry.restore(
            await self._ledger.do(calls.all_sessions),
            await self._ledger.do(calls.all_models),
            await self._ledger.do(calls.all_samplers),
        )
        await self.checkpoints.open()
        rows = await self._ledger.do(calls.all_calls)
        for row in rows:
            self.futures.restore(row)
            is_repeated = row.state != "waiting" and row.content is not None
            if is_repeated and row.kind == requests.OptimStep.__name__:
                self.registry.models[row.line].updates += 1
        for row in rows:
            if row.state == "waiting":
                try:
                    self._restart_call(row)
                except UsageError as error:
                    # A refused request has taken its number again, so `abandon` does nothing. A call whose model is gone fails here.
                    self.futures.abandon(row.id, error)
                except Exception as error:  # must not keep the server from starting
                    logger.exception("the call %s of an earlier process cannot continue", row.id)
                    self.futures.abandon(row.id, UsageError(f"It cannot continue: {error}"))

    def _restart_call(self, row: CallRow) -> None:
        """Start a call again that had no outcome when the last process ended."""
        assert row.content is not None
        start_by_kind: Mapping[str, Callable[[bytes], Any]] = {
            FORWARD_BACKWARD: lambda content: self.training.forward_backward(
                translate.read(content)
            ),
            "CreateModel": _parse_then(requests.CreateModel, self.training.create_model),
            "OptimStep": _parse_then(requests.OptimStep, self.training.optim_step),
            "SaveWeights": _parse_then(requests.SaveWeights, self.training.save_weights),
            "LoadWeights": _parse_then(requests.LoadWeights, self.training.load_weights),
            "SaveForSampler": _parse_then(requests.SaveForSampler, self.training.save_for_sampler),
            "Sample": _parse_then(requests.Sample, self.sampling.begin_sample),
        }
        if row.kind == REFUSED:
            error = UsageError("This request was refused before.")
            self.registry.model(row.line).queue.submit(row.sequence, row.content, error, REFUSED)
        else:
            start_by_kind[row.kind](row.content)

    async def wait_until_persisted(self, id: str) -> None:
        """Wait until a call is in the ledger, so that its client may get the id. Raises LedgerUnavailable if that takes too long."""
        await self.futures.wait_until_persisted(id, ACCEPTED_WITHIN)

    async def close(self) -> None:
        """Stop all calls; the engine stays."""
        self.futures.suspend()
        await self.checkpoints.close()
        for model in self.registry.models.values():
            await model.queue.close()
        await self.futures.close()

    def status(self) -> TinkerStatus:
        """The Tinker API's part of the server's status."""
        models = [model.id for model in self.registry.models.values() if model.spec is not None]
        return TinkerStatus(
            sessions=self.registry.sessions, models=models, waiting=self.futures.waiting
        )

    def capabilities(self) -> list[dict[str, Any]]:
        """The available bases, in the client's format."""
        return [
            {
                "model_name": name,
                "max_context_length": self._engine.context_length(name),
                "trainable": True,
                "sampleable": True,
            }
            for name in self._engine.names()
        ]

    async def zipped_tokenizer(self, base: str) -> bytes:
        """The tokenizer of a base as a zip file, for AutoTokenizer.from_pretrained."""
        folder = await self._engine.tokenizer_folder(base)

        def zipped() -> bytes:
            content = io.BytesIO()
            with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(folder.iterdir()):
                    if path.name in TOKENIZER_FILES:
                        archive.write(path, path.name)
            return content.getvalue()

        return await asyncio.to_thread(zipped)

    def use_up_number(self, body: bytes, error: UsageError) -> None:
        """Record a JSON request that was refused before it reached its model's queue. Its number, if it has one, is used up: the client
        continues with the next number, which would otherwise wait forever. No large body has one.
        """
        if len(body) > SMALL_BODY:
            return
        try:
            values = parse(body)
            model, sequence = values["model_id"], values["seq_id"]
        except (ValueError, TypeError, KeyError):
            return
        model_state = self.registry.models.get(model) if isinstance(model, str) else None
        if (
            model_state is None
            or type(sequence) is not int
            or not 1 <= sequence < requests.MAX_CALLS
        ):
            return
        # If the number was used before, the request was refused for that reason.
        with contextlib.suppress(UsageError, AnswerGone, TooManyCalls):
            model_state.queue.submit(sequence, body, error, REFUSED)

    async def answer(self, id: str, timeout: float) -> Outcome | None:
        """See `Futures.wait_for_answer`."""
        return await self.futures.wait_for_answer(id, timeout)


def _parse_then(kind: type[BodyT], start: Callable[[BodyT], Any]) -> Callable[[bytes], Any]:
    """Returns a function that starts a call from its stored content."""
    return lambda content: start(kind.model_validate_json(content))


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
