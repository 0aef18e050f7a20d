"""`groupwise web`: one process that shows the runs of a folder to browsers."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from groupwise.api.http.listening import Uvicorn, bind, check_tls, url_at, uvicorn_config
from groupwise.api.http.logs import configure
from groupwise.api.schemas.keys import VARIABLE, Keyring, read_keys_in
from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.loopback import is_loopback
from groupwise.dashboard.access import AccessControl
from groupwise.dashboard.app import make_app
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.sources.fleet import WatchedFleet
from groupwise.dashboard.sources.runs import RunsIndex
from groupwise.dashboard.sources.server import WatchedServer

SHUTDOWN_SECONDS = 5
"""Seconds within which connections must be closed."""
FIRST_READ_SECONDS = 6.0
"""Seconds for reading the runs before the server reports that it listens; later pages then find them in memory."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The addresses it listens on, and the content it shows."""

    runs: Path
    host: str = "127.0.0.1"
    port: int = 8080
    key_file: Path | None = None
    certificate: str | None = None
    key: str | None = None
    """PEM files, for TLS."""
    proxy: str | None = None
    """Address of a proxy in front, whose forwarded headers are trusted."""
    allow_actions: bool = False
    """True if buttons may change something."""


def keys_of(settings: Settings, plain: str | None) -> Keyring | None:
    """Keys that grant access; None if there are none, and only this machine is answered. `plain`: the key from the environment.

    Raises UsageError if others could connect without a key, or a key would be sent unencrypted.
    """
    stored_keys = () if settings.key_file is None else read_keys_in(settings.key_file.expanduser())
    if settings.key_file is not None and not stored_keys:
        raise ConfigError(
            f"{settings.key_file} holds no key, so no one could look. `groupwise serve --new-key read` makes one."
        )
    keys = Keyring(stored_keys, plain) if stored_keys or plain is not None else None
    if is_loopback(settings.host):
        return keys
    if keys is None:
        raise UsageError(
            f"{settings.host} can be reached from other machines, but the dashboard has no key. Put one into the variable {VARIABLE}, or "
            "`groupwise serve --new-key read` makes one whose line goes into the file of --key-file. Or leave --host out: then only this "
            "machine can look."
        )
    if settings.certificate is None and settings.proxy is None:
        raise UsageError(
            f"{settings.host} can be reached from other machines, where keys would be sent for all to read. Give --tls-certificate and "
            "--tls-key, or --proxy with the address of one that has them, or listen on 127.0.0.1 and come by `ssh -L`."
        )
    return keys


def serve(
    settings: Settings,
    plain: str | None,
    say: Callable[[str], None],
    fleet: WatchedFleet | None = None,
    server: WatchedServer | None = None,
) -> int:
    """Serve until a signal arrives; returns the exit code. Raises UsageError if it cannot start."""
    if settings.runs.exists() and not settings.runs.is_dir():
        raise UsageError(f"{settings.runs} is a file; --dir names a folder of runs.")
    check_tls(settings.certificate, settings.key)
    access = AccessControl(keys_of(settings, plain), allow_actions=settings.allow_actions)
    context = DashboardContext(RunsIndex(settings.runs), access, fleet, server)
    with bind(settings.host, settings.port) as listening:
        return asyncio.run(_serve_context(context, settings, listening, say))


async def _serve_context(
    context: DashboardContext,
    settings: Settings,
    listening: socket.socket,
    announce: Callable[[str], None],
) -> int:
    await asyncio.to_thread(context.runs.all_runs, FIRST_READ_SECONDS)
    http = Uvicorn(
        uvicorn_config(
            make_app(context),
            certificate=settings.certificate,
            key=settings.key,
            proxy=settings.proxy,
        )
    )
    http.config.timeout_graceful_shutdown = SHUTDOWN_SECONDS
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    answering = asyncio.create_task(http.serve(sockets=[listening]))
    await http.listening.wait()
    host, port = listening.getsockname()[:2]
    announce(url_at("http" if settings.certificate is None else "https", host, port))
    log = configure("text")
    try:
        await ending.wait()
        context.ending.set()
        http.should_exit = True
        await answering
    finally:
        logging.getLogger().removeHandler(log)
    return 0
