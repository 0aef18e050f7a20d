"""The one-call training loop: examples and a reward function here, the model on the server.

    with TrainingClient() as client:
        client.start(model_id="tiny", groups_per_step=4)
        train(client, [{"prompt": "…", "answer": "…"}], reward, steps=20)

Each of several workers repeatedly requests the completions of the next example, scores them and posts the rewards. One watcher reads
the server's events: it shows each step, and ends the loop after the last one. Only as many groups are posted as the steps need, plus
replacements for those that the server reports as lost, so the server is idle after the last step. Draw k always uses example
k modulo the number of examples: the run is the same for any number of workers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from groupwise.api.client.async_training_client import AsyncTrainingClient
from groupwise.api.client.errors import ClientError, DrawTaken, GroupGone, RunFinished
from groupwise.api.client.request_bodies import Sampling
from groupwise.api.client.training_client import TrainingClient
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.template_columns import ARGUMENTS, TOOLS
from groupwise.api.schemas.training import EventData, EventKind, GroupAnswer, Metrics, StatusAnswer
from groupwise.core.errors import TaskError, UsageError
from groupwise.core.interruption import run_to_end
from groupwise.core.reward_call.call import (
    RESERVED,
    RewardCallable,
    call,
    call_plain,
    check_columns,
    check_function,
    is_async,
    name_of,
)
from groupwise.core.reward_call.request import ScoreRequest
from groupwise.core.reward_call.text import as_completion
from groupwise.core.terminal.progress import Progress

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Consecutive groups whose reward function may fail, or whose lease may expire, before the loop raises an error."""
CLEANUP_SECONDS = 5.0
"""Seconds at the end for giving up the groups that are still open."""
ENDS = frozenset({EventKind.FINISHED, EventKind.STOPPED})
CHANGES_COUNTS = frozenset(
    {
        EventKind.STEP,
        EventKind.GROUPS,
        EventKind.QUARANTINED,
        EventKind.RECOVERED,
        EventKind.RECOVERED_INEXACT,
    }
)

Example = Mapping[str, Any]
"""`prompt` (text or messages), and any other columns, which the reward function receives."""


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """The result of a call of `train`."""

    run_id: str
    metrics: dict[int, Metrics] = field(default_factory=dict[int, Metrics])
    """Metrics of each step (from 0) whose event was received."""
    failed_groups: int = 0
    """Groups for which the reward function failed."""

    @property
    def rewards(self) -> dict[int, float]:
        """The mean reward of each step that has one."""
        rewards_by_step = {
            step: metrics.get("reward") for step, metrics in sorted(self.metrics.items())
        }
        return {step: reward for step, reward in rewards_by_step.items() if reward is not None}


def train(
    client: TrainingClient,
    examples: Sequence[Example],
    reward_function: RewardCallable,
    *,
    steps: int,
    concurrency: int = 8,
    first_draw: int | None = None,
    sampling: Sampling | None = None,
    progress: bool = True,
) -> TrainingSummary:
    """Train the started run for `steps` steps, or until it is finished; see `train_async`. Ctrl-C gives up the open groups."""

    async def with_its_twin() -> TrainingSummary:
        async with client.asynchronous() as twin:
            return await train_async(
                twin,
                examples,
                reward_function,
                steps=steps,
                concurrency=concurrency,
                first_draw=first_draw,
                sampling=sampling,
                progress=progress,
            )

    return run_to_end(with_its_twin())


