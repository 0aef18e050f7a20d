"""The training server's logic, without HTTP: each route has a method here, and each client error is a `Refusal`.

The service records requests in the ledger and gets the engine from the run's conductor; it makes no decisions about steps. A method returns
when its result is on disk. This module assembles the parts:

    lifecycle.py                 starts and ends runs
    completions_and_rewards.py   completions, rewards, manual steps
    queries.py                   status, events, files of a version
    activity.py                  a snapshot of all current activity
    checkpoints.py               checkpoints that a run can start from
    periodic_tasks.py            background tasks, independent of requests
    active_run.py                the current or most recent run, shared by all parts
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from groupwise.api.schemas.activity import ActivityAnswer, LoopElsewhere, Session
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.training import StartAnswer, StartRequest, StatusAnswer, TinkerStatus
from groupwise.core.errors import GroupwiseError
from groupwise.server.engine.engine_protocol import Engine
from groupwise.server.ledger import events, runs
from groupwise.server.ledger.idempotency import StoredResponse, stored_response
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run.active_run import ActiveRun
from groupwise.server.run.activity import activity_of
from groupwise.server.run.checkpoints import Checkpoints
from groupwise.server.run.completions_and_rewards import CompletionsAndRewards
from groupwise.server.run.conductor import Conductor
from groupwise.server.run.engine_errors import await_engine
from groupwise.server.run.engine_supervisor import EngineSupervisor, Limits
from groupwise.server.run.lifecycle import MachineUser, RunLifecycle
from groupwise.server.run.periodic_tasks import PeriodicTasks
from groupwise.server.run.queries import Queries
from groupwise.server.settings import ServerConfig

T = TypeVar("T")


class Service:
    """The training server of one output folder. Errors for the client are raised as `Refusal`."""

    def __init__(
        self, config: ServerConfig, ledger: Ledger, make_engine: Callable[[], Awaitable[Engine]]
    ) -> None:
        """`make_engine` starts an engine process in which nothing is open."""
        self._config = config
        self._ledger = ledger
        self._supervisor = EngineSupervisor(
            make_engine, Limits(restarts=config.max_engine_restarts, window=config.restart_window)
        )
        active_run = self._active_run = ActiveRun(config)
        self._periodic = PeriodicTasks(active_run, ledger)
        checkpoints = Checkpoints(active_run, ledger)
        self._lifecycle = RunLifecycle(active_run, ledger, self._supervisor, checkpoints)
        self._queries = Queries(active_run, ledger, self._supervisor, self._periodic)
        completions_and_rewards = CompletionsAndRewards(active_run, ledger)

        # Methods called by the routes, taken from the part that implements them.
        self.stop = self._lifecycle.stop
        self.completions = completions_and_rewards.completions
        self.give_up = completions_and_rewards.give_up
        self.rewards = completions_and_rewards.rewards
        self.close_group = completions_and_rewards.close_group
        self.rewards_trained = completions_and_rewards.rewards_trained
        self.step = completions_and_rewards.step
        self.step_taken = completions_and_rewards.step_taken
        self.events = self._queries.events
        self.last_event = self._queries.last_event
        self.next_event = self._queries.next_event
        self.open_version = self._queries.open_version
        self.tokenizer = self._queries.tokenizer
        self.checkpoints = checkpoints.list_checkpoints
        self.save_checkpoint = checkpoints.save

        # Called by the other protocols (OpenAI, Tinker, parts).
        self.active_conductor = active_run.active_conductor
        self.active = active_run.active
        self.wait_for_engine = active_run.wait_for_engine
        self.machine_lock = self._lifecycle.machine_lock
        """Held while a run, or an engine for something else, is started or ended."""
        self.machine_users: dict[str, MachineUser] = {}
        """Other users of the machine, by name: the Tinker API, and the parts of a training loop in another process."""
        self.tinker_status: Callable[[], TinkerStatus] = TinkerStatus
        """Returns the status of the models trained through the Tinker API; by default there are none."""
        self.sessions: Callable[[], list[Session]] = list
        """Lists the sessions of the clients that train through the Tinker API, for /activity."""
        self.loop_elsewhere: Callable[[], LoopElsewhere | None] = lambda: None
        """Describes the client whose training loop uses this server's sampler and learner; None if there is none."""

    # --- start and shutdown ----------------------------------------------------------------------

    async def begin(self) -> None:
        """Resume the run that was active when the server ended, and start the periodic tasks."""
        await self._lifecycle.resume_active_run()
        self._periodic.start()

    async def shut_down(self, seconds: float) -> None:
        """Accept nothing new, finish the step in progress within `seconds`, and end the engine. The run resumes at the next start."""
        self._active_run.shutting_down = True
        self._active_run.changed.notify()
        if self._active_run.conductor is not None:
            await self._active_run.conductor.end("shut down", seconds)
        await self._periodic.stop()
        await self._supervisor.end()
        await self._ledger.close()

    def ready(self) -> str | None:
        """None if the server is ready, else why requests would be refused."""
        conductor = self._active_run.conductor
        if self._active_run.shutting_down:
            return "the server is shutting down"
        if conductor is not None and conductor.phase in ("starting", "recovering"):
            return f"the engine is {conductor.phase}"
        if conductor is not None and conductor.phase == "failed":
            return f"the run has failed: {conductor.last_error}"
        return None

    # --- called by the routes ---------------------------------------------------------------------

    async def start(self, request: StartRequest, caller: Caller) -> StartAnswer:
        """Start or resume a run."""
        return await self._lifecycle.start(request, caller, tuple(self.machine_users.values()))

    async def finished_run(self, request: StartRequest) -> str | None:
        """The name of the newest run that took all its steps with exactly these settings; None if there is none."""
        settings = request.model_dump(mode="json", exclude_unset=True)
        rows = await self._ledger.do(runs.list_runs)
        finished = [r.run for r in rows if r.state == "finished" and r.settings == settings]
        return finished[-1] if finished else None

    async def status(self) -> StatusAnswer:
        """Status of server and run."""
        loop = self.loop_elsewhere()
        others = {"tinker": self.tinker_status(), "loop_elsewhere": loop and loop.owner}
        return (await self._queries.status()).model_copy(update=others)

    async def activity(self) -> ActivityAnswer:
        """Current activity."""
        activity = await activity_of(self._active_run, self._ledger, self.sessions())
        return activity.model_copy(update={"loop_elsewhere": self.loop_elsewhere()})

    async def remembered(self, caller: Caller) -> StoredResponse | None:
        """The stored answer to this request; refuses if its key was used with another body."""
        if caller.answer_key is None:
            return None
        return await self._ledger.do(stored_response, caller)

    async def count_refusal(self, code: str) -> None:
        """Count a refused request in the counters of the run."""
        latest = self._active_run.latest
        if latest is not None:
            with suppress(GroupwiseError):  # a counter is not worth a failure
                await self._ledger.do(events.count, latest.run, f"refused/{code}")

    # --- called by the other protocols -----------------------------------------------------------

    async def make_room(self, for_user: str) -> None:
        """Make the other users release the machine for `for_user`. Refuses with `run_active` if one of them is in use. Call while holding
        `machine_lock`.
        """
        for name, user in self.machine_users.items():
            if name != for_user:
                await user.release_machine()

    async def await_engine(self, work: Awaitable[T], conductor: Conductor) -> T:
        """Await an engine's answer. A request that the engine refuses is the client's fault, a lost engine is not."""
        return await await_engine(work, conductor, self._config.sampling_time_limit)
