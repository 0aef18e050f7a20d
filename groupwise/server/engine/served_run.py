"""A run whose groups come from clients: the inputs of `take_step`, and the gate between sampling and new weights.

Clients may ask for completions at any time, also while a step is learned. The sampler receives new weights only when no completion is in
progress, so each completion has one policy: `settle` closes the gate and waits for the requests inside, and new requests wait outside until
the step is over.

No client request may stop the run: steps without a scored rollout, and updates that are skipped because they are not finite, are counted
and reported, and the run continues.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from groupwise.core.terminal.progress import Progress
from groupwise.core.types import Policy
from groupwise.core.waiting import ChangeNotifier
from groupwise.runs.records import WarningRecord
from groupwise.training.loops.group_sampling import load_into_sampler
from groupwise.training.loops.run import Run

logger = logging.getLogger(__name__)


class Gate:
    """Admits requests while it is open; `close` waits until none is inside."""

    def __init__(self) -> None:
        self.inside = 0
        self._busy = 0.0
        self._since = 0.0
        """When the gate was last entered while empty."""
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    async def enter(self) -> None:
        """Wait until the gate is open, then enter."""
        await self._open.wait()
        if not self.inside:
            self._since = time.perf_counter()
        self.inside += 1
        self._empty.clear()

    @property
    def is_open(self) -> bool:
        """True if requests may enter."""
        return self._open.is_set()

    async def opened(self) -> None:
        """Wait until the gate is open."""
        await self._open.wait()

    def leave(self) -> None:
        """Leave the gate; the last request to leave lets `close` return."""
        self.inside -= 1
        if not self.inside:
            self._busy += time.perf_counter() - self._since
            self._empty.set()

    def busy(self) -> float:
        """Seconds during which at least one request was inside, since the last call."""
        now = time.perf_counter()
        busy, self._busy = self._busy, 0.0
        if self.inside:
            busy, self._since = busy + now - self._since, now
        return busy

    async def close(self) -> None:
        """Keep new requests out, and return once none is inside."""
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        """Admit requests again."""
        self._open.set()


class Phase(Progress):
    """A step's current phase, for status requests to the engine; nothing is displayed or written."""

    def __init__(self, run: str, max_steps: int) -> None:
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115 — closed by `close`
        super().__init__(run, max_steps, stream=self._nowhere)
        self.name = "loading"

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """See `Progress.phase`."""
        self.name = name

    def close(self) -> None:
        """See `Progress.close`."""
        super().close()
        self._nowhere.close()


@dataclass(slots=True, kw_only=True)
class ServedRun(Run):
    """A run of the training server."""

    gate: Gate = field(default_factory=Gate)
    warned: list[str] = field(default_factory=list[str])
    """Warnings from the signals of the current step."""
    left: ChangeNotifier = field(default_factory=ChangeNotifier)
    """Beats when a request ends, so that another policy may be loaded."""
    waiting: Counter[int] = field(default_factory=Counter[int])
    """Requests that wait to be sampled, by the step count of their policy."""

    @property
    def kept_policies(self) -> int:
        """See `Run.kept_policies`: enough for the oldest policy that a trained group may come from."""
        return self.config.training.max_off_policy_steps

    @property
    def unscored_limit(self) -> None:
        """See `Run.unscored_limit`."""

    @property
    def non_finite_limit(self) -> None:
        """See `Training.non_finite_limit`."""

    async def settle(self) -> None:
        """See `Run.settle`."""
        await self.gate.close()

    def warn(self, warning: WarningRecord) -> None:
        """See `Run.warn`. In the run's log it is information: the server warns of it itself, when it gets the step's result."""
        text = self.warning_text(warning)
        logger.info("%s", text)
        self.warned.append(text)

    @asynccontextmanager
    async def sampled_by(self, requested_step: int | None) -> AsyncGenerator[tuple[int, Policy]]:
        """Context in which the sampler serves the policy after `requested_step` steps (None: the newest), or the nearest one that is kept.

        Yields its step count, and the policy.

        The sampler serves one policy at a time, so requests for another one wait until it is idle. Those for older policies come first:
        their groups are due earlier, and while they wait no request for a newer one enters.
        """
        step = await self._enter(requested_step)
        try:
            yield step, self.serving
        finally:
            self.gate.leave()
            self.left.notify()

    async def _enter(self, requested_step: int | None) -> int:
        """Enter the gate when the sampler serves the right policy, loading it if no request is inside; returns the policy's step count."""
        noted: int | None = None
        """Under which step this request is counted in `waiting`."""
        try:
            while True:
                await self.gate.opened()
                if not self.gate.is_open:  # the next step has closed it before this task was woken
                    continue
                step, policy = self._nearest_policy(requested_step)
                if noted != step:
                    self._stop_waiting(noted)
                    self.waiting[step] += 1
                    noted = step
                beat = self.left.next_event
                is_first = step == min(self.waiting)
                if is_first and policy.version == self.serving.version:
                    await self.gate.enter()
                    return step
                if is_first and not self.gate.inside:
                    await self.gate.enter()
                    await self._swap_inside_gate(policy)
                    return step
                await beat.wait()
        finally:
            self._stop_waiting(noted)

    def _stop_waiting(self, step: int | None) -> None:
        if step is None:
            return
        self.waiting[step] -= 1
        if not self.waiting[step]:
            del self.waiting[step]
        self.left.notify()

    def _nearest_policy(self, requested_step: int | None) -> tuple[int, Policy]:
        policies = {**self.recent_policies, self.step: self.policy}
        step = (
            self.step
            if requested_step is None
            else min(max(requested_step, min(policies)), self.step)
        )
        while step not in policies:  # it was not kept, so the next younger one is the nearest
            step += 1
        return step, policies[step]

    async def _swap_inside_gate(self, policy: Policy) -> None:
        """Load a policy while this request, alone inside the gate, keeps steps and other requests away. Leaves the gate after an error; a
        cancelled request leaves it when the policy is loaded.
        """
        loading = asyncio.ensure_future(load_into_sampler(self, policy))

        def leave(_: object = None) -> None:
            self.gate.leave()
            self.left.notify()

        try:
            await asyncio.shield(loading)
        except BaseException:
            if loading.done():
                leave()
            else:
                loading.add_done_callback(leave)
            raise
        self.left.notify()  # others wait for the same policy

    @contextmanager
    def taking_a_step(self) -> Generator[None]:
        """Context of one step; the gate is open afterwards, even after an error."""
        self.warned.clear()
        try:
            yield
        finally:
            self.gate.open()
