"""Where the API listens decides who may ask: without a key only this machine, and only by a name of its own."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.api.serve import Address, check
from groupwise.jobs.fleet.operations import keys
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.store.database import Database
from tests.fleet_api import api, place_in

KEY = {"GROUPWISE_API_KEY": "environment-key-0123456789"}
REMOTE_HOSTS = ("0.0.0.0", "::", "10.1.2.3", "example.org")


def test_this_machine_needs_no_key(database: Database) -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check(Address(host), database, {})
    with pytest.raises(UsageError, match="both"):
        check(Address("127.0.0.1", certificate="some.pem"), database, KEY)


def test_other_machines_need_a_key(database: Database) -> None:
    for host in REMOTE_HOSTS:
        with pytest.raises(UsageError, match="groupwise fleet key new"):
            check(Address(host), database, {})


def test_keys_do_not_travel_in_the_clear(database: Database) -> None:
    for stored in (False, True):
        if stored:
            database.run(lambda s: keys.make(s, Actor("user:ada"), "admin"))
        for host in REMOTE_HOSTS:
            with pytest.raises(UsageError, match="--tls-certificate"):
                check(Address(host), database, {} if stored else KEY)


@pytest.fixture
def without_a_key(database: Database, tmp_path: Path) -> Iterator[str]:
    with api(database, place_in(tmp_path / "fleet")) as url:
        yield url


def test_without_a_key_only_this_machine_by_name(without_a_key: str) -> None:
    """A browser of this machine asks whatever the pages of other sites have it ask."""
    for headers, status in (
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "fleet.example.org"}, 403),
        ({"Origin": "https://example.org"}, 403),
    ):
        with httpx2.Client(base_url=without_a_key, headers=headers, trust_env=False) as browser:
            assert browser.get("/jobs").status_code == status


def test_the_first_key_ends_that_at_once(database: Database, without_a_key: str) -> None:
    """Also for who began to listen before it was made, and whatever becomes of the key."""
    with httpx2.Client(base_url=without_a_key, trust_env=False) as client:
        assert client.get("/jobs").status_code == 200
        made = database.run(lambda s: keys.make(s, Actor("user:ada"), "read"))
        assert client.get("/jobs").status_code == 401
        bearer = {"Authorization": f"Bearer {made['key']}"}
        assert client.get("/jobs", headers=bearer).status_code == 200
        assert client.get("/keys", headers=bearer).status_code == 403
        database.run(lambda s: keys.revoke(s, Actor("user:ada"), made["key_id"]))
        assert client.get("/jobs").status_code == 401
