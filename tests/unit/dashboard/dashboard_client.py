"""A dashboard of some runs, asked without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2

from groupwise.api.schemas.keys import Keyring
from groupwise.dashboard.access import AccessControl
from groupwise.dashboard.app import make_app
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.sources.runs import RunsIndex

HERE = "http://127.0.0.1:8080"


def place_of(runs: Path, keys: Keyring | None = None) -> DashboardContext:
    index = RunsIndex(runs)
    index.all_runs(timeout=10.0)
    return DashboardContext(index, AccessControl(keys))


def asking(runs: Path, keys: Keyring | None = None, at: str = HERE) -> httpx2.AsyncClient:
    """Whoever asks it, by the address `at`."""
    transport = httpx2.ASGITransport(make_app(place_of(runs, keys)))
    return httpx2.AsyncClient(transport=transport, base_url=at)


async def json_of(runs: Path, path: str) -> Any:
    """What a program is told."""
    async with asking(runs) as client:
        answer = await client.get(path, headers={"accept": "application/json"})
    assert answer.status_code == 200, answer.text
    return answer.json()
