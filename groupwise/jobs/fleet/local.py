"""The client for a fleet whose database is on this machine. Requests go to the FastAPI application in the same process.

No server has to run. A command is written once, and each route, refusal and document has one implementation. The application opens the
fleet's database and folder. When a job may be able to start, it rings the fleet's doorbell (`notify/base.py`), which wakes a dispatcher.
Its caller is the user of the terminal, who may do everything. This includes adding a machine that is reached without SSH or whose host key
is already verified, which keys of the API may not do.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx2

from groupwise.api.http.in_process import InProcessTransport
from groupwise.api.schemas.keys import LOCAL
from groupwise.jobs.fleet.api.app import ACTS_FOR, make_local_app
from groupwise.jobs.fleet.api.serving import Folders, LocalServing
from groupwise.jobs.fleet.client import Document, FleetClient, named_files
from groupwise.jobs.fleet.download import OnProgress, ProgressCounter, no_progress
from groupwise.jobs.fleet.notify.composite import SeveralDoorbells, doorbell_of
from groupwise.jobs.fleet.settings import FleetPlace
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.verbs import machines
from groupwise.jobs.fleet.verbs.actor import Actor
from groupwise.jobs.hosts.files import BlobStore

log = logging.getLogger(__name__)
URL = "http://fleet"
"""Dummy base URL; requests never leave the process."""


class _LazyDoorbells(SeveralDoorbells):
    """Connects at the first ring, so that commands that only read make no connection. It is rung by routes, on the event loop."""

    def ring(self, job_ids: Iterable[str]) -> None:
        self.open()
        super().ring(job_ids)


class LocalFleet(FleetClient):
    """The fleet in a folder of this machine. The caller that opened the database closes it, after closing this client."""

    is_local = True
    tries = 1  # the database has already tried again

    def __init__(
        self,
        place: FleetPlace,
        database: Database,
        user: str,
        *,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        """`user`: the actor in the events of its changes, such as `user:ada`."""
        self.place, self.database, self.user = place, database, user
        # Without NATS: connecting takes longer than the other doorbells need to wake a dispatcher.
        self._doorbell = _LazyDoorbells(
            doorbell_of(place.folder, database, None, os.environ).doorbells
        )
        folders = Folders(place.logs, place.artefacts, BlobStore(place.blobs))
        serving = LocalServing(database, folders, self._doorbell, place.secrets)
        self._transport = InProcessTransport(make_local_app(serving, user))
        super().__init__(URL, key="", transport=self._transport, warn=warn)

    def on_behalf_of(self, who: str) -> Self:
        """A client of the same fleet that acts for the holder of the dashboard's key `who`; the local user acts as themselves.

        It shares this client's doorbell and transport, so only this client is closed.
        """
        if who == LOCAL.key_id:
            return self
        client = copy.copy(self)
        client._http = httpx2.Client(
            base_url=self.url, headers={ACTS_FOR: f"web:{who}"}, transport=self._transport
        )
        return client

    def add_machine(self, machine: Mapping[str, Any]) -> Document:
        """Add a machine: the fields of `verbs.machines.NewMachine`, including `transport` and `seen_host_key`."""
        new_machine = machines.NewMachine(**machine)
        return self.database.run(
            lambda session: machines.add(session, Actor(self.user), new_machine)
        )

    def upload(
        self,
        files: Sequence[str | Path] | Mapping[str, str | Path],
        *,
        on_progress: OnProgress = no_progress,
    ) -> dict[str, list[Any]]:
        """See `FleetClient.upload`. Files of this machine are read once, and copied while they are hashed."""
        local_files = named_files(files)
        progress = ProgressCounter(
            on_progress, sum(path.stat().st_size for path in local_files.values())
        )
        entries = BlobStore(self.place.blobs).put_files(
            local_files, lambda name, count: progress.add(f"copying {name}", count)
        )
        return {name: [entry.sha256, entry.mode, entry.size] for name, entry in entries.items()}

    def close(self) -> None:
        """Flush pending rings of the doorbell, then stop the application."""
        try:
            self._transport.run(self._doorbell.close())
        finally:
            super().close()
