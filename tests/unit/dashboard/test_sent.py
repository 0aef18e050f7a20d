"""Long answers release what they read as soon as the client is gone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from groupwise.dashboard.app import make_app
from tests.unit.dashboard.dashboard_client import place_of
from tests.web_runs import write_run


def opened_below(folder: Path) -> list[str]:
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    found = [os.readlink(each) for each in links if os.path.lexists(each)]
    return [each for each in found if each.startswith(str(folder))]


@pytest.mark.parametrize("path", ["/runs/one/rollouts.jsonl", "/runs/one/weights/final.zip"])
async def test_a_client_that_disconnects_leaves_no_file_open(tmp_path: Path, path: str) -> None:
    run = write_run(tmp_path / "one", 3)
    (run / "final").mkdir()
    (run / "final" / "weights").write_bytes(b"x" * 5_000_000)
    pieces = 0

    async def send(message: Any) -> None:
        nonlocal pieces
        pieces += message["type"] == "http.response.body"
        if pieces == 2:
            raise OSError("gone")

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [(b"host", b"127.0.0.1:8080")],
        "client": ("127.0.0.1", 5000), "server": ("127.0.0.1", 8080),
    }  # fmt: skip
    with pytest.raises(ClientDisconnect) as raised:
        await make_app(place_of(tmp_path))(scope, receive, send)
    assert pieces == 2
    assert opened_below(tmp_path) == [], raised
