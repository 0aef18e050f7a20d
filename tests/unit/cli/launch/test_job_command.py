"""The command line of `groupwise launch`: what is the launcher's, what is the job's; names; variables from files."""

from pathlib import Path
from typing import Any, cast

import pytest

from groupwise.cli.launch.job_command import JobCommand, new_name, split_command
from groupwise.cli.launch.options import CommandOptions
from groupwise.cli.main import main
from groupwise.cli.parsing import variables
from groupwise.core.errors import UsageError
from groupwise.jobs.hosts.spec import JOB_ID

ODD = ("--config", "a b", "it's", "", "two\nlines", "-v", "--script", "$(x)", "--")


def test_words_after_the_dashes_are_kept_unchanged() -> None:
    own, behind = split_command(["--gpus", "1", "--", "rl", *ODD])
    assert own == ["--gpus", "1"]
    assert behind == JobCommand(None, ("rl", *ODD))
    assert behind.line == ("groupwise", "rl", *ODD)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("groupwise", "rl", "-c", "C"), ("groupwise", "rl", "-c", "C")),
        (("python", "train.py", "--help"), ("python", "train.py", "--help")),
        (("sh", "-c", "echo $HOME"), ("sh", "-c", "echo $HOME")),
        (("./rl",), ("./rl",)),
    ],
)
def test_any_program_runs_as_it_is_written(words: tuple[str, ...], line: tuple[str, ...]) -> None:
    command = split_command(["--gpus", "1", "--", *words])[1]
    assert command is not None
    assert command.line == line


@pytest.mark.parametrize("given", [["--script", "s.py"], ["--script=s.py"]])
@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_arguments_after_a_script_belong_to_the_script(given: list[str], dashes: list[str]) -> None:
    own, behind = split_command(["--gpus", "1", *given, *dashes, *ODD])
    assert own == ["--gpus", "1"]
    assert behind == JobCommand("s.py", ODD)
    assert behind.line == ("python", "s.py", *ODD)


RAY = ("ray", "--script", "job.py")


@pytest.mark.parametrize(("words", "told"), [
    (["local"], "there is nothing to run"), (["local", "rl", "--config", "c"], "groupwise launch local -- rl --config c"),
    (["local", "--", "rl --config c"], "words apart, `-- rl --config c`"), (["local", "--gpus", "A100:2", *RAY[1:]], "--gpus 2"),
    (["local", "--gpus", "2x", *RAY[1:]], "a model with a number"),
    (["slurm", "--gpus", "A100:2", "--gpu-model", "H100", *RAY[1:]], "give one"),
    (["local", "--", "doctor"], "can be launched are rl, sft, eval, generate"), (["local", "--"], "there is nothing to run"),
    (["local", "--", "groupwise", "doctor"], "can be launched are rl, sft, eval, generate"),
    (["local", "--", "evel", "-c", "C"], "-- ./evel"),
    (["local", "--", "--config", "c"], "a command of groupwise (rl, sft, eval, generate) or a program is expected"),
    (["local", "--", "rl", "--help"], "--help after `--` belongs to the job"),
    (["local", "--bogus", "--", "rl"], "No such option: --bogus"), ([RAY[0], "--resource", "apart", *RAY[1:]], "NAME=N"),
    ([RAY[0], "--memory", "much", *RAY[1:]], "a size"), ([RAY[0], "--address", "head:8265", *RAY[1:]], "the address of Ray's dashboard"),
    ([RAY[0], "--user", "me", *RAY[1:]], "--host"),
])  # fmt: skip
def test_refusals_teach(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("script", ["train.py", "-x.py", "é ü.py", "a/b/c" * 40 + ".py", ".py"])
def test_names_can_be_names_of_jobs(script: str) -> None:
    assert JOB_ID.fullmatch(new_name(JobCommand(script, ()), now=1e9))
    assert JOB_ID.fullmatch(new_name(JobCommand(None, (script,)), now=1e9))


def test_variables_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME_OF_MINE", "never looked up")
    first, second = tmp_path / ".env", tmp_path / "more.env"
    first.write_text("# a comment\nA=1\nexport B='two words'\nC=\"${HOME_OF_MINE}\"\nEMPTY=\n")
    second.write_text("A=later\n")
    assert variables((), [first, second]) == {
        "A": "later", "B": "two words", "C": "${HOME_OF_MINE}", "EMPTY": "",
    }  # fmt: skip
    assert variables([], []) == {}
    ctx = cast("Any", None)
    options = CommandOptions(ctx=ctx, env=["B=of the line", "D=a=b"], env_file=[first, second])
    assert options.secrets() == {
        "A": "later", "B": "of the line", "C": "${HOME_OF_MINE}", "EMPTY": "", "D": "a=b",
    }  # fmt: skip
    for wrong, told in (["B"], "KEY=VALUE"), (["B=1", "B=2"], "B is given twice"):
        with pytest.raises(UsageError, match=told):
            variables(wrong, [])


def test_a_name_without_a_value_is_refused_and_no_value_is_shown(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("GOOD=canary-value\nLONELY\n")
    with pytest.raises(UsageError, match="a line there has no `=`") as refused:
        variables([], [path])
    assert "canary" not in str(refused.value)
    assert "LONELY" not in str(refused.value)
