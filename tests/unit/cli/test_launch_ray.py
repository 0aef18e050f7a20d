"""Words of `groupwise launch ray` that are no words of it, before anything is asked."""

from pathlib import Path

import pytest

from groupwise.cli.main import main


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--resource", "apart"], "NAME=N is expected"),
        (["--resource", "apart=0"], "a number above 0"),
        (["--resource", "apart=many"], "a number above 0"),
        (["--resource", "a=1", "--resource", "a=2"], "stands there twice"),
        (["--memory", "much"], "a size is expected"),
        (["--memory", "0G"], "a size is expected"),
        (["--address", "ray://head:10001"], "the address of Ray's dashboard"),
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
