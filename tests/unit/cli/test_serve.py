"""`groupwise serve` as a command: what it refuses before it serves, and how it makes keys."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from groupwise.api.schemas.keys import Keyring, Role, read_key_file
from groupwise.cli.main import main


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would have been served."""
    calls: list[tuple[Any, ...]] = []
    fake: Any = ModuleType("groupwise.server.serve")

    def serve(*given: Any, in_front: Any) -> int:
        calls.append((*given, in_front))
        return 0

    fake.serve = serve
    fake.read_start = lambda path: f"read {path}"
    monkeypatch.setitem(sys.modules, "groupwise.server.serve", fake)
    monkeypatch.delenv("GROUPWISE_API_KEY", raising=False)
    return calls


def test_options_and_words_are_settings(served: list[tuple[Any, ...]], tmp_path: Path) -> None:
    """The folder suffices."""
    file = tmp_path / "S.yaml"
    file.write_text("port: 1\nlog_format: json\n")
    words = ["--config", str(file), "--port", "2", "--start-with", "s.yaml", "burst=9"]
    assert main(["serve", "--output-dir", "D"]) == 0
    assert (
        main(["serve", "--output-dir", "D", *words, "dashboard=false", "requests_per_second=3"])
        == 0
    )
    (plain, keys, none, in_front), (config, _, start, nothing_in_front) = served
    assert (plain.output_dir, plain.host, plain.port) == ("D", "127.0.0.1", 8000)
    assert keys is none is nothing_in_front is None
    assert callable(in_front)
    assert (config.port, config.log_format, config.burst) == (2, "json", 9)
    assert start == "read s.yaml"


def test_serve_names_the_missing_extra_before_missing_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve"]) == 2
    told = capsys.readouterr().err
    assert ("groupwise[server]" in told, "output_dir" in told) == (True, False)


@pytest.mark.parametrize("form", [["--api-key", "a-secret-value"], ["--api-key=a-secret-value"]])
def test_a_key_on_the_command_line_is_refused(
    form: list[str], served: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--output-dir", "D", *form]) == 2
    told = capsys.readouterr().err
    assert "GROUPWISE_API_KEY" in told
    assert "--new-key" in told
    assert "a-secret-value" not in told
    assert served == []


def test_others_can_reach_it_only_with_a_key(
    served: list[tuple[Any, ...]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["serve", "--output-dir", "D", "--host", "0.0.0.0"]) == 2
    assert "it has no key" in capsys.readouterr().err
    monkeypatch.setenv("GROUPWISE_API_KEY", "long-enough-to-be-a-key")
    assert main(["serve", "--output-dir", "D", "--host", "0.0.0.0"]) == 0
    assert len(served) == 1


def test_a_new_key_and_its_line_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for role in Role:
        assert main(["serve", "--new-key", role.word]) == 0
        key, line = (row.split(maxsplit=1)[1] for row in capsys.readouterr().out.splitlines())
        caller = Keyring(read_key_file(line, "keys")).caller(key)
        assert caller is not None
        assert caller.role == role
        assert key not in line
    assert main(["serve", "--new-key", "root"]) == 2
    assert "read, train, admin" in capsys.readouterr().err
