"""Where the API listens decides who may ask: without a key only this machine, and only by a name of its own."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from groupwise.errors import UsageError
from groupwise.fleet.api.serve import Address, check
from groupwise.fleet.store.database import Database
from groupwise.fleet.verbs import keys
from groupwise.fleet.verbs.actor import Actor
from tests.fleet_api import api, place_in

KEY = {"GROUPWISE_API_KEY": "environment-key-0123456789"}
ELSEWHERE = ("0.0.0.0", "::", "10.1.2.3", "example.org")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_needs_no_key(database: Database, host: str) -> None:
    check(Address(host), database, {})


@pytest.mark.parametrize("host", ELSEWHERE)
def test_other_machines_need_a_key(database: Database, host: str) -> None:
    with pytest.raises(UsageError, match=r"has no key.*groupwise fleet key new"):
        check(Address(host), database, {})


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("host", ELSEWHERE)
def test_keys_do_not_travel_in_the_clear(database: Database, host: str, stored: bool) -> None:
    if stored:
        database.run(lambda s: keys.make(s, Actor("user:ada"), "admin"))
    with pytest.raises(UsageError, match=r"for all to read.*--tls-certificate"):
        check(Address(host), database, {} if stored else KEY)


def test_half_of_tls_is_none(database: Database) -> None:
    with pytest.raises(UsageError, match="both"):
        check(Address("127.0.0.1", certificate="some.pem"), database, KEY)


@pytest.fixture
def without_a_key(database: Database, tmp_path: Path) -> Iterator[str]:
    with api(database, place_in(tmp_path / "fleet")) as url:
        yield url


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "fleet.example.org"}, 403),
        ({"Origin": "https://example.org"}, 403),
    ],
)
def test_without_a_key_only_this_machine_by_name(
    without_a_key: str, headers: dict[str, str], status: int
) -> None:
    """A browser of this machine asks whatever the pages of other sites have it ask."""
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
