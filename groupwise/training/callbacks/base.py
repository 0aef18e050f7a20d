"""Callbacks: user code that receives the events of a training run and may make requests of it.

The loop announces an event once its effect is durable. `Callbacks` passes it to one callback after the other, in order, and the loop
waits for each of them, so what callbacks see and request does not depend on timing. A plain method runs in a separate thread (one for
all callbacks), so running rewards and completions continue meanwhile; an async method runs in the event loop. Callbacks receive
copies: changes to them do not reach the run. If a callback fails, the failure is logged and the run continues, unless the callback is
`critical`.

A checkpoint holds the callbacks' state (`Callback.state`) between two steps. A resume restores that state and announces again
everything that came after it: first the checkpoint itself, then evaluations and steps. So a callback that keeps its state never sees an
event twice, but one with effects outside the run may repeat them after a crash.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from groupwise.core.errors import CallbackError
from groupwise.core.interruption import Interruption
from groupwise.core.plugins import explain
from groupwise.core.processes.threads import DaemonThreads
from groupwise.core.settings.view import View
from groupwise.core.types import Group, Policy
from groupwise.runs.folder import RunFolder
from groupwise.runs.records import EvaluationRecord

logger = logging.getLogger(__name__)

EVENTS = {
    "on_run_begin": ("run",),
    "on_step_begin": ("run",),
    "on_groups": ("run", "groups", "rejected"),
    "on_step_end": ("run", "metrics"),
    "on_evaluate": ("run", "evaluation"),
    "on_save": ("run", "checkpoint"),
    "on_run_end": ("run", "end"),
}
"""The events in the order of a step: name of the callback's method -> names of its arguments."""

SLOW_CALLBACK_SECONDS = 60.0
"""Seconds after which a warning names the callback that the run is waiting for."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended."""

    state: Literal["finished", "interrupted", "failed"]
    summary: dict[str, Any]
    """Same as the run's summary.json; empty for a failed run."""
    error: str | None = None
    """The error that ended a failed run; None otherwise."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A callback's request to end the run."""

    by: str
    """Name of the callback."""
    reason: str


class ObservedRun(Protocol):
    """The parts of a training run that callbacks can see."""

    @property
    def config(self) -> Any: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def saved_step(self) -> int | None: ...
    @property
    def folder(self) -> RunFolder: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def interruption(self) -> Interruption: ...
    def keep_for_replay(self, draws: Iterable[int]) -> None: ...
    def epoch(self) -> float: ...
    def say(self, text: str) -> None: ...


class RunHandle:
    """The run as one callback sees it: the data that it may read and the requests that it may make."""

    def __init__(self, run: ObservedRun, requests: ControlRequests, name: str) -> None:
        self._run = run
        self._requests = requests
        self._name = name
        self.config = View(run.config.model_dump(mode="json"))
        """The resolved config, read-only: `run.config["training"]["seed"]`, `run.config.training.seed`."""
        self.first_step = run.step
        """Number of steps already done when this process started or resumed the run; 0 for a new run."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self._run.folder.name

    @property
    def folder(self) -> Path:
        """The run's folder; a callback may write its own files there."""
        return self._run.folder.path

    @property
    def kind(self) -> str:
        """The kind of training: `rl` or `sft`."""
        return str(self._run.folder.store.get_meta().get("kind", "rl"))

    @property
    def step(self) -> int:
        """Number of steps done, which is the number of the last one."""
        return self._run.step

    @property
    def max_steps(self) -> int:
        """Number of steps of the whole run."""
        return self._run.max_steps

    @property
    def epoch(self) -> float:
        """Number of passes over the data so far."""
        return self._run.epoch()

    @property
    def policy(self) -> Policy:
        """The newest policy. Its files exist only for the next few steps; those of a checkpoint are kept for longer."""
        return self._run.policy

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._run.tokenizer

    def metrics(
        self, names: Sequence[str] | None = None, since: int | None = None
    ) -> dict[str, list[tuple[int, float]]]:
        """Metrics from the run's record: name -> [(step, value), …], with steps from 1, of the steps after the first `since`. Without
        `names`, all metrics."""
        return self._run.folder.store.metrics(names, since)

    def keep_for_replay(self, draws: Iterable[int]) -> None:
        """Put the prompts of these draws of the current step into the replay buffer once the step is committed."""
        self._run.keep_for_replay(draws)

    def record_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Record an evaluation that the callback made. It replaces an earlier one of the same step, name and policy."""
        self._run.folder.store.add_evaluation(evaluation)

    def say(self, text: str) -> None:
        """Show a message to the user and write it to the log."""
        self._run.say(text)

    @property
    def interrupted(self) -> bool:
        """True once Ctrl-C or SIGTERM has asked the run to end. A callback that waits for long should check this regularly."""
        return self._run.interruption.received_signal is not None

    def leave(self, what: str) -> None:
        """Call this in `on_run_end` of a finished run to leave work to a resume. The run then counts as interrupted."""
        self._requests.left.append(what)

    def stop(self, reason: str = "") -> None:
        """End the run after this step, in good order and with final weights. The run's summary contains `reason`."""
        if self._requests.stop is None:
            self._requests.stop = Stop(self._name, reason)

    def save(self) -> None:
        """Write a checkpoint after this step."""
        self._requests.save = True

    def evaluate(self) -> None:
        """Evaluate on the held-out prompts after this step."""
        self._requests.evaluate = True


