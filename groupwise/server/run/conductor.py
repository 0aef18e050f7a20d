"""Takes the steps of one run: decides when a step is due, stores its plan, passes it to the engine, and stores the result.

    clients' rewards → ledger → nudge → due? → plan in the ledger → engine.step → trained in the ledger → waiting clients get answers

A single task does all of this, so there is never more than one step in progress. Every request to the engine is stored in the ledger first;
its results are in the run's own record, and the ledger keeps a copy. So any process may end at any time:

    the engine     a new one is started. It resumes from its last checkpoint and reports which steps it had committed; the plans after
                   the checkpoint are taken again, in order, with the same groups.
    this process   the next server process does the same when it starts.

A plan that ends its engine twice is quarantined with its groups, and the run continues without it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import EventKind, Phase, StartRequest
from groupwise.core.errors import GroupwiseError, StoreError, UsageError
from groupwise.core.types import Policy
from groupwise.core.waiting import ChangeNotifier, wait_for_first
from groupwise.runs.folder import CHECKPOINTS
from groupwise.server.engine.engine_protocol import (
    Engine,
    EngineLost,
    Opened,
    OpenRun,
    Plan,
    StepDone,
)
from groupwise.server.ledger import events, groups, plans
from groupwise.server.ledger.plans import PlanRow
from groupwise.server.ledger.runs import RunState
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run import steps
from groupwise.server.run.admission import Admission, Capacity
from groupwise.server.run.engine_supervisor import EngineSupervisor, TooManyRestarts, is_full

logger = logging.getLogger(__name__)

NEWEST_STEP_WEIGHT = 0.2
"""Weight of the newest step in the moving average of seconds per step."""

StopReason = Literal["stop", "replace", "shut down"]
"""Why no further step is taken. `shut down`: the run resumes when the server starts again. `replace`: another run is being started; this
one stays the active run in the ledger until the other one is open, and goes on if that fails.
"""

_STATES: Mapping[StopReason, RunState] = {"stop": "stopped"}
"""State in the ledger of a run that is stopped for good."""


@dataclass(slots=True)
class RunStatus:
    """Live status of the run."""

    opened: Opened
    step: int
    """Number of completed steps."""
    policy: Policy
    """The policy now served."""
    versions: dict[int, Policy]
    """The last policies whose files the engine keeps, by step count."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the last step."""
    seconds_per_step: float | None = None
    stepped_at: float | None = None
    """Time of the last step (monotonic clock)."""

    @property
    def run(self) -> str:
        return self.opened.run

    @property
    def folder(self) -> Path:
        return Path(self.opened.folder)

    @property
    def max_steps(self) -> int:
        return self.opened.max_steps

    @property
    def version(self) -> tuple[str, int]:
        """Version of the policy now served: run, and number of completed steps."""
        return self.run, self.step

    def record_step(self, done: StepDone, checkpoints_kept: int) -> None:
        """Update the status after a step; the files of `checkpoints_kept` policies before the newest one are kept."""
        now = time.monotonic()
        if self.stepped_at is not None:
            seconds = now - self.stepped_at
            average = self.seconds_per_step
            self.seconds_per_step = (
                seconds if average is None else average + NEWEST_STEP_WEIGHT * (seconds - average)
            )
        self.stepped_at = now
        self.step, self.policy, self.metrics = done.record.step + 1, done.policy, done.metrics
        self.versions[self.step] = done.policy
        for step in [step for step in self.versions if step < self.step - checkpoints_kept]:
            del self.versions[step]


