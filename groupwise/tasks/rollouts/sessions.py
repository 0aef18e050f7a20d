"""Runs environments: one session for each rollout; each call repeats all earlier completions.

A `SessionCall` carries every completion so far. If the session exists, only the last one is new to it. If it was lost with its
process, the environment is created again and gets all completions again; its answers must be the same as before (`reply_digests`), or the
rollout fails. The repeated part has its own limit (`repeat_limit`), because the rollout may have little time left. So killing a
process costs only the rollout that hung in it, and the other rollouts need no bookkeeping.

`Sessions` runs in a worker process or in a thread of the run, and never raises the errors of an environment.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from groupwise.core.errors import TaskError
from groupwise.core.plugins import explain, printable
from groupwise.core.types import Outcome, Prompt, RewardPart, to_json
from groupwise.tasks.environment import (
    EnvironmentFactory,
    Observation,
    as_parts,
    as_prompt,
    as_step,
    check_methods,
    reset_arguments,
)


class OnStart(Protocol):
    """Callback that is called just before user code runs."""

    def __call__(self, name: str, *, repeated: bool = False) -> None:
        """`repeated`: the code has run before, in a process that was lost."""
        ...


@dataclass(frozen=True, slots=True)
class SessionCall:
    """A request to the environment of one rollout: its first prompt, the next turn, or its end."""

    session: int
    """Identifies the rollout."""
    draw: int
    member: int
    seed: int
    """The same for all members of a group."""
    prompt: Prompt
    columns: dict[str, Any]
    completions: tuple[str, ...] = ()
    """All completions so far; empty in the request for the first prompt."""
    reply_digests: tuple[str, ...] = ()
    """Digests of the replies so far: one for the start and one for each turn."""
    repeat_limit: float | None = None
    """Seconds for each repeated piece, which was fast enough before; independent of the remaining time. None: the limit of new pieces."""
    ending: bool = False
    """True if the rollout has ended and only its final rewards and metrics are requested."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer, or the reason why there is none."""

    prompt: Prompt | None = None
    """The first prompt, if `reset` returned one."""
    observation: Observation = None
    done: bool = False
    parts: tuple[RewardPart, ...] = ()
    seconds: float = 0.0
    """Seconds that the environment took; repetitions after the loss of its process do not count."""
    digest: str = ""
    outcome: Outcome = "pending"
    """`failed` or `timed_out` with a reason, or `pending`."""
    reason: str | None = None


@dataclass(slots=True)
class _Session:
    environment: Any
    reply_digests: list[str] = field(default_factory=list[str])


class _Unusable(Exception):
    """The environment or one of its answers is invalid; the message says why."""


class Sessions:
    """The environments of one process; the worker calls `answer` for each request."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._factory = factory
        self._sessions: dict[int, _Session] = {}

    async def answer(self, call: SessionCall, started: OnStart) -> dict[str, Any]:
        """The `Reply`, as JSON values."""
        return json.loads(to_json(await self.reply(call, started)))

    async def reply(self, call: SessionCall, started: OnStart) -> Reply:
        """Execute a call; an exception of the environment fails its rollout."""
        try:
            session = self._sessions.get(call.session)
            if session is None:
                session = await self._rebuild_session(call, started)
            if call.ending:
                reply = await self._end_session(session, call, started)
                await self._drop_session(call.session)
                return reply
            reply = await self._run_turn(session, call, len(call.reply_digests), started)
            session.reply_digests.append(reply.digest)
            return reply
        except _Unusable as problem:
            reason = str(problem)
        except BaseException as error:  # noqa: BLE001 — user code; it fails its rollout only
            reason = f"the environment raised {explain(error).strip()}"
        await self._drop_session(call.session)
        return Reply(outcome="failed", reason=printable(reason))

    async def _rebuild_session(self, call: SessionCall, started: OnStart) -> _Session:
        """A new environment that has repeated all turns of the lost one."""
        started(f"{_display_name(self._factory)}()", repeated=bool(call.reply_digests))
        environment = self._factory()
        try:
            check_methods(environment, "the environment")
        except TaskError as problem:
            raise _Unusable(str(problem)) from problem
        session = self._sessions[call.session] = _Session(environment)
        for turn, digest in enumerate(call.reply_digests):
            repeat = await self._run_turn(session, call, turn, partial(started, repeated=True))
            if repeat.digest != digest:
                raise _Unusable(
                    f"the environment was made again after the loss of its process, and answered differently in turn {turn}. "
                    "It must depend on its row, seed and member and on the completions alone."
                )
            session.reply_digests.append(repeat.digest)
        return session

    async def _run_turn(
        self, session: _Session, call: SessionCall, turn: int, started: OnStart
    ) -> Reply:
        """The start of the rollout (turn 0), or the answer to the completion of a turn (from 1)."""
        begun_at = time.perf_counter()
        reply = await (
            self._call_reset(session, call, started)
            if turn == 0
            else self._call_step(session, call.completions[turn - 1], turn, started)
        )
        seconds = time.perf_counter() - begun_at
        call_json = json.dumps(
            [
                reply.prompt,
                reply.observation,
                reply.done,
                [[part.name, part.value] for part in reply.parts],
            ]
        )
        return replace(
            reply, seconds=seconds, digest=hashlib.sha256(call_json.encode()).hexdigest()[:16]
        )

    async def _call_reset(self, session: _Session, call: SessionCall, started: OnStart) -> Reply:
        reset = getattr(session.environment, "reset", None)
        if reset is None:
            return Reply()
        name = f"{_display_name(session.environment)}.reset"
        started(name)
        call_arguments = {"prompt": call.prompt, "seed": call.seed, "member": call.member}
        arguments = reset_arguments(reset, {**call.columns, **call_arguments})
        result = await _await_if_needed(reset(**arguments))
        with _checking_answer_of(name):
            return Reply(prompt=as_prompt(result))

    async def _call_step(
        self, session: _Session, completion: str, turn: int, started: OnStart
    ) -> Reply:
        name = f"{_display_name(session.environment)}.step, turn {turn}"
        started(name)
        result = await _await_if_needed(session.environment.step(completion))
        with _checking_answer_of(name):
            step = as_step(result)
            parts = (*as_parts(step.reward, turn - 1), *as_parts(step.metrics, turn - 1, 0.0))
        return Reply(observation=step.observation, done=step.done, parts=parts)

    async def _end_session(self, session: _Session, call: SessionCall, started: OnStart) -> Reply:
        """The reward parts of the whole rollout."""
        begun_at = time.perf_counter()
        parts: list[RewardPart] = []
        for method, weight in (("reward", 1.0), ("metrics", 0.0)):
            function = getattr(session.environment, method, None)
            if function is not None:
                name = f"{_display_name(session.environment)}.{method}"
                started(name)
                result = await _await_if_needed(function())
                with _checking_answer_of(name):
                    parts += as_parts(result, None, weight)
        started(f"{_display_name(session.environment)}.close")
        return Reply(parts=tuple(parts), seconds=time.perf_counter() - begun_at)

    async def _drop_session(self, session: int) -> None:
        """Remove an environment; errors of its `close` are ignored."""
        old_session = self._sessions.pop(session, None)
        close = getattr(old_session and old_session.environment, "close", None)
        if close is not None:
            with suppress(BaseException):
                await _await_if_needed(close())


@contextmanager
def _checking_answer_of(name: str) -> Generator[None]:
    """Turns a ValueError into `_Unusable` with the name of the method that returned the invalid answer."""
    try:
        yield
    except ValueError as problem:
        raise _Unusable(f"the environment's {name}: {problem}") from problem


async def _await_if_needed(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _display_name(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)
