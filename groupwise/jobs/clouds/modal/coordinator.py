"""The desk: the one container that decides. It answers requests to the runner, whose files lie on the volume, and says whose turn it is.

A volume has no locks and no names that only one can take, so of several containers and laptops that write to it none can decide
anything. Modal sees to it that there is one desk (`max_containers=1`, one input at a time), which reloads the volume before an answer and
commits after it; whatever has to happen once is asked of it:

    ask        → the answer of the runner to a request, byte for byte as over SSH; the interpreter starts anew for each
    note       a call was spawned for this attempt. → the turn
    turns      → the turns of attempts, by their names
    take       a call has begun: → {"spent": seconds since the first stint began, "handed_over": whether it has ended and has yet to spawn
               the next call}, or None where it has nothing to do
    hand_over  a stint has ended, and another is to go on. → whether it is to be spawned
    end        nothing runs, and nothing shall. The exit record says why

A turn is {"number", "call", "given", "by", "since", "began"}: of which stint it is, which call has it (none: the first of that number that
takes it), which calls were spawned for it, which call handed it over, and when it and the first one began. Each may be asked again: a desk
may be killed before it commits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.jobs.clouds.modal.port import ROOT
from groupwise.jobs.hosts import runner
from groupwise.jobs.hosts.bootstrap import BOOTSTRAP, FLAGS

TURN = "turn.json"
ASKED = "asked.json"
"""What `queued.json` becomes once a call has taken it; there are no secrets in it."""
OVER = ("voided", "refused")


def answer(home: str, what: str, arguments: Sequence[Any]) -> Any:
    """`home`: where the volume is."""
    return VERBS[what](home, *arguments)


def attempt(home: str, job: str, epoch: int) -> runner.Attempt:
    """On the volume, or a copy of it."""
    return runner.Attempt(runner.Root(os.path.join(home, ROOT)), job, epoch)


def ask(home: str, request: bytes) -> bytes:
    """Both in the framing of `groupwise.jobs.hosts.framing`."""
    environment = {"HOME": home, "PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
    done = subprocess.run(
        [sys.executable, *FLAGS, "-c", BOOTSTRAP],
        input=request,
        stdout=subprocess.PIPE,
        env=environment,
        cwd="/",
        check=False,
    )
    return done.stdout


def note(home: str, job: str, epoch: int, number: int, call: str) -> dict[str, Any] | None:
    """None where there is no such attempt."""
    place = attempt(home, job, epoch)
    if not os.path.isdir(place.path):
        return None
    turn = turn_of(place)
    if turn["number"] == number and call not in turn["given"]:
        turn["given"].append(call)
        runner.write_json(place.at(TURN), turn)
    return turn


def turns(home: str, names: Sequence[Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """With `age`, the seconds since it is of this number."""
    found: dict[str, dict[str, Any]] = {}
    for job, epoch in names:
        place = attempt(home, job, epoch)
        turn = turn_of(place)
        found[place.name] = {**turn, "age": time.time() - turn["since"]}
    return found


def take(home: str, job: str, epoch: int, number: int, call: str) -> dict[str, Any] | None:
    """Once taken it is that call's, which may be begun again in another container."""
    place = attempt(home, job, epoch)
    turn = turn_of(place)
    if is_over(place):
        return None
    handed_over = _was_handed_over(turn, number, call)
    if not handed_over:
        if turn["number"] != number or turn["call"] not in (None, call) or not _has_token(place):
            return None
        turn.update(call=call, began=turn["began"] or time.time())
        runner.write_json(place.at(TURN), turn)
    return {"spent": max(0.0, time.time() - turn["began"]), "handed_over": handed_over}


def _was_handed_over(turn: Mapping[str, Any], number: int, call: str) -> bool:
    """By this call, and nothing was spawned yet that anybody knows of."""
    return turn["number"] == number + 1 and turn["by"] == call and not turn["given"]


def _has_token(place: runner.Attempt) -> bool:
    """Taken away now, or before; whoever voids an attempt takes it, too."""
    return runner.take_token(place, place.at(ASKED)) or os.path.exists(place.at(ASKED))


def hand_over(home: str, job: str, epoch: int, number: int, call: str) -> bool:
    """From this call to the next number."""
    place = attempt(home, job, epoch)
    turn = turn_of(place)
    if is_over(place):
        return False
    if turn["number"] == number and turn["call"] == call:
        turn.update(number=number + 1, call=None, given=[], by=call, since=time.time())
        runner.write_json(place.at(TURN), turn)
    return _was_handed_over(turn, number, call)


def end(home: str, job: str, epoch: int, because: str) -> None:
    """Only what has begun, and has not ended."""
    place = attempt(home, job, epoch)
    if os.path.isdir(place.path) and not is_over(place):
        record = {"reason": "cancelled", "message": because, "tail": ""}
        runner.write_json(place.at("exit.json"), record)


def turn_of(place: runner.Attempt) -> dict[str, Any]:
    """Before the first note, too."""
    first: dict[str, Any] = {"number": 1, "call": None, "given": [], "by": None, "began": None}
    first["since"] = runner.modified(place.path)
    return {**first, **(runner.read_json(place.at(TURN)) or {})}


def is_over(place: runner.Attempt) -> bool:
    """It has ended, or never begins."""
    state = runner.read_json(place.at("state.json"))
    return state is None or state.get("phase") in OVER or os.path.exists(place.at("exit.json"))


VERBS: dict[str, Callable[..., Any]] = {
    "ask": ask,
    "note": note,
    "turns": turns,
    "take": take,
    "hand_over": hand_over,
    "end": end,
}