class Conductor:
    """Conducts one run, from the engine that first opens it to its end."""

    def __init__(
        self,
        ledger: Ledger,
        supervisor: EngineSupervisor,
        request: StartRequest,
        open_request: OpenRun,
        *,
        max_open_groups: int,
        changed: ChangeNotifier,
    ) -> None:
        """`max_open_groups`: maximum number of groups in progress with manual steps. `changed` is notified of every change
        that a waiting client may be interested in.
        """
        self.request = request
        self.phase: Phase = "starting"
        self.last_error: str | None = None
        self.last_status: RunStatus | None = None
        self.admission_if_open: Admission | None = None
        self._ledger = ledger
        self._supervisor = supervisor
        self._open_request = open_request
        self._max_open_groups = max_open_groups
        self._changed = changed
        self._engine: Engine | None = None
        self._nudged = asyncio.Event()
        self._stop_reason: StopReason | None = None
        self._task: asyncio.Task[None] | None = None

    # --- called by the service --------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine, if it accepts calls; otherwise raises the reason as a Refusal."""
        if self._engine is None or not self.is_serving:
            raise self.refusal()
        return self._engine

    @property
    def is_serving(self) -> bool:
        """True while the run has an engine and is not being stopped."""
        return self._engine is not None and self.phase == "running"

    @property
    def model(self) -> str:
        """The run's base model, as the client named it."""
        return self.request.model_id

    @property
    def run(self) -> str:
        """The run's name; it has one once it was opened."""
        return self._run_name

    @property
    def model_source(self) -> str:
        """Name or folder that the model is loaded from."""
        return self._open_request.config["model"]["name"]

    @property
    def seed(self) -> int:
        """The run's seed, from which those of its completions are derived."""
        return self._open_request.config.get("training", {}).get("seed", 0)

    @property
    def status(self) -> RunStatus:
        """The run's status; raises a Refusal until an engine has opened the run."""
        if self.last_status is None:
            raise self.refusal()
        return self.last_status

    @property
    def admission(self) -> Admission:
        """Admits requests for completions; raises a Refusal until an engine has opened the run."""
        if self.admission_if_open is None:
            raise self.refusal()
        return self.admission_if_open

    def refusal(self) -> Refusal:
        """Why the engine accepts no calls now."""
        if self.phase == "failed":
            return Refusal("engine_failed", self.last_error)
        if self.phase in ("stopping", "stopped", "finished"):
            if self._stop_reason == "shut down":
                return Refusal("shutting_down", retry_after=5)
            if self._stop_reason == "replace" and self.phase == "stopping":
                return Refusal("engine_recovering", "another run is being started.", retry_after=2)
            return Refusal("finished")
        return Refusal("engine_recovering", retry_after=2)

    def nudge(self) -> None:
        """Something was posted: check whether a step is due."""
        self._nudged.set()

    async def recount(self) -> None:
        """Count the groups again after some were added or removed: waiting requests may be admitted."""
        if self.last_status is not None and self.admission_if_open is not None:
            self.admission_if_open.update(
                await self._ledger.do(steps.count_traffic, self.last_status.run)
            )

    async def begin(self) -> RunStatus:
        """Open the run with its first engine. On an error nothing of a new run remains."""
        if self._open_request.run is None:
            self._engine, opened = await self._supervisor.open(self._open_request)
            self._open_request = replace(self._open_request, run=opened.run)
            self._set_opened(opened)
        else:
            self._engine = await self._recover()
        await self._accept_requests()
        return self.status

    async def tokenizer_files(self) -> Mapping[str, bytes]:
        """Tokenizer files of the started engine."""
        assert self._engine is not None, "no engine was started"
        return await self._engine.tokenizer_files()

    def start_steps(self) -> None:
        """Take steps, in a task of its own, until the run ends."""
        self._task = asyncio.create_task(self._conduct(), name="conductor")

    async def wait_if_finishing(self) -> None:
        """If all steps are done, wait until the final weights are written; otherwise return at once."""
        if self._task is not None and self.status.step >= self.status.max_steps:
            await asyncio.wait((self._task,))

    async def end(self, why: StopReason, seconds: float) -> None:
        """Finish the step in progress and take no other. If that takes longer than `seconds`, the engine is killed."""
        if self.phase in ("finished", "stopped", "failed"):
            return
        self._stop_reason, self.phase = why, "stopping"
        self._end_admission()
        self.nudge()
        if self._task is None:
            return
        done, _ = await asyncio.wait((self._task,), timeout=seconds)
        if not done:
            logger.warning(
                "the step in progress was aborted after %g s; it is repeated when the run continues",
                seconds,
            )
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        state = _STATES.get(why)
        if self.phase == "stopping" and state is not None:
            self.phase = "stopped"  # the engine was ended before it could close the run
            step = self.last_status.step if self.last_status else 0
            await self._ledger.do(steps.end_run, self._run_name, state, EventKind.STOPPED, step)

    def successor(self) -> Conductor:
        """A conductor that goes on with this run in a new engine, after `end` with `replace`. Call its `start_steps`."""
        return Conductor(
            *(self._ledger, self._supervisor, self.request, self._open_request),
            max_open_groups=self._max_open_groups,
            changed=self._changed,
        )

    # --- the run's single task --------------------------------------------------------------------

    async def _conduct(self) -> None:
        try:
            while not await self._run_on_engine():
                pass
        except Exception as error:
            logger.exception("the run cannot continue")
            await self._fail(str(error) or repr(error))
        finally:
            self._engine = None
            await self._supervisor.end()
            self._end_admission()
            self._changed.notify()

    async def _run_on_engine(self) -> bool:
        """Take steps until the run ends or is stopped, or the engine is lost; returns False if another engine should continue."""
        try:
            engine = self._engine or await self._recover()
            await self._accept_requests()
            await self._announce_checkpoint()
            await self._take_steps(engine)
            await self._close_run(engine)
        except UsageError as error:  # the next engine would fail in the same way
            await self._fail(str(error))
        except GroupwiseError as error:
            return not await self._prepare_restart(error)
        return True

    async def _prepare_restart(self, error: GroupwiseError) -> bool:
        self._engine = None
        self.last_error = str(error)
        await self._supervisor.end()
        if self._stop_reason is not None:
            logger.warning("the engine ended while the run was being stopped: %s", error)
            return False
        self.phase = "recovering"
        logger.warning("restarting the engine: %s", error)
        self._changed.notify()
        try:
            if is_full(error):
                await self._supervisor.wait_for_disk(self.status.folder)
            else:
                await self._supervisor.pause(error)
            detail = {"message": str(error)}
            await self._ledger.do(events.add_event, self._run_name, EventKind.ENGINE_LOST, detail)
        except TooManyRestarts as too_many:
            await self._fail(str(too_many))
            return False
        except StoreError as full:  # the disk is full again, as it would be for the next engine
            return await self._prepare_restart(full)
        return True

    async def _fail(self, reason: str) -> None:
        self.phase, self.last_error = "failed", reason
        logger.error("the run has failed: %s", reason)
        step = self.last_status.step if self.last_status else 0
        # Clients see the failure anyway, and the next server tries again.
        with suppress(StoreError):
            await self._ledger.do(
                steps.end_run, self._run_name, "failed", EventKind.FAILED, step, reason
            )

    async def _close_run(self, engine: Engine) -> None:
        """Close the run as `end` asked for, or as finished."""
        status = self.status
        if status.step >= status.max_steps:
            await engine.close_run(finished=True)
            await self._announce_checkpoint()
            self.phase = "finished"
            await self._ledger.do(
                steps.end_run, status.run, "finished", EventKind.FINISHED, status.step
            )
        elif self._stop_reason == "shut down":
            await engine.save()
            await self._announce_checkpoint()
            # The server logs no more events.
            logger.info(
                "%s: checkpoint after %d steps, where the next server continues",
                status.run,
                status.step,
            )
        else:
            await engine.close_run(finished=False)
            await self._announce_checkpoint()
            assert self._stop_reason is not None, "steps end only at the last one or for a reason"
            if (state := _STATES.get(self._stop_reason)) is not None:
                self.phase = "stopped"
                await self._ledger.do(
                    steps.end_run, status.run, state, EventKind.STOPPED, status.step
                )

    # --- recovery ---------------------------------------------------------------------------------

    async def _recover(self) -> Engine:
        """Start a new engine and restore the run."""
        if self._stop_reason is None:
            self.phase = "recovering"
        engine, opened = await self._supervisor.open(self._open_request)
        self._set_opened(opened)
        # Record steps that were committed when the engine, or this process, ended before the ledger was updated.
        next_step = await self._ledger.do(steps.next_step, opened.run)
        for manifest in opened.manifests:
            if manifest.step >= next_step:
                metrics = await engine.metrics_of(manifest.step)
                await self._ledger.do(steps.note_committed, opened.run, manifest, metrics)
        if opened.step > await self._ledger.do(steps.next_step, opened.run):
            raise UsageError(
                f"The run {opened.run} has taken {opened.step} steps, but the server's ledger knows of fewer: it is an older copy. "
                "Restore the one that belongs to the run."
            )
        later_plans = await self._ledger.do(plans.plans_from, opened.run, opened.step)
        repeated = [plan for plan in later_plans if plan.trained is not None]
        logger.info(
            "%s continues at step %d%s",
            opened.run,
            opened.step + len(repeated) + 1,
            f"; first its engine takes {len(repeated)} steps again, those after its last checkpoint"
            if repeated
            else "",
        )
        exact = True
        for plan in repeated:
            exact = await self._take_step(engine, plan) and exact
        reason = self.last_error or "it ended the engine"
        await self._ledger.do(steps.quarantine_failing, opened.run, reason)
        await self._ledger.do(steps.note_recovery, opened.run, exact, opened.inexact)
        self._engine = engine
        return engine

    def _set_opened(self, opened: Opened) -> None:
        previous = self.last_status
        self.last_status = RunStatus(
            opened, opened.step, opened.policy, {opened.step: opened.policy}
        )
        if previous is not None:
            self.last_status.metrics = previous.metrics

    async def _accept_requests(self) -> None:
        """Update the admission, and accept requests again."""
        run = self.status.run
        traffic = await self._ledger.do(steps.count_traffic, run)
        if self.admission_if_open is None:
            draw = await self._ledger.do(groups.first_unused_draw, run)
            limits = Capacity(
                groups_per_step=self.request.prompts_per_step,
                staleness=self.request.staleness,
                manual=self.request.steps == "manual",
                max_open_groups=self._max_open_groups,
            )
            self.admission_if_open = Admission(limits, traffic, draw)
        self.admission_if_open.update(traffic)
        if self._stop_reason is None:
            self.phase = "running"
        self._changed.notify()

    # --- steps ------------------------------------------------------------------------------------

    async def _take_steps(self, engine: Engine) -> None:
        """Take steps when they are due, until the last one is done or the run is to be stopped."""
        # Number of rewarded groups that make a step due; None: only clients request steps.
        size = None if self.request.steps == "manual" else self.request.prompts_per_step
        while self._stop_reason is None and self.status.step < self.status.max_steps:
            self._nudged.clear()
            plan = await self._ledger.do(
                steps.plan_when_due, self._run_name, size, self.request.staleness
            )
            if plan is None:
                for lost in await wait_for_first(self._nudged.wait(), engine.lost()):
                    if isinstance(lost, EngineLost):
                        raise lost
            else:
                await self._take_step(engine, plan)

    async def _take_step(self, engine: Engine, plan: PlanRow) -> bool:
        """Take one step, stored in the ledger before and after; False if a repeated step gave a different result."""
        scored_groups = await self._ledger.do(steps.groups_to_train, plan)
        rate = plan.parameters.get(steps.LEARNING_RATE)
        try:
            done = await engine.step(Plan(plan.step, scored_groups, rate))
        except GroupwiseError as error:
            if not is_full(error):
                await self._ledger.do(plans.count_loss, plan.run, plan.step)
            raise
        exact = await self._ledger.do(steps.note_trained, plan, done)
        self.status.record_step(done, self.request.staleness)
        await self._announce_checkpoint()
        self._log_step()
        await self.recount()
        self._changed.notify()
        return exact

    def _log_step(self) -> None:
        """Log one line about the step, every `logging_steps` steps."""
        status, metrics = self.status, self.status.metrics
        if status.step % self.request.logging_steps and status.step != status.max_steps:
            return
        loss = metrics.get("loss", math.nan)  # no loss is reported if nothing was learnt
        logger.info(
            "%s: step %d/%d  reward %.3f ±%.3f  %s%.1f s",
            status.run,
            status.step,
            status.max_steps,
            metrics.get("reward", math.nan),
            metrics.get("reward_std", math.nan),
            f"loss {loss:.4f}  " if math.isfinite(loss) else "",
            metrics.get("time/step", math.nan),
        )

    @property
    def _run_name(self) -> str:
        assert self._open_request.run is not None, "the run was not opened"
        return self._open_request.run

    def _end_admission(self) -> None:
        if self.admission_if_open is not None:
            self.admission_if_open.end(self.refusal())

    async def _announce_checkpoint(self) -> None:
        """Report the checkpoint of the current step to clients, if the engine has written one."""
        status = self.status
        if (status.folder / CHECKPOINTS / f"step-{status.step}").is_dir():
            await self._ledger.do(steps.note_checkpoint, status.run, status.step)
            self._changed.notify()
