"""A fleet's API behind a real socket, in a thread of its own, for tests of clients."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from groupwise.jobs.fleet.api.serve import Address, serving
from groupwise.jobs.fleet.notify.local import LocalDoorbell
from groupwise.jobs.fleet.settings import FleetPlace, FleetSettings
from groupwise.jobs.fleet.store.database import Database


def place_in(folder: Path) -> FleetPlace:
    folder.mkdir(parents=True, exist_ok=True)
    return FleetPlace(folder, FleetSettings())


@contextmanager
def api(
    database: Database, place: FleetPlace, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Its address."""
    told: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    ending = asyncio.Event()

    async def serve() -> None:
        bell = LocalDoorbell(place.folder)
        async with serving(
            place, database, bell, Address(port=0), dict(environment or {})
        ) as address:
            told.append(address)
            ready.set()
            await ending.wait()
        await bell.close()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(20)
    assert told, "the API did not start within 20 s"
    try:
        yield told[0]
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(20)
