"""Tracks clients' sessions, models and samplers, each by its id.

A client opens a session and keeps it alive by a heartbeat; its models are released when the session ends, or falls silent and their room
is needed. A sampler represents weights that do not change: weights saved under a name, weights that a training client saved only for this
sampler, or a base model. All of it is in the ledger before clients get the ids, and a new process restores it (`restore`).

The client's paths of saved weights: `tinker://<model>/weights/<name>`, or `tinker://<model>/sampler_weights/<name>`.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, get_args

from groupwise.api.schemas import activity as wire
from groupwise.core.errors import UsageError
from groupwise.server.engine.tinker_protocol import (
    ModelSpec,
    NoRoom,
    Stored,
    StoredKind,
    TinkerEngine,
)
from groupwise.server.ledger import calls
from groupwise.server.ledger.calls import ModelRow, SamplerRow
from groupwise.server.ledger.writer import Ledger
from groupwise.server.tinker import requests
from groupwise.server.tinker.futures import CallQueue, Futures

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)

EPHEMERAL = "_sampler-"
"""Prefix of names of weights saved for a single sampler; names chosen by clients start with a letter or digit."""
ROOM_SILENCE = 60.0
"""Seconds without a heartbeat after which a session is ended if its models take the room that another client needs. Clients send one
every ten seconds; a program that ended without closing its session sends none.
"""
SESSION_SILENCE = 600.0
"""Seconds without a heartbeat after which a session is ended in any case."""


class NotFound(UsageError):
    """There is no session, model or sampler with this id."""

    code = "not_there"


@dataclass(eq=False, slots=True)
class Session:
    """One client's session."""

    id: str
    seen: float
    models: set[str] = field(default_factory=set[str])


@dataclass(eq=False, slots=True)
class Model:
    """A model that a client trains."""

    id: str
    queue: CallQueue
    spec: ModelSpec | None = None
    """None until the model has been created."""
    ephemeral: list[Stored] = field(default_factory=list[Stored])
    updates: int = 0
    """Number of updates since its state was last kept."""
    sums: dict[str, float] = field(default_factory=dict[str, float])
    """Sums of the gradient passes since the last update."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Weights that a client samples with."""

    id: str
    base: str
    weights: Stored | None
    """None: the base without an adapter."""
    path: str | None


