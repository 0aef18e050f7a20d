"""The coordinator (function `coordinate`): a single container that makes all decisions. It answers requests to the runner, whose files are
on the volume, and assigns turns.

A volume has no locks and no exclusive creation of files. Several containers and laptops that write to it can therefore not agree on
anything by themselves. Modal guarantees that there is one coordinator (`max_containers=1`, one input at a time). It reloads the volume
before each answer and commits it afterwards. Everything that must happen only once goes through it:

    ask        answer a request to the runner, byte for byte as over SSH, in a new interpreter each time → the answer
    note       record that a call was spawned for this attempt → the turn
    turns      → the turns of attempts, by their names
    take       a call has started and requests the turn → {"spent": seconds since the first stint started, "handed_over": true if this
               call's stint has ended and it has yet to spawn the next call}, or None if the call has nothing to do
    hand_over  a stint has ended, and another is to continue the job → true if the next call is to be spawned
    end        nothing runs and nothing may start; writes an exit record with the reason

A turn is the right to run the next stint, the part of the job that one Modal call runs. It is {"number", "call", "given", "by", "since",
"began"}: the number of the stint, the call that has the turn (none: the first call of that number that takes it), the calls that were
spawned for it, the call that handed it over, the time at which this turn was created, and the time at which the first stint started.
Every request may be repeated, because the coordinator may be killed before it commits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.jobs.clouds.modal.api import ROOT
from groupwise.jobs.hosts.bootstrap import BOOTSTRAP, FLAGS
from groupwise.jobs.hosts.runner.attempt_folder import take_token
from groupwise.jobs.hosts.runner.files import modification_time, read_json, write_json
from groupwise.jobs.hosts.runner.root import Attempt, Root

TURN = "turn.json"
TAKEN_TOKEN = "asked.json"
"""The name of `queued.json` once a call has taken it; the file holds no secrets."""
OVER = ("voided", "refused")


def answer(home: str, verb: str, arguments: Sequence[Any]) -> Any:
    """Answer one request to the coordinator. `home`: the folder of the volume."""
    return VERBS[verb](home, *arguments)


def attempt_at(home: str, job: str, epoch: int) -> Attempt:
    """An attempt on the volume, or on a container's copy of it."""
    return Attempt(Root(os.path.join(home, ROOT)), job, epoch)


def ask(home: str, request: bytes) -> bytes:
    """Pass a request to the runner. Request and answer are framed as in `groupwise.jobs.hosts.framing`."""
    environment = {"HOME": home, "PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
    process = subprocess.run(
        [sys.executable, *FLAGS, "-c", BOOTSTRAP],
        input=request,
        stdout=subprocess.PIPE,
        env=environment,
        cwd="/",
        check=False,
    )
    return process.stdout


def note(home: str, job: str, epoch: int, number: int, call: str) -> dict[str, Any] | None:
    """Record that a call was spawned for this stint; returns the turn, or None if the attempt does not exist."""
    attempt = attempt_at(home, job, epoch)
    if not os.path.isdir(attempt.path):
        return None
    turn = turn_of(attempt)
    if turn["number"] == number and call not in turn["given"]:
        turn["given"].append(call)
        write_json(attempt.at(TURN), turn)
    return turn


def turns(home: str, names: Sequence[Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """The turns of attempts, each with `age`: seconds since this turn was created."""
    answer: dict[str, dict[str, Any]] = {}
    for job, epoch in names:
        attempt = attempt_at(home, job, epoch)
        turn = turn_of(attempt)
        answer[attempt.name] = {**turn, "age": time.time() - turn["since"]}
    return answer


def take(home: str, job: str, epoch: int, number: int, call: str) -> dict[str, Any] | None:
    """Give the turn to a call. The call keeps the turn if Modal restarts it in another container."""
    attempt = attempt_at(home, job, epoch)
    turn = turn_of(attempt)
    if is_over(attempt):
        return None
    handed_over = _was_handed_over(turn, number, call)
    if not handed_over:
        # The token is taken now, or was taken before. `void` takes it too, so a voided attempt never starts.
        if (
            turn["number"] != number
            or turn["call"] not in (None, call)
            or not (
                take_token(attempt, attempt.at(TAKEN_TOKEN))
                or os.path.exists(attempt.at(TAKEN_TOKEN))
            )
        ):
            return None
        turn.update(call=call, began=turn["began"] or time.time())
        write_json(attempt.at(TURN), turn)
    return {"spent": max(0.0, time.time() - turn["began"]), "handed_over": handed_over}


def _was_handed_over(turn: Mapping[str, Any], number: int, call: str) -> bool:
    """True if this call handed the turn over, and no call is recorded for the next stint yet."""
    return turn["number"] == number + 1 and turn["by"] == call and not turn["given"]


def hand_over(home: str, job: str, epoch: int, number: int, call: str) -> bool:
    """Hand the turn over from this call to the next stint. True if this call is to spawn the next one."""
    attempt = attempt_at(home, job, epoch)
    turn = turn_of(attempt)
    if is_over(attempt):
        return False
    if turn["number"] == number and turn["call"] == call:
        turn.update(number=number + 1, call=None, given=[], by=call, since=time.time())
        write_json(attempt.at(TURN), turn)
    return _was_handed_over(turn, number, call)


def end(home: str, job: str, epoch: int, because: str) -> None:
    """Write an exit record for an attempt that has not ended yet."""
    attempt = attempt_at(home, job, epoch)
    if os.path.isdir(attempt.path) and not is_over(attempt):
        record = {"reason": "cancelled", "message": because, "tail": ""}
        write_json(attempt.at("exit.json"), record)


def turn_of(attempt: Attempt) -> dict[str, Any]:
    """The attempt's turn; the first turn if none is recorded yet."""
    default: dict[str, Any] = {"number": 1, "call": None, "given": [], "by": None, "began": None}
    default["since"] = modification_time(attempt.path)
    return {**default, **(read_json(attempt.at(TURN)) or {})}


def is_over(attempt: Attempt) -> bool:
    """True if the attempt has ended or will never start."""
    state = read_json(attempt.at("state.json"))
    return state is None or state.get("phase") in OVER or os.path.exists(attempt.at("exit.json"))


VERBS: dict[str, Callable[..., Any]] = {
    "ask": ask,
    "note": note,
    "turns": turns,
    "take": take,
    "hand_over": hand_over,
    "end": end,
}
