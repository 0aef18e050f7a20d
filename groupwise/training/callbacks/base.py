"""Callbacks: user code that receives the events of a training run, and may make requests of it.

The loop announces an event once its effect is durable. `Callbacks` passes it to one callback after the other, in their order, and the
loop waits for each, so that what they see and request does not depend on time. A plain method runs in a separate thread (one for all
callbacks), so that rewards and completions under way go on meanwhile; an async one runs in the event loop. Callbacks receive copies:
changes to them do not reach the run. One that fails is reported, and the run goes on, unless the callback is `critical`.

A checkpoint holds the callbacks' state (`Callback.state`) between two steps. A resume restores it, and announces again everything that
came after it: first that checkpoint, then evaluations and steps. So a callback that keeps its state never sees an event twice, and one
with effects outside the run may repeat them after a crash.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
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
"""The events: methods of a callback in the order of a step, with their arguments."""

SLOW = 60.0
"""Seconds after which the log says which callback the run waits for."""


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
    """The request of a callback to end the run."""

    by: str
    """Name of the callback."""
    reason: str


class Observed(Protocol):
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
    """The run as one callback sees it: what it may read, and the requests that it may make."""

    def __init__(self, run: Observed, asked: ControlRequests, name: str) -> None:
        self._run = run
        self._asked = asked
        self._name = name
        self.config = View(run.config.model_dump(mode="json"))
        """The resolved config, read-only: `run.config["training"]["seed"]`, `run.config.training.seed`."""
        self.first_step = run.step
        """Steps done when this process took the run up; 0 for a new one."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self._run.folder.name

    @property
    def folder(self) -> Path:
        """The run's folder; a callback may write files of its own there."""
        return self._run.folder.path

    @property
    def kind(self) -> str:
        """The command that trains: `rl` or `sft`."""
        return str(self._run.folder.store.get_meta().get("kind", "rl"))

    @property
    def step(self) -> int:
        """Steps done; the next one has this index."""
        return self._run.step

    @property
    def max_steps(self) -> int:
        """Steps of the whole run."""
        return self._run.max_steps

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._run.epoch()

    @property
    def policy(self) -> Policy:
        """The newest policy; its files stand for the next steps only, those of a checkpoint for longer."""
        return self._run.policy

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._run.tokenizer

    def metrics(
        self, names: Sequence[str] | None = None, since: int | None = None
    ) -> dict[str, list[tuple[int, float]]]:
        """Curves from the record: name -> (step, value), from step `since` on; all of them without `names`."""
        return self._run.folder.store.metrics(names, since)

    def keep_for_replay(self, draws: Iterable[int]) -> None:
        """Keep the prompts of these draws of the step under way in the replay buffer, once the step is committed."""
        self._run.keep_for_replay(draws)

    def record_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Record an evaluation by the callback; it replaces an earlier one of the same step, name and policy."""
        self._run.folder.store.add_evaluation(evaluation)

    def say(self, text: str) -> None:
        """Show a message to the user and write it to the log."""
        self._run.say(text)

    @property
    def interrupted(self) -> bool:
        """True once Ctrl-C or SIGTERM has asked the run to end; a callback that waits long should check it regularly."""
        return self._run.interruption.asked is not None

    def leave(self, what: str) -> None:
        """Call in `on_run_end` of a finished run to leave work undone. The run counts as interrupted, so that a resume does it."""
        self._asked.left.append(what)

    def stop(self, reason: str = "") -> None:
        """End the run after this step, whole and with its final weights; `reason` stands in its summary."""
        if self._asked.stop is None:
            self._asked.stop = Stop(self._name, reason)

    def save(self) -> None:
        """Write a checkpoint after this step."""
        self._asked.save = True

    def evaluate(self) -> None:
        """Answer the held-out prompts after this step."""
        self._asked.evaluate = True


EventResult = Awaitable[None] | None
"""Return type of an event's method: None, or an awaitable if it is async."""


class Callback:
    """Override the events that you want to hear of, as plain or async methods. See docs/how-to/callbacks.md."""

    critical: bool = False
    """True: the run ends when a method of this callback fails."""
    last: bool = False
    """True: it is called after the other callbacks, because it shows what they record."""

    def claim(self) -> str | None:
        """Name what it needs exclusively, asked after `check`: two callbacks with an equal claim are refused."""
        return None

    def check(self, config: View) -> None:
        """Before anything is loaded: raise ValueError if this callback has nothing to do, or no means, in such a run."""

    def on_run_begin(self, run: RunHandle) -> EventResult:
        """Everything is built, and a resumed run taken back to its checkpoint; `load_state` was called before."""

    def on_step_begin(self, run: RunHandle) -> EventResult:
        """The next step begins: its groups are asked for, or waited for."""

    def on_groups(
        self, run: RunHandle, groups: Sequence[Group], rejected: Sequence[Group]
    ) -> EventResult:
        """The groups of the step are drawn and scored, and not yet learnt from. Others were drawn for the `rejected` ones."""

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> EventResult:
        """A step is committed, and `run.step` counts it; these are all its metrics."""

    def on_evaluate(self, run: RunHandle, evaluation: EvaluationRecord) -> EventResult:
        """Held-out data were answered by the policy after `evaluation.step` steps; metrics and rows are recorded."""

    def on_save(self, run: RunHandle, checkpoint: Path) -> EventResult:
        """The checkpoint after `run.step` steps stands complete in this folder."""

    def on_run_end(self, run: RunHandle, end: RunEnd) -> EventResult:
        """The run ended, and its folder says how."""

    def state(self) -> Any:
        """State that must survive a resume, as plain JSON (finite numbers, text, lists, dicts with text as keys); None: nothing."""
        return None

    def load_state(self, state: Any) -> None:
        """Take back what `state` returned at the checkpoint that the run goes on from."""


