"""What `groupwise check` finds out about an environment: it can be made, begins alike for all members, and answers a turn.

Whether it gives the right rewards only its task knows: there is no gold for a conversation.
"""

from __future__ import annotations

import json
from dataclasses import replace

from groupwise.core.errors import EnvironmentWorkerError
from groupwise.core.types import Example
from groupwise.tasks.contract import Task
from groupwise.tasks.rollouts.hosts import EnvironmentHost, LocalHost, WorkerHost
from groupwise.tasks.rollouts.sessions import Reply, SessionCall, Sessions
from groupwise.training.checks.check_data import written
from groupwise.training.checks.check_gold import GARBAGE
from groupwise.training.checks.findings import Finding
from groupwise.training.config import RunConfig, view

NAME = "environment"
SEED = 0


async def check_environment(task: Task, config: RunConfig, example: Example) -> Finding:
    """Begin two members of a group, take one turn with nonsense, and end."""
    host = _host(task, config)
    try:
        await host.start()
        return await _played(host, example, config.rollout.time_limit)
    except EnvironmentWorkerError as error:
        return _broken(str(error))
    finally:
        await host.close()


def _host(task: Task, config: RunConfig) -> EnvironmentHost:
    """In a process that can be killed, where the task can be imported by one."""
    if task.spec is None or config.rollout.in_process:
        return LocalHost(Sessions(task.environment(view(config))))
    return WorkerHost(
        "groupwise.training.rollout_builder:environments_for_worker",
        {"config": config.model_dump(mode="json"), "task": task.spec},
        start_limit=config.rollout.start_limit,
    )


async def _played(host: EnvironmentHost, example: Example, limit: float) -> Finding:
    first = SessionCall(0, example.index, 0, SEED, example.prompt, example.columns)
    begun = await host.ask(first, limit)
    if begun.reason is not None:
        return _broken(f"the first prompt: {begun.reason}")
    again = await host.ask(replace(first, session=1), limit)
    turn = replace(first, completions=(GARBAGE,), heard=(begun.digest,))
    answer = await host.ask(turn, limit)
    if answer.reason is not None:
        return _broken(f"a turn with {GARBAGE!r}: {answer.reason}")
    ended = await host.ask(replace(turn, heard=(begun.digest, answer.digest), ending=True), limit)
    if ended.reason is not None:
        return _broken(f"the end of a rollout: {ended.reason}")
    return _told(begun, again, answer, ended)


def _told(begun: Reply, again: Reply, answer: Reply, ended: Reply) -> Finding:
    earned: dict[str, float] = {}
    for part in (*answer.parts, *ended.parts):
        if part.weight and part.value is not None:
            earned[part.name] = earned.get(part.name, 0.0) + part.value
    opening = "the row's prompt" if begun.prompt is None else repr(written(begun.prompt)[:80])
    said = "nothing" if answer.observation is None else repr(_text(answer)[:80])
    measured = (
        f"begins with {opening}; answers nonsense with {said}{' and ends' if answer.done else ''}; "
        f"rewards so far: {json.dumps(earned) if earned else 'none'}"
    )
    data = {"done": answer.done, "rewards": earned, "seconds": begun.seconds + answer.seconds}
    if begun.digest != again.digest:
        return Finding(
            NAME,
            "problem",
            "two members of a group begin differently with the same seed",
            "they are compared with each other, and a lost process cannot be replaced",
            "draw what is random from the `seed` that `reset` is given",
            data,
        )
    return Finding(NAME, "ok", measured, data=data)


def _text(answer: Reply) -> str:
    return "" if answer.observation is None else written(answer.observation)


def _broken(reason: str) -> Finding:
    return Finding(
        NAME,
        "problem",
        reason,
        "in training such rollouts are failed and do not teach",
        "let the environment take any text",
    )
