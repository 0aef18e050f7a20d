"""Decides which policy draws which groups, and when.

`FixedLag` with a lag of s: the groups of step n are drawn by the policy after max(0, n − s) steps. Lag 0 is the synchronous loop. With a
lag of 1, the groups of the next step are sampled while this step is trained. Order and policies depend only on these numbers, so a
resumed run repeats the uninterrupted one bit for bit: it draws the groups in progress again, by the same policies, which the
checkpoint holds.

`Free`: each step takes the groups that finish first, so a group with slow rewards does not delay the others. A group is trained at most s
steps after it was sampled: the step that reaches this limit waits for it, and no group is discarded. The order is recorded, but
another run of the same config may have another order.

Both load new weights into the sampler only while no completion is being sampled: each completion has one policy.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.core.interruption import Interrupted, gather_all
from groupwise.core.types import Group, Policy
from groupwise.training.loops import group_sampling
from groupwise.training.loops.run import Schedule, StepBatch, TaskRun


def make_schedule(run: TaskRun) -> Schedule:
    """The schedule that the config names, for the run's current step."""
    return FixedLag(run) if run.config.training.schedule == "fixed_lag" else Free(run)


class FixedLag:
    """Step n is drawn by the policy after max(0, n − lag) steps."""

    def __init__(self, run: TaskRun) -> None:
        self._run = run
        self._lag = run.config.training.max_off_policy_steps
        self._steps: dict[int, asyncio.Task[StepBatch]] = {}
        self._sampling: dict[int, asyncio.Event] = {}
        self._ends = {run.step - 1: run.next_draw}
        """The first draw after those of each step."""
        self._caught_up = False

    @property
    def next_draw(self) -> int:
        return self._ends[self._run.step - 1]

    @property
    def outstanding(self) -> Sequence[int]:
        return ()

    async def next(self) -> StepBatch:
        run = self._run
        if not self._caught_up:
            await self._catch_up()
            self._caught_up = True
        for step in range(run.step, min(run.step + self._lag + 1, run.max_steps)):
            self._start_step(step)
        batch = await self._steps[run.step]
        del self._steps[run.step]
        return batch

    async def settle(self) -> None:
        await _settle_sampling(self, self._run, list(self._sampling.values()))

    def committed(self, batch: StepBatch) -> None:
        self._run.selection.finish(self._run.step, len(batch.all))

    async def close(self) -> None:
        await _cancel_tasks(self._steps.values())
        self._steps.clear()

    async def _catch_up(self) -> None:
        """Draw again the groups that were in progress when the checkpoint was written, by the same policies as then."""
        run = self._run
        for step in range(run.step, min(run.step + self._lag, run.max_steps)):
            await self._serve_policy(run.recent_policies.get(max(0, step - self._lag), run.policy))
            self._start_step(step)
        await self._serve_policy(run.policy)

    async def _serve_policy(self, policy: Policy) -> None:
        if policy.version != self._run.serving.version:
            await group_sampling.load_policy(self._run, policy)

    def _start_step(self, step: int) -> None:
        if step in self._steps:
            return
        size = self._run.config.training.prompts_per_step
        slots = size * (1 + self._run.algorithm.resample_rounds)
        self._run.selection.plan(step, step, slots)
        self._ends[step] = self._ends[step - 1] + size
        self._sampling[step] = asyncio.Event()
        previous = self._steps.get(step - 1)
        self._steps[step] = asyncio.create_task(self._draw_step(step, previous))

    async def _draw_step(self, step: int, previous: asyncio.Task[StepBatch] | None) -> StepBatch:
        """The groups of a step. With dynamic sampling, wait for the step before, because the first draw depends on it."""
        try:
            if previous is not None and self._run.algorithm.resample_rounds:
                await asyncio.wait((previous,))
            # Rounds draw the missing groups until enough are accepted, or no further round is allowed.
            size = self._run.config.training.prompts_per_step
            rounds_left = self._run.algorithm.resample_rounds
            timer = _Timer()
            accepted: list[Group] = []
            rejected: list[Group] = []
            next_draw = self._ends[step - 1]
            while True:
                draws = range(next_draw, next_draw + size - len(accepted))
                self._ends[step] = next_draw = draws.stop
                for group in await self._groups(step, draws, timer, is_last_round=not rounds_left):
                    (accepted if self._run.algorithm.accepts(group) else rejected).append(group)
                if len(accepted) == size or not rounds_left:
                    return timer.add_timings(fill_step(accepted, rejected, size))
                rounds_left -= 1
        finally:
            self._sampling.pop(step).set()

    async def _groups(
        self, step: int, draws: Sequence[int], timer: _Timer, *, is_last_round: bool
    ) -> list[Group]:
        waiting = set(draws)
        first_draw = self._ends[step - 1]

        async def one(draw: int) -> Group:
            choice = self._run.selection.take(step, draw - first_draw, draw)
            group = timer.sampled(await group_sampling.sample(self._run, draw, choice, step))
            waiting.discard(draw)
            if is_last_round and not waiting:
                self._sampling[step].set()
            return await _score_group(self._run, group, step, timer)

        return await gather_all(one(draw) for draw in draws)


