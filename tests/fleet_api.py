"""A fleet's API behind a real socket, at an address or in the fleet's folder, in a thread of its own, for tests of clients."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from groupwise.jobs.fleet.api.serve import Address, serving, serving_commands
from groupwise.jobs.fleet.notify.local import LocalNotifier
from groupwise.jobs.fleet.settings import FleetPlace, FleetSettings
from groupwise.jobs.fleet.store.database import Database

T = TypeVar("T")


def place_in(folder: Path) -> FleetPlace:
    folder.mkdir(parents=True, exist_ok=True)
    return FleetPlace(folder, FleetSettings())


@contextmanager
def api(
    database: Database, place: FleetPlace, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Serve the API; yields its address."""
    address, environment = Address(port=0), dict(environment or {})
    with _in_thread(
        place, lambda notifier: serving(place, database, notifier, address, environment)
    ) as url:
        yield url


@contextmanager
def commands_answered(database: Database, place: FleetPlace) -> Iterator[None]:
    """Serve commands that name the fleet's folder, as `groupwise fleet up` does."""
    with _in_thread(place, lambda notifier: serving_commands(place, database, notifier)):
        yield


@contextmanager
def _in_thread(
    place: FleetPlace, server: Callable[[LocalNotifier], AbstractAsyncContextManager[T]]
) -> Iterator[T]:
    told: list[T] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    ending = asyncio.Event()

    async def serve() -> None:
        notifier = LocalNotifier(place.folder)
        async with server(notifier) as address:
            told.append(address)
            ready.set()
            await ending.wait()
        await notifier.close()

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
