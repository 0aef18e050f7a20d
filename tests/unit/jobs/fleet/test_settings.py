"""Which fleet is used, where its settings may be, and what is refused."""

import os
from pathlib import Path

import pytest

from groupwise.core.errors import ConfigError
from groupwise.core.settings.schema import keys_of
from groupwise.jobs.fleet.files.logs import make
from groupwise.jobs.fleet.settings import (
    ENVIRONMENT,
    FleetPlace,
    FleetSettings,
    find,
)
from groupwise.jobs.hosts.files import BlobStore


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
        *(
            (f"{key}: {odd}\n", key)
            for key, setting in keys_of(FleetSettings).items()
            for odd in ("-1", "1.0e300", ".inf", ".nan", "''", "{}")
            if setting.annotation is not bool
        ),
        ("pol_seconds: 3\n", "poll_seconds"),
        ("folder: /x\n", "where fleet.yaml lies"),
    ):
        (tmp_path / "fleet.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"fleet\.yaml") as refused:
            place(str(tmp_path))
        assert told in refused.value.message


def test_permissions_of_existing_and_new_folders_are_private(tmp_path: Path) -> None:
    fleet = place(str(tmp_path / "fleet"))
    (fleet.blobs / "ab").mkdir(parents=True)
    before = os.umask(0o022)
    try:
        fleet.folder.chmod(0o755)
        fleet.blobs.chmod(0o777)
        fleet.keep_private()
        blob = BlobStore(fleet.blobs).put(b"x")
        make(fleet.logs, "job", 0)
    finally:
        os.umask(before)
    made = [fleet.folder, *fleet.folder.rglob("*")]
    assert BlobStore(fleet.blobs).path(blob) in made
    open_ones = [path for path in made if not path.is_symlink() and path.stat().st_mode & 0o077]
    assert open_ones == [fleet.blobs / "ab"], "below a folder that is closed"
