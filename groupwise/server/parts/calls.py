"""The calls of some parts: each is done once, even if it is sent several times, and the learner's calls are done in order.

A call continues whether or not its client waits. Its answer is kept until the client has it. Ordered calls (the learner's) name an earlier
call in `after`; their answers are kept until a later call names the same or a higher number. Any other call may be done twice without harm,
and its answer is kept for some time after delivery. Everything is in memory and ends with the engine, which holds all the state that the
calls have changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from groupwise.api.schemas.parts import AnyVerb, CallAnswer, CallError, CallRequest
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.core.waiting import ChangeNotifier

MAX_CALLS = 4096
"""Limit on calls in progress and answers not yet fetched."""
MAX_BODIES = 8
"""Limit on the size of unfinished calls in memory, in multiples of the largest body."""
KEPT_AFTER_DELIVERY = 900.0
"""Seconds for which the answer of an unordered call is kept after delivery: as long as clients repeat requests."""
FREED = frozenset({"generate"})
"""Verbs whose calls are cancelled when given up. Any other call may have changed something by then, so it continues."""


@dataclass(eq=False, slots=True)
class _Call:
    content: bytes
    """Hash (SHA-256) of the request."""
    task: asyncio.Task[Any] | None
    """None: the client gave the call up before it arrived."""
    ordered: bool
    verb: str = ""
    size: int = 0
    """Size of the request in bytes."""
    delivered: float | None = None
    """Time of the last delivery to the client, by `clock`; None: not delivered yet."""

    @property
    def over(self) -> bool:
        return self.task is None or self.task.done()


class Calls:
    """See the module. Client errors are raised as `Refusal`."""

    def __init__(
        self,
        do: Callable[[AnyVerb], Awaitable[Any]],
        longest_wait: float,
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`do` does one call. `longest_wait`: seconds for which a call waits for earlier calls. `most_bytes`: largest request body."""
        self._run_call = do
        self._longest_wait = longest_wait
        self._most_bytes = MAX_BODIES * most_bytes
        self._clock = clock
        self._calls: dict[int, _Call] = {}
        self._reached = 0
        """The highest ordered number that is over, or was given up before it arrived."""
        self._named = 0
        """The highest number that a call has named in `after`: the client knows the outcome of all calls up to it."""
        self._forgotten = 0
        """The highest ordered number whose answer is no longer kept."""
        self._call_ended = ChangeNotifier()
        """Beats when an ordered call is over."""

    async def make(
        self, number: int, request: CallRequest, content: bytes, wait: float
    ) -> CallAnswer:
        """Start a call, or find the same earlier one; returns its state after at most `wait` seconds. `content`: the raw request body."""
        digest = hashlib.sha256(content).digest()
        call = self._calls.get(number)
        if call is None:
            ordered = request.after is not None
            if ordered and number <= self._forgotten:
                raise _unknown_call(number)
            self._named = max(self._named, request.after or 0)
            self._refuse_more(len(content))
            task = asyncio.create_task(
                self._run_in_order(number, request), name=f"parts {request.do.verb}"
            )
            # Retrieve the error, so that asyncio does not log it as never retrieved.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            call = _Call(digest, task, ordered, request.do.verb, len(content))
            self._calls[number] = call
        elif call.task is not None and call.content != digest:
            raise Refusal(
                "call_taken",
                f"The call {number} was made before, with other content. Each call has a number of its own.",
            )
        return await self._state_of(number, call, wait)

    async def answer(self, number: int, wait: float) -> CallAnswer:
        """The state of a call, after at most `wait` seconds."""
        if number not in self._calls:
            raise _unknown_call(number)
        return await self._state_of(number, self._calls[number], wait)

    async def give_up(self, number: int) -> CallAnswer:
        """Give up a call. A call that may have changed something continues; a call that has not arrived yet will not be done."""
        call = self._calls.get(number)
        if call is None:
            if number <= self._forgotten:
                raise _unknown_call(number)
            self._refuse_more(0)
            call = self._calls[number] = _Call(b"", None, ordered=True)
            self._note_over(number)
        elif call.task is not None and call.verb in FREED:
            call.task.cancel()
            await asyncio.wait((call.task,))
        return await self._state_of(number, call, 0.0)

    async def end(self) -> None:
        """Cancel all calls in progress."""
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def pending(self) -> int:
        """Number of calls that wait or are in progress."""
        return sum(not call.over for call in self._calls.values())

    def forget(self) -> None:
        """Delete answers that the client has received."""
        oldest_kept = self._clock() - KEPT_AFTER_DELIVERY
        for number, call in [*self._calls.items()]:
            if not call.over:
                continue
            if call.ordered and number <= self._named:
                self._forgotten = max(self._forgotten, number)
            elif call.ordered or call.delivered is None or call.delivered >= oldest_kept:
                continue
            del self._calls[number]

    def _refuse_more(self, size: int) -> None:
        if len(self._calls) >= MAX_CALLS:
            self.forget()
        waiting = sum(call.size for call in self._calls.values() if not call.over)
        if len(self._calls) >= MAX_CALLS or waiting + size > self._most_bytes:
            raise Refusal(
                "too_busy",
                f"{len(self._calls)} calls with {waiting} bytes are under way or not fetched; there may be {MAX_CALLS}, with "
                f"{self._most_bytes} bytes. Wait for some of them.",
                retry_after=1.0,
            )

    async def _run_in_order(self, number: int, request: CallRequest) -> Any:
        try:
            if request.after is not None:
                try:
                    async with asyncio.timeout(self._longest_wait):
                        while not self._is_over(request.after):
                            await self._call_ended.next_event.wait()
                except TimeoutError:
                    raise UsageError(
                        f"The call {request.after}, after which this one was to be done, was not over within {self._longest_wait:g} "
                        "seconds."
                    ) from None
            return await self._run_call(request.do)
        finally:
            if request.after is not None:
                asyncio.get_running_loop().call_soon(self._note_over, number)  # once it is done

    def _is_over(self, number: int) -> bool:
        """True if the call and all ordered ones before it are over."""
        if self._reached < number:
            return False
        return all(
            call.over
            for earlier_number, call in self._calls.items()
            if call.ordered and earlier_number <= number
        )

    def _note_over(self, number: int) -> None:
        self._reached = max(self._reached, number)
        self._call_ended.notify()

    async def _state_of(self, number: int, call: _Call, wait: float) -> CallAnswer:
        task = call.task
        if task is None:
            return CallAnswer(number=number, state="given_up")
        if not task.done() and wait > 0:
            await asyncio.wait((task,), timeout=wait)
        if not task.done():
            return CallAnswer(number=number, state="working")
        call.delivered = self._clock()
        if task.cancelled():
            return CallAnswer(number=number, state="given_up")
        error = task.exception()
        if error is None:
            return CallAnswer(number=number, state="done", result=task.result())
        if isinstance(error, Refusal) or not isinstance(error, GroupwiseError):
            raise error
        failure = CallError(code=error.code, message=error.message)
        return CallAnswer(number=number, state="failed", error=failure)


def _unknown_call(number: int) -> Refusal:
    return Refusal(
        "unknown_call",
        f"There is no call {number}: it was never made, or it is over and its answer is kept no longer.",
    )