async def train_async(
    client: AsyncTrainingClient,
    examples: Sequence[Example],
    reward_function: RewardCallable,
    *,
    steps: int,
    concurrency: int = 8,
    first_draw: int | None = None,
    sampling: Sampling | None = None,
    progress: bool = True,
) -> TrainingSummary:
    """Train the started run for `steps` steps, or until it is finished.

    `reward_function(prompts, completions, **columns)` returns a number or None for each completion; it may be async. If it is not, it is
    called in a thread, one group at a time. If it raises, the group is not trained on; after three failures in a row TaskError is raised.
    `concurrency` groups are in progress at once. `first_draw`: position of the first example in the run's order of draws; None: the
    position after the finished steps. `sampling` overrides the run's own settings; `progress` shows the steps on standard error.

    Raises RunFinished if the run is finished or stopped before the first draw. Restarts of the engine and of the server are waited for.
    """
    _check_arguments(examples, reward_function, steps, concurrency)
    status = await client.status()
    if status.run_id is None or status.groups_per_step is None:
        raise UsageError("The server has no run. Begin one with client.start(…) first.")
    if (status.training_settings or {}).get("steps") == "manual":
        raise UsageError(
            "The run was started with `steps: manual`; this loop needs `auto`. Start it so, or post rewards and call client.step()."
        )
    done = status.step or 0
    target = min(done + steps, status.max_steps or done + steps)
    if status.phase in ("finished", "stopped") or target <= done:
        detail = (
            f"the run {status.run_id} is {'stopped' if status.phase == 'stopped' else 'finished'} after {done} of {status.max_steps} "
            "steps, and takes no more. Begin the next run with client.start(…), or continue this one: "
            f"client.start(resume_from={status.run_id!r}, max_steps=…)."
        )
        raise RunFinished.about(Refusal("finished", detail).problem())
    first_index = done * status.groups_per_step if first_draw is None else first_draw
    draws = _DrawQueue(first_index, (target - done) * status.groups_per_step)
    name = f"{status.run_id} on {client.connection.url}"
    view = Progress(name, target, done) if progress else None
    with ThreadPoolExecutor(1, thread_name_prefix="reward") as thread, ExitStack() as contexts:
        if view is not None:
            contexts.enter_context(view)
            contexts.enter_context(client.connection.outage.reported_to(view.note))
        scoring = _Scoring(reward_function, thread, status.groups_per_step, target, len(examples))
        loop = _Loop(client, examples, scoring, draws, sampling or {}, status, target, view)
        await loop.run(concurrency)
    return TrainingSummary(status.run_id, loop.metrics, scoring.failed)


def _check_arguments(
    examples: Sequence[Example], function: object, steps: int, concurrency: int
) -> None:
    check_function(function, "reward_function")
    if not examples:
        raise UsageError("There are no examples. Give a list of mappings with at least `prompt`.")
    if steps < 1 or concurrency < 1:
        raise UsageError(f"steps is {steps} and concurrency {concurrency}; both are at least 1.")
    for index, example in enumerate(examples):
        if "prompt" not in example:
            raise UsageError(f"Example {index} has no `prompt`; it has: {', '.join(example)}.")
        if reserved := set(example) & set(RESERVED):
            raise UsageError(
                f"Example {index} has a column `{min(reserved)}`, which is an argument that every reward function gets. Rename it."
            )
    check_columns(cast("RewardCallable", function), list(examples[0]), "reward_function")


