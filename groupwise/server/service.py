"""What the training server does, without HTTP: each route has a method here, and each thing that a client can get wrong a `Refusal`.

The service keeps what clients do in the ledger and asks the run's conductor for the engine; it decides nothing about steps. A method
returns when what it tells is on the disk.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from groupwise.errors import CheckpointError, GroupwiseError, RunError, UsageError
from groupwise.rollouts.asking import gather_all
from groupwise.runs import durable, find
from groupwise.server import keeping, named
from groupwise.server.caller import Caller
from groupwise.server.conductor import Conductor, Leaving, Standing
from groupwise.server.downloads import OpenVersion
from groupwise.server.engine.port import (
    Engine,
    EngineLost,
    OpenRun,
    Probe,
    SampleOrder,
    Sampling,
)
from groupwise.server.idempotent import answer_of
from groupwise.server.keeper import Keeper, Limits
from groupwise.server.ledger import counters, events, groups, runs
from groupwise.server.ledger.answers import Answer, forget_old_answers, stored_answer
from groupwise.server.ledger.runs import RunRow
from groupwise.server.ledger.uptime import TICK_SECONDS
from groupwise.server.ledger.writer import Ledger
from groupwise.server.named import Beginning, NamedCheckpoints
from groupwise.server.orders import RUNS, Allowed, order_of
from groupwise.server.pulse import Pulse
from groupwise.server.settings import ServerConfig
from groupwise.server.status import status_of
from groupwise.server.tokenizers import tokenizer_answer
from groupwise.server.versions import Versions
from groupwise.types import Prompt
from groupwise.wire.problems import KINDS, Refusal
from groupwise.wire.training import (
    CheckpointAnswer,
    CheckpointsAnswer,
    CompletionsRequest,
    EventData,
    GroupAnswer,
    ModelVersion,
    RewardAnswer,
    RewardsOfOne,
    RewardsOfSeveral,
    StartAnswer,
    StartRequest,
    StatusAnswer,
    StepAnswer,
    StepRequest,
    StopAnswer,
    TokenizerAnswer,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

TOKENIZERS = "tokenizers"
"""Folder of the server's output that holds tokenizers by their hash."""
ENDED = ("finished", "stopped", "failed")
"""Phases of a run that takes nothing more."""
FORGET_EVERY = 600.0
"""Seconds between two looks for answers that are kept no longer."""
PROBE_EVERY = 2.0
"""Seconds between two questions to the engine how it is doing."""


class Beside(Protocol):
    """What is trained beside runs: models that clients drive by verbs."""

    async def make_way(self) -> None:
        """A run is to begin. Refused as `run_active` where there is no room for it."""
        ...

    async def shut_down(self) -> None:
        """The server ends."""
        ...