class SessionRegistry:
    """All open sessions, models and samplers of this server."""

    def __init__(
        self, engine: TinkerEngine, futures: Futures, ledger: Ledger, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._futures = futures
        self._ledger = ledger
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._samplers: dict[str, Sampler] = {}
        self.models: dict[str, Model] = {}
        """Models that exist or are about to be created, by id."""

    def restore(
        self, sessions: Sequence[str], models: Sequence[ModelRow], samplers: Sequence[SamplerRow]
    ) -> None:
        """Load the sessions, models and samplers of earlier processes."""
        for id in sessions:
            self._sessions[id] = Session(id, self._clock())
        for row in models:
            queue = CallQueue(row.id, self._futures, first=row.done + 1)
            self.models[row.id] = Model(row.id, queue, ModelSpec(**row.spec), sums=row.sums)
            self._sessions[row.session].models.add(row.id)
        for row in samplers:
            weights = None if row.weights is None else Stored(**row.weights)
            self.register_sampler(row.id, row.base, weights)

    # --- sessions --------------------------------------------------------------------------------

    async def create_session(
        self,
        idempotency_key: str | None,
        caller: str = "",
        display_name: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Open a session and return its id. A request repeated after a lost connection has the same key and gets the same session."""
        await self.end_silent_sessions()
        new_id = f"s-{secrets.token_hex(8)}"
        id = await self._ledger.do(
            calls.add_session, new_id, idempotency_key, caller, display_name, user_metadata
        )
        self._sessions.setdefault(id, Session(id, self._clock()))
        self._futures.callers[id] = caller
        return id

    def heartbeat(self, session: str) -> None:
        """Note that the client is alive."""
        self.session(session)

    async def finish(self, session: str) -> None:
        """End a session and release its models. Repeating it is harmless."""
        session_state = self._sessions.pop(session, None)
        self._futures.callers.pop(session, None)
        for id in sorted(session_state.models) if session_state is not None else ():
            model = self.models.pop(id)
            await model.queue.close()
            for stored in model.ephemeral:
                await self._engine.drop_sampler(stored)
            await self._engine.drop(id)
        for id in [id for id in self._samplers if id.startswith(f"{session}:")]:
            del self._samplers[id]
        if session_state is not None:
            await self._ledger.do_when_writable(calls.end_session, session)
            # A repeated request may have opened it again meanwhile.
            self._sessions.pop(session, None)

    async def end_silent_sessions(self) -> None:
        """End the sessions of clients that have sent no heartbeat for `SESSION_SILENCE` seconds."""
        silent = self._clock() - SESSION_SILENCE
        for session in [session.id for session in self._sessions.values() if session.seen < silent]:
            await self.finish(session)

    async def with_room(self, session: str, attempt: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Returns what `attempt` does for a session. While it raises NoRoom, the other session with models that has been silent for
        longest is ended, if its silence is at least `ROOM_SILENCE`, and it is tried again.
        """
        while True:
            try:
                return await attempt()
            except NoRoom as error:
                others = [
                    other
                    for other in self._sessions.values()
                    if other.models and other.id != session
                ]
                silent = min(others, key=lambda other: other.seen, default=None)
                if silent is None or self._clock() - silent.seen < ROOM_SILENCE:
                    raise NoRoom(f"{error} {self._advice(session, silent)}".strip()) from None
                logger.info("%s ends: silent, and its room is needed", silent.id)
                await self.finish(silent.id)

    def _advice(self, own: str, silent: Session | None) -> str:
        """Advice for the client of the session `own`; `silent` is the other session that has been silent for longest."""
        if silent is None:
            mine = [id for id in self._sessions[own].models if self.models[id].spec is not None]
            return (
                f"Your own client has {', '.join(mine)}: close it (ServiceClient.close), and make a new one."
                if mine
                else ""
            )
        wait = max(silent.seen + ROOM_SILENCE - self._clock(), 0)
        return (
            f"Models that are there: {'; '.join(self.with_models().values())}. If one of these clients is yours and not needed, close it "
            f"(ServiceClient.close) or end its program, then try again: a client that has ended without closing makes way after "
            f"{ROOM_SILENCE:g} seconds of silence, the first of them in {wait:.0f} seconds at the earliest."
        )

    async def free_room(self) -> None:
        """End the sessions with models that have been silent for `ROOM_SILENCE` seconds, because a run needs the machine."""
        silent = self._clock() - ROOM_SILENCE
        for session in [*self._sessions.values()]:
            if session.models and session.seen < silent:
                await self.finish(session.id)

    def with_models(self) -> dict[str, str]:
        """Describe the sessions that have models, by session id; for messages."""
        now = self._clock()

        def models_of(session: Session) -> str:
            names = [id for id in sorted(session.models) if self.models[id].spec is not None]
            return ", ".join(names) or f"{session.id}, whose model is being made"

        return {
            session.id: f"{models_of(session)}: heard of {now - session.seen:.0f} seconds ago, makes way in "
            f"{max(session.seen + ROOM_SILENCE - now, 0):.0f} unless it is heard of again"
            for session in self._sessions.values()
            if session.models
        }

    def list_sessions(self) -> list[wire.Session]:
        """All sessions, for the dashboard. The steps of their models are missing; the caller adds them from the ledger."""
        now = self._clock()
        samplers = Counter(session_of(id) for id in self._samplers)
        return [
            wire.Session(
                id=session.id,
                silent_seconds=max(now - session.seen, 0.0),
                let_go_seconds=max(
                    session.seen + (ROOM_SILENCE if session.models else SESSION_SILENCE) - now, 0.0
                ),
                models=[
                    wire.SessionModel(
                        id=model.id,
                        base=None if model.spec is None else model.spec.base,
                        rank=None if model.spec is None else model.spec.rank,
                        waiting=model.queue.pending,
                    )
                    for model in (self.models[id] for id in sorted(session.models))
                ],
                samplers=samplers[session.id],
            )
            for session in self._sessions.values()
        ]

    def session(self, id: str) -> Session:
        """Note that a session is alive, and return it. Raises NotThere if there is none."""
        if id not in self._sessions:
            raise NotFound(
                f"There is no session {id!r}: it was finished, has been silent for {ROOM_SILENCE:g} seconds while another client needed "
                f"its room, or for {SESSION_SILENCE:g} in any case, or had to make way for a run that was started with `replace`. "
                "Make a new ServiceClient; what was saved can be loaded by its path."
            )
        self._sessions[id].seen = self._clock()
        return self._sessions[id]

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        return len(self._sessions)

    # --- models ----------------------------------------------------------------------------------

    def new_model(self, session: str, number: int) -> Model:
        """Register a model that is about to be created; the same number gives the same model."""
        owner = self.session(session)
        id = f"{session}:train:{number}"
        if id not in self.models:
            self.models[id] = Model(id, CallQueue(id, self._futures))
            owner.models.add(id)
        return self.models[id]

    def model(self, id: str) -> Model:
        """A model of an open session. Raises NotThere if it is missing."""
        self.session(session_of(id))
        if id not in self.models:
            raise NotFound(f"There is no model {id!r} in its session.")
        return self.models[id]

    # --- samplers --------------------------------------------------------------------------------

    def add_sampler(self, sampler: Sampler) -> None:
        """Register a sampler; repeating it is harmless. UsageError if its id already has other weights."""
        if self._samplers.setdefault(sampler.id, sampler) != sampler:
            raise UsageError(f"The sampler {sampler.id} exists already, with other weights.")

    def register_sampler(self, id: str, base: str, weights: Stored | None) -> None:
        """Register a sampler that is in the ledger. If it is known already, this is a repeated call."""
        if id in self._samplers:
            return
        path = None if weights is None else path_of(weights)
        self._samplers[id] = Sampler(id, base, weights, path)
        if weights is not None and weights.name.startswith(EPHEMERAL):
            owner = self.models.get(weights.model)
            if owner is not None and session_of(id) == session_of(owner.id):
                owner.ephemeral.append(weights)

    def is_sampled(self, stored: Stored) -> bool:
        """True if a sampler of an open session uses these weights."""
        return any(sampler.weights == stored for sampler in self._samplers.values())

    def sampler(self, id: str) -> Sampler:
        """A sampler by id. Raises NotThere if it is missing."""
        if id not in self._samplers:
            raise NotFound(
                f"There is no sampler {id!r}: its session has ended, or the server was restarted. Make a new sampling client."
            )
        return self._samplers[id]


def session_of(model: str) -> str:
    """The session in the id of a model or sampler; such ids start with the session's id."""
    return model.partition(":")[0]


SCHEME = "tinker://"
MODEL, SAVED = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.-]*"), re.compile(requests.NAME_PATTERN)
"""Model ids and names of saved weights. Both become folder names, so they are checked strictly."""


def path_of(stored: Stored) -> str:
    """The client's path for saved weights."""
    return f"{SCHEME}{stored.model}/{stored.kind}/{stored.name}"


def stored_at(path: str) -> Stored:
    """The inverse of `path_of`. UsageError if the path is malformed."""
    kinds: Mapping[str, StoredKind] = {kind: kind for kind in get_args(StoredKind)}
    parts = path.removeprefix(SCHEME).split("/")
    well_formed = len(parts) == 3 and MODEL.fullmatch(parts[0]) and SAVED.fullmatch(parts[2])
    if not path.startswith(SCHEME) or not well_formed or parts[1] not in kinds:
        raise UsageError(
            f"{path!r} is not a path of saved weights. They look like tinker://<model>/weights/<name> or "
            "tinker://<model>/sampler_weights/<name>."
        )
    return Stored(parts[0], kinds[parts[1]], parts[2])
