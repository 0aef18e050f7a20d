import asyncio
from pathlib import Path

import pytest

from groupwise.fleet.doorbells.chosen import doorbell_of, ring_and_leave
from groupwise.fleet.doorbells.local import LocalDoorbell
from groupwise.fleet.store import database as databases


@pytest.mark.parametrize(
    ("scheme", "nats_url", "chosen"),
    [
        ("sqlite", None, ["LocalDoorbell"]),
        ("sqlite", "nats://localhost:4222", ["LocalDoorbell", "NatsDoorbell"]),
        ("postgresql", None, ["LocalDoorbell", "PostgresDoorbell"]),
        ("postgresql", "nats://x", ["LocalDoorbell", "PostgresDoorbell", "NatsDoorbell"]),
    ],
)
def test_a_fleet_has_the_doorbells_that_its_settings_name(
    tmp_path: Path, scheme: str, nats_url: str | None, chosen: list[str]
):
    url = f"sqlite:///{tmp_path}/fleet.db" if scheme == "sqlite" else "postgresql://u@localhost/x"
    database = databases.connect(url)
    several = doorbell_of(tmp_path, database, nats_url, {})
    assert [type(each).__name__ for each in several.doorbells] == chosen
    database.close()


async def test_a_command_rings_and_leaves(tmp_path: Path):
    listener = LocalDoorbell(tmp_path)
    assert await listener.wait(0) == frozenset()
    await asyncio.to_thread(ring_and_leave, LocalDoorbell(tmp_path), ["a"])
    assert await listener.wait(60) == {"a"}
    await listener.close()
