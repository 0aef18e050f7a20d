"""The client for a fleet whose folder is on this machine.

`groupwise fleet up` answers commands at a socket in its folder (`api/serve.py`). A command that uses it loads neither SQLAlchemy nor
FastAPI, and takes a third of the time. If no process of this release answers there, the same application runs in the command's own process,
on the fleet's database: so commands work without `up`, and go on if it ends. Either way each route, refusal and document has one
implementation. The caller is the user of the terminal, who may do everything, also add a machine that is reached without SSH or whose host
key is already verified, which keys of the API may not do.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import httpx2

from groupwise.api.schemas.fleet import ACTS_FOR
from groupwise.api.schemas.idempotency import HEADER
from groupwise.api.schemas.keys import LOCAL
from groupwise.jobs.fleet.client import Document, FleetClient, named_files
from groupwise.jobs.fleet.download import OnProgress, ProgressCounter, no_progress
from groupwise.jobs.fleet.machines import packing
from groupwise.jobs.fleet.notify.local import OpenFolder, command_socket
from groupwise.jobs.fleet.settings import FleetPlace
from groupwise.jobs.hosts.files import BlobStore, total_size

if TYPE_CHECKING:
    from groupwise.api.http.in_process import InProcessTransport
    from groupwise.jobs.fleet.notify.composite import SeveralNotifiers
    from groupwise.jobs.fleet.store.database import Database

log = logging.getLogger(__name__)
URL = "http://fleet"
"""Dummy base URL; requests never leave the machine."""
PROBE_SECONDS = 2.0
"""Seconds within which a process at the socket must answer; one that hangs is not waited for."""


class _FleetTransport(httpx2.BaseTransport):
    """Sends requests to the process at the fleet's socket; without one, or once it has ended, to the application in this process. Any
    number of threads may use it at once."""

    def __init__(
        self, place: FleetPlace, open_database: Callable[[], Database], *, use_socket: bool
    ) -> None:
        """`use_socket`: whether to look for a process at the socket."""
        self._place, self._open_database = place, open_database
        self._lock = threading.Lock()
        self._notifier: SeveralNotifiers | None = None
        self._in_process: InProcessTransport | None = None
        self._stack = ExitStack()
        self._folder = OpenFolder(place.folder)
        self._name = command_socket(packing.version(), place.settings.database)
        self._socket = self._open_socket() if use_socket else None
        if self._socket is None:
            self._local_application()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request, and return when the response starts."""
        socket = self._socket
        if socket is not None and self._folder.has_listener(self._name):
            request.extensions["timeout"] = {}  # a process that ends closes its socket
            try:
                return socket.handle_request(request)
            except httpx2.TransportError as error:
                is_repeatable = request.method == "GET" or HEADER in request.headers
                if not (is_repeatable or isinstance(error, httpx2.ConnectError)):
                    raise  # it may have been carried out
        self._socket = None
        return self._local_application().handle_request(request)

    def close(self) -> None:
        """Send the pending ids of the notifier, then stop the application."""
        with self._stack:
            if self._in_process is not None and self._notifier is not None:
                self._in_process.run(self._notifier.close())
                self._in_process.close()

    def _open_socket(self) -> httpx2.HTTPTransport | None:
        if not self._place.folder.is_dir():
            return None
        self._stack.enter_context(self._folder)
        if not self._folder.has_listener(self._name):
            return None
        # A socket has no TLS.
        transport = httpx2.HTTPTransport(uds=self._folder.address(self._name), verify=False)
        self._stack.callback(transport.close)
        timeout = httpx2.Timeout(PROBE_SECONDS).as_dict()
        probe = httpx2.Request("GET", f"{URL}/healthz", extensions={"timeout": timeout})
        try:
            transport.handle_request(probe).read()
        except httpx2.TransportError as error:
            log.debug("no process answers at %s: %s", self._name, error)
            return None
        return transport

    def _local_application(self) -> InProcessTransport:
        """The application in this process, loaded by the first call."""
        with self._lock:
            if self._in_process is None:
                # Importing creates many objects but little garbage; without the collector it is 0.25 s faster.
                gc.disable()
                try:
                    from groupwise.api.http.in_process import InProcessTransport
                    from groupwise.jobs.fleet.api.app import make_local_app
                    from groupwise.jobs.fleet.api.serving import Folders, LocalServing
                    from groupwise.jobs.fleet.notify.composite import LazyNotifiers, notifier_of
                finally:
                    gc.freeze()  # exclude the imported objects from later collections
                    gc.enable()
                place, database = self._place, self._open_database()
                # Without NATS: connecting takes longer than the other notifiers need to wake a dispatcher.
                self._notifier = LazyNotifiers(
                    notifier_of(place.folder, database, None, os.environ).notifiers
                )
                folders = Folders(place.logs, place.artefacts, BlobStore(place.blobs))
                serving = LocalServing(database, folders, self._notifier, place.secrets)
                self._in_process = InProcessTransport(make_local_app(serving))
            return self._in_process


class LocalFleet(FleetClient):
    """The fleet in a folder of this machine."""

    is_local = True
    tries = 1  # the database has already tried again

    def __init__(
        self,
        place: FleetPlace,
        user: str,
        *,
        database: Database | None = None,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        """`user`: the actor in the events of its changes, such as `user:ada`. `database`: one that the caller has opened and closes after
        this client; None: the fleet's own, opened when it is first needed. Raises UsageError for tables of another release."""
        self.place, self.user = place, user
        self._database, self._owns_database = database, database is None
        self._transport = _FleetTransport(place, lambda: self.database, use_socket=database is None)
        super().__init__(URL, key="", transport=self._transport, warn=warn)
        self._http.headers[ACTS_FOR] = quote(user)

    @property
    def database(self) -> Database:
        """The fleet's database."""
        if self._database is None:
            from groupwise.jobs.fleet.processes import role_holder
            from groupwise.jobs.fleet.store.database import check_schema, connect

            database = connect(self.place.database_url)
            try:
                check_schema(database, lambda: role_holder(self.place.folder))
            except BaseException:
                database.close()
                raise
            self._database = database
        return self._database

    def on_behalf_of(self, who: str) -> Self:
        """A client of the same fleet that acts for the holder of the dashboard's key `who`; the local user acts as themselves.

        It shares this client's transport, so only this client is closed.
        """
        if who == LOCAL.key_id:
            return self
        client = copy.copy(self)
        client._http = httpx2.Client(
            base_url=self.url,
            headers={ACTS_FOR: quote(f"web:{who}")},
            transport=self._transport,
        )
        return client

    def add_machine(self, machine: Mapping[str, Any]) -> Document:
        """Add a machine: the fields of `operations.machines.NewMachine`, including `transport` and `seen_host_key`."""
        from groupwise.jobs.fleet.operations import machines
        from groupwise.jobs.fleet.operations.actor import Actor

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
        progress = ProgressCounter(on_progress, total_size(local_files.values()))
        entries = BlobStore(self.place.blobs).put_files(
            local_files, lambda name, count: progress.add(f"copying {name}", count)
        )
        return {name: [entry.sha256, entry.mode, entry.size] for name, entry in entries.items()}

    def close(self) -> None:
        """Close its connections, and the database if it was opened here."""
        try:
            super().close()
        finally:
            if self._owns_database and self._database is not None:
                self._database.close()