class _DrawQueue:
    """Hands out draws until `total` groups are in progress, or posted and not lost afterwards."""

    def __init__(self, first: int, total: int) -> None:
        self._next = first
        self._target_groups = total
        self._in_progress = self._posted = self._lost = 0
        self._changed = asyncio.Condition()

    async def take(self) -> int:
        """The next draw; waits while enough groups are in progress or posted."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._in_progress + self._posted - self._lost < self._target_groups
            )
            self._in_progress += 1
            self._next += 1
            return self._next - 1

    async def give_back(self, *, posted: bool) -> None:
        """Mark a draw as no longer in progress; `posted` if its rewards were accepted."""
        async with self._changed:
            self._in_progress -= 1
            self._posted += posted
            self._changed.notify_all()

    async def lost(self, groups: int) -> None:
        """Set the number of posted groups that will not be trained."""
        async with self._changed:
            self._lost = groups
            self._changed.notify_all()


class _Scoring:
    """Calls the reward function, and counts its failures."""

    def __init__(
        self,
        function: RewardCallable,
        thread: Executor,
        groups_per_step: int,
        max_steps: int,
        examples: int,
    ) -> None:
        """A function that is not async is called in `thread`: it must not block the event loop."""

        @functools.wraps(function)  # callers inspect the signature to find its arguments
        async def in_thread(**arguments: Any) -> Any:
            work = functools.partial(call_plain, function, arguments)
            return await asyncio.get_running_loop().run_in_executor(thread, work)

        self.failed = 0
        self._name = name_of(function)
        self._function = function if is_async(function) else in_thread
        self._groups_per_step = groups_per_step
        self._max_steps = max_steps
        self._steps_per_epoch = examples / groups_per_step
        self._consecutive_failures = 0

    async def rewards(
        self, example: Example, group: GroupAnswer, warn: Callable[[str], None]
    ) -> tuple[float | None, ...]:
        """The reward of each completion. Raises TaskError if the function failed too often in a row."""
        count, prompt = len(group.completions), example["prompt"]
        request = ScoreRequest(
            draw=group.draw,
            prompts=[prompt] * count,
            completions=[as_completion(prompt, text) for text in group.completions],
            completion_ids=group.completion_tokens,
            columns={name: [value] * count for name, value in example.items() if name != "prompt"},
            global_step=group.draw // self._groups_per_step,
            max_steps=self._max_steps,
            steps_per_epoch=self._steps_per_epoch,
        )
        answer = await call(self._name, self._function, request, lambda _: None)
        reasons = [reason for reason in answer.failures if reason is not None]
        for reason in dict.fromkeys(reasons):
            warn(f"{group.group_id}: {reason}; what it concerns does not teach")
        if len(reasons) < len(answer.failures):
            self._consecutive_failures = 0
            return answer.values
        self.failed += 1
        self._consecutive_failures += 1
        if self._consecutive_failures >= MAX_FAILURES:
            raise TaskError(
                f"The reward function failed for {self._consecutive_failures} groups in a row; fix it. The last time: {reasons[0]}"
            )
        return answer.values


class _Loop:
    """The workers and the watcher of one call of `train_async`."""

    def __init__(
        self,
        client: AsyncTrainingClient,
        examples: Sequence[Example],
        scoring: _Scoring,
        draws: _DrawQueue,
        sampling: Sampling,
        status: StatusAnswer,
        target: int,
        view: Progress | None,
    ) -> None:
        """`status` is the server's status before the first draw."""
        self.metrics: dict[int, Metrics] = {}
        """Metrics of each step whose event was received."""
        self._client = client
        self._examples = examples
        self._scoring = scoring
        self._draws = draws
        self._sampling = sampling
        self._initial_status = status
        self._target = target
        self._view = view
        self._open: set[str] = set()
        self._late = 0

    async def run(self, concurrency: int) -> None:
        """Run until the watcher has seen the last step. Raises the error of the first worker (or watcher) that failed."""
        watcher = asyncio.create_task(self._watch_events())
        workers = [asyncio.create_task(self._process_draws()) for _ in range(concurrency)]
        waiting: set[asyncio.Task[None]] = {watcher, *workers}
        try:
            while not watcher.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            # Free the server's slots of groups that will not be rewarded now, instead of when their lease expires.
            with suppress(ClientError, TimeoutError):
                async with asyncio.timeout(CLEANUP_SECONDS):
                    for group_id in list(self._open):
                        await self._client.give_up(group_id)

    async def _process_draws(self) -> None:
        """Process one draw after another until the run is finished, or until the watcher ends the loop."""
        with suppress(RunFinished):
            while True:
                draw = await self._draws.take()
                posted = False
                try:
                    posted = await self._process_draw(draw)
                finally:
                    await self._draws.give_back(posted=posted)

    async def _process_draw(self, draw: int) -> bool:
        """Get the completions of one draw, score them and post the rewards. True if the server accepted them."""
        example = self._examples[draw % len(self._examples)]
        columns = {name: example[name] for name in (TOOLS, ARGUMENTS) if example.get(name)}
        sampling = cast("Sampling", {**self._sampling, **columns})
        while True:
            try:
                group = await self._client.completions(example["prompt"], draw=draw, **sampling)
            except DrawTaken:
                return False
            self._open.add(group.group_id)
            rewards = await self._scoring.rewards(example, group, self._warn)
            try:
                await self._client.rewards(group, rewards)
            except GroupGone as gone:
                if gone.code != "lease_expired":
                    return False
                # The draw is free again and is repeated, at most MAX_FAILURES times in a row.
                self._late += 1
                self._warn(str(gone))
                if self._late >= MAX_FAILURES:
                    raise
            else:
                self._late = 0
                return True
            finally:
                self._open.discard(group.group_id)

    async def _watch_events(self) -> None:
        """Follow the server's events up to the last step, or to the run's end."""
        events = self._client.events(self._initial_status.last_event_id)
        async with aclosing(cast("Any", events)):
            async for event in events:
                if event.run_id not in (None, self._initial_status.run_id):
                    continue
                if event.kind == EventKind.STEP:
                    self._record_step(event)
                    if event.step == self._target - 1:
                        return
                elif event.kind in ENDS:
                    return
                elif event.kind == EventKind.FAILED:
                    raise ClientError(f"The server's engine has failed: {event.message}")
                elif event.message and event.kind != EventKind.CHECKPOINT:
                    self._warn(event.message)
                if event.kind in CHANGES_COUNTS:
                    counters, initial = (
                        (await self._client.status()).counters,
                        self._initial_status.counters,
                    )
                    lost_groups = (
                        counters.stale + counters.quarantined - initial.stale - initial.quarantined
                    )
                    await self._draws.lost(lost_groups)

    def _record_step(self, event: EventData) -> None:
        if event.step is None or event.step < (self._initial_status.step or 0):
            return
        metrics = event.metrics or {}
        self.metrics[event.step] = metrics
        if self._view is not None:
            finite_metrics = {name: value for name, value in metrics.items() if value is not None}
            self._view.step(event.step, finite_metrics)

    def _warn(self, text: str) -> None:
        if self._view is not None:
            self._view.note(text)
        else:
            log.warning("%s", text)
