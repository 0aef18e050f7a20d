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

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from groupwise.api.schemas.activity import ActivityAnswer, LoopElsewhere, Session
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.training import (
    ByVerbs,
    StartAnswer,
    StartRequest,
    StatusAnswer,
)
from groupwise.core.errors import GroupwiseError
from groupwise.server.engine.engine_protocol import Engine
from groupwise.server.ledger import counters
from groupwise.server.ledger.answers import StoredResponse, stored_answer
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run.active_run import Current
from groupwise.server.run.activity import activity_of
from groupwise.server.run.checkpoints import Checkpoints
from groupwise.server.run.completions_and_rewards import AskPost
from groupwise.server.run.conductor import Conductor
from groupwise.server.run.engine_errors import await_engine
from groupwise.server.run.engine_supervisor import EngineSupervisor, Limits
from groupwise.server.run.lifecycle import Beside, StartStop
from groupwise.server.run.periodic_tasks import PeriodicTasks
from groupwise.server.run.queries import Queries
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
        current = self._current = Current(config)
        self._periodic = PeriodicTasks(current, ledger)
        checkpoints = Checkpoints(current, ledger)
        self._start_stop = StartStop(current, ledger, self._supervisor, checkpoints)
        self._queries = Queries(current, ledger, self._supervisor, self._periodic)
        ask_post = AskPost(current, ledger)

        # What the routes call, each at the part that does it.
        self.stop = self._start_stop.stop
        self.completions = ask_post.completions
        self.give_up = ask_post.give_up
        self.rewards = ask_post.rewards
        self.rewards_trained = ask_post.rewards_trained
        self.step = ask_post.step
        self.step_taken = ask_post.step_taken
        self.events = self._queries.events
        self.last_event = self._queries.last_event
        self.next_event = self._queries.next_event
        self.open_version = self._queries.open_version
        self.tokenizer = self._queries.tokenizer
        self.checkpoints = checkpoints.listed
        self.save_checkpoint = checkpoints.save

        # What other protocols and users of the machine call.
        self.conducted = current.conducted
        self.active = current.active
        self.turn = self._start_stop.turn
        """Held while a run is begun or ended, or an engine for something else is."""
        self.beside: dict[str, Beside] = {}
        """Other users of the machine, by name: models of clients, parts of a loop elsewhere."""
        self.by_verbs: Callable[[], ByVerbs] = ByVerbs
        """Status of the models that clients drive; by default there are none."""
        self.sessions: Callable[[], list[Session]] = list
        """Sessions of those clients, for people."""
        self.loop_elsewhere: Callable[[], LoopElsewhere | None] = lambda: None
        """Describes the client that drives sampler and learner from elsewhere."""

    # --- the server's own life -------------------------------------------------------------------

    async def begin(self) -> None:
        """Go on with the run that was active when the server ended."""
        await self._start_stop.go_on()
        self._periodic.start()

    async def shut_down(self, seconds: float) -> None:
        """Take nothing new, finish the step under way as far as the time allows, and end the engine. The run goes on at the next start."""
        self._current.shutting_down = True
        self._current.changed.beat()
        if self._current.conductor is not None:
            await self._current.conductor.leave("shut down", seconds)
        await self._periodic.stop()
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

    # --- what the routes want ---------------------------------------------------------------------

    async def start(self, request: StartRequest, caller: Caller) -> StartAnswer:
        """Begin a run, or go on with one."""
        return await self._start_stop.start(request, caller, tuple(self.beside.values()))

    async def status(self) -> StatusAnswer:
        """Status of server and run."""
        loop = self.loop_elsewhere()
        beside = {"verbs": self.by_verbs(), "loop_elsewhere": loop and loop.owner}
        return (await self._queries.status()).model_copy(update=beside)

    async def activity(self) -> ActivityAnswer:
        """Current activity."""
        found = await activity_of(self._current, self._ledger, self.sessions())
        return found.model_copy(update={"loop_elsewhere": self.loop_elsewhere()})

    async def remembered(self, caller: Caller) -> StoredResponse | None:
        """The earlier answer to this request; refused if its key came with another body."""
        if caller.answer_key is None:
            return None
        return await self._ledger.do(stored_answer, caller)

    async def count_refusal(self, code: str) -> None:
        """A request about the run was refused."""
        latest = self._current.latest
        if latest is not None:
            with suppress(GroupwiseError):  # a count is not worth failing for
                await self._ledger.do(counters.count_refusal, latest.run, code)

    # --- what the other protocols want -----------------------------------------------------------

    async def make_room(self, whom: str) -> None:
        """Something beside runs is to have the machine. Refused as `run_active` where something else has it; to be asked within `turn`."""
        for name, other in self.beside.items():
            if name != whom:
                await other.make_way()

    async def await_engine(self, work: Awaitable[T], conductor: Conductor) -> T:
        """Await an engine's answer; refused requests are the client's fault, a lost engine is not."""
        return await await_engine(work, conductor, self._config.sampling_time_limit)
