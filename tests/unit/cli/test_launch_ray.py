"""Words of `groupwise launch ray` that are no words of it, before anything is asked."""

from pathlib import Path

import pytest

from groupwise.cli.main import main


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--resource", "apart"], "NAME=N is expected"),
        (["--memory", "much"], "a size is expected"),
        (["--memory", "0G"], "a size is expected"),
        (["--address", "head:8265"], "the address of Ray's dashboard"),
        (["--shared", "relative"], "absolute path"),
        (["--user", "me"], "--host names it"),
        (["--python", "p", "--lock", "l"], "--python names an environment that is there"),
    ],
)
def test_what_is_wrong_is_told(
    words: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "ray", *words, "--script", "job.py"]) == 2
    assert why in capsys.readouterr().err
