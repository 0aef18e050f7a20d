"""The gateway: the dead do nothing."""

import pytest

from groupwise.jobs.fleet.attempts.effects import Death, Gateway, Side
from groupwise.jobs.fleet.store.database import Database


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
        gateway.read(lambda _: found.append("four")),
    ):
        with pytest.raises(Death):
            await again
    assert found == done
