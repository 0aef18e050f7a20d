import asyncio
from collections.abc import Iterable

import pytest

from groupwise.fleet.doorbells.local import LocalDoorbell
from groupwise.fleet.doorbells.several import SeveralDoorbells


class Broken:
    """Raises whatever is asked of it."""

    def __init__(self) -> None:
        self.asked = 0

    def open(self) -> None:
        pass

    def ring(self, job_ids: Iterable[str]) -> None:
        raise RuntimeError("no rope")

    async def wait(self, timeout: float) -> frozenset[str]:
        self.asked += 1
        raise RuntimeError("no ears")

    async def close(self) -> None:
        raise RuntimeError("no lid")


async def test_whichever_rings_is_heard_and_all_are_rung():
    first, second = LocalDoorbell(), LocalDoorbell()
    several = SeveralDoorbells([first, second])
    for each in (first, second):
        each.ring(["a"])
        assert await several.wait(60) == {"a"}
    await several.close()
    several.ring(["b"])
    assert [await first.wait(0), await second.wait(0)] == [{"b"}, {"b"}]


async def test_a_dead_one_changes_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture):
    alive, dead = LocalDoorbell(), Broken()
    several = SeveralDoorbells([dead, alive, Broken()], after_an_error=0)
    several.open()
    several.ring(["a"])
    assert await several.wait(60) == {"a"}
    for _ in range(100):
        await asyncio.sleep(0)
    assert dead.asked > 3
    alive.ring(["b"])
    assert await several.wait(60) == {"b"}
    await several.close()
    assert caplog.text.count("cannot be heard: no ears") == 2
    assert caplog.text.count("cannot ring: no rope") == 2
