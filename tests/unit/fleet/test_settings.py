"""Which fleet is meant, where its settings may stand, and what is refused."""

from pathlib import Path

import pytest

from groupwise.errors import ConfigError
from groupwise.fleet.settings import (
    ENVIRONMENT,
    FleetPlace,
    find,
)


def place(told: str | None = None, environment: dict[str, str] | None = None) -> FleetPlace:
    found = find(told, environment or {})
    assert isinstance(found, FleetPlace)
    return found


def test_later_places_go_before_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(
        "poll_seconds: 1.0\nsweep_seconds: 1.0\nrequeue_seconds: 1.0\n"
    )
    environment = {f"{ENVIRONMENT}SWEEP_SECONDS": "2.5", f"{ENVIRONMENT}REQUEUE_SECONDS": "2.5"}
    found = find(str(tmp_path), environment, {"requeue_seconds": 3.5})
    assert isinstance(found, FleetPlace)
    seconds = found.settings
    given = (seconds.poll_seconds, seconds.sweep_seconds, seconds.requeue_seconds)
    assert given == (1, 2.5, 3.5)


def test_a_url_in_the_environment_may_hold_a_password(tmp_path: Path) -> None:
    url = "postgresql://u:p: #%40@db/fleet"
    found = place(str(tmp_path), {f"{ENVIRONMENT}DATABASE": url})
    assert found.database_url == url
    assert not found.is_embedded
    found = place(str(tmp_path))
    assert (found.database_url, found.is_embedded) == (f"sqlite:///{tmp_path}/fleet.db", True)


def test_a_file_is_read_strictly(tmp_path: Path) -> None:
    for text, told in (
        ("poll_seconds: 0\n", "poll_seconds"),
        ("lease_seconds: 0.5\n", "lease_seconds"),
        ("pol_seconds: 3\n", "poll_seconds"),
        ("folder: /x\n", "where fleet.yaml lies"),
    ):
        (tmp_path / "fleet.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"fleet\.yaml") as refused:
            place(str(tmp_path))
        assert told in refused.value.message
