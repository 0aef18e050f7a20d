"""The settings of a server: where they may be given, their precedence, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from groupwise.api.schemas.keys import Role, new_key
from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.loopback import is_loopback
from groupwise.core.settings.schema import keys_of
from groupwise.server.settings import ServerConfig, read_keys, read_settings

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
    variables = {"GROUPWISE_SERVE_OUTPUT_DIR": "out"} | (environment or {})
    return read_settings(path, variables, options or {}, words)


# Keys


def test_later_places_go_before_earlier_ones(tmp_path: Path) -> None:
    file = "port: 1\nhost: localhost\nmodel_dir: file\nburst: 50\nmax_event_streams: 1\n"
    variables = {
        "PORT": "2",
        "MODEL_DIR": "environment",
        "MAX_EVENT_STREAMS": "2",
        "KEY_FILE": "null",
    }
    variables |= {"ALLOWED_MODELS": "[org/model, /srv/m]", "REQUESTS_PER_SECOND": "2.5"}
    environment = {f"GROUPWISE_SERVE_{name}": value for name, value in variables.items()}
    environment["GROUPWISE_OTHER"] = "is not ours"
    options = {"model_dir": "option", "max_event_streams": 3}
    settings = read(file, environment, options, ("max_event_streams=4",), tmp_path=tmp_path)
    assert (settings.host, settings.port) == ("localhost", 2)
    assert (settings.model_dir, settings.max_event_streams) == ("option", 4)
    assert settings.allowed_models == ("org/model", "/srv/m")
    assert (settings.requests_per_second, settings.key_file) == (2.5, None)


def test_all_invalid_settings_are_reported_at_once_with_their_source(tmp_path: Path) -> None:
    for name, key in keys_of(ServerConfig).items():
        assert key.description, name
    environment = {"GROUPWISE_SERVE_PORT": "x"}
    options = {"model_dir": ""}
    with pytest.raises(ConfigError) as error:
        read("host: 5\n", environment, options, ("burst=0",), tmp_path=tmp_path)
    for place in ("S.yaml:1: host", "GROUPWISE_SERVE_PORT: port", "--model-dir: ", "burst=0: "):
        assert place in error.value.message
    wrong: list[tuple[dict[str, str], tuple[str, ...], str]] = [
        ({"PROT": "1"}, (), "did you mean GROUPWISE_SERVE_PORT?"), ({"PORT": ""}, (), "GROUPWISE_SERVE_PORT: nothing is given"),
        ({"API_KEY": PLAIN}, (), "GROUPWISE_API_KEY"), ({}, ("api_key=" + PLAIN,), "--new-key"),
        ({}, ("port=65536",), "at most 65535"), ({}, ("tls_certificate=c.pem",), "tls_certificate has no effect without tls_key"),
        ({}, ("burst=3",), "burst has no effect without requests_per_second"),
    ]  # fmt: skip
    for settings, words, problem in wrong:
        variables = {f"GROUPWISE_SERVE_{name}": value for name, value in settings.items()}
        with pytest.raises(ConfigError) as error:
            read(None, variables, {}, words, tmp_path=tmp_path)
        assert problem in error.value.message
        assert PLAIN not in error.value.message
    with pytest.raises(ConfigError, match="output_dir is required"):
        read_settings(None, {}, {}, ())


def test_others_may_not_ask_without_a_key_and_this_machine_may(tmp_path: Path) -> None:
    def keys(environment: dict[str, str], **settings: Any) -> Any:
        return read_keys(ServerConfig(output_dir="out", **settings), environment)

    plain = {"GROUPWISE_API_KEY": PLAIN}
    for host in ("0.0.0.0", "::", "10.0.0.5", "train.example"):
        with pytest.raises(UsageError, match="--new-key"):
            keys({}, host=host)
        assert keys(plain, host=host).caller(PLAIN)
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1", "LocalHost."):
        assert is_loopback(host)
        assert keys({}, host=host) is None
    made = new_key(Role.TRAIN)
    (tmp_path / "keys").write_text(made.line)
    (tmp_path / "empty").write_text("# nobody\n")
    ring = keys(plain, key_file=str(tmp_path / "keys"))
    assert [ring.caller(key).role for key in (made.key, PLAIN)] == [Role.TRAIN, Role.ADMIN]
    for name in ("none", "empty"):
        with pytest.raises(ConfigError, match=name):
            keys({}, key_file=str(tmp_path / name))
    for others in (0o620, 0o602):  # who could add a key of their own
        (tmp_path / "keys").chmod(others)
        with pytest.raises(ConfigError, match="chmod go-w"):
            keys({}, key_file=str(tmp_path / "keys"))
    with pytest.raises(UsageError) as error:
        keys({"GROUPWISE_API_KEY": "short-key"})
    assert "short-key" not in error.value.message
