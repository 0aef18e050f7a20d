"""The main process's side of samplers apart from learners: processes on this machine that draw completions with their own model.

Each serves the weights published last, and its draws follow from seeds, so nothing is lost when one ends. Another is started in its
place, loads the newest weights, and receives all unanswered calls again; callers see no difference. A sampler that sends no message for
longer than the timeout, because it hangs or was stopped, is killed and replaced in the same way. If one ends repeatedly without having
drawn anything, all are ended.

Calls come from the main thread while the thread of `SpawnedWorkers` replaces processes: the lock `_replacement_lock` guards sending, and
the calls that may have to be sent again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from groupwise.core.errors import PolicyMismatchError, RunError
from groupwise.core.types import Policy
from groupwise.engine.distributed.messages import (
    Call,
    CallFailure,
    CallResult,
    Cancel,
    MessageChannel,
    RankSetup,
)
from groupwise.engine.distributed.rpc import RESUME_HINT, explain_exit
from groupwise.engine.distributed.spawned_workers import RankMessage, SpawnedWorkers

logger = logging.getLogger(__name__)

_DRAW = "sampler.generate"
_LOAD = "sampler.load"
MAX_CONSECUTIVE_ENDS = 3
"""The run fails after this many ends of one sampler without a completion in between: its requests, or the machine, are then likely to
end the next one as well."""
START_TIMEOUT = 1800.0
"""Seconds that a sampler may take to make its model: a large one loads slowly from a shared disk."""
_STARTED_TOO_LATE = f"it had not made its model after {START_TIMEOUT:g} s, and was killed."
_CHECKS_PER_TIMEOUT = 8
"""Silence checks, and heartbeats of each sampler, within `distributed.sampler_timeout`."""


class SamplerWorkers(SpawnedWorkers):
    """`count` samplers. One that ends, or is silent for longer than `timeout` seconds, is replaced. With `sends_log`, the first one sends
    the package's log."""

    def __init__(self, count: int, first_gpu: int, *, sends_log: bool, timeout: float) -> None:
        super().__init__(count, "sampler", first_gpu)
        self._timeout = timeout
        self._heartbeat_interval = self._check_interval = timeout / _CHECKS_PER_TIMEOUT
        self._silent: Counter[int] = Counter()
        """Consecutive silence checks, `_heartbeat_interval` seconds apart, without a message from each sampler."""
        self._checked_at = time.monotonic()
        self._sends_log = sends_log
        self._replacement_lock = threading.RLock()
        self._unanswered: list[dict[int, Call]] = [{} for _ in range(count)]
        """Unanswered calls of each sampler, by their numbers; a replacement receives them again."""
        self._available: set[int] = set()
        """Samplers that are ready to receive calls."""
        self._newest: Policy | None = None
        self._catching_up: dict[int, int] = {}
        """Replacement samplers that are loading the newest weights, by the number of the call that loads them."""
        self._ends: Counter[int] = Counter()
        """Number of times that each sampler ended since it last drew a completion."""

    def _start_call(
        self, rank: int, name: str, arguments: tuple[Any, ...]
    ) -> tuple[int, Future[Any]]:
        number, future = self._new_call()
        self._note_call()
        call = Call(number, name, arguments)
        with self._replacement_lock:
            if name == _LOAD:
                (self._newest,) = arguments
            self._unanswered[rank][number] = call
            if rank in self._available:
                self._send_message(self._by_rank[rank], call)
        return number, future

    def _send_message(self, channel: MessageChannel, message: Call | Cancel) -> None:
        with self._replacement_lock:
            super()._send_message(channel, message)

    def _pop_pending(self, number: int) -> Future[Any] | None:
        with self._replacement_lock:
            for calls in self._unanswered:
                calls.pop(number, None)
        return super()._pop_pending(number)

    # --- run by the thread -----------------------------------------------------------------------

    def _launch_workers(self) -> None:
        for rank in range(self.count):
            self._start_rank(rank)

    def _setup_of(self, rank: int) -> tuple[RankSetup, list[socket.socket]]:
        assert self._setup is not None
        sends_log = self._sends_log and rank == 0
        return RankSetup(
            rank,
            self.count,
            self._setup,
            None,
            sends_log=sends_log,
            heartbeat_interval=self._heartbeat_interval,
        ), []

    def _send_setup(self, rank: int, channel: MessageChannel) -> None:
        """See `SpawnedWorkers._send_setup`. Sending holds the lock that replacing a sampler needs, so it must not block for ever."""
        channel.set_send_timeout(self._timeout)
        super()._send_setup(rank, channel)

    def _handle_message(self, rank: int, message: RankMessage) -> None:
        match message:
            case CallFailure(0, error) if self._ready.done():
                raise error
            case CallFailure(number, error) if number in self._catching_up:
                raise error
            case CallResult(number, fingerprint) if number in self._catching_up:
                self._finish_catching_up(self._catching_up.pop(number), fingerprint)
            case CallResult(number):
                completion = self._unanswered[rank].get(number)
                if completion is not None and completion.name == _DRAW:
                    del self._ends[rank]
                super()._handle_message(rank, message)
            case _:
                super()._handle_message(rank, message)

    def _handle_ready(self, rank: int) -> None:
        with self._replacement_lock:
            if self._newest is None:
                self._resume(rank)
            else:
                number = next(self._numbers)
                self._catching_up[number] = rank
                self._send_message(
                    self._by_rank[rank], Call(number, "load_policy", (self._newest,))
                )
        if not self._ready.done():
            super()._handle_ready(rank)

    def _finish_catching_up(self, rank: int, fingerprint: str) -> None:
        """Put a replacement sampler to work if it serves the newest weights, or will: newer ones leave a `load` call pending."""
        with self._replacement_lock:
            assert self._newest is not None
            loads = any(call.name == _LOAD for call in self._unanswered[rank].values())
            if fingerprint != self._newest.fingerprint and not loads:
                raise PolicyMismatchError(
                    f"Sampler {rank + 1} was restarted and loaded version {self._newest.version}, which was published with fingerprint "
                    f"{self._newest.fingerprint}, but it serves {fingerprint}."
                )
            self._resume(rank)

    def _resume(self, rank: int) -> None:
        """Send a sampler its unanswered calls, in the order in which they were made."""
        self._available.add(rank)
        if self._channels:
            self._channels[rank] = self._by_rank[rank]
        for call in self._unanswered[rank].values():
            self._send_message(self._by_rank[rank], call)

    def _check_silence(self, responsive: set[int]) -> RunError | None:
        """Replace silent samplers. It counts checks, not seconds: while this process itself is stopped, no sampler counts as silent."""
        for rank in responsive:
            self._silent[rank] = 0
        now = time.monotonic()
        if now - self._checked_at < self._heartbeat_interval:
            return None
        self._checked_at = now
        for rank in {*self._by_rank} - responsive:
            self._silent[rank] += 1
            starting = rank not in self._pids
            if self._silent[rank] * self._heartbeat_interval > (
                START_TIMEOUT if starting else self._timeout
            ):
                hangs = f"it gave no sign of life for {self._timeout:g} s (distributed.sampler_timeout), and was killed."
                reason = self._handle_disconnect(rank, _STARTED_TOO_LATE if starting else hangs)
                if reason is not None:
                    return reason
        return None

    def _handle_disconnect(self, rank: int, hangs: str = "") -> RunError | None:
        """Replace a sampler that has ended, or hangs; `hangs` is then the reason for the message. Returns an error if all must end."""
        if self._end_reason is not None:
            return self._end_reason
        self._silent[rank] = 0
        with self._replacement_lock:
            self._available.discard(rank)
            self._catching_up = {
                number: other for number, other in self._catching_up.items() if other != rank
            }
            channel = self._by_rank[rank]
            self._selector.unregister(channel)
            channel.close()
        self._pids.pop(rank, None)
        with suppress(ProcessLookupError, PermissionError):  # its own children, too
            os.killpg(self._started[rank].pid, signal.SIGKILL)
        code, words = self._reap(rank)
        self._ends[rank] += 1
        worker = f"Sampler {rank + 1} of {self.count} (distributed.samplers) ended"
        cause = hangs or explain_exit(code)
        if self._ends[rank] == MAX_CONSECUTIVE_ENDS:
            return RunError(
                f"{worker} {MAX_CONSECUTIVE_ENDS} times without having drawn anything in between, at last so: {cause} Another one would "
                f"end likewise. {RESUME_HINT}{words}"
            )
        logger.warning(
            "%s: %s Another one takes its place, and draws again what was not finished%s",
            worker,
            cause,
            words,
        )
        self._start_rank(rank)
        return None
