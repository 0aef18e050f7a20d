"""Options of `groupwise launch aws`."""

from pathlib import Path

import pytest

from groupwise.cli.launch_aws import usual_key


def test_the_key_of_a_pair_lies_where_people_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = tmp_path / ".ssh"
    keys.mkdir()
    assert usual_key("mine") == keys / "mine.pem", "what is told to be missing"
    (keys / "mine").touch()
    assert usual_key("mine") == keys / "mine"
    (keys / "mine.pem").touch()
    assert usual_key("mine") == keys / "mine.pem"
