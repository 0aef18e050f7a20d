"""`groupwise web`: the dashboard."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import flag, option
from groupwise.cli.output import say
from groupwise.core.extras import require_packages

if TYPE_CHECKING:
    from groupwise.dashboard.sources.fleet import WatchedFleet
    from groupwise.dashboard.sources.server import WatchedServer


DASHBOARD_PACKAGES = ("starlette", "uvicorn", "jinja2")


def web(
    dir: Annotated[Path, option("DIR", "Folder that holds the runs.", "--dir")] = Path("runs"),
    host: Annotated[str, option("ADDRESS", "Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, option("PORT", "Port to listen at; 0: any free port.", min=0, max=65535)
    ] = 8080,
    key_file: Annotated[Path | None, option("FILE", "File with one line per API key.")] = None,
    tls_certificate: Annotated[str | None, option("PEM", "Certificate, for https.")] = None,
    tls_key: Annotated[str | None, option("PEM", "Private key of the certificate.")] = None,
    proxy: Annotated[
        str | None, option("ADDRESS", "Address of a proxy in front that terminates TLS.")
    ] = None,
    fleet: Annotated[
        str | None,
        option("FOLDER|URL", "Show this fleet, too: its folder, or the address of its API."),
    ] = None,
    server: Annotated[str | None, option("URL", "Show this training server, too.")] = None,
    allow_actions: Annotated[
        bool,
        flag(
            "Let keys with the role train or admin change jobs, and keys with admin also machines.",
            "--allow-actions",
        ),
    ] = False,
) -> None:
    """Show your runs in a browser: curves, rollouts, evaluations.

    Without a key only this machine can open it. A key is in --key-file or GROUPWISE_API_KEY; `groupwise serve --new-key read`
    makes one. Pages update themselves.
    """
    import os

    from groupwise.api.schemas.keys import VARIABLE

    require_packages("The dashboard", "web", *DASHBOARD_PACKAGES)
    from groupwise.dashboard.serve import Settings, serve

    settings = Settings(dir, host, port, key_file, tls_certificate, tls_key, proxy, allow_actions)

    plain_key = os.environ.get(VARIABLE)

    def tell(address: str) -> None:
        keys = [f"that of {VARIABLE}"] if plain_key else []
        keys += [f"one of {key_file}"] if key_file else []
        key_hint = f"; it asks for a key: {' or '.join(keys)}" if keys else ""
        shown = [f"the fleet {fleet} at {address}/fleet"] if fleet else []
        shown.append(f"the runs in {dir} at {address}/runs")
        say(f"showing {', and '.join(shown)}{key_hint} (Ctrl-C stops it)")

    with _watched_fleet(fleet) as watched_fleet, _watched_server(server) as watched_server:
        raise typer.Exit(serve(settings, plain_key, tell, watched_fleet, watched_server))


@contextmanager
def _watched_fleet(address: str | None) -> Generator[WatchedFleet | None]:
    """The fleet to show; None if none was requested."""
    if address is None:
        yield None
        return
    from groupwise.cli.fleet.access import PACKAGES, fleet
    from groupwise.dashboard.sources.cached_values import ending
    from groupwise.dashboard.sources.fleet import TIMEOUT, WatchedFleet

    require_packages("A fleet", "fleet", *PACKAGES)
    with fleet(address, timeout=TIMEOUT) as client, ending(WatchedFleet(client)) as watched:
        yield watched


@contextmanager
def _watched_server(url: str | None) -> Generator[WatchedServer | None]:
    """The training server to show, with the key in GROUPWISE_API_KEY; None if none was requested."""
    if url is None:
        yield None
        return
    from groupwise.api.client import TrainingClient
    from groupwise.dashboard.sources.cached_values import ending
    from groupwise.dashboard.sources.server import RETRY_TIMEOUT, TIMEOUT, WatchedServer

    with (
        TrainingClient(url, retry_timeout=RETRY_TIMEOUT, timeout=TIMEOUT) as client,
        ending(WatchedServer(client)) as watched,
    ):
        yield watched