EventResult = Awaitable[None] | None
"""Return type of an event's method: None, or an awaitable if the method is async."""


class Callback:
    """Base class of callbacks: override the events that you need, as plain or async methods. See docs/how-to/callbacks.md."""

    critical: bool = False
    """True: the run fails if a method of this callback raises."""
    last: bool = False
    """True: this callback is called after the others, because it shows what they record."""

    def claim(self) -> str | None:
        """Name the resource that this callback needs exclusively; called after `check`. Two callbacks with an equal claim are refused."""
        return None

    def check(self, config: View) -> None:
        """Called before anything is loaded. Raise ValueError if the callback cannot work in such a run, or has nothing to do in it."""

    def on_run_begin(self, run: RunHandle) -> EventResult:
        """The run is built and, if resumed, restored to its checkpoint; `load_state` was called before."""

    def on_step_begin(self, run: RunHandle) -> EventResult:
        """The next step starts: the loop now draws its groups, or waits for them."""

    def on_groups(
        self, run: RunHandle, groups: Sequence[Group], rejected: Sequence[Group]
    ) -> EventResult:
        """The step's groups are drawn and scored, but not yet trained on. `rejected` are groups that others were drawn to replace."""

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> EventResult:
        """A step is committed and included in `run.step`; `metrics` are all its metrics."""

    def on_evaluate(self, run: RunHandle, evaluation: EvaluationRecord) -> EventResult:
        """The policy after `evaluation.step` steps was evaluated on held-out data; metrics and rows are recorded."""

    def on_save(self, run: RunHandle, checkpoint: Path) -> EventResult:
        """The checkpoint after `run.step` steps is complete in this folder."""

    def on_run_end(self, run: RunHandle, end: RunEnd) -> EventResult:
        """The run ended, and the outcome is written in its folder."""

    def state(self) -> Any:
        """State that must survive a resume, as plain JSON: finite numbers, strings, lists, dicts with string keys. None: no state."""
        return None

    def load_state(self, state: Any) -> None:
        """Restore the value that `state` returned for the checkpoint from which the run resumes."""


def overrides(callback: Callback, method: str) -> bool:
    """True if a callback overrides this method of the base class."""
    return getattr(type(callback), method) is not getattr(Callback, method)


@dataclass(slots=True)
class ControlRequests:
    """The requests of all callbacks to the run."""

    stop: Stop | None = None
    save: bool = False
    evaluate: bool = False
    left: list[str] = field(default_factory=list[str])
    """Descriptions of the work that a finished run leaves to a resume (see `RunHandle.leave`)."""


@dataclass(slots=True)
class _Member:
    name: str
    callback: Callback
    handle: RunHandle | None = None
    failures: Counter[str] = field(default_factory=Counter[str])
    """Number of failures per event."""


