"""Small requests of one client are answered soon while another client sends megabytes, plain and compressed, to a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.small_requests import measure
from tests.integration.server.server_process import running

LONGEST = 2.0
"""Seconds that the server may compute while one small request waits. Not seconds by the clock: the machine may be busy. A fast machine
computes at most 0.3, a slow one 0.7; a body that is read in one piece takes several seconds. `python -m benchmarks.serving --only others`
gives the figures.
"""


@pytest.mark.timeout(240)
def test_small_requests_do_not_wait_for_large_bodies(tmp_path: Path) -> None:
    with running(tmp_path / "out") as server:
        waits, sent = measure(server.url, server.pid, seconds=1, rounds=2)
    assert sent > 20
    assert len(waits) == 5
    for request, wait in waits.items():
        assert wait.computing < LONGEST, request
