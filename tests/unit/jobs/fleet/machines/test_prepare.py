"""A machine is prepared by the real runner on this machine, with a program in place of Python and pip."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.jobs.fleet.machines import prepare as preparing
from groupwise.jobs.hosts.host import Host, HostUnreachable, Request, RunnerResponse
from tests.processes import wait_until_async
from tests.unit.jobs.fleet.machines.prepared_place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_an_environment_is_built_once_and_then_reused(place: Place) -> None:
    made = await place.prepare()
    assert made.made
    assert made.python == f"{place.environment()}/bin/python"
    assert any("1/4" in line for line in place.told)
    assert any("made in" in line for line in place.told)
    while (again := await place.prepare()).made:
        pass  # the one before was still about to end, and was followed
    assert again.python == made.python
    assert any("it is there already" in line for line in place.told)


async def test_the_fleet_does_not_take_it_for_a_stranger(place: Place) -> None:
    await place.prepare()
    seen = await preparing.Runner(place.host, root=str(place.vm)).observe(probe=("true",))
    assert (seen.attempts, seen.quarantined) == ((), ())


async def test_two_at_once_make_it_once(place: Place) -> None:
    mark, go_on = place.builds.folder / "installing", place.builds.folder / "go-on"
    wait = f"touch {mark}; while [ ! -e {go_on} ]; do sleep 0.01; done"
    place.builds.behaves(f'case "$*" in *"-r lock.txt"*) {wait};; esac')
    first = asyncio.create_task(place.prepare())
    await wait_until_async(mark.exists)
    second = asyncio.create_task(place.prepare())
    await wait_until_async(lambda: any("being made already" in line for line in place.told))
    go_on.touch()
    one, two = await asyncio.gather(first, second)
    assert one == two
    assert sum("-m venv" in call for call in place.builds.calls()) == 1


class Cut:
    """A way to a machine that is cut whenever a test says so."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.verbs: list[str] = []
        self.cut_once: set[str] = set()

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        self.verbs.append(request.verb)
        if request.verb in self.cut_once:
            self.cut_once.discard(request.verb)
            raise HostUnreachable("cut")
        return await self._host.call(request, timeout=timeout)

    async def close(self) -> None:
        await self._host.close()


async def test_a_lost_connection_is_made_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "AGAIN", 0.01)
    way = Cut(place.host)
    way.cut_once = {"wait", "log"}
    assert (await place.prepare(host=way)).made
    assert sum("the connection is lost" in line for line in place.told) >= 1
    assert sum("4/4" in line for line in place.told) == 1  # no line is told twice


async def test_an_environment_built_long_ago_is_checked_before_it_is_recorded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked has slept meanwhile, and somebody else has pruned."""
    hello = preparing.Runner.hello
    said: list[float] = []

    async def after_a_night(runner: preparing.Runner) -> preparing.Hello:
        found = await hello(runner)
        said.append(found.time or 0.0)
        if len(said) != 2:
            return found
        shutil.rmtree(place.environment())
        return replace(found, time=said[0] + 2 * preparing.PRUNE_AFTER_SECONDS)

    monkeypatch.setattr(preparing.Runner, "hello", after_a_night)
    made = await place.prepare()
    assert made.made
    assert place.environment().exists()
    assert sum("still there" in line for line in place.told) == 1
