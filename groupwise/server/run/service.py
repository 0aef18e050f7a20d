"""The training server's work, without HTTP: each route has a method here, and each thing that a client can get wrong a `Refusal`.

The service keeps what clients do in the ledger and asks the run's conductor for the engine; it decides nothing about steps. A method
returns when what it tells is on the disk. Here its parts are put together; each has its own story:

    lifecycle.py    begins runs and ends them
    completions_and_rewards.py      completions, rewards, steps by hand
    queries.py       status, events, files of a version
    activity.py      what goes on at one instant
    checkpoints.py   what can be gone on from
    periodic_tasks.py     what is done every few seconds, requests or not
    active_run.py       the run that is, or was last: what they all look at
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from groupwise.api.schemas.activity import ActivityAnswer, LoopElsewhere, Session
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.training import (
    ByVerbs,
    CheckpointAnswer,
    CheckpointsAnswer,
    CompletionsRequest,
    EventData,
    GroupAnswer,
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
from groupwise.core.errors import GroupwiseError
from groupwise.server.engine.engine_protocol import Engine
from groupwise.server.ledger import counters
from groupwise.server.ledger.answers import StoredResponse, stored_answer
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run import ledger_operations
from groupwise.server.run.active_run import Current
from groupwise.server.run.activity import Activity
from groupwise.server.run.checkpoints import Checkpoints
from groupwise.server.run.completions_and_rewards import AskPost
from groupwise.server.run.conductor import Conductor
from groupwise.server.run.downloads import OpenVersion
from groupwise.server.run.engine_errors import asked
from groupwise.server.run.engine_supervisor import EngineSupervisor, Limits
from groupwise.server.run.lifecycle import Beside, StartStop
from groupwise.server.run.periodic_tasks import Clockwork
from groupwise.server.run.queries import Reading
from groupwise.server.settings import ServerConfig

T = TypeVar("T")


class Service:
    """The training server of one output folder: a `groupwise.server.routes.context.ServiceLike`."""

    def __init__(
        self,
        config: ServerConfig,
        ledger: Ledger,
        make_engine: Callable[[], Awaitable[Engine]],
    ) -> None:
        """`make_engine` begins an engine process in which nothing is open."""
        self._config = config
        self._ledger = ledger
        self._supervisor = EngineSupervisor(
            make_engine, Limits(restarts=config.max_engine_restarts, window=config.restart_window)
        )
        self._current = Current(config)
        self._checkpoints = Checkpoints(self._current, ledger)
        self._start_stop = StartStop(self._current, ledger, self._supervisor, self._checkpoints)
        self._ask_post = AskPost(self._current, ledger)
        self._clockwork = Clockwork(self._current, ledger)
        self._activity = Activity(self._current, ledger)
        self._reading = Reading(self._current, ledger, self._supervisor, self._clockwork)
        self.beside: dict[str, Beside] = {}
        """Other users of the machine, by name: models of clients, parts of a loop elsewhere."""
        self.by_verbs: Callable[[], ByVerbs] = ByVerbs
        """Status of the models that clients drive; by default there are none."""
        self.sessions: Callable[[], list[Session]] = list
        """Sessions of those clients, for people."""
        self.loop_elsewhere: Callable[[], LoopElsewhere | None] = lambda: None
        """Describes the client that drives sampler and learner from elsewhere."""
        self.turn = self._start_stop.turn
        """Held while a run is begun or ended, or an engine for something else is."""

    # --- the server's own life -------------------------------------------------------------------

    async def begin(self) -> None:
        """Go on with the run that was active when the server ended."""
        await self._start_stop.go_on()
        self._clockwork.start()

    async def shut_down(self, seconds: float) -> None:
        """Take nothing new, finish the step under way as far as the time allows, and end the engine. The run goes on at the next start."""
        self._current.shutting_down = True
        self._current.changed.beat()
        if self._current.conductor is not None:
            await self._current.conductor.leave("shut down", seconds)
        await self._clockwork.stop()
        await self._supervisor.end()
        await self._ledger.close()

    def ready(self) -> str | None:
        """None, or why requests would be refused."""
        conductor = self._current.conductor
        if self._current.shutting_down:
            return "the server is shutting down"
        if conductor is not None and conductor.phase in ("starting", "recovering"):
            return f"the engine is {conductor.phase}"
        if conductor is not None and conductor.phase == "failed":
            return f"the run has failed: {conductor.last_error}"
        return None

    # --- what the routes of ask and post want ----------------------------------------------------

    async def start(self, request: StartRequest, caller: Caller) -> StartAnswer:
        """Begin a run, or go on with one."""
        return await self._start_stop.start(request, caller, tuple(self.beside.values()))

    async def stop(self) -> StopAnswer:
        """End the run after the step under way, with a checkpoint; harmless when repeated."""
        return await self._start_stop.stop()

    async def completions(self, request: CompletionsRequest, caller: Caller) -> list[GroupAnswer]:
        """Sample, keep, and only then answer."""
        return await self._ask_post.completions(request, caller)

    async def give_up(self, group: str) -> None:
        """End a group that its client no longer wants."""
        await self._ask_post.give_up(group)

    async def rewards(
        self, request: RewardsOfOne | RewardsOfSeveral, caller: Caller
    ) -> list[RewardAnswer]:
        """Keep rewards, and only then answer; with `wait` after the step that learns from them."""
        return await self._ask_post.rewards(request, caller)

    async def rewards_trained(
        self, answers: Sequence[RewardAnswer], seconds: float
    ) -> list[RewardAnswer]:
        """Answers that were given before, after the step that learnt from them, or after so many seconds."""
        return await self._ask_post.rewards_trained(answers, seconds)

    async def step(self, request: StepRequest, caller: Caller) -> StepAnswer:
        """Take a step with the groups that are named, or with those that wait."""
        return await self._ask_post.step(request, caller)

    async def step_taken(self, answer: StepAnswer, seconds: float) -> StepAnswer:
        """An answer that was given before, after the step that was planned, or after so many seconds."""
        return await self._ask_post.step_taken(answer, seconds)

    async def status(self) -> StatusAnswer:
        """Status of server and run."""
        loop = self.loop_elsewhere()
        beside = {"verbs": self.by_verbs(), "loop_elsewhere": loop and loop.owner}
        return (await self._reading.status()).model_copy(update=beside)

    async def activity(self) -> ActivityAnswer:
        """Current activity."""
        found = await self._activity.answer(self.sessions())
        return found.model_copy(update={"loop_elsewhere": self.loop_elsewhere()})

    async def events(self, after: int | None, limit: int) -> list[EventData]:
        """Up to `limit` events after this one, oldest first; None: those that come from now on."""
        return await self._reading.events(after, limit)

    async def last_event(self) -> int:
        """The id of the newest event."""
        return await self._reading.last_event()

    async def next_event(self, after: int, seconds: float) -> None:
        """Return when there is an event after this one, or so many seconds are over, or the server shuts down."""
        await self._reading.next_event(after, seconds)

    async def open_version(self, version: str | None) -> OpenVersion:
        """The files of a version, open."""
        return await self._reading.open_version(version)

    async def tokenizer(self) -> TokenizerAnswer:
        """The data that a client needs to render and tokenise as the server does."""
        return await self._reading.tokenizer()

    async def checkpoints(self) -> CheckpointsAnswer:
        """All that can be gone on from: the automatic ones of every run, then those with a name."""
        return await self._checkpoints.listed()

    async def save_checkpoint(self, name: str, caller: Caller) -> CheckpointAnswer:
        """Keep the run as it is now under a name: after the step under way, or as it was left."""
        return await self._checkpoints.save(name, caller)

    async def remembered(self, caller: Caller) -> StoredResponse | None:
        """The earlier answer to this request; refused if its key came with another body."""
        request = ledger_operations.named(caller)
        return None if request is None else await self._ledger.do(stored_answer, request)

    async def count_refusal(self, code: str) -> None:
        """A request about the run was refused."""
        latest = self._current.latest
        if latest is not None:
            with suppress(GroupwiseError):  # a count is not worth failing for
                await self._ledger.do(counters.count_refusal, latest.run, code)

    # --- what the other protocols want -----------------------------------------------------------

    def conducted(self) -> Conductor | None:
        """The run that has an engine, or is about to have one again."""
        return self._current.conducted()

    async def make_room(self, whom: str) -> None:
        """Something beside runs is to have the machine. Refused as `run_active` where something else has it; to be asked within `turn`."""
        for name, other in self.beside.items():
            if name != whom:
                await other.make_way()

    def active(self) -> Conductor:
        """The run that takes something new. Refused as `not_started`, or as what has become of it."""
        return self._current.active()

    async def asked(self, work: Awaitable[T], conductor: Conductor) -> T:
        """Await an engine's answer; refused requests are the client's fault, a lost engine is not."""
        return await asked(work, conductor, self._config.sampling_time_limit)
