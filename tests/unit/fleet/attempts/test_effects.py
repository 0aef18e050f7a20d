"""The gateway: every effect is seen on both sides, and the dead do nothing."""

import asyncio

import pytest

from groupwise.fleet.attempts.effects import Death, Gateway, Side
from groupwise.fleet.store.database import Database
from groupwise.hosts.port import Host, Request
from groupwise.testing.fake_hosts import FakeHosts


class Hook:
    def __init__(self, death: tuple[str, Side] | None = None) -> None:
        self.seen: list[tuple[str, Side]] = []
        self.death = death

    def __call__(self, name: str, side: Side) -> None:
        self.seen.append((name, side))
        if (name, side) == self.death:
            raise Death


def both(name: str) -> list[tuple[str, Side]]:
    return [(name, Side.BEFORE), (name, Side.AFTER)]


async def test_effects_are_seen_by_name_on_both_sides(database: Database) -> None:
    hook = Hook()
    gateway = Gateway(database, hook)
    host: Host = gateway.host(FakeHosts({"a": []})["a"])
    assert await gateway.commit("one", lambda _: 1) == 1
    assert await gateway.write("two", lambda: 2) == 2
    assert await gateway.look(lambda _: 3) == 3
    await host.call(Request("hello"), timeout=1.0)
    assert hook.seen == [*both("one"), *both("two"), *both("host.hello")]


@pytest.mark.parametrize(("side", "done"), [(Side.BEFORE, []), (Side.AFTER, ["one"])])
async def test_after_its_death_nothing_is_done_any_more(
    database: Database, side: Side, done: list[str]
) -> None:
    gateway = Gateway(database, Hook(("one", side)))
    found: list[str] = []
    with pytest.raises(Death):
        await gateway.write("one", lambda: found.append("one"))
    for again in (
        gateway.write("two", lambda: found.append("two")),
        gateway.commit("three", lambda _: found.append("three")),
        gateway.look(lambda _: found.append("four")),
    ):
        with pytest.raises(Death):
            await again
    assert found == done


async def test_what_was_under_way_when_another_task_died_is_not_heard_of(
    database: Database,
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    gateway = Gateway(database, Hook(("death", Side.BEFORE)))

    async def slowly() -> str:
        begun.set()
        await go_on.wait()
        return "answer"

    waiting = asyncio.ensure_future(gateway.ask("slow", slowly))
    await begun.wait()
    with pytest.raises(Death):
        await gateway.write("death", lambda: None)
    go_on.set()
    with pytest.raises(Death):
        await waiting
