"""Sampler and learner for one loop that runs elsewhere: opened under an id, called by numbers, and let go of when nobody asks any more.

    open       an engine of its own is begun, unless a run or models have the machine
    call       something is done by the engine; it goes on whether or not the client waits, and its answer is kept until it was told
    end        by the client, by the next loop of the same owner, or after silence; engine and files go

A call that is sent again (its connection was lost) is done once. Calls of the learner name the one before, so that they are done in their
order whatever becomes of connections. All of it ends with the engine, and with this process: the loop has its run, record and
checkpoints on its own disk, and resumes from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from groupwise.errors import GroupwiseError, UsageError
from groupwise.server.engine.port import EngineLost, OpenParts, PartsOpened
from groupwise.server.engine_refusals import refusal_of
from groupwise.server.keeper import Keeper
from groupwise.server.orders import Allowed, allowed_model
from groupwise.server.parts.files import Files
from groupwise.server.pulse import Pulse
from groupwise.wire import parts as wire
from groupwise.wire.parts import (
    OF_RUN,
    SECTIONS,
    AnyVerb,
    CallAnswer,
    CallError,
    CallRequest,
    PartsAnswer,
    PartsKind,
    PartsRequest,
    PlanAnswer,
    PlanRequest,
)
from groupwise.wire.problems import Refusal

logger = logging.getLogger(__name__)

NAME = "parts"
"""Among what is beside runs, and of the folder."""
MOST_CALLS = 4096
"""Under way at once."""
TOLD_KEPT = 120.0
"""Seconds for which an answer is kept after it was told: it may have been lost on its way."""
GONE_KEPT = 100
"""Parts that have ended whose end can be told."""
FREED = frozenset({"generate"})
"""Verbs whose calls end when they are given up; the others have changed something by then, and go on."""
LOOK_EVERY = 5.0
"""Seconds between two looks for parts whose client is silent."""


class Runs(Protocol):
    """What else may have the machine; see `groupwise.server.service.Service`."""

    turn: asyncio.Lock

    def conducted(self) -> Any: ...

    async def make_room(self, whom: str) -> None: ...


class Called(Protocol):
    """An engine whose parts can be called by name."""

    async def call(self, verb: str, *arguments: Any) -> Any: ...


@dataclass(eq=False, slots=True)
class _Call:
    content: bytes
    """Hash of what was asked."""
    task: asyncio.Task[Any] | None
    """None: it was given up before it came."""
    verb: str = ""
    told: float | None = None


@dataclass(frozen=True, slots=True)
class _Gone:
    why: str
    code: Literal["parts_gone", "parts_taken"]
    """Whether they were lost, or somebody wanted it so."""


@dataclass(eq=False, slots=True)
class _Parts:
    id: str
    owner: str
    files: Files
    engine: Called
    seen: float
    ready: bool = False
    calls: dict[int, _Call] = field(default_factory=dict[int, _Call])
    in_order: int = 0
    """The highest number of a call in the learner's order that is over."""
    over: Pulse = field(default_factory=Pulse)
    """Beats when one is."""


