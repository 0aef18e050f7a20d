"""Serves the API of a fleet, as a part of `groupwise fleet up`, or alone while the roles run elsewhere; and, at a socket in the fleet's
folder, the commands of this machine.

It needs only the database and the folder of the fleet: jobs that are submitted while no dispatcher runs wait for one. If it listens on this
machine only, no key is needed; otherwise there must be a key, and TLS, unless a proxy on this machine does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn

from groupwise.api.http.listening import Uvicorn, bind, check_tls, url_at, uvicorn_config
from groupwise.api.schemas.keys import VARIABLE, Keyring
from groupwise.core.errors import UsageError
from groupwise.core.loopback import is_loopback
from groupwise.jobs.fleet.api.app import any_key, make_app, make_local_app
from groupwise.jobs.fleet.api.serving import Folders, LocalServing, Serving
from groupwise.jobs.fleet.machines import packing
from groupwise.jobs.fleet.notify.base import Notifier
from groupwise.jobs.fleet.notify.local import OpenFolder, command_socket
from groupwise.jobs.fleet.settings import FleetPlace
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.hosts.files import BlobStore

log = logging.getLogger(__name__)
END_SECONDS = 10
"""Time limit in seconds for open connections to finish at the end."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address to listen on."""

    host: str = "127.0.0.1"
    port: int = 8010
    """0 means any free port."""
    certificate: str | None = None
    key: str | None = None
    """PEM file of the private key, for TLS with `certificate`."""

    @property
    def scheme(self) -> str:
        """URL scheme of the address."""
        return "http" if self.certificate is None else "https"


def check(address: Address, database: Database, environment: Mapping[str, str]) -> None:
    """Raise UsageError if other machines could send requests without a key, or a key would be sent unencrypted."""
    check_tls(address.certificate, address.key)
    Keyring(plain=environment.get(VARIABLE))
    if is_loopback(address.host):
        return
    if not _has_keys(database, environment):
        raise UsageError(
            f"{address.host} can be reached from other machines, but the fleet has no key. `groupwise fleet key new admin` makes one; "
            "or leave --host out: then only this machine can ask."
        )
    if address.certificate is None:
        raise UsageError(
            f"{address.host} can be reached from other machines, where keys would be sent for all to read. Give --tls-certificate and "
            "--tls-key, or listen on 127.0.0.1 behind a proxy that has them."
        )


def _has_keys(database: Database, environment: Mapping[str, str]) -> bool:
    return bool(environment.get(VARIABLE)) or database.read(any_key)


@asynccontextmanager
async def serving(
    place: FleetPlace,
    database: Database,
    notifier: Notifier,
    address: Address,
    environment: Mapping[str, str] = os.environ,
) -> AsyncGenerator[str]:
    """Serve requests within the `with` block, which gets the address. Raises UsageError if it cannot listen."""
    check(address, database, environment)
    folders = Folders(place.logs, place.artefacts, BlobStore(place.blobs))
    serving_state = Serving(database, folders, notifier, place.secrets)
    app = make_app(
        serving_state,
        environment.get(VARIABLE),
        open_to_this_machine=not _has_keys(database, environment),
    )
    config = uvicorn_config(app, certificate=address.certificate, key=address.key, proxy=None)
    with bind(address.host, address.port) as listen_socket:
        async with _listening(config, listen_socket, serving_state):
            host, port = listen_socket.getsockname()[:2]
            yield url_at(address.scheme, host, port)


@asynccontextmanager
async def serving_commands(
    place: FleetPlace, database: Database, notifier: Notifier
) -> AsyncGenerator[None]:
    """Answer commands of this machine (`LocalFleet`) within the `with` block, at a socket in the fleet's folder that only its user can
    open. If that is impossible, or another process does it already, do nothing: commands then open the database themselves."""
    with contextlib.ExitStack() as stack:
        try:
            listen_socket = stack.enter_context(_command_socket(place))
        except OSError as error:
            log.info("commands are not answered in %s: %s", place.folder, error)
            yield
            return
        folders = Folders(place.logs, place.artefacts, BlobStore(place.blobs))
        serving_state = LocalServing(database, folders, notifier, place.secrets)
        config = uvicorn_config(
            make_local_app(serving_state), certificate=None, key=None, proxy=None
        )
        async with _listening(config, listen_socket, serving_state):
            yield


@contextlib.contextmanager
def _command_socket(place: FleetPlace) -> Generator[socket.socket]:
    name = command_socket(packing.version(), place.settings.database)
    with OpenFolder(place.folder) as folder, socket.socket(socket.AF_UNIX) as listener:
        address = folder.address(name)
        if folder.has_listener(name):
            raise FileExistsError("another process answers them")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)  # of a process that was killed
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen(2048)
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)


@asynccontextmanager
async def _listening(
    config: uvicorn.Config, listen_socket: socket.socket, serving_state: Serving
) -> AsyncGenerator[None]:
    http = Uvicorn(config)
    config.timeout_graceful_shutdown = END_SECONDS
    serve_task = asyncio.create_task(http.serve(sockets=[listen_socket]))
    try:
        await http.listening.wait()
        yield
    finally:
        serving_state.end()
        http.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serve_task
