"""The settings of a server: where they may stand, what goes before what, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import ConfigError, UsageError
from groupwise.http.addresses import is_loopback
from groupwise.server.settings import ServerConfig, read_keys, read_settings
from groupwise.settings.schema import keys_of
from groupwise.wire.keys import Role, new_key

PLAIN = "a-plain-key-of-some-length"


def read(
    file: str | None = None,
    environment: dict[str, str] | None = None,
    options: dict[str, Any] | None = None,
    words: tuple[str, ...] = (),
    *,
    tmp_path: Path,
) -> ServerConfig:
    path = None
    if file is not None:
        path = tmp_path / "S.yaml"
        path.write_text(file)
    given = {"GROUPWISE_SERVE_OUTPUT_DIR": "out"} | (environment or {})
    return read_settings(path, given, options or {}, words)


def test_every_key_says_what_it_means() -> None:
    for name, key in keys_of(ServerConfig).items():
        assert key.description, name


def test_later_places_go_before_earlier_ones(tmp_path: Path) -> None:
    file = "port: 1\nhost: localhost\nmodel_dir: file\nburst: 50\nmax_event_streams: 1\n"
    environment = {
        "GROUPWISE_SERVE_PORT": "2",
        "GROUPWISE_SERVE_MODEL_DIR": "environment",
        "GROUPWISE_SERVE_MAX_EVENT_STREAMS": "2",
    }
    options = {"model_dir": "option", "max_event_streams": 3}
    found = read(file, environment, options, ("max_event_streams=4",), tmp_path=tmp_path)
    assert (found.host, found.port) == ("localhost", 2)
    assert (found.model_dir, found.max_event_streams) == ("option", 4)
    assert found.shutdown_seconds == 30.0


def test_variables_are_typed_as_in_the_file(tmp_path: Path) -> None:
    environment = {
        "GROUPWISE_SERVE_ALLOWED_MODELS": "[org/model, /srv/m]",
        "GROUPWISE_SERVE_REQUESTS_PER_SECOND": "2.5",
        "GROUPWISE_SERVE_KEY_FILE": "null",
        "GROUPWISE_OTHER": "is not ours",
    }
    found = read(None, environment, tmp_path=tmp_path)
    assert found.allowed_models == ("org/model", "/srv/m")
    assert (found.requests_per_second, found.key_file) == (2.5, None)


@pytest.mark.parametrize(
    ("environment", "words", "problem"),
    [
        (
            {"GROUPWISE_SERVE_PROT": "1"},
            (),
            "GROUPWISE_SERVE_PROT is no setting; did you mean GROUPWISE_SERVE_PORT?",
        ),
        ({"GROUPWISE_SERVE_port": "1"}, (), "did you mean GROUPWISE_SERVE_PORT?"),
        ({"GROUPWISE_SERVE_XYZ": "1"}, (), "there are GROUPWISE_SERVE_OUTPUT_DIR"),
        (
            {"GROUPWISE_SERVE_PORT": "x"},
            (),
            'GROUPWISE_SERVE_PORT: port is "x"; it must be a whole number',
        ),
        ({"GROUPWISE_SERVE_PORT": ""}, (), "GROUPWISE_SERVE_PORT: nothing is given"),
        ({"GROUPWISE_SERVE_API_KEY": PLAIN}, (), "GROUPWISE_API_KEY"),
        ({}, ("api_key=" + PLAIN,), "--new-key"),
        ({}, ("port=65536",), "at most 65535"),
        ({}, ("prot=1",), "did you mean port?"),
        ({}, ("tls_certificate=c.pem",), "tls_certificate has no effect without tls_key"),
        ({}, ("tls_key=k.pem",), "tls_key has no effect without tls_certificate"),
        ({}, ("burst=3",), "burst has no effect without requests_per_second"),
        ({}, ("log_format=xml",), "one of text, json"),
    ],
)
def test_what_cannot_be_is_told(
    environment: dict[str, str], words: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as told:
        read(None, environment, {}, words, tmp_path=tmp_path)
    assert problem in told.value.message
    assert PLAIN not in told.value.message


def test_settings_that_do_not_go_together_are_told_under_one_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        read(None, {}, {}, ("tls_certificate=c.pem",), tmp_path=tmp_path)
    assert told.value.message == (
        "settings: tls_certificate has no effect without tls_key; give both."
    )


def test_all_problems_are_told_at_once_each_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        read(
            "host: 5\n",
            {"GROUPWISE_SERVE_PORT": "x"},
            {"model_dir": ""},
            ("burst=0",),
            tmp_path=tmp_path,
        )
    for place in ("S.yaml:1: host", "GROUPWISE_SERVE_PORT: port", "--model-dir: ", "burst=0: "):
        assert place in told.value.message


def test_the_folder_is_needed() -> None:
    with pytest.raises(ConfigError, match="output_dir is required"):
        read_settings(None, {}, {}, ())


# Keys


def config(**given: Any) -> ServerConfig:
    return ServerConfig(output_dir="out", **given)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "train.example"])
def test_others_may_not_ask_without_a_key(host: str) -> None:
    with pytest.raises(UsageError) as told:
        read_keys(config(host=host), {})
    assert "GROUPWISE_API_KEY" in told.value.message
    assert "--new-key" in told.value.message
    assert read_keys(config(host=host), {"GROUPWISE_API_KEY": PLAIN}).caller(PLAIN)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "LocalHost."])
def test_this_machine_may(host: str) -> None:
    assert is_loopback(host)
    assert read_keys(config(host=host), {}) is None


def test_keys_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    made = new_key(Role.TRAIN)
    path = tmp_path / "keys"
    path.write_text(made.line)
    ring = read_keys(config(key_file=str(path)), {"GROUPWISE_API_KEY": PLAIN})
    assert ring.caller(made.key).role == Role.TRAIN
    assert ring.caller(PLAIN).role == Role.ADMIN


def test_a_key_file_that_helps_nobody_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(config(key_file=str(tmp_path / "none")), {})
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(config(key_file=str(tmp_path / "empty")), {})


def test_a_short_key_is_told_without_being_shown() -> None:
    with pytest.raises(UsageError) as told:
        read_keys(config(), {"GROUPWISE_API_KEY": "short-key"})
    assert "short-key" not in told.value.message