class Callbacks:
    """The callbacks of one run: passes events to them and collects their requests."""

    def __init__(self, callbacks: Iterable[tuple[str, Callback]] = ()) -> None:
        self._members: list[_Member] = []
        for name, callback in sorted(callbacks, key=lambda pair: pair[1].last):
            # Number repeated names, so that each callback has its own: x, x-2, …
            count = sum(m.name == name or m.name.startswith(f"{name}-") for m in self._members)
            self._members.append(_Member(f"{name}-{count + 1}" if count else name, callback))
        self._requests = ControlRequests()
        self._run: ObservedRun | None = None
        self._thread: DaemonThreads[Callable[[], Any]] | None = None
        self._announced: list[str] = []
        """Evaluations of the current policy that were already announced, by name and prompts."""
        self._announced_save: int | None = None
        self._between_steps: dict[str, Any] | None = None
        """During a step: the callbacks' state from before the step, which is what a checkpoint must hold. Otherwise None."""

    @property
    def names(self) -> list[str]:
        """The callbacks' names in messages and checkpoints, in order."""
        return [member.name for member in self._members]

    # Requests

    @property
    def stop(self) -> Stop | None:
        """The request to end the run after this step, with the callback that made it; None if there is none."""
        return self._requests.stop

    @property
    def unfinished_work(self) -> Sequence[str]:
        """Descriptions of the work that a finished run leaves to a resume."""
        return self._requests.left

    def save_was_asked(self) -> bool:
        """True if a checkpoint was requested; reading clears the request."""
        save_requested, self._requests.save = self._requests.save, False
        return save_requested

    @property
    def evaluation_was_asked(self) -> bool:
        """True from the request for an evaluation until one is announced or the request is dropped; survives a resume."""
        return self._requests.evaluate

    def give_up_evaluation(self) -> None:
        """Drop the request for an evaluation, because none can be made."""
        self._requests.evaluate = False

    # Events

    async def begin(self, run: ObservedRun) -> None:
        """Start the callbacks of a new or resumed run. Announces the checkpoint that it resumes from, if that was not announced yet."""
        self._run = run
        if not self._members:
            return
        self._thread = DaemonThreads([_Caller()], "callbacks")
        for member in self._members:
            member.handle = RunHandle(run, self._requests, member.name)
        logger.info("callbacks: %s", ", ".join(self.names))
        await self._announce("on_run_begin")
        await self.announce_checkpoint()

    async def step_begins(self) -> None:
        """Announce that a step is about to be drawn."""
        self._between_steps = self._state_now()
        await self._announce("on_step_begin")

    async def groups_scored(self, groups: Sequence[Group], rejected: Sequence[Group] = ()) -> None:
        """Announce the scored groups of a step."""
        await self._announce("on_groups", lambda: (_copy_groups(groups), _copy_groups(rejected)))

    async def step_committed(self, metrics: Mapping[str, float]) -> None:
        """Announce a step that is committed to the record."""
        self._between_steps = None
        self._announced.clear()
        await self._announce("on_step_end", lambda: (dict(metrics),))

    async def announce_evaluation(self, record: EvaluationRecord) -> None:
        """Announce a recorded evaluation, also one from before a resume; once only, and only if it is of the current policy."""
        if self._run is None or record.step != self._run.step:
            return
        self._requests.evaluate = False
        key = f"{record.name} {record.asked}".strip()  # other prompts: another evaluation
        if key in self._announced:
            return
        self._announced.append(key)
        await self._announce("on_evaluate", lambda: (copy.deepcopy(record),))

    async def announce_checkpoint(self) -> None:
        """Announce the checkpoint of the current step, if there is one that was not announced yet."""
        run = self._run
        if run is None or run.saved_step != run.step or self._announced_save == run.step:
            return
        self._announced_save = run.step
        folder = run.folder.checkpoints / f"step-{run.step}"
        await self._announce("on_save", lambda: (folder,))

    async def end(self, end: RunEnd) -> None:
        """Announce the end of the run. If the run itself failed, errors of callbacks are only logged, so its own error is reported.

        After one callback has left work to a resume, the callbacks after it see an interrupted run.
        """

        def ended() -> tuple[RunEnd]:
            state = "interrupted" if self._requests.left else end.state
            return (replace(end, state=state, summary=dict(end.summary)),)

        try:
            await self._announce("on_run_end", ended)
        except CallbackError as error:
            if end.state != "failed":
                raise
            logger.warning("%s", error)
        for member in self._members:
            if member.failures.total() > 1:
                failures = ", ".join(f"{count} × {e}" for e, count in member.failures.items())
                logger.warning("the callback %s failed: %s; see log.txt", member.name, failures)

    def close(self) -> None:
        """Close the thread. It is a daemon: a callback that hangs in it does not keep the process alive."""
        if self._thread is not None:
            self._thread.close()

    # State in checkpoints

    def state(self) -> dict[str, Any]:
        """The state of all callbacks after the last committed step, as plain JSON."""
        return self._between_steps or self._state_now()

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state` returned. State of callbacks that are no longer configured is dropped."""
        states = saved.get("states", {})
        for member in self._members:
            if member.name in states:
                self._call_safely(
                    member, "load_state", lambda m=member: m.callback.load_state(states[m.name])
                )
        self._announced = list(saved.get("told", ()))
        self._requests.evaluate = saved.get("evaluate", False)
        stop = saved.get("stop")
        if stop and stop["by"] in self.names:
            self._requests.stop = Stop(**stop)

    def _state_now(self) -> dict[str, Any]:
        keeping = [member for member in self._members if overrides(member.callback, "state")]
        states = {
            m.name: self._call_safely(m, "state", lambda m=m: _json_state(m.callback))
            for m in keeping
        }
        return {
            "states": {name: state for name, state in states.items() if state is not None},
            "told": list(self._announced),
            "evaluate": self._requests.evaluate,
            "stop": asdict(self._requests.stop) if self._requests.stop else None,
        }

    # Calls

    async def _announce(
        self, event: str, make_arguments: Callable[[], tuple[Any, ...]] = lambda: ()
    ) -> None:
        for member in self._members:
            if overrides(member.callback, event):
                # There is no time limit, only a warning. The callback has a task of its own, so code
                # that cancels itself does not cancel the run.
                work = self._call_callback(member, event, make_arguments)
                task = asyncio.ensure_future(work)
                try:
                    done, _ = await asyncio.wait((task,), timeout=SLOW_CALLBACK_SECONDS)
                    if not done:
                        logger.warning(
                            "the run has been waiting for the callback %s in %s for %g seconds; Ctrl-C twice ends it",
                            member.name,
                            event,
                            SLOW_CALLBACK_SECONDS,
                        )
                        await asyncio.wait((task,))
                finally:
                    task.cancel()
                error = (
                    RuntimeError("it was cancelled from within")
                    if task.cancelled()
                    else task.result()
                )
                if error is not None:
                    self._report_failure(member, event, error)

    async def _call_callback(
        self, member: _Member, event: str, make_arguments: Callable[[], tuple[Any, ...]]
    ) -> BaseException | None:
        """Call one callback; returns the exception that it raised, or None."""
        assert self._thread is not None
        try:
            method, arguments = getattr(member.callback, event), (member.handle, *make_arguments())
            with redirect_stdout(sys.stderr):  # standard output belongs to the command's result
                if inspect.iscoroutinefunction(method):
                    await method(*arguments)
                    return None
                result, error = await asyncio.wrap_future(
                    self._thread.submit(lambda: method(*arguments))
                )
                if error is None and inspect.isawaitable(result):
                    await result
        except (Exception, SystemExit) as raised:  # noqa: BLE001 — any code of users may run here
            return raised
        return error

    def _call_safely(self, member: _Member, method: str, call: Callable[[], Any]) -> Any:
        try:
            with redirect_stdout(sys.stderr):
                return call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 — any code of users may run here
            self._report_failure(member, method, error)
            return None

    def _report_failure(self, member: _Member, event: str, error: BaseException) -> None:
        """Raise if the callback is critical; otherwise log a warning the first time per event and an info line after that."""
        explanation = explain(error)
        if member.callback.critical:
            raise CallbackError(
                f"The callback {member.name} failed in {event}, and it is critical, so the run ends:\n{explanation}\n"
                "Fix it, or remove it from the callbacks, then go on with --resume."
            ) from error
        first_time = not member.failures[event]
        member.failures[event] += 1
        logger.log(
            logging.WARNING if first_time else logging.INFO,
            "the callback %s failed in %s; the run goes on:\n%s",
            member.name,
            event,
            explanation,
        )


class _Caller:
    """Runs plain methods in the thread. Errors are returned, because a future cannot hold every exception (StopIteration, for one)."""

    def begin(self) -> None:
        pass

    def do(self, job: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        try:
            return job(), None
        except BaseException as error:  # noqa: BLE001 — no error of a callback may end the thread
            return None, error

    def end(self) -> None:
        pass


def _json_state(callback: Callback) -> Any:
    """A callback's state as a resume will return it. Raises ValueError if a round trip through JSON would change it."""
    state = callback.state()
    try:
        round_trip = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"its state cannot be kept, because it is not plain JSON: {error}"
        ) from error
    if round_trip != state:
        raise ValueError(
            "its state cannot be kept, because it comes back from JSON as another one: return lists for tuples, and text for "
            "keys that are numbers"
        )
    return round_trip


def _copy_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Copies of groups that share nothing mutable with the run."""
    return tuple(
        replace(
            group,
            example=replace(
                group.example,
                prompt=copy.deepcopy(group.example.prompt),
                columns=copy.deepcopy(group.example.columns),
            ),
            rollouts=tuple(
                replace(
                    rollout,
                    notes=copy.deepcopy(rollout.notes),
                    messages=copy.deepcopy(rollout.messages),
                )
                for rollout in group.rollouts
            ),
            metrics=dict(group.metrics),
        )
        for group in groups
    )
