"""Which fleet is meant, where its settings may stand, and what is refused."""

from pathlib import Path

import pytest

from groupwise.errors import ConfigError
from groupwise.fleet.settings import (
    ENVIRONMENT,
    FleetAddress,
    FleetPlace,
    FleetSettings,
    find,
)
from groupwise.settings.schema import keys_of


def place(told: str | None = None, environment: dict[str, str] | None = None) -> FleetPlace:
    found = find(told, environment or {})
    assert isinstance(found, FleetPlace)
    return found


def test_every_key_says_what_it_means() -> None:
    for name, key in keys_of(FleetSettings).items():
        assert key.description, name


def test_an_option_goes_before_the_environment_and_that_before_the_home(tmp_path: Path) -> None:
    environment = {"GROUPWISE_FLEET": str(tmp_path / "b"), "HOME": str(tmp_path)}
    assert place(str(tmp_path / "a"), environment).folder == tmp_path / "a"
    assert place(None, environment).folder == tmp_path / "b"
    assert place(None, {}).folder == Path("~/.groupwise/fleet").expanduser()


def test_an_address_is_an_api() -> None:
    assert find(None, {"GROUPWISE_FLEET": "https://fleet.example/"}) == FleetAddress(
        "https://fleet.example"
    )


def test_a_file_is_no_folder_of_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(
        ConfigError, match=r"is a file\. GROUPWISE_FLEET and --fleet name the folder"
    ):
        place(str(tmp_path / "f"))


def test_defaults_are_an_embedded_fleet(tmp_path: Path) -> None:
    found = place(str(tmp_path))
    assert found.database_url == f"sqlite:///{tmp_path}/fleet.db"
    assert found.is_embedded
    assert found.settings.nats_url is None
    assert (found.settings.poll_seconds, found.settings.sweep_seconds) == (15.0, 2.0)


def test_later_places_go_before_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(
        "poll_seconds: 1.0\nsweep_seconds: 1.0\nrequeue_seconds: 1.0\n"
    )
    environment = {f"{ENVIRONMENT}SWEEP_SECONDS": "2.5", f"{ENVIRONMENT}REQUEUE_SECONDS": "2.5"}
    found = find(str(tmp_path), environment, {"requeue_seconds": 3.5})
    assert isinstance(found, FleetPlace)
    settings = found.settings
    assert (settings.poll_seconds, settings.sweep_seconds, settings.requeue_seconds) == (
        1,
        2.5,
        3.5,
    )


def test_a_url_in_the_environment_may_hold_a_password(tmp_path: Path) -> None:
    url = "postgresql://u:p: #%40@db/fleet"
    found = place(str(tmp_path), {f"{ENVIRONMENT}DATABASE": url})
    assert found.database_url == url
    assert not found.is_embedded


@pytest.mark.parametrize(
    "url", ["nats://a", "tls://u:p@a:4222", "nats://[::1]:4222", "nats://a:1, tls://b", "off"]
)
def test_what_is_a_url_of_nats_is_taken(url: str, tmp_path: Path) -> None:
    assert place(str(tmp_path), {f"{ENVIRONMENT}NATS_URL": url}).settings.nats_url == url


@pytest.mark.parametrize(
    "url",
    ["foo", "a:4222", "http://a", "nats://", "nats://:1", "nats://a:port", "nats://a,", "OFF"],
)
def test_what_is_no_url_of_nats_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--nats-url: .* no URL of NATS; it is nats://host:4222"):
        find(str(tmp_path), {}, {"nats_url": url})


def test_no_refusal_of_a_url_of_nats_holds_its_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no URL of NATS") as refused:
        find(str(tmp_path), {}, {"nats_url": "nats://user:canary@a:port"})
    assert "canary" not in refused.value.message


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("GROUPWISE_FLEET_POLL_SECOND", "did you mean GROUPWISE_FLEET_POLL_SECONDS?"),
        ("GROUPWISE_FLEET_FOLDER", "GROUPWISE_FLEET or --fleet names it"),
        ("GROUPWISE_FLEET_API_KEY", "GROUPWISE_API_KEY"),
        ("GROUPWISE_FLEET_XYZZY", "there are GROUPWISE_FLEET_DATABASE"),
    ],
)
def test_an_unknown_variable_is_told_the_right_one(
    variable: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is no setting") as refused:
        place(str(tmp_path), {variable: "1"})
    assert told in refused.value.message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("poll_seconds: 0\n", "poll_seconds"),
        ("lease_seconds: 0.5\n", "lease_seconds"),
        ("pol_seconds: 3\n", "poll_seconds"),
        ("folder: /x\n", "where fleet.yaml lies"),
    ],
)
def test_a_file_is_read_strictly(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"fleet\.yaml") as refused:
        place(str(tmp_path))
    assert told in refused.value.message