class Service:
    """The training server of one output folder."""

    def __init__(
        self,
        config: ServerConfig,
        ledger: Ledger,
        make_engine: Callable[[], Awaitable[Engine]],
    ) -> None:
        """`make_engine` begins an engine process in which nothing is open."""
        self._config = config
        self._ledger = ledger
        self._keeper = Keeper(
            make_engine, Limits(restarts=config.max_engine_restarts, window=config.restart_window)
        )
        self._allowed = Allowed(Path(config.model_dir).expanduser(), tuple(config.allowed_models))
        self._named_checkpoints = NamedCheckpoints(config.folder)
        self._changed = Pulse()
        self._conductor: Conductor | None = None
        self._latest: RunRow | None = None
        """The run that is, or was last."""
        self.turn = asyncio.Lock()
        """Held while a run is begun or ended, or an engine for something else is."""
        self.beside: Beside | None = None
        """What is trained beside runs."""
        self._shutting_down = False
        self._probed: Probe | None = None
        """What the engine said last of how it is doing."""
        self._clockwork: tuple[asyncio.Task[None], ...] = ()

    # --- the server's own life -------------------------------------------------------------------

    async def begin(self) -> None:
        """Go on with the run that was active when the server ended; in the background, because it takes a while."""
        known = await self._ledger.do(runs.list_runs)
        self._latest = known[-1] if known else None
        active = await self._ledger.do(runs.active_run)
        if active is not None:
            self._latest = active
            request = StartRequest.model_validate_json(json.dumps(active.settings))
            order = OpenRun(self._here(active.config), request.max_prompt_length, run=active.run)
            self._conductor = self._conductor_of(request, order)
            self._conductor.go_on()
            logger.info("going on with the run %s", active.run)
        self._clockwork = tuple(
            asyncio.create_task(work, name="clockwork") for work in (self._tick(), self._probe())
        )

    async def shut_down(self, seconds: float) -> None:
        """Take nothing new, finish the step under way as far as the time allows, and end the engine. The run goes on at the next start."""
        self._shutting_down = True
        self._changed.beat()
        if self._conductor is not None:
            await self._conductor.leave("shut down", seconds)
        for each in self._clockwork:
            each.cancel()
        await asyncio.gather(*self._clockwork, return_exceptions=True)
        await self._keeper.end()
        await self._ledger.close()

    def ready(self) -> str | None:
        """None, or why requests would be refused."""
        if self._shutting_down:
            return "the server is shutting down"
        if self._conductor is not None and self._conductor.phase in ("starting", "recovering"):
            return f"the engine is {self._conductor.phase}"
        if self._conductor is not None and self._conductor.phase == "failed":
            return f"the run has failed: {self._conductor.last_error}"
        return None

    async def _tick(self) -> None:
        """Every few seconds: keep the uptime, end groups whose lease is over, and forget old answers."""
        forgotten = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            with suppress(GroupwiseError):  # a full disk is told to those who write
                if await self._ledger.do(keeping.tick):
                    self._changed.beat()
                    if self._conductor is not None:
                        self._conductor.nudge()
                        await self._conductor.recount()
                if time.monotonic() - forgotten > FORGET_EVERY:
                    await self._ledger.do(forget_old_answers)
                    forgotten = time.monotonic()

    async def _probe(self) -> None:
        """Every few seconds: how the engine is doing. Whoever asks for the status need not wait for an engine that is computing."""
        while True:
            conductor, probed = self._conductor, None
            if conductor is not None and conductor.phase == "running":
                with suppress(GroupwiseError):  # its loss is noticed elsewhere
                    probed = await conductor.engine.probe()
            self._probed = probed
            await asyncio.sleep(PROBE_EVERY)

    # --- starting and stopping -------------------------------------------------------------------

    async def start(self, request: StartRequest, caller: Caller) -> StartAnswer:
        """Begin a run, or go on with one."""
        async with self.turn:
            self._refuse_when_shutting_down()
            replacing = request.replace
            order, request, old = await self._order(request)
            if self.beside is not None and (replacing or self.conducted() is None):
                await self.beside.make_way()
            await self._make_way(replacing)
            conductor = self._conductor_of(request, order)
            standing = await self._begun(conductor)
            answer = _start_answer(request, standing)
            await self._keep_tokenizer(conductor, standing)
            row = await self._ledger.do(
                keeping.started,
                standing.run,
                f"{RUNS}/{standing.run}",
                request.model_dump(mode="json", exclude_unset=True),
                dict(order.config),
                old is not None,
                standing.step,
                caller,
                answer_of(answer),
            )
            self._conductor, self._latest = conductor, row
            conductor.go_on()
            return answer

    async def _order(self, request: StartRequest) -> tuple[OpenRun, StartRequest, RunRow | None]:
        """What the engine is asked for; of a run that goes on, with what is given beside its own settings."""
        if request.resume_from is None:
            order = order_of(request, self._allowed, self._config.folder)
            return self._named(order), request, None
        rows = {row.run: row for row in await self._ledger.do(runs.list_runs)}
        if (old := rows.get(request.resume_from)) is not None:
            merged = _merged(old.settings, request)
            order = order_of(merged, self._allowed, self._config.folder)
            config = _with_run(order.config, name=old.run)
            return OpenRun(config, merged.max_prompt_length, run=old.run), merged, old
        beginning = self._beginning(request.resume_from, rows)
        merged = _merged(beginning.settings, request)
        order = self._named(order_of(merged, self._allowed, self._config.folder))
        return replace(order, start_from=str(beginning.folder)), merged, None

    def _beginning(self, name: str, rows: Mapping[str, RunRow]) -> Beginning:
        """The checkpoint that a new run begins with: one with a name, or `run@step`. Refused as `unknown_checkpoint`."""
        found = self._named_checkpoints.find(name)
        run, _, step = name.rpartition("@")
        if found is None and run in rows:
            kept = {str(each.step): each for each in self._named_checkpoints.automatic(rows[run])}
            if step in kept:
                found = Beginning(kept[step].path, rows[run].settings)
        if found is not None:
            return found
        raise Refusal(
            "unknown_checkpoint",
            f"there is neither a checkpoint nor a run {name!r}. GET /checkpoints lists the checkpoints; runs that can be gone on with: "
            f"{', '.join(rows) or 'none yet'}.",
        )

    def _named(self, order: OpenRun) -> OpenRun:
        """Under a name that no run has had: one that was stopped is gone on with by `resume_from`, not by chance."""
        wanted = order.config["run"]["name"]
        name, number = wanted, 1
        while (self._config.folder / RUNS / name).exists():
            number += 1
            name = f"{wanted}-{number}"
        return replace(order, config=_with_run(order.config, name=name))

    def _here(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config of a run in this output folder, which may have been moved since."""
        return _with_run(config, dir=str(self._config.folder / RUNS))

    async def _make_way(self, replacing: bool) -> None:
        conductor = self._conductor
        if conductor is not None:
            await conductor.last_words()
        if conductor is None or conductor.phase in ENDED:
            return
        if not replacing:
            run = self._latest.run if self._latest else "the run"
            raise Refusal(
                "run_active",
                f"{run} is active. Stop it first (POST /stop), or start with `replace: true`, which stops it cleanly.",
            )
        await self._left(conductor, "replace")

    async def _begun(self, conductor: Conductor) -> Standing:
        limit = self._config.start_time_limit
        try:
            async with asyncio.timeout(limit):
                return await conductor.begin()
        except TimeoutError:
            await self._keeper.end()
            raise Refusal(
                "timed_out",
                f"the run was not ready after {limit:g} seconds (the server's start_time_limit).",
            ) from None
        except UsageError as error:
            raise refusal_of(error, otherwise="settings_conflict") from None
        except (
            EngineLost
        ) as error:  # it may have been killed for want of memory that is there again
            raise Refusal("engine_recovering", str(error), retry_after=2) from None
        except GroupwiseError as error:
            await self._keeper.end()
            raise refusal_of(error, otherwise="engine_failed") from None

    async def _keep_tokenizer(self, conductor: Conductor, standing: Standing) -> None:
        """Beside the runs, so that it can be had when no engine is there."""
        place = self._tokenizer_folder(standing.opened.tokenizer_hash)
        if place.is_dir():
            return
        files = await conductor.tokenizer_files()

        def fill(folder: Path) -> None:
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

        await asyncio.to_thread(durable.make_folder, place, fill, replace=True)

    def _tokenizer_folder(self, tokenizer_hash: str) -> Path:
        return self._config.folder / TOKENIZERS / tokenizer_hash

    async def stop(self) -> StopAnswer:
        """End the run after the step under way, with a checkpoint; harmless when repeated."""
        async with self.turn:
            if self._conductor is not None:
                await self._left(self._conductor, "stop")
            standing, row = self._standing, self._latest
            return StopAnswer(
                run_id=row.run if row else None, step=standing.step if standing else None
            )

    async def _left(self, conductor: Conductor, why: Leaving) -> None:
        await conductor.leave(why, self._config.step_time_limit)
        self._changed.beat()

    def _conductor_of(self, request: StartRequest, order: OpenRun) -> Conductor:
        return Conductor(
            self._ledger,
            self._keeper,
            request,
            order,
            most_open=self._config.max_open_groups,
            changed=self._changed,
        )

    # --- completions -----------------------------------------------------------------------------

    async def completions(self, request: CompletionsRequest, caller: Caller) -> list[GroupAnswer]:
        """Sample, keep, and only then answer."""
        conductor = self.active()
        _ = conductor.engine  # refused before waiting
        self._check_tokenizer(request.tokenizer_hash, conductor)
        await self._ledger.do(keeping.check_draws, conductor.now.run, request.all_draws)
        wait = self._config.completions_wait
        async with conductor.room.admitted(request.all_draws, wait) as draws:
            orders = [
                _order_of_sample(request, prompt, draw)
                for prompt, draw in zip(request.all_prompts, draws, strict=True)
            ]
            engine = conductor.engine
            sampled = await self.asked(
                gather_all(engine.sample(order) for order in orders), conductor
            )
            answers = await self._ledger.do(
                keeping.keep_groups,
                conductor.now.run,
                sampled,
                conductor.request.lease_seconds,
                request,
                caller,
            )
            await conductor.recount()
        return answers

    async def asked(self, work: Awaitable[T], conductor: Conductor) -> T:
        """What the engine gave; what it refused is the client's, and its loss nobody's fault."""
        try:
            async with asyncio.timeout(self._config.sampling_time_limit):
                return await work
        except TimeoutError:
            raise Refusal("timed_out") from None
        except EngineLost:
            conductor.nudge()
            raise Refusal("engine_recovering", retry_after=2) from None
        except UsageError as error:
            raise refusal_of(error, otherwise="invalid_request") from None
        except RunError as error:
            raise refusal_of(error, otherwise="engine_recovering", retry_after=5) from None

    def _check_tokenizer(self, given: str | None, conductor: Conductor) -> None:
        own = conductor.now.opened.tokenizer_hash
        if given not in (None, own):
            raise Refusal(
                "tokenizer_mismatch",
                f"tokenizer_hash is {given!r}, but the server's tokenizer and template have {own!r}. GET /tokenizer has them.",
            )

    async def give_up(self, group: str) -> None:
        """End a group that its client no longer wants."""
        await self._ledger.do(groups.give_up, group)
        if self._conductor is not None:
            await self._conductor.recount()

    # --- rewards and steps -----------------------------------------------------------------------

    async def rewards(
        self, request: RewardsOfOne | RewardsOfSeveral, caller: Caller
    ) -> list[RewardAnswer]:
        """Keep rewards, and only then answer; with `wait` after the step that learns from them."""
        run = self._any_run()
        if request.wait and self._is_manual():
            raise Refusal("manual_mode")
        version = self._version()
        answers = await self._ledger.do(keeping.keep_rewards, run.run, version, request, caller)
        if self._conductor is not None:
            self._conductor.nudge()
        if not request.wait:
            return answers
        return await self._trained(answers, request.timeout)

    async def _trained(self, answers: list[RewardAnswer], seconds: float) -> list[RewardAnswer]:
        """Answers as they are after the step that learnt from them, or after so many seconds."""
        return await self._awaited(
            lambda: self._ledger.do(keeping.after_step, answers),
            lambda found: all(each.status == "trained" for each in found),
            seconds,
        )

    async def step(self, request: StepRequest, caller: Caller) -> StepAnswer:
        """Take a step with the groups that are named, or with those that wait."""
        conductor = self.active()
        if request.group_ids is None and not self._is_manual():
            raise Refusal("auto_mode")
        deadline = time.monotonic() + request.timeout
        while True:
            beat = self._changed.next
            answer = await self._ledger.do(
                keeping.keep_plan,
                conductor.now.run,
                request,
                conductor.request.prompts_per_step,
                conductor.request.staleness,
                caller,
            )
            if answer is not None:
                break
            await self._beat_before(beat, deadline)
        conductor.nudge()
        if not request.wait:
            return answer
        return await self._awaited(
            lambda: self._ledger.do(keeping.step_after, conductor.now.run, answer),
            lambda found: found.status == "trained",
            deadline - time.monotonic(),
        )

    async def _beat_before(self, beat: asyncio.Event, deadline: float) -> None:
        """Wait for a change. Refused as `too_busy` when the time is over: another step waits already."""
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                await beat.wait()
        except TimeoutError:
            raise Refusal(
                "too_busy", "another step is still being taken; ask again.", retry_after=2
            ) from None

    async def _awaited(
        self, look: Callable[[], Awaitable[T]], done: Callable[[T], bool], seconds: float
    ) -> T:
        """What one sees when it is done, or after so many seconds, or when nobody will do it any more."""
        deadline = time.monotonic() + seconds
        while True:
            beat = self._changed.next
            found = await look()
            if done(found) or self._is_over():
                return found
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    await beat.wait()
            except TimeoutError:
                return found

    # --- what is asked ---------------------------------------------------------------------------

    async def status(self) -> StatusAnswer:
        """Where server and run stand."""
        row, conductor = self._latest, self._conductor
        if row is None:
            return StatusAnswer(phase="idle")
        versions = await asyncio.to_thread(self._versions(row).steps)
        told = await self._ledger.do(keeping.told, row.run)  # last, so that it fits the phase
        return status_of(told, conductor, self._probed, versions, self._keeper.restarts)

    async def events(self, after: int | None, limit: int) -> list[EventData]:
        """At most so many events after this one, the oldest first; None: those that come from now on."""
        if after is None:
            return []
        found = await self._ledger.do(events.events_after, after, limit)
        return [
            EventData(id=each.id, kind=each.kind, at=each.at, run_id=each.run, **each.data)
            for each in found
        ]

    async def last_event(self) -> int:
        """The id of the newest event."""
        return await self._ledger.do(events.last_event)

    async def next_event(self, after: int, seconds: float) -> None:
        """Return when there is an event after this one, or so many seconds are over, or the server shuts down."""
        deadline = time.monotonic() + seconds
        while True:
            beat = self._changed.next
            if self._shutting_down or await self.last_event() > after:
                return
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    await beat.wait()
            except TimeoutError:
                return

    async def open_version(self, version: str | None) -> OpenVersion:
        """The files of a version, open."""
        return await asyncio.to_thread(self._versions(self._any_run()).open, version)

    async def checkpoints(self) -> CheckpointsAnswer:
        """All that can be gone on from: the automatic ones of every run, then those with a name."""
        rows = await self._ledger.do(runs.list_runs)

        def listed() -> list[CheckpointAnswer]:
            kept = [
                named.answer_of(row, each)
                for row in rows
                for each in self._named_checkpoints.automatic(row)
            ]
            return [*kept, *self._named_checkpoints.listed()]

        return CheckpointsAnswer(checkpoints=await asyncio.to_thread(listed))

    async def save_checkpoint(self, name: str) -> CheckpointAnswer:
        """Keep the run as it is now under a name: after the step under way, or as it was left."""
        row = self._any_run()
        self._named_checkpoints.refuse_taken(name)
        while True:
            path = await self._checkpoint(row)
            try:
                return await asyncio.to_thread(self._named_checkpoints.keep, name, path, row)
            except (FileNotFoundError, CheckpointError):
                if path.is_dir():
                    raise  # it was not pruned meanwhile: it is damaged

    async def _checkpoint(self, row: RunRow) -> Path:
        """The newest state of the run, on disk."""
        conductor = self._conductor
        if conductor is not None and conductor.phase not in ENDED:
            saved = await self.asked(conductor.engine.save(), conductor)
            return Path(saved.path)
        kept = self._named_checkpoints.automatic(row)
        if not kept:
            raise Refusal("unknown_checkpoint", f"the run {row.run} has no checkpoint.")
        return kept[-1].path

    async def tokenizer(self) -> TokenizerAnswer:
        """What a client needs to render and tokenise as the server does."""
        standing = self._standing
        if standing is None:
            raise self._conductor.refusal() if self._conductor else Refusal("not_started")
        opened = standing.opened
        folder = self._tokenizer_folder(opened.tokenizer_hash)
        return await asyncio.to_thread(tokenizer_answer, folder, opened)

    async def remembered(self, caller: Caller) -> Answer | None:
        """What the request was answered before; refused where its key came with another body."""
        request = keeping.named(caller)
        return None if request is None else await self._ledger.do(stored_answer, request)

    async def count_refusal(self, code: str) -> None:
        """A request about the run was refused."""
        if self._latest is not None:
            with suppress(GroupwiseError):  # a count is not worth failing for
                await self._ledger.do(counters.count_refusal, self._latest.run, code)

    # --- which run -------------------------------------------------------------------------------

    def conducted(self) -> Conductor | None:
        """The run that has an engine, or is about to have one again."""
        conductor = self._conductor
        return None if conductor is None or conductor.phase in ENDED else conductor

    def active(self) -> Conductor:
        """The run that takes something new. Refused as `not_started`, or as what has become of it."""
        self._refuse_when_shutting_down()
        if self._conductor is None:
            raise Refusal("not_started" if self._latest is None else "finished")
        if self._conductor.phase in ENDED:
            raise self._conductor.refusal()
        return self._conductor

    def _any_run(self) -> RunRow:
        """The run that is, or was last. Refused as `not_started` before the first."""
        if self._latest is None:
            raise Refusal("not_started")
        return self._latest

    def _refuse_when_shutting_down(self) -> None:
        if self._shutting_down:
            raise Refusal("shutting_down", retry_after=5)

    @property
    def _standing(self) -> Standing | None:
        return self._conductor.standing if self._conductor else None

    def _is_manual(self) -> bool:
        return self._conductor is not None and self._conductor.request.steps == "manual"

    def _is_over(self) -> bool:
        """Whether nobody takes steps any more."""
        conductor = self._conductor
        return self._shutting_down or conductor is None or conductor.phase in ENDED

    def _version(self) -> ModelVersion:
        """[run, steps done]."""
        standing = self._standing
        return standing.version if standing else (self._any_run().run, 0)

    def _versions(self, row: RunRow) -> Versions:
        standing = self._standing
        if standing is None or standing.run != row.run:
            folder = self._config.folder / row.folder
            return Versions(
                row.run,
                folder,
                find.run_info(folder).steps,
                {},
                self._config.folder / TOKENIZERS,
            )
        return Versions(
            row.run,
            standing.folder,
            standing.step,
            dict(standing.versions),
            self._tokenizer_folder(standing.opened.tokenizer_hash),
        )


# --- small translations ---------------------------------------------------------------------------


def refusal_of(error: GroupwiseError, otherwise: str, retry_after: float | None = None) -> Refusal:
    """What the package says is wrong, as a problem of the table: under its own code where that is one."""
    if isinstance(error, Refusal):
        return error
    code = error.code if error.code in KINDS else otherwise
    return Refusal(code, str(error), retry_after=retry_after)


def _with_run(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The config with another name or folder of its run."""
    return {**config, "run": {**config["run"], **changes}}


def _merged(settings: Mapping[str, Any], request: StartRequest) -> StartRequest:
    """The settings of an earlier run, with what is given anew."""
    given = request.model_dump(mode="json", exclude_unset=True)
    ours = ("resume_from", "replace")
    kept = {key: value for key, value in settings.items() if key not in ours}
    fresh = {key: value for key, value in given.items() if key not in ours}
    return StartRequest.model_validate_json(json.dumps({**kept, **fresh}))


def _start_answer(request: StartRequest, standing: Standing) -> StartAnswer:
    return StartAnswer(
        run_id=standing.run,
        model_version=standing.version,
        fingerprint=standing.policy.fingerprint,
        max_steps=standing.max_steps,
        groups_per_step=request.prompts_per_step,
        tokenizer_hash=standing.opened.tokenizer_hash,
    )


def _order_of_sample(request: CompletionsRequest, prompt: Prompt, draw: int) -> SampleOrder:
    ids = request.prompt_tokens
    return SampleOrder(
        draw,
        prompt,
        request.num_completions,
        Sampling(
            temperature=request.temperature,
            max_tokens=request.max_completion_length,
            min_tokens=request.min_completion_length,
            stop=None if request.stop is None else tuple(request.stop),
        ),
        None if ids is None else tuple(ids),
    )
