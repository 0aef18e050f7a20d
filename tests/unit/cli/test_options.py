"""Options with several names: the first is shown, the others still work, and two of them at once are refused."""

import pytest

from groupwise.cli.main import main
from tests.unit.cli.conftest import Command

CPUS = ["fleet", "submit", "--cpus", "2"]


@pytest.mark.parametrize(("words", "both"), [
    ([*CPUS, "--cpu", "3", "--", "true"], ("--cpus", "--cpu")),
    (["fleet", "submit", "--ram=1GB", "--memory", "2GB", "true"], ("--ram", "--memory")),
    (["generate", "--concurrency", "1", "--input-batch-size", "2"], ("--concurrency", "--input-batch-size")),
    (["launch", "local", "--max-hours", "1", "--time-limit", "2h", "--", "rl"], ("--max-hours", "--time-limit")),
])  # fmt: skip
def test_two_names_of_one_option_are_refused(
    words: list[str], both: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{both[0]} and {both[1]} are the same" in told


def test_one_name_several_times_and_what_is_the_commands_own_is_not(still: Command) -> None:
    plan = ("submit", "--gpus", "0", "--array", "/no/such/file")
    for words in (
        ("--cpus", "2", "--cpus", "3", "--", "true"),
        ("--cpus", "2", "true", "--cpu", "3"),
        ("--output", "a", "--artefact", "b", "--", "true"),
    ):
        code, _, err = still(*plan, *words)
        assert (code, "/no/such/file" in err, "are the same" in err) == (2, True, False)