class PartsService:
    """See the module. What a client can get wrong is a `Refusal`."""

    def __init__(
        self,
        *,
        runs: Runs,
        keeper: Keeper,
        allowed: Allowed,
        folder: Path,
        silence: float,
        longest_wait: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keeper`: of the parts' own engine. Seconds: `silence` after which parts are ended, `longest_wait` for a call before."""
        self._runs = runs
        self._keeper = keeper
        self._allowed = allowed
        self._folder = folder
        self._silence = silence
        self._longest_wait = longest_wait
        self._clock = clock
        self._parts: _Parts | None = None
        self._spare: Called | None = None
        """An engine in which nothing is open yet."""
        self._spare_until = 0.0
        self._gone: OrderedDict[str, _Gone] = OrderedDict()
        self._watch: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Forget what an earlier process has left."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._watch = asyncio.create_task(self._look(), name="silent parts")

    async def shut_down(self) -> None:
        """The server ends."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        async with self._runs.turn:
            await self._end("the server was shut down")
        await self._keeper.end()

    async def make_way(self) -> None:
        """A run or models are to begin. Refused as `run_active` while there are parts; see `groupwise.server.service.Beside`."""
        await self._end_if_silent()
        if self._parts is not None:
            raise _taken(self._parts)
        await self._end_spare()

    async def let_go(self) -> None:
        """A run is started with `replace: true`; see `groupwise.server.start_stop.Beside`."""
        await self._end("a run of the server was started in their place", "parts_taken")

    async def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare = None
            await self._keeper.end()

    def in_use(self) -> str | None:
        """Who has parts open, in their own words."""
        return None if self._parts is None else self._parts.owner

    # --- opening and ending ----------------------------------------------------------------------

    async def open(self, id: str, request: PartsRequest) -> PartsAnswer:
        """Have an engine under this id; again, to hear of it."""
        async with self._runs.turn:
            known = self._parts
            if known is not None and known.id == id:
                return self._answer(known)
            if id in self._gone:
                raise self._ended(id)
            if known is not None and known.owner == request.owner:
                await self._end(f"{request.owner} has opened other parts", "parts_taken")
            await self._end_if_silent()
            if self._parts is not None:
                raise _taken(self._parts)
            if self._runs.conducted() is not None:
                raise _run_is_active()
            await self._runs.make_room(NAME)
            engine, self._spare = await self._fresh_engine(), None
            files = Files(self._folder / id)
            self._parts = _Parts(id, request.owner, files, engine, self._clock())
            logger.info("parts %s are opened for %s", id, request.owner)
            return self._answer(self._parts)

    async def plan(self, request: PlanRequest) -> PlanAnswer:
        """How the work would be laid out here; any engine can tell, and one that is begun for it is kept for who opens parts next."""
        async with self._runs.turn:
            engine = await self._some_engine()
        self._spare_until = self._clock() + self._silence
        try:
            with self._described(request.described) as sent:
                config = self._config(request.kind, request.config, sent)
                layout = await engine.call(
                    "parts.plan", request.kind, config, request.longest_prompt
                )
        except EngineLost as error:
            raise Refusal("engine_recovering", str(error), retry_after=1.0) from None
        except GroupwiseError as error:
            raise refusal_of(error, otherwise="settings_conflict") from None
        return PlanAnswer(layout=layout)

    @contextmanager
    def _described(self, text: str | None) -> Generator[str | None]:
        """A folder with nothing but the description of a model."""
        if text is None:
            yield None
            return
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(text, encoding="utf-8")
            yield folder

    async def _some_engine(self) -> Called:
        run = self._runs.conducted()
        if self._parts is not None:
            return self._parts.engine
        if run is not None:
            raise _run_is_active()
        await self._runs.make_room(NAME)
        return await self._fresh_engine()

    async def _fresh_engine(self) -> Called:
        """An engine in which nothing is open."""
        if self._spare is not None:
            try:
                if not await self._spare.call("parts.ready"):
                    return self._spare
            except EngineLost:
                pass
        self._spare = None
        self._spare = cast("Called", await self._keeper.begin())
        return self._spare

    def look(self, id: str) -> PartsAnswer:
        """The client is there."""
        return self._answer(self._of(id))

    async def close(self, id: str) -> None:
        """The loop needs them no longer. Repeating it is harmless."""
        async with self._runs.turn:
            if self._parts is not None and self._parts.id == id:
                await self._end("they were closed", "parts_taken")
            elif id not in self._gone:
                raise self._ended(id)

    def files(self, id: str) -> Files:
        """What was sent, saved and published."""
        return self._of(id).files

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            self.forget_told()
            if self._is_silent(self._parts) or self._spare is not None:
                async with self._runs.turn:
                    await self._end_if_silent()
                    if self._clock() > self._spare_until:
                        await self._end_spare()

    def _is_silent(self, parts: _Parts | None) -> bool:
        return parts is not None and parts.seen < self._clock() - self._silence

    async def _end_if_silent(self) -> None:
        if self._is_silent(self._parts):
            await self._end(f"nothing was heard of their loop for {self._silence:g} seconds")

    async def _end(
        self, why: str, code: Literal["parts_gone", "parts_taken"] = "parts_gone"
    ) -> None:
        parts, self._parts = self._parts, None
        if parts is None:
            return
        self._gone[parts.id] = _Gone(why, code)
        while len(self._gone) > GONE_KEPT:
            self._gone.popitem(last=False)
        logger.info("parts %s of %s are ended: %s", parts.id, parts.owner, why)
        tasks = [call.task for call in parts.calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._keeper.end()
        await asyncio.to_thread(parts.files.remove)

    def _of(self, id: str) -> _Parts:
        parts = self._parts
        if parts is None or parts.id != id:
            raise self._ended(id)
        parts.seen = self._clock()
        return parts

    def _ended(self, id: str) -> Refusal:
        if id in self._gone:
            gone = self._gone[id]
            return Refusal(
                gone.code,
                f"The parts {id} are no more: {gone.why.rstrip('.')}. What the loop has on its own disk stands; with --resume it "
                "goes on from its last checkpoint.",
            )
        return Refusal(
            "unknown_parts",
            f"There are no parts {id}: they were never opened, or the server has been started anew since. With --resume the loop "
            "goes on from its last checkpoint.",
        )

    def _answer(self, parts: _Parts) -> PartsAnswer:
        parts.seen = self._clock()
        return PartsAnswer(id=parts.id, ready=parts.ready, silence=self._silence)

    # --- calls -----------------------------------------------------------------------------------

    async def call(
        self, id: str, number: int, request: CallRequest, content: bytes, wait: float
    ) -> CallAnswer:
        """Have something done; its answer, if it is there within `wait` seconds. `content`: the request as it came."""
        parts = self._of(id)
        digest = hashlib.sha256(content).digest()
        known = parts.calls.get(number)
        if known is None:
            self._refuse_more(parts)
            work = self._done(parts, number, request)
            task = asyncio.create_task(work, name=f"parts {request.do.verb}")
            task.add_done_callback(_look_at_it)
            known = parts.calls[number] = _Call(digest, task, request.do.verb)
        elif known.task is not None and known.content != digest:
            raise Refusal(
                "call_taken",
                f"The call {number} was made before, with other content. Each call has a number of its own.",
            )
        return await self._told(parts, number, known, wait)

    async def answer(self, id: str, number: int, wait: float) -> CallAnswer:
        """What has become of a call."""
        parts = self._of(id)
        known = parts.calls.get(number)
        if known is None:
            raise Refusal(
                "unknown_call",
                f"There is no call {number}: it was never made, or its answer was told more than {TOLD_KEPT:g} seconds ago.",
            )
        return await self._told(parts, number, known, wait)

    async def give_up(self, id: str, number: int) -> CallAnswer:
        """Nobody waits for a call any more. One that changes something goes on; one that has not come yet will not be done."""
        parts = self._of(id)
        known = parts.calls.get(number)
        if known is None:
            known = parts.calls[number] = _Call(b"", None)
            self._is_over(parts, number)
        elif known.task is not None and known.verb in FREED:
            known.task.cancel()
            await asyncio.wait((known.task,))
        return await self._told(parts, number, known, 0.0)

    async def _told(self, parts: _Parts, number: int, call: _Call, wait: float) -> CallAnswer:
        task = call.task
        if task is None:
            call.told = self._clock()
            return CallAnswer(number=number, state="given_up")
        if not task.done() and wait > 0:
            await asyncio.wait((task,), timeout=wait)
            parts.seen = self._clock()
        if not task.done():
            return CallAnswer(number=number, state="working")
        call.told = self._clock()
        if task.cancelled():
            if self._parts is not parts:
                raise self._ended(parts.id)
            return CallAnswer(number=number, state="given_up")
        error = task.exception()
        if error is None:
            return CallAnswer(number=number, state="done", result=task.result())
        if isinstance(error, EngineLost) and self._parts is not parts:
            raise self._ended(parts.id)
        if isinstance(error, Refusal):
            raise error
        if not isinstance(error, GroupwiseError):
            raise error
        told = CallError(code=error.code, message=error.message)
        return CallAnswer(number=number, state="failed", error=told)

    async def _done(self, parts: _Parts, number: int, request: CallRequest) -> Any:
        try:
            if request.after is not None:
                await self._after(parts, request.after)
            return await self._by_engine(parts, request.do)
        except EngineLost as error:
            asyncio.get_running_loop().call_soon(self._lose, parts, str(error))
            raise
        finally:
            if request.after is not None:
                self._is_over(parts, number)

    async def _after(self, parts: _Parts, number: int) -> None:
        try:
            async with asyncio.timeout(self._longest_wait):
                while parts.in_order < number:
                    await parts.over.next.wait()
        except TimeoutError:
            raise UsageError(
                f"The call {number}, after which this one was to be done, was not over within {self._longest_wait:g} seconds."
            ) from None

    def _is_over(self, parts: _Parts, number: int) -> None:
        parts.in_order = max(parts.in_order, number)
        parts.over.beat()

    def _lose(self, parts: _Parts, why: str) -> None:
        """The engine has ended, and what it held with it."""
        if self._parts is parts:
            self._losing = asyncio.create_task(self._lost(parts, why), name="parts lost")

    async def _lost(self, parts: _Parts, why: str) -> None:
        async with self._runs.turn:
            if self._parts is parts:
                await self._end(why)

    async def _by_engine(self, parts: _Parts, do: AnyVerb) -> Any:
        call = parts.engine.call
        if isinstance(do, wire.Open):
            opened: PartsOpened = await call("parts.open", self._order(parts, do))
            parts.ready = True
            return asdict(opened)
        if isinstance(do, wire.Load):
            Files.check(do.policy.path)
        arguments = [getattr(do, name) for name in type(do).model_fields if name != "verb"]
        return await call(f"parts.{do.verb}", *arguments)

    def _order(self, parts: _Parts, do: wire.Open) -> OpenParts:
        model, adapter, weights = (
            None if path is None else str(parts.files.folder(path))
            for path in (do.model, do.adapter, do.weights)
        )
        return OpenParts(
            kind=do.kind,
            config=self._config(do.kind, do.config, model, adapter),
            run=do.run,
            folder=str(parts.files.root),
            longest_prompt=do.longest_prompt,
            weights=weights,
            base=do.base,
        )

    def _config(
        self,
        kind: PartsKind,
        given: Mapping[str, Any],
        sent: str | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """The sections of the client's config that parts are made by, with models that it may have the server load."""
        config = {key: given[key] for key in SECTIONS[kind] if key in given}
        of_run = _section(given, "run")
        model = dict(_section(given, "model"))
        if model.get("trust_remote_code"):
            raise UsageError(
                "model.trust_remote_code would run code of the model's author on the server, which it does for nobody. Leave it out."
            )
        if sent is not None:
            model |= {"name": sent, "revision": None}
        elif isinstance(model.get("name"), str):
            model["name"] = allowed_model("model.name", model["name"], self._allowed)
        # Prompts come as tokens, and adapters as files.
        model |= {"adapter": adapter, "adapter_revision": None, "chat_template": None}
        run = {key: of_run[key] for key in OF_RUN if key in of_run}
        return {**config, "model": model, "run": run}

    def _refuse_more(self, parts: _Parts) -> None:
        if len(parts.calls) >= MOST_CALLS:
            self.forget_told()
        if len(parts.calls) >= MOST_CALLS:
            raise Refusal(
                "too_busy",
                f"{len(parts.calls)} calls are under way or not fetched, as many as there may be. Wait for some of them.",
                retry_after=1.0,
            )

    def forget_told(self) -> None:
        """Let go of answers that were told some time ago."""
        before = self._clock() - TOLD_KEPT
        calls = {} if self._parts is None else self._parts.calls
        for number in [
            n for n, each in calls.items() if each.told is not None and each.told < before
        ]:
            del calls[number]


def _run_is_active() -> Refusal:
    return Refusal(
        "run_active",
        "A run of this server is active, and has the model to itself. Stop it (POST /stop), or let the loop compute where it is.",
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}


def _taken(parts: _Parts) -> Refusal:
    return Refusal(
        "run_active",
        f"The loop {parts.owner} drives sampler and learner of this server from elsewhere (parts {parts.id}). It frees them when it ends "
        f"or falls silent; DELETE /parts/{parts.id} takes them from it, and so does POST /start with `replace: true`.",
    )


def _look_at_it(task: asyncio.Task[Any]) -> None:
    """So that asyncio does not complain of an error that nobody has asked for yet."""
    if not task.cancelled():
        task.exception()
