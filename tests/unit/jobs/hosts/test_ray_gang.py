"""Several machines of Ray without Ray: each is an object here, and starts real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.hosts import ray_gang
from groupwise.jobs.hosts.ray_gang import Gang, Machine, process_tree
from tests.processes import is_gone, wait_until

ENDLESS_SCRIPT = "while true; do sleep 0.05; done"
SCRIPT_UNTIL_EVICTED = "until [ -e {0}/evict ]; do sleep 0.05; done; cat {0}/evict; exit 9"
"""What leads, until it is told to end, as a runner looks for it."""


class RayError(Exception):
    """As Ray has it."""


class ActorUnavailableError(RayError):
    """Likewise."""


class FakeRay:
    """Answers are there as soon as they are asked for."""

    class exceptions:
        RayError = RayError
        ActorUnavailableError = ActorUnavailableError

    def get(self, answer: Callable[[], Any]) -> Any:
        return answer()


class Actor:
    """A machine of Ray's, which may be gone with its node."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.gone = False
        self.misses = 0
        """Answers to each question that do not come, after it has done what was asked."""
        self._missed: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        class Method:
            @staticmethod
            def remote(*asked: Any) -> Callable[[], Any]:
                return lambda: self.answer(name, *asked)

        return Method

    def answer(self, name: str, *asked: Any) -> Any:
        if self.gone:
            raise RayError
        answer = "127.0.0.1" if name == "host" else getattr(self.machine, name)(*asked)
        self._missed[name] = self._missed.get(name, 0) + 1
        if self._missed[name] <= self.misses:
            raise ActorUnavailableError
        return answer


class Gangs:
    """A gang of two in a folder, led by a script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.actors = [Actor(), Actor()]
        self.stops: list[int] = []

    def run(self, leads: str) -> int:
        (self.folder / "begin.sh").write_text(leads)
        ray: Any = FakeRay()
        return Gang(ray, [*self.actors], str(self.folder), self.stops).run()


def follow(*words: str, at: str = "/") -> str:
    """A line that has the other one begin this, with a secret."""
    order = {"arguments": words, "environment": {**os.environ, "CANARY": "secret"}, "folder": at}
    return f"cat >$RAY_GROUPWISE_ORDER.new <<'E'\n{json.dumps(order)}\nE\nmv $RAY_GROUPWISE_ORDER.new $RAY_GROUPWISE_ORDER\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_gang, "TICK", 0.02)


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gangs]:
    found = Gangs(tmp_path)
    yield found
    for each in found.actors:
        each.machine.kill()


def test_the_others_run_what_the_first_one_says_and_end_after_it(gang: Gangs) -> None:
    told = gang.folder / "told"
    script = f"echo $NODE_RANK $CANARY; echo >{told}; {ENDLESS_SCRIPT}"
    waits = f"until [ -e {told} ]; do sleep 0.05; done; ls {gang.folder} >{gang.folder}/seen\n"
    assert gang.run(f"{follow('sh', '-c', script)}{waits}sleep 0.3\nexit 3") == 3
    assert gang.actors[1].machine.ended() == 128 + signal.SIGTERM
    [said] = gang.folder.glob("order.*.1.log")
    assert said.read_text() == "1 secret\n"
    assert not list(gang.folder.glob("order.*.json")), "what holds secrets does not stay"


@pytest.mark.parametrize("how", ["ends", "is gone"])
def test_all_ranks_end_when_one_ends(
    gang: Gangs, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_gang, "NOTICE", 0.1)
    if how == "is gone":
        gang.actors[1].gone = True
        leads = SCRIPT_UNTIL_EVICTED.format(gang.folder)
    else:
        leads = f"{follow('false')}{SCRIPT_UNTIL_EVICTED.format(gang.folder)}"
    assert gang.run(leads) == 9


def engine_said(gang: Gangs) -> str:
    log = gang.folder / "engine.log"
    return log.read_text() if log.exists() else ""


def test_an_answer_that_does_not_come_is_no_end_and_nothing_begins_twice(gang: Gangs) -> None:
    for each in gang.actors:
        each.misses = 3
    twice = gang.folder / "twice"
    once = f"echo x >>{twice}\n{follow('sh', '-c', f'echo x >>{twice}')}"
    assert gang.run(f"{once}until [ $(wc -l <{twice}) = 2 ]; do sleep 0.05; done\nexit 4") == 4
    assert twice.read_text() == "x\nx\n"


def test_a_stop_by_ray_is_sent_to_the_first_machine(gang: Gangs) -> None:
    ready = gang.folder / "ready"

    class Stops(list[int]):
        def __bool__(self) -> bool:
            return ready.exists()

    gang.stops = Stops()
    told = "trap 'exit 8' TERM"  # its runner is to tell it, alone
    assert gang.run(f"{told}\necho >{ready}\n{SCRIPT_UNTIL_EVICTED.format(gang.folder)}") == 9
    assert engine_said(gang) == "25"


def test_a_member_that_ignores_sigterm_is_killed(
    gang: Gangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_gang, "SAVING", 0.2)
    ready = gang.folder / "ready"
    stays = f"trap '' TERM; echo >{ready}; {ENDLESS_SCRIPT}"
    waits = f"until [ -e {ready} ]; do sleep 0.05; done\n"
    assert gang.run(f"{follow('sh', '-c', stays)}{waits}sleep 0.2") == 0
    wait_until(lambda: gang.actors[1].machine.ended() == 128 + signal.SIGKILL)


def test_processes_of_a_gang_end_with_their_leader(tmp_path: Path) -> None:
    """However that ended."""
    text = Path(ray_gang.__file__).read_text().partition("\nif __name__")[0]
    (tmp_path / "begin.sh").write_text(f"echo $$ >{tmp_path}/pid\n{ENDLESS_SCRIPT}")
    begins = f"{text}\nMachine().lead({str(tmp_path)!r}, {{}})\nsignal.pause()"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", begins]) as process:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        pid = int((tmp_path / "pid").read_text())
        assert pid in process_tree(process.pid)
        process.kill()
    wait_until(lambda: is_gone(pid))
