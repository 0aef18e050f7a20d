"""What `fleet up` says is news and nothing else: a deaf reader does not end the fleet."""

from pathlib import Path

import pytest

from groupwise.jobs.fleet import event_listener
from groupwise.jobs.fleet.event_listener import EventListener
from groupwise.jobs.fleet.store.database import Database
from tests.fleet_api import place_in


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_listener, "LOOK_SECONDS", 0.01)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "its reader has gone"), ValueError("bug")])
async def test_an_event_listener_whose_output_fails_ends_without_an_error(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def say(line: str) -> None:
        raise error

    await EventListener(place_in(tmp_path), database, say).run()
    assert "no" in caplog.text
    assert "news" in caplog.text
