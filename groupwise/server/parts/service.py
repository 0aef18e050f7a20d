"""Sampler and learner for one training loop in another process: opened under an id, called by numbers, and released after silence.

    open       starts an engine of its own, unless a run or models use the machine
    call       calls the engine; it continues if the client stops waiting, and its answer is kept until the client has it
    end        by the client, by the next loop of the same owner, or after silence; engine and files are removed

`calls.py` manages the calls. All state ends with the engine, and with this process: the loop has its run, record and checkpoints on its own
disk, and resumes from there.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from groupwise.api.schemas import parts as wire
from groupwise.api.schemas.activity import LoopElsewhere
from groupwise.api.schemas.parts import (
    OF_RUN,
    PIECE,
    SECTIONS,
    AnyVerb,
    CallAnswer,
    CallRequest,
    PartsAnswer,
    PartsKind,
    PartsRequest,
    PlanAnswer,
    PlanRequest,
)
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.server.engine.engine_protocol import (
    CallableEngine,
    Engine,
    EngineLost,
    OpenParts,
    PartsOpened,
)
from groupwise.server.parts.calls import Calls
from groupwise.server.parts.files import Files
from groupwise.server.run.engine_errors import refusal_of
from groupwise.server.run.engine_supervisor import EngineSupervisor
from groupwise.server.run.lifecycle import Runs
from groupwise.server.run.run_config import AllowedModels, allowed_model

logger = logging.getLogger(__name__)

NAME = "parts"
"""Name under which the parts ask for the machine (see `Service.machine_users`), and of their folder."""
GONE_KEPT = 100
"""Number of ended parts for which the reason of their end is kept."""
LOOK_EVERY = 5.0
"""Seconds between two checks for parts whose client is silent."""


GoneCode = Literal["parts_gone", "parts_taken"]


@dataclass(frozen=True, slots=True)
class _EndedParts:
    why: str
    code: GoneCode
    """Code of later refusals: whether the parts were lost (`parts_gone`) or ended on purpose (`parts_taken`)."""


@dataclass(eq=False, slots=True)
class _OpenParts:
    id: str
    owner: str
    files: Files
    engine: CallableEngine
    seen: float
    ready: bool = False
    calls: Calls = field(init=False)


class PartsService:
    """See the module. Client errors are raised as `Refusal`."""

    def __init__(
        self,
        *,
        runs: Runs,
        make_engine: Callable[[], Awaitable[Engine]],
        allowed: AllowedModels,
        folder: Path,
        silence: float,
        longest_wait: float,
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_engine` starts an engine in which nothing is open. `silence`: seconds without a request after which parts are ended;
        `longest_wait`: seconds for which a call waits for the calls before it; `most_bytes`: size limit of a request.
        """
        self._runs = runs
        self._make_engine = make_engine
        self._supervisor = EngineSupervisor(make_engine)
        self._allowed = allowed
        self._folder = folder
        self._silence = silence
        self._longest_wait = longest_wait
        self._most_bytes = most_bytes
        self._clock = clock
        self._parts: _OpenParts | None = None
        self._spare: CallableEngine | None = None
        """A running engine in which nothing is open yet, e.g. one started for a plan."""
        self._spare_until = 0.0
        self._planning = asyncio.Lock()
        """Held while a plan is made: one at a time."""
        self._gone: OrderedDict[str, _EndedParts] = OrderedDict()
        self._watch: asyncio.Task[None] | None = None
        self._cleaning: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Delete the files of an earlier process, and start checking for silent parts."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._watch = asyncio.create_task(self._watch_silence(), name="silent parts")

    async def shut_down(self) -> None:
        """End the parts and all engines, because the server shuts down."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        async with self._runs.machine_lock:
            await self._end_parts("the server was shut down")
        await self._supervisor.end()

    async def release_machine(self) -> None:
        """Called before a run or models start. Refuses with `run_active` while there are parts; see
        `groupwise.server.run.lifecycle.MachineUser`.
        """
        await self._end_if_silent()
        if self._parts is not None:
            raise _taken_refusal(self._parts)
        await self._end_spare()

    async def release_for_replacement(self) -> None:
        """Called before a run is started with `replace: true`; see `groupwise.server.run.lifecycle.MachineUser`."""
        await self._end_parts("a run of the server was started in their place", "parts_taken")

    async def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare = None
            await self._supervisor.end()

    def in_use(self) -> LoopElsewhere | None:
        """The loop that has parts open; None if there is none."""
        parts = self._parts
        if parts is None:
            return None
        silent = max(self._clock() - parts.seen, 0.0)
        return LoopElsewhere(
            id=parts.id, owner=parts.owner, silent_seconds=silent, calls=parts.calls.pending
        )

    # --- opening and ending ----------------------------------------------------------------------

    async def open(self, id: str, request: PartsRequest) -> PartsAnswer:
        """Open parts under this id, with an engine; repeating it returns their state."""
        async with self._runs.machine_lock:
            current = self._parts
            if current is not None and current.id == id:
                return self._parts_answer(current)
            if id in self._gone:
                raise self._ended_refusal(id)
            if current is not None and current.owner == request.owner:
                await self._end_parts(f"{request.owner} has opened other parts", "parts_taken")
            await self._end_if_silent()
            if self._parts is not None:
                raise _taken_refusal(self._parts)
            if self._runs.active_conductor() is not None:
                raise _run_is_active()
            await self._runs.make_room(NAME)
            if self._planning.locked():
                self._spare = None  # planning may take long, so use another engine
            engine, self._spare = await self._fresh_engine(), None
            files = Files(self._folder / id)
            parts = self._parts = _OpenParts(id, request.owner, files, engine, self._clock())
            parts.calls = Calls(
                partial(self._run_call, parts), self._longest_wait, self._most_bytes, self._clock
            )
            logger.info("parts %s are opened for %s", id, request.owner)
            return self._parts_answer(parts)

    async def plan(self, request: PlanRequest) -> PlanAnswer:
        """How the work would be laid out on this machine. An engine started for this is kept for the next parts."""
        async with self._planning:
            async with self._runs.machine_lock:
                if self._parts is not None:  # a plan may take long or crash its engine
                    engine = await _await_engine(self._make_engine())
                elif self._runs.active_conductor() is not None:
                    raise _run_is_active()
                else:
                    await self._runs.make_room(NAME)
                    engine = await self._fresh_engine()
            self._spare_until = self._clock() + self._silence
            try:
                with self._model_description(request.described) as folder:
                    return await self._plan_answer(engine, request, folder)
            finally:
                # Parts may have been opened in this engine meanwhile; it must then stay.
                of_parts = self._parts is not None and self._parts.engine is engine
                if engine is not self._spare and not of_parts:
                    await cast("Engine", engine).close()

    async def _plan_answer(
        self, engine: CallableEngine, request: PlanRequest, described: str | None
    ) -> PlanAnswer:
        try:
            config = self._checked_config(request.kind, request.config, described)
            layout = await engine.call(
                "parts.plan", request.kind, config, request.longest_prompt, described
            )
        except EngineLost as error:
            raise Refusal("engine_recovering", str(error), retry_after=1.0) from None
        except GroupwiseError as error:
            refusal = refusal_of(error, otherwise="settings_conflict")
            refusal.detail = refusal.detail.replace(str(described), "the model")
            raise refusal from None
        return PlanAnswer(layout=layout)

    @contextmanager
    def _model_description(self, text: str | None) -> Generator[str | None]:
        """A temporary folder that contains only the description of a model."""
        if text is None:
            yield None
            return
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(text, encoding="utf-8")
            yield folder

    async def _fresh_engine(self) -> CallableEngine:
        """A running engine in which nothing is open."""
        if self._spare is None or self._spare.reason is not None:
            self._spare = None
            self._spare = await _await_engine(self._supervisor.begin())
        return self._spare

    def look(self, id: str) -> PartsAnswer:
        """The state of parts; the request also counts as a sign of life."""
        return self._parts_answer(self._require_open(id))

    async def close(self, id: str) -> None:
        """End parts that their loop no longer needs. Repeating it is harmless."""
        async with self._runs.machine_lock:
            if self._parts is not None and self._parts.id == id:
                await self._end_parts("they were closed", "parts_taken")
            elif id not in self._gone:
                raise self._ended_refusal(id)

    def files(self, id: str) -> Files:
        """The files of some parts: sent, saved and published."""
        return self._require_open(id).files

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            self.forget_delivered()
            self.notice_loss()
            if self._is_silent(self._parts) or self._spare is not None:
                async with self._runs.machine_lock:
                    await self._end_if_silent()
                    if self._clock() > self._spare_until:
                        await self._end_spare()

    def _is_silent(self, parts: _OpenParts | None) -> bool:
        return parts is not None and parts.seen < self._clock() - self._silence

    async def _end_if_silent(self) -> None:
        if self._is_silent(self._parts):
            await self._end_parts(f"nothing was heard of their loop for {self._silence:g} seconds")

    async def _end_parts(self, reason: str, code: GoneCode = "parts_gone") -> None:
        parts, self._parts = self._parts, None
        if parts is None:
            return
        self._note_gone(parts, reason, code)
        await parts.calls.end()
        await self._supervisor.end()
        await asyncio.to_thread(parts.files.remove)

    def _note_gone(self, parts: _OpenParts, reason: str, code: GoneCode) -> None:
        self._gone[parts.id] = _EndedParts(reason, code)
        while len(self._gone) > GONE_KEPT:
            self._gone.popitem(last=False)
        logger.info("parts %s of %s are ended: %s", parts.id, parts.owner, reason)

    def _require_open(self, id: str) -> _OpenParts:
        parts = self._parts
        if parts is None or parts.id != id:
            raise self._ended_refusal(id)
        parts.seen = self._clock()
        return parts

    def _ended_refusal(self, id: str) -> Refusal:
        if id in self._gone:
            gone = self._gone[id]
            return Refusal(
                gone.code,
                f"The parts {id} no longer exist: {gone.why.rstrip('.')}. What their loop has on its own disk remains; with "
                "--resume a training continues from its last checkpoint.",
            )
        return Refusal(
            "unknown_parts",
            f"There are no parts {id}: they were never opened, or the server has been restarted since. With --resume a "
            "training continues from its last checkpoint.",
        )

    def _parts_answer(self, parts: _OpenParts) -> PartsAnswer:
        parts.seen = self._clock()
        return PartsAnswer(
            id=parts.id,
            ready=parts.ready,
            silence=self._silence,
            piece=min(PIECE, self._most_bytes),
        )

    # --- calls -----------------------------------------------------------------------------------

    async def call(
        self, id: str, number: int, request: CallRequest, content: bytes, wait: float
    ) -> CallAnswer:
        """See `Calls.make`."""
        parts = self._require_open(id)
        return await self._await_answer(parts, parts.calls.make(number, request, content, wait))

    async def answer(self, id: str, number: int, wait: float) -> CallAnswer:
        """See `Calls.answer`."""
        parts = self._require_open(id)
        return await self._await_answer(parts, parts.calls.answer(number, wait))

    async def give_up(self, id: str, number: int) -> CallAnswer:
        """See `Calls.give_up`."""
        parts = self._require_open(id)
        return await self._await_answer(parts, parts.calls.give_up(number))

    async def _await_answer(self, parts: _OpenParts, work: Awaitable[CallAnswer]) -> CallAnswer:
        """Await an answer; if the parts have ended meanwhile, raise the reason."""
        try:
            answer = await work
        except EngineLost:
            raise self._ended_refusal(parts.id) from None
        if self._parts is not parts:
            raise self._ended_refusal(parts.id)
        parts.seen = self._clock()
        return answer

    def forget_delivered(self) -> None:
        """Delete answers that the client has received."""
        if self._parts is not None:
            self._parts.calls.forget()

    async def _run_call(self, parts: _OpenParts, do: AnyVerb) -> Any:
        """Pass a call to the engine. Folders with client files that the call loads are sealed first."""
        call = parts.engine.call
        loads: tuple[str | None, ...] = ()
        if isinstance(do, wire.Open):
            loads = do.model, do.adapter, do.weights
        elif isinstance(do, wire.Load):
            loads = (do.policy.path,)
        elif isinstance(do, wire.LoadState):
            loads = (do.folder,)
        sealed = await asyncio.to_thread(parts.files.seal, *loads)
        try:
            if isinstance(do, wire.Open):
                model, adapter, weights = (
                    None if path is None else str(parts.files.folder(path))
                    for path in (do.model, do.adapter, do.weights)
                )
                order = OpenParts(
                    kind=do.kind,
                    config=self._checked_config(do.kind, do.config, model, adapter),
                    run=do.run,
                    folder=str(parts.files.root),
                    longest_prompt=do.longest_prompt,
                    weights=weights,
                    base=do.base,
                )
                opened: PartsOpened = await call("parts.open", order)
                parts.ready = True
                return asdict(opened)
            arguments = [getattr(do, name) for name in type(do).model_fields if name != "verb"]
            return await call(f"parts.{do.verb}", *arguments)
        except GroupwiseError as error:
            await asyncio.to_thread(parts.files.unseal, sealed)
            if isinstance(error, EngineLost):
                self._drop_lost(parts, str(error))
            raise

    def notice_loss(self) -> None:
        """Release parts whose engine has ended between calls."""
        if self._parts is not None and (reason := self._parts.engine.reason) is not None:
            self._drop_lost(self._parts, reason)

    def _drop_lost(self, parts: _OpenParts, reason: str) -> None:
        """The engine has ended, with all the state of the parts. Calls in progress fail with the same reason."""
        if self._parts is parts:
            self._parts = None
            self._note_gone(parts, reason, "parts_gone")
            self._cleaning = asyncio.create_task(asyncio.to_thread(parts.files.remove))

    def _checked_config(
        self,
        kind: PartsKind,
        client_config: Mapping[str, Any],
        described_model: str | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """The sections of the client's config that the parts are built from. Only models that clients may load are accepted."""
        config = {key: client_config[key] for key in SECTIONS[kind] if key in client_config}
        of_run = _config_section(client_config, "run")
        model = dict(_config_section(client_config, "model"))
        if model.get("trust_remote_code"):
            raise UsageError(
                "model.trust_remote_code would run code of the model's author on the server, which it never does. Leave it out."
            )
        if described_model is not None:
            model |= {"name": described_model, "revision": None}
        elif model.get("revision") is not None:
            raise UsageError(
                "model.revision: anybody may put files on a hub under a revision, so the server loads models as its list names them. "
                "Leave it out, or keep that revision in a folder of the server's models."
            )
        elif isinstance(model.get("name"), str):
            model["name"] = allowed_model("model.name", model["name"], self._allowed)
        # Prompts are sent as tokens, and adapters as files.
        model |= {"adapter": adapter, "adapter_revision": None, "chat_template": None}
        run = {key: of_run[key] for key in OF_RUN if key in of_run}
        return {**config, "model": model, "run": run}


async def _await_engine(engine: Awaitable[Engine]) -> CallableEngine:
    try:
        return cast("CallableEngine", await engine)
    except GroupwiseError as error:  # memory for it may be free again soon
        raise refusal_of(error, otherwise="engine_recovering", retry_after=5.0) from None


def _run_is_active() -> Refusal:
    return Refusal(
        "run_active",
        "A run of this server is active and uses the model alone. Stop it (POST /stop), or run the loop without this server.",
    )


def _config_section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return cast("Mapping[str, Any]", section) if isinstance(section, Mapping) else {}


def _taken_refusal(parts: _OpenParts) -> Refusal:
    return Refusal(
        "run_active",
        f"The loop {parts.owner} drives sampler and learner of this server from elsewhere (parts {parts.id}). It frees them when it ends "
        f"or falls silent; DELETE /parts/{parts.id} takes them from it, and so does POST /start with `replace: true`.",
    )