def fill_step(accepted: Sequence[Group], rejected: Sequence[Group], size: int) -> StepBatch:
    """Fill a step that has too few accepted groups with rejected ones. They carry no signal but count in the loss's denominators."""
    missing = size - len(accepted)
    return StepBatch((*accepted, *rejected[:missing]), tuple(rejected[missing:]))


@dataclass(eq=False, slots=True)
class _PendingGroup:
    """A group of the free schedule that is not trained yet."""

    requested_step: int
    """Number of steps done when it was requested."""
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    group: Group | None = None
    """The scored group, once it is finished."""


class Free:
    """Each step takes the groups that finish first; none is more than `lag` steps old."""

    def __init__(self, run: TaskRun) -> None:
        self._run = run
        self._lag = run.config.training.max_off_policy_steps
        self._next = run.next_draw
        self._redraws = list(run.outstanding)
        self._size = run.config.training.prompts_per_step
        self._planned: set[int] = set()
        """Blocks whose draws were chosen; a block has as many draws as a step has prompts."""
        self._pending: dict[int, _PendingGroup] = {}
        self._finished: list[int] = []
        """Draws in the order in which they finished."""
        self._taken: tuple[int, list[int]] = (-1, [])
        """The current step and its draws."""
        self._timer = _Timer()

    @property
    def next_draw(self) -> int:
        return self._next

    @property
    def outstanding(self) -> Sequence[int]:
        step, draws = self._taken
        uncommitted = draws if step == self._run.step else []
        return sorted([*self._redraws, *self._pending, *uncommitted])

    async def next(self) -> StepBatch:
        run = self._run
        size = run.config.training.prompts_per_step
        self._timer, self._taken = _Timer(), (run.step, [])
        rejected: list[Group] = []
        while True:
            replacements_left = run.algorithm.resample_rounds * size - len(rejected)
            rejected += [
                self._take_group(draw) for draw in self._not_accepted()[:replacements_left]
            ]
            count = size * min(self._lag + 1, self._run.max_steps - self._run.step)
            while len(self._pending) < count:
                if self._redraws:
                    draw = self._redraws.pop(0)
                else:
                    draw, self._next = self._next, self._next + 1
                pending = self._pending[draw] = _PendingGroup(self._run.step)
                pending.task = asyncio.create_task(self._draw_group(draw, pending))
            draws = self._choose(size)
            if draws is not None:
                return self._timer.add_timings(
                    StepBatch([self._take_group(draw) for draw in draws], rejected)
                )
            # Wait for another group to finish; `result` raises the error if it failed.
            tasks = [
                entry.task for entry in self._pending.values() if entry.task and not entry.group
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def settle(self) -> None:
        await _settle_sampling(
            self, self._run, [pending.sampled for pending in self._pending.values()]
        )

    def committed(self, batch: StepBatch) -> None:
        """Tell the selection which blocks are complete: all their draws belong to committed steps."""
        draws = {group.draw for group in batch.all}
        first_open = min([d for d in self.outstanding if d not in draws], default=self._next)
        for block in [b for b in self._planned if b < first_open // self._size]:
            self._planned.remove(block)
            self._run.selection.finish(block, self._size)

    async def close(self) -> None:
        await _cancel_tasks(pending.task for pending in self._pending.values() if pending.task)

    def _choose(self, size: int) -> list[int] | None:
        """The draws that the step trains, or None. While others are in progress, replayed groups are limited to their configured share."""
        groups = {draw: pending.group for draw, pending in self._pending.items()}
        sampled_steps = {draw: pending.requested_step for draw, pending in self._pending.items()}
        replayed_draws = {d for d, group in groups.items() if group and group.origin == "replay"}
        replay = self._run.config.data.replay
        max_replayed = int(replay.max_share * size) if replay and None in groups.values() else size
        return choose(
            self._finished,
            sampled_steps,
            self._run.step,
            self._lag,
            size,
            replayed_draws,
            max_replayed,
        )

    async def _draw_group(self, draw: int, pending: _PendingGroup) -> None:
        try:
            block, slot = divmod(draw, self._size)
            self._planned.add(block)
            self._run.selection.plan(block, self._run.step, self._size)
            choice = self._run.selection.take(block, slot, draw)
            group = await group_sampling.sample(self._run, draw, choice, pending.requested_step)
            self._timer.sampled(group)
        finally:
            pending.sampled.set()
        pending.group = await _score_group(self._run, group, pending.requested_step, self._timer)
        self._finished.append(draw)

    def _not_accepted(self) -> list[int]:
        groups = {draw: self._pending[draw].group for draw in self._finished}
        return [
            d for d, group in groups.items() if group and not self._run.algorithm.accepts(group)
        ]

    def _take_group(self, draw: int) -> Group:
        self._finished.remove(draw)
        group = self._pending.pop(draw).group
        assert group is not None, f"draw {draw} is not finished"
        self._taken[1].append(draw)
        return group


def choose(
    finished: Sequence[int],
    sampled_steps: Mapping[int, int],
    step: int,
    lag: int,
    size: int,
    replayed_draws: AbstractSet[int] = frozenset(),
    max_replayed: int | None = None,
) -> list[int] | None:
    """Choose the `size` finished groups that step `step` trains, the earliest if possible; None: wait for more.

    `sampled_steps` maps each draw, finished or in progress, to the step at which it was sampled. After this step, the groups sampled at
    step t or earlier must fit into the steps up to t + lag; if they do not, the surplus is taken now, first. Of the rest, at most
    `max_replayed` chosen groups may be in `replayed_draws`.
    """
    counts = Counter(sampled_steps.values())
    chosen: list[int] = []
    for t in sorted(counts):
        sampled_count = sum(counts[other_step] for other_step in counts if other_step <= t)
        due = sampled_count - max(0, t + lag - step) * size
        chosen_count = sum(sampled_steps[draw] <= t for draw in chosen)
        candidates = [draw for draw in finished if sampled_steps[draw] <= t and draw not in chosen]
        if due - chosen_count > len(candidates):
            return None
        chosen += candidates[: max(0, due - chosen_count)]
    for draw in (candidate for candidate in finished if candidate not in chosen):
        replay_is_full = (
            max_replayed is not None and len(replayed_draws & set(chosen)) >= max_replayed
        )
        if len(chosen) < size and not (replay_is_full and draw in replayed_draws):
            chosen.append(draw)
    return chosen if len(chosen) == size else None


class _Timer:
    """Measures when the first group was requested, the last one sampled and the last one scored."""

    def __init__(self) -> None:
        self._requested_at = self._sampled_at = self._scored_at = time.perf_counter()
        self._tokens = 0

    def sampled(self, group: Group) -> Group:
        if group.again is not None:
            return group
        self._sampled_at = self._scored_at = time.perf_counter()
        self._tokens += sum(
            len(segment.token_ids)
            for rollout in group.rollouts
            for segment in rollout.segments
            if segment.source == "policy"
        )
        return group

    def scored(self) -> None:
        self._scored_at = time.perf_counter()

    def add_timings(self, batch: StepBatch) -> StepBatch:
        return replace(
            batch,
            sampling=self._sampled_at - self._requested_at,
            scoring=self._scored_at - self._sampled_at,
            sampled_tokens=self._tokens,
        )


async def _score_group(run: TaskRun, group: Group, step: int, timer: _Timer) -> Group:
    scored_group = await group_sampling.score(run, group, step)
    timer.scored()
    run.uncommitted_groups[group.draw] = scored_group
    show_sampling(run)
    return scored_group


def show_sampling(run: TaskRun) -> None:
    """Show how many groups of the step are sampled and scored."""
    run.progress.phase(
        "sampling", len(run.uncommitted_groups), run.config.training.prompts_per_step
    )


async def _settle_sampling(
    schedule: Schedule, run: TaskRun, sampling: Sequence[asyncio.Event]
) -> None:
    """Wait until all is sampled. A run that is asked to end cancels its groups instead; the resume draws them again."""
    try:
        await run.interruption.allow(_all_set(sampling))
    except Interrupted:
        await schedule.close()


async def _all_set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def _cancel_tasks(tasks: Iterable[asyncio.Task[StepBatch] | asyncio.Task[None]]) -> None:
    given_up: list[asyncio.Task[Any]] = list(tasks)
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
