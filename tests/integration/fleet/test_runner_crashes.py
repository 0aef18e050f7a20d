"""The runner and its supervisor are killed at each of their side effects.

Each call that changes something (a file, a lock, a process) is a point. For each point in turn a launch is begun in which the process in
question dies there by SIGKILL, at the point or just after it; then the control plane does what it does after any call without
an answer: it asks again. Whatever stood on disk at that moment:

1. the command is started at most once in all, never twice;
2. killed in the launch: asking again leads to one run and its exit record;
3. killed in the supervisor: either nothing ever ran, and asking again leads to one run; or the state is `lost`, or the true exit record is
   there, and the command does not live on;
4. a void in the place of that second launch is true: nothing ran, and nothing ever will, or the answer says that it began;
5. nothing that was left behind keeps the next epoch from its slot.
"""

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processes import is_gone, wait_until
from tests.rotation import turn
from tests.runner_machine import Machine, machine, request

DYING = """

import itertools as _itertools

def _dying():
    depth, last, when = os.environ["DIE_AT"].split(":")
    here, count = [0], _itertools.count(1)
    os.register_at_fork(after_in_child=lambda: here.__setitem__(0, here[0] + 1))

    def wrap(module, name):
        real = getattr(module, name)

        def call(*arguments, **options):
            dies = here[0] == int(depth) and next(count) == int(last)
            if dies and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*arguments, **options)
            finally:
                if dies and here[0] == int(depth):
                    os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, call)

    for name in "open mkdir rename unlink fsync pwrite write ftruncate mkfifo fork setsid rmdir waitpid dup2 close".split():
        wrap(os, name)
    wrap(fcntl, "flock")

_dying()
"""
"""Appended to the runner's text. The launch has depth 0, what stands between it and the supervisor 1, the supervisor 2, its child 3."""
LAUNCH, BETWEEN, SUPERVISOR, CHILD = 0, 1, 2, 3
SCRIPT = "echo started >> ../starts; exit 3"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def dying(here: Machine, depth: int, point: int, when: str) -> Machine:
    """The same machine, whose processes die there."""
    other = Machine(here.home.parent, here.python)
    other.source = here.source + DYING
    other.environment = {**here.environment, "DIE_AT": f"{depth}:{point}:{when}"}
    return other


def launched(here: Machine, depth: int, point: int, when: str, job: str) -> bool:
    """A launch that may die. Whether its own process did; for a supervisor, whether that did."""
    bad = dying(here, depth, point, when)
    order = bad.order("sh", "-c", SCRIPT, job=job, slot=0)
    call = bad.begin(request(bad.body("launch", source=bad.source, **order)))
    with call:
        assert call.stdout is not None
        call.stdout.read()
    return call.returncode == -signal.SIGKILL


def starts(here: Machine, job: str) -> int:
    try:
        return len((here.folder(job) / "starts").read_text().splitlines())
    except OSError:
        return 0


def settled(here: Machine, job: str) -> dict[str, Any]:
    """Its state once nothing moves any more."""
    return wait_until(
        lambda: (s := here.status(job))["state"] not in ("claimed", "running") and s, "an end"
    )


def asked_again(here: Machine, job: str) -> dict[str, Any]:
    here.sh(SCRIPT, job=job, slot=0)
    return settled(here, job)


def next_one_runs(here: Machine) -> None:
    """What was left behind does not hold the slot."""
    told = here.sh("exit 0", job="next", slot=0)
    assert told["refused"] is None, told
    assert settled(here, "next")["exit"]["code"] == 0


def points(here: Machine, depth: int, when: str, every: int) -> Iterator[str]:
    """One job for each point, until there are no more of them. All want the same slot."""
    for point in range(1 + turn() % every, 1200, every):
        job = f"{when}-{point}"
        died = launched(here, depth, point, when, job)
        if not died:
            assert point > 20, "there are more points than that"
            return
        yield job
    raise AssertionError("there is no end of points")


ALL = pytest.param(1, marks=pytest.mark.soak(suite="fleet"), id="all")
every_point = pytest.mark.parametrize("every", [ALL, pytest.param(13, id="some")])


@every_point
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_launch_dies_anywhere(here: Machine, when: str, every: int) -> None:
    for n, job in enumerate(points(here, LAUNCH, when, every)):
        if n % 2:
            told = here.ask("void", job=job, epoch=1)
            if told["state"] == "voided":
                assert starts(here, job) == 0
                assert here.sh(SCRIPT, job=job)["state"] == "voided"
            else:
                assert settled(here, job)["exit"]["code"] == 3
                assert starts(here, job) == 1
        else:
            told = asked_again(here, job)
            assert (told["state"], told["exit"] and told["exit"]["code"]) == ("exited", 3), (
                job,
                told,
            )
            assert starts(here, job) == 1


@pytest.mark.parametrize("every", [ALL, pytest.param(29, id="some")])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_supervisor_dies_anywhere(here: Machine, when: str, every: int) -> None:
    lost = never = recorded = 0
    for point in range(1 + turn() % every, 1200, every):
        job = f"{when}-{point}"
        launched(here, SUPERVISOR, point, when, job)
        told = settled(here, job)
        if told["state"] == "lost":
            assert starts(here, job) <= 1
            begun = told["pid"] is not None
            wait_until(
                lambda pid=told["pid"]: pid is None or is_gone(pid), "the end of the command"
            )
            before = starts(here, job)
            again = asked_again(here, job)
            if begun:
                assert (again["state"], starts(here, job)) == ("lost", before)
                lost += 1
            else:
                assert before == 0
                assert (again["state"], starts(here, job)) == ("exited", 1)
                never += 1
        else:
            assert (told["state"], told["exit"]["code"], starts(here, job)) == ("exited", 3, 1)
            recorded += 1
            if recorded > 12 / every:
                break
    assert min(lost, never, recorded) > 0, (lost, never, recorded)
    next_one_runs(here)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(range(1, 16), marks=pytest.mark.soak(suite="fleet"), id="all"),
        pytest.param((1, 2 + turn() % 9), id="some"),
    ],
)
@pytest.mark.parametrize("depth", [BETWEEN, CHILD])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_launch_killed_at_any_point_starts_the_job_at_most_once(
    here: Machine, depth: int, when: str, chosen: Sequence[int]
) -> None:
    """The first point is reached, or nothing is tested."""
    for point in chosen:
        job = f"{when}-{point}"
        launched(here, depth, point, when, job)
        told = settled(here, job)
        if told["state"] == "lost":
            assert (told["pid"], starts(here, job)) == (None, 0)
            assert asked_again(here, job)["exit"]["code"] == 3
            assert starts(here, job) == 1
        elif told["exit"]["code"] == 3:
            assert (starts(here, job), point == 1) == (1, False)
        else:
            assert (told["exit"]["signal"], starts(here, job)) == (signal.SIGKILL, 0)
