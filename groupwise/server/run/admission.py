"""The waiting room of /completions: holds requests back if their groups could not be trained in time.

A group that is sampled now must be trained within `staleness` steps after the one that is due. So the number of groups in progress (being
sampled, open, rewarded or planned) is limited to what those steps take. Further requests wait here, in the order of arrival, until a step
is done or a group is gone, and are refused when the wait gets too long: before the sampling, not after it.

A request that names a draw waits for the draw's turn instead: draw d belongs to step d // groups_per_step, or to a later one if draws
before it were lost. The groups of a step are therefore the same, and sampled by the same policy, for any number of clients and any order of
their requests. A request is refused soon if nothing is in progress that would bring its draw's turn nearer.

With `steps: manual` only the client knows what a step will take, so only the number of groups in progress is limited.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from groupwise.api.schemas.problems import Refusal

RETRY_SECONDS = 2.0
"""Seconds after which a refused client may ask again; about the duration of a step of a small model."""
IDLE_SECONDS = 3.0
"""Seconds to wait for a draw if nothing brings its turn nearer; clients that start at the same time all arrive within less."""


@dataclass(slots=True, kw_only=True)
class Capacity:
    """Limits on the groups in progress."""

    groups_per_step: int
    staleness: int
    manual: bool
    max_open_groups: int
    """Limit on groups in progress with `steps: manual`."""

    @property
    def capacity(self) -> int:
        """Maximum number of groups in progress at once."""
        return self.max_open_groups if self.manual else self.groups_per_step * (self.staleness + 1)

    def first_too_early(self, steps_done: int, lost: int) -> int:
        """The first draw whose turn has not come, given that `lost` draws will never be trained."""
        return (steps_done + 1 + self.staleness) * self.groups_per_step + lost

    def policy_step(self, draw: int) -> int | None:
        """Step count of the policy that samples the draw, for all clients and at all times; None with manual steps: the newest policy."""
        return None if self.manual else max(0, draw // self.groups_per_step - self.staleness)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The run's counts of steps and groups."""

    steps_done: int = 0
    under_way: int = 0
    """Groups that are open, rewarded or planned."""
    lost: int = 0
    """Groups that no step will take: too old, or quarantined."""


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A waiting request."""

    draws: tuple[int | None, ...]
    key_id: str
    """Id of the API key of the request."""
    since: float = field(default_factory=time.monotonic)
    admitted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Admission:
    """Admits requests for completions of one run. Used in one event loop only."""

    def __init__(self, limits: Capacity, traffic: Traffic, next_draw: int) -> None:
        """`next_draw`: the first draw that is not assigned to a group yet."""
        self.limits = limits
        self.sampling = 0
        """Number of groups being sampled."""
        self._traffic = traffic
        self._next_draw = next_draw
        self._queue: deque[QueuedRequest] = deque()
        self._ended: Refusal | None = None

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    def queued_requests(self) -> tuple[QueuedRequest, ...]:
        """The waiting requests, in order of arrival."""
        return tuple(self._queue)

    def update(self, traffic: Traffic) -> None:
        """Update the counts after a step, or after groups were added or removed."""
        self._traffic = traffic
        self._admit_waiting()

    def end(self, refusal: Refusal) -> None:
        """Admit no more requests, and raise this refusal in those that wait."""
        self._ended = refusal
        for waiting in self._queue:
            if not waiting.admitted.done():
                waiting.admitted.set_exception(refusal)
        self._queue.clear()

    @asynccontextmanager
    async def admit(
        self, draws: Sequence[int | None], limit: float, key_id: str
    ) -> AsyncGenerator[tuple[int, ...]]:
        """Wait for room for these groups, at most `limit` seconds; yields their draws, with free ones chosen for None. `key_id`: id of
        the API key.

        Within the context the groups count as being sampled; a caller that has kept groups calls `update` before leaving it. Raises
        Refusal: `too_busy` when the time is over, or nothing brings the turn of a named draw nearer; `invalid_request` for more groups than
        there can ever be room for.
        """
        if len(draws) > self.limits.capacity:
            limit_text = (
                "may be open at once"
                if self.limits.manual
                else f"can be under way: groups_per_step × (staleness + 1) = {self.limits.groups_per_step} × "
                f"{self.limits.staleness + 1}"
            )
            message = (
                f"{len(draws)} prompts were sent at once, but only {self.limits.capacity} groups {limit_text}. "
                "Send fewer at once, or start with higher settings."
            )
            raise Refusal("invalid_request", message, field="prompts")
        await self._wait_for_turn(draws, limit, key_id)
        self.sampling += len(draws)
        assigned: list[int] = []
        for draw in draws:
            assigned.append(self._next_draw if draw is None else draw)
            self._next_draw = max(self._next_draw, assigned[-1] + 1)
        try:
            yield tuple(assigned)
        finally:
            self.sampling -= len(draws)
            self._admit_waiting()

    async def _wait_for_turn(self, draws: Sequence[int | None], limit: float, key_id: str) -> None:
        if self._ended is not None:
            raise self._ended
        waiting = QueuedRequest(tuple(draws), key_id)
        self._queue.append(waiting)
        self._admit_waiting()
        idle_limit = min(limit, IDLE_SECONDS)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(idle_limit):
                    await asyncio.shield(waiting.admitted)  # a timeout must not cancel it
            under_way = self._traffic.under_way + self.sampling + self._admitted_groups()
            if not waiting.admitted.done() and not under_way:
                raise TimeoutError  # nothing can bring the draw's turn nearer
            async with asyncio.timeout(limit - idle_limit):
                await waiting.admitted
        except BaseException as error:
            self._leave_queue(waiting)
            self._admit_waiting()  # this request may have been admitted already, so its room is free again
            if isinstance(error, TimeoutError):
                raise self._too_busy(waiting) from None
            raise
        self._leave_queue(waiting)

    def _too_busy(self, waiting: QueuedRequest) -> Refusal:
        early_draws = [
            draw for draw in waiting.draws if draw is not None and not self._is_due(draw)
        ]
        if not early_draws:
            return Refusal("too_busy", retry_after=RETRY_SECONDS)
        limits, steps_done = self.limits, self._traffic.steps_done
        first_too_early = limits.first_too_early(steps_done, self._traffic.lost)
        under_way = self._traffic.under_way + self.sampling
        return Refusal(
            "too_busy",
            f"it is not the turn of draw {min(early_draws)}: {steps_done} steps are done, and "
            f"with groups_per_step {limits.groups_per_step} and staleness {limits.staleness} the draws below {first_too_early} may "
            f"be sampled; {under_way or 'none'} of their groups {'is' if under_way == 1 else 'are'} under way. "
            "Ask for the draws before it, post their rewards, and ask again; or leave "
            "`draw` out for the next free one.",
            retry_after=RETRY_SECONDS,
        )

    def _leave_queue(self, waiting: QueuedRequest) -> None:
        if waiting in self._queue:
            self._queue.remove(waiting)

    def _admit_waiting(self) -> None:
        """Admit all requests that fit, in order of arrival; one whose named draws are not due yet does not block others."""
        room = (
            self.limits.capacity - self._traffic.under_way - self.sampling - self._admitted_groups()
        )
        for waiting in list(self._queue):
            if waiting.admitted.done():
                continue
            if not all(self._is_due(draw) for draw in waiting.draws):
                continue
            if len(waiting.draws) > room:
                return
            room -= len(waiting.draws)
            waiting.admitted.set_result(None)

    def _admitted_groups(self) -> int:
        """Groups of requests that were admitted but have not resumed yet."""
        return sum(
            len(waiting.draws)
            for waiting in self._queue
            if waiting.admitted.done() and not waiting.admitted.cancelled()
        )

    def _is_due(self, draw: int | None) -> bool:
        traffic = self._traffic
        return draw is None or (
            self.limits.manual
            or draw < self.limits.first_too_early(traffic.steps_done, traffic.lost)
        )