def overrides(callback: Callback, method: str) -> bool:
    """True if a callback overrides this method of the base class."""
    return getattr(type(callback), method) is not getattr(Callback, method)


@dataclass(slots=True)
class ControlRequests:
    """Requests of callbacks to the run."""

    stop: Stop | None = None
    save: bool = False
    evaluate: bool = False
    left: list[str] = field(default_factory=list[str])
    """Work of a finished run that is not done."""


@dataclass(slots=True)
class _Member:
    name: str
    callback: Callback
    handle: RunHandle | None = None
    failures: Counter[str] = field(default_factory=Counter[str])
    """Number of failures per event."""


class Callbacks:
    """The callbacks of one run: passes events to them, and keeps their requests."""

    def __init__(self, callbacks: Iterable[tuple[str, Callback]] = ()) -> None:
        self._members: list[_Member] = []
        for name, callback in sorted(callbacks, key=lambda named: named[1].last):
            # A name that is taken gets a number.
            taken = sum(m.name == name or m.name.startswith(f"{name}-") for m in self._members)
            self._members.append(_Member(f"{name}-{taken + 1}" if taken else name, callback))
        self._asked = ControlRequests()
        self._run: Observed | None = None
        self._thread: DaemonThreads[Callable[[], Any]] | None = None
        self._announced: list[str] = []
        """The announced evaluations of the present policy."""
        self._announced_save: int | None = None
        self._between_steps: dict[str, Any] | None = None
        """While a step is under way: the state before it."""

    @property
    def names(self) -> list[str]:
        """Their names in messages and checkpoints, in order."""
        return [member.name for member in self._members]

    # Their requests

    @property
    def stop(self) -> Stop | None:
        """The callback that wants the run to end after this step, and its reason."""
        return self._asked.stop

    @property
    def left(self) -> Sequence[str]:
        """Work that a finished run did not wait for and a resume will do."""
        return self._asked.left

    def save_was_asked(self) -> bool:
        """True if a checkpoint is wanted now; reading it clears the request."""
        save_requested, self._asked.save = self._asked.save, False
        return save_requested

    @property
    def evaluation_was_asked(self) -> bool:
        """True until a wanted evaluation was announced or given up, also across an interruption."""
        return self._asked.evaluate

    def give_up_evaluation(self) -> None:
        """Drop the request for an evaluation, because it cannot be made."""
        self._asked.evaluate = False

    # Events

    async def begin(self, run: Observed) -> None:
        """The run begins or goes on. The checkpoint that it goes on from is announced: it was not when it was written."""
        self._run = run
        if not self._members:
            return
        self._thread = DaemonThreads([_Caller()], "callbacks")
        for member in self._members:
            member.handle = RunHandle(run, self._asked, member.name)
        logger.info("callbacks: %s", ", ".join(self.names))
        await self._announce("on_run_begin")
        await self.saved()

    async def step_begins(self) -> None:
        """A step is about to be drawn."""
        self._between_steps = self._state_now()
        await self._announce("on_step_begin")

    async def groups_scored(self, groups: Sequence[Group], rejected: Sequence[Group] = ()) -> None:
        """The groups of a step are there."""
        await self._announce("on_groups", lambda: (_copy_groups(groups), _copy_groups(rejected)))

    async def step_committed(self, metrics: Mapping[str, float]) -> None:
        """A step is committed to the record."""
        self._between_steps = None
        self._announced.clear()
        await self._announce("on_step_end", lambda: (dict(metrics),))

    async def evaluated(self, record: EvaluationRecord) -> None:
        """An evaluation is in the record, now or since before a resume. Announced once, if it is of the present policy."""
        if self._run is None or record.step != self._run.step:
            return
        self._asked.evaluate = False
        key = f"{record.name} {record.asked}".strip()  # other prompts make it another evaluation
        if key in self._announced:
            return
        self._announced.append(key)
        await self._announce("on_evaluate", lambda: (copy.deepcopy(record),))

    async def saved(self) -> None:
        """Announce the checkpoint of the steps done, if there is one that was not announced yet."""
        run = self._run
        if run is None or run.saved_step != run.step or self._announced_save == run.step:
            return
        self._announced_save = run.step
        folder = run.folder.checkpoints / f"step-{run.step}"
        await self._announce("on_save", lambda: (folder,))

    async def end(self, end: RunEnd) -> None:
        """The run ended. If it failed, its own error is reported, and errors of callbacks are only logged.

        Once one callback leaves work to a resume, the later ones see an interrupted run.
        """

        def ended() -> tuple[RunEnd]:
            state = "interrupted" if self._asked.left else end.state
            return (replace(end, state=state, summary=dict(end.summary)),)

        try:
            await self._announce("on_run_end", ended)
        except CallbackError as error:
            if end.state != "failed":
                raise
            logger.warning("%s", error)
        for member in self._members:
            if member.failures.total() > 1:
                what = ", ".join(f"{count} × {e}" for e, count in member.failures.items())
                logger.warning("the callback %s failed: %s; see log.txt", member.name, what)

    def close(self) -> None:
        """End the thread; one that hangs in a callback does not keep the process alive."""
        if self._thread is not None:
            self._thread.close()

    # Their state in checkpoints

    def state(self) -> dict[str, Any]:
        """Their state after the steps done, as plain JSON."""
        return self._between_steps or self._state_now()

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """The inverse of `state`. What belongs to a callback that is not there any more is forgotten."""
        states = saved.get("states", {})
        for member in self._members:
            if member.name in states:
                self._call_safely(
                    member, "load_state", lambda m=member: m.callback.load_state(states[m.name])
                )
        self._announced = list(saved.get("told", ()))
        self._asked.evaluate = saved.get("evaluate", False)
        stop = saved.get("stop")
        if stop and stop["by"] in self.names:
            self._asked.stop = Stop(**stop)

    def _state_now(self) -> dict[str, Any]:
        keeping = [member for member in self._members if overrides(member.callback, "state")]
        found = {
            m.name: self._call_safely(m, "state", lambda m=m: _json_state(m.callback))
            for m in keeping
        }
        return {
            "states": {name: state for name, state in found.items() if state is not None},
            "told": list(self._announced),
            "evaluate": self._asked.evaluate,
            "stop": asdict(self._asked.stop) if self._asked.stop else None,
        }

    # Calling them

    async def _announce(
        self, event: str, given: Callable[[], tuple[Any, ...]] = lambda: ()
    ) -> None:
        for member in self._members:
            if overrides(member.callback, event):
                error = await self._wait_for(self._call(member, event, given), member, event)
                if error is not None:
                    self._report_failure(member, event, error)

    async def _call(
        self, member: _Member, event: str, given: Callable[[], tuple[Any, ...]]
    ) -> BaseException | None:
        """Call one callback; returns what it raised."""
        assert self._thread is not None
        try:
            method, arguments = getattr(member.callback, event), (member.handle, *given())
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

    async def _wait_for(
        self, work: Coroutine[Any, Any, BaseException | None], member: _Member, event: str
    ) -> BaseException | None:
        """Wait as long as it takes. The work is a task of its own, so that code that cancels itself does not cancel the run."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait((task,), timeout=SLOW)
            if not done:
                logger.warning(
                    "the run has been waiting for the callback %s in %s for %g seconds; Ctrl-C twice ends it",
                    member.name,
                    event,
                    SLOW,
                )
                await asyncio.wait((task,))
        finally:
            task.cancel()
        return RuntimeError("it was cancelled from within") if task.cancelled() else task.result()

    def _call_safely(self, member: _Member, method: str, call: Callable[[], Any]) -> Any:
        try:
            with redirect_stdout(sys.stderr):
                return call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 — any code of users may run here
            self._report_failure(member, method, error)
            return None

    def _report_failure(self, member: _Member, event: str, error: BaseException) -> None:
        """Raise if the callback is critical; otherwise warn the first time, and log it afterwards."""
        explanation = explain(error)
        if member.callback.critical:
            raise CallbackError(
                f"The callback {member.name} failed in {event}, and it is critical, so the run ends:\n{explanation}\n"
                "Mend it, or remove it from the callbacks, then go on with --resume."
            ) from error
        first = not member.failures[event]
        member.failures[event] += 1
        logger.log(
            logging.WARNING if first else logging.INFO,
            "the callback %s failed in %s; the run goes on:\n%s",
            member.name,
            event,
            explanation,
        )


class _Caller:
    """Runs plain methods in a thread. Their errors are returned, because some cannot be put into a future."""

    def begin(self) -> None:
        pass

    def do(self, job: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        try:
            return job(), None
        except BaseException as error:  # noqa: BLE001 — whatever it is, it must not end the thread
            return None, error

    def end(self) -> None:
        pass


def _json_state(callback: Callback) -> Any:
    """A callback's state, as a resume will return it. Raises ValueError if JSON would change it."""
    state = callback.state()
    try:
        copied = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"its state cannot be kept, because it is not plain JSON: {error}"
        ) from error
    if copied != state:
        raise ValueError(
            "its state cannot be kept, because it comes back from JSON as another one: return lists for tuples, and text for "
            "keys that are numbers"
        )
    return copied


def _copy_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Copies of groups: nothing mutable in them belongs to the run."""
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
