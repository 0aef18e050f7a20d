from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from groupwise.cli.printing import (
    commands_after_run,
    commands_after_sft,
    print_pairs,
    print_table,
    round_number,
)
from groupwise.cli.rl import write_outcome
from groupwise.cli.runs.app import app, list_command, rollouts
from groupwise.core.errors import RunNotFoundError, UsageError
from groupwise.core.types import Example, Group, RewardPart, Rollout, Segment
from groupwise.runs import checkpoints
from groupwise.runs.find import best_and_worst
from groupwise.runs.folder import RunFolder
from groupwise.runs.records import EvaluationRecord, StepRecord, WarningRecord
from groupwise.runs.store import Store

HOSTILE = "\x1b]0;owned\x07 [bold]no markup[/bold]\nsecond line"


def rollout(draw: int, member: int, reward: float) -> Rollout:
    return Rollout(
        draw=draw,
        member=member,
        attempt=0,
        prompt_ids=(1,),
        segments=(Segment("policy", (1, 2, 3), finish_reason="length" if member else "stop"),),
        completion=f"answer {member} kiwi" if member else HOSTILE,
        outcome="scored",
        reward=reward,
        parts=(
            RewardPart("order", reward),
            RewardPart("style", None),
            RewardPart("turns", 0.5, turn=1),
        ),
        advantage=reward - 0.5,
    )


def failed(draw: int) -> Rollout:
    return Rollout(draw, 2, 1, (1,), (), "oops", "timed_out", "took longer\x1b than 30 s")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    config = {"model": {"name": "tiny", "load_in_4bit": False}, "task": {"note": "\x1b[31m"}}
    left_out = {"get_rl_dataset": {"the prompt is empty": 7}}
    meta = {
        "model": "tiny",
        "task": "sort_words",
        "max_steps": 12,
        "init_from": "sort-sft",
        "rows_left_out": left_out,
    }
    with RunFolder.create(tmp_path, "sort", config, meta) as run:
        for step in range(4):
            members = (rollout(step, 0, step / 4), rollout(step, 1, 1.0), failed(step))
            label = {"task": ("even", "odd")[step % 2]}
            group = Group(step, Example(step, f"Sort {step}", label), members)
            metrics = {"reward": step / 4, "odd": math.nan}
            run.store.commit_step(
                StepRecord(step, step, step + 1, "f", (step,), 1e-5, 0.0), [group], metrics
            )
        run.store.add_evaluation(EvaluationRecord(4, "held_out", "sort@4", {"reward": 0.75}))
        run.store.set_warning(
            3, "length", WarningRecord(3, "length", "begins", "grows", {"now": 9.0})
        )
        checkpoints.save(run.checkpoints, 4, lambda folder: (folder / "w").touch())
        run.finish("finished", {})
    with RunFolder.create(tmp_path, "empty", {}, {}):
        pass
    return tmp_path


def call(runs: Path, *arguments: str) -> str:
    """Standard output of the command."""
    result = CliRunner().invoke(app, [*arguments, "--dir", str(runs)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def call_json(runs: Path, *arguments: str) -> Any:
    written = call(runs, *arguments, "--json")
    assert written.isascii()
    return json.loads(written, parse_constant=pytest.fail)


class TestList:
    def test_shows_every_run(self, runs: Path) -> None:
        (runs / "torn").mkdir()
        lines = call(runs, "list").splitlines()
        assert lines[0].split() == ["name", "state", "steps", "reward", "started", "model", "task"]
        assert [line.split()[:2] for line in lines[1:]] == [
            ["sort", "finished"],
            ["empty", "interrupted"],
            ["torn", "broken"],
        ]
        assert "4/12   0.125 → 0.625" in lines[1]
        sort, empty, torn = call_json(runs, "list")
        assert (sort["name"], sort["steps"], sort["state"]) == ("sort", 4, "finished")
        assert empty["reward_first"] is None
        assert "does not exist" in torn["broken"]

    def test_a_terminal_is_told_how_to_see_the_newest_run(
        self, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        list_command(runs)
        assert "next" not in capsys.readouterr().out
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        (runs / "torn").mkdir()
        list_command(runs)
        words = shlex.split(capsys.readouterr().out.splitlines()[-2])
        assert words == ["groupwise", "runs", "show", "empty", "--dir", str(runs)]

    @pytest.mark.parametrize("verb", ["show", "export"])
    def test_a_shell_completes_the_names_of_runs(self, runs: Path, verb: str) -> None:
        asked = {"COMP_WORDS": f"groupwise runs {verb} --dir {runs} s", "COMP_CWORD": "5"}
        environment = os.environ | asked | {"_GROUPWISE_COMPLETE": "complete_bash"}
        groupwise = Path(sys.executable).with_name("groupwise")
        shown = subprocess.run(
            [groupwise], check=True, env=environment, capture_output=True, text=True
        )
        assert shown.stdout.split() == ["sort"]

    def test_a_narrow_terminal_shows_names_and_hours_whole(
        self, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "80")
        (runs / "sort").rename(runs / "sort-with-seed-17")
        list_command(runs)
        lines = capsys.readouterr().out.splitlines()
        (line,) = (line for line in lines if line.startswith("sort-with-seed-17  "))
        assert re.search(r"  \d\d-\d\d \d\d:\d\d  ", line)
        assert all(len(line) <= 80 for line in lines[:3])
        (runs / "sort-with-seed-17").rename(runs / f"sort-with-{'long-' * 3}seed-17")
        list_command(runs)
        head, *lines = capsys.readouterr().out.splitlines()
        assert head.split() == ["name", "state", "steps", "reward", "started"]
        assert any(line.startswith(f"sort-with-{'long-' * 3}seed-17  ") for line in lines)
        assert all(len(line) <= 80 for line in lines[:2])

    def test_tables_fit_a_terminal_of_80_columns(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        row = ["quickstart", "finished", "40/40", "smollm2-135m-instruct" * 2, "task" * 9]
        least = {3: 12, 4: 10}
        print_table([row], least)
        assert row[3] in capsys.readouterr().out, "a file or pipe gets all"
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "80")
        print_table([row], least)
        (line,) = capsys.readouterr().out.splitlines()
        assert len(line) == 80
        assert line.split() == [*row[:3], "smollm2-135m…", row[4]]
        print_pairs([("folder", "/home" * 20), ("warning", "completions grow " * 9)])
        path, *folded = capsys.readouterr().out.splitlines()
        assert path == "folder   " + "/home" * 20, "it can be copied"
        assert all(len(line) <= 80 for line in folded)
        assert folded[1].startswith("         completions")


class TestShow:
    def test_tells_what_there_is(self, runs: Path) -> None:
        shown = call(runs, "show", "sort")
        for expected in (
            "state        finished",
            "init-from    sort-sft",
            "steps        4 of 12",
            "reward       ▁▃▆█",
            "checkpoints  sort@4",
            "evaluation held_out after 4 steps (sort@4)",
            "warnings\n  after 3 steps  length begins: grows\n",
            "rows of get_rl_dataset left out\n  7  the prompt is empty\n",
            'model.name  "tiny"',
        ):
            assert expected in shown
        following = shown.split("\nnext\n")[1]
        assert "runs rollouts sort --worst" in following
        assert "runs show" not in following, "that was this command"
        assert "runs export sort" in following, "the weights of its checkpoint"
        assert "\nnext\n" not in call(runs, "show", "empty"), "it has no step"
        assert "\x1b" not in shown
        assert "load_in_4bit" not in shown, "defaults are left out"
        facts = call_json(runs, "show", "sort")
        warning = {"step": 3, "name": "length", "kind": "begins", "message": "grows", "values": {"now": 9.0}}  # fmt: skip
        assert (facts["checkpoints"], facts["warnings"]) == ([4], [warning])
        assert facts["last_metrics"] == {"odd": None, "reward": 0.75}
        assert facts["rows_left_out"] == {"get_rl_dataset": {"the prompt is empty": 7}}
        assert (facts["summary"]["state"], facts["config"]["model"]["name"]) == ("finished", "tiny")
        assert "checkpoints  none" in call(runs, "show", "empty")
        with pytest.raises(RunNotFoundError, match="Did you mean 'sort'"):
            call(runs, "show", "sorts")


class TestRollouts:
    def test_show_the_last_step_with_its_prompt_once_and_hostile_text_harmlessly(
        self, runs: Path
    ) -> None:
        shown = call(runs, "rollouts", "sort")
        assert (shown.count("Sort 3"), shown.count("Sort 2")) == (1, 0)
        for part in (
            "rollout 1 · reward 0.750 · advantage +0.250 · 3 tokens\n",
            "order 0.75   style –   turns (turn 1) 0.5",
            "rollout 2 · reward 1.000 · advantage +0.500 · 3 tokens, cut off",
            "rollout 3 · TIMED OUT: took longer␛ than 30 s · attempt 1",
            "     ␛]0;owned␇ [bold]no markup[/bold]\n     second line",
        ):
            assert part in shown
        assert all(letter == "\n" or letter.isprintable() for letter in shown)
        assert call(runs, "rollouts", "sort", "--text", "nowhere") == ""
        assert call(runs, "rollouts", "empty") == ""

    def test_a_terminal_is_told_where_to_read_on(
        self, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        rollouts("sort", runs)
        words = shlex.split(capsys.readouterr().out.splitlines()[-2])
        assert words == ["groupwise", "web", "--dir", str(runs)]

    def test_options(self, runs: Path) -> None:
        for options, found in (
            ("--step 1", [(1, 1), (1, 2), (1, 3)]),
            ("--failed", [(1, 3), (2, 3), (3, 3), (4, 3)]),
            ("--failed --step 2", [(2, 3)]),
            ("--text KIWI", [(1, 2), (2, 2), (3, 2), (4, 2)]),
            ("--worst --limit 2", [(1, 1), (2, 1)]),
            ("--worst --limit 5", [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)]),
            ("--worst --limit 2 --part turns", [(4, 2), (4, 1)]),
            ("--best --limit 2", [(4, 2), (3, 2)]),
            ("--part order --worst --limit 1", [(1, 1)]),
            ("--task odd --failed", [(2, 3), (4, 3)]),
            ("--task even --best --limit 1", [(3, 2)]),
            ("--all --limit 4", [(1, 1), (1, 2), (1, 3), (2, 1)]),
        ):
            views = call_json(runs, "rollouts", "sort", *options.split())
            assert [(view["step"], view["rollout"]) for view in views] == found, options

    def test_contradictions_and_what_there_is_not_are_refused(self, runs: Path) -> None:
        for words in ("sort --best --worst", "sort --step 1 --all"):
            with pytest.raises(UsageError, match="contradict"):
                call(runs, "rollouts", *words.split())
        for words, said in (
            ("sort --step 77", "1 to 4"),
            ("empty --step 1", "none yet"),
            ("sort --part ordr", "order, style, turns"),
            ("sort --task od", "even, odd"),
            ("empty --task odd", "name none"),
        ):
            with pytest.raises(RunNotFoundError, match=said):
                call(runs, "rollouts", *words.split())


class TestPlot:
    def test_draws_and_writes(self, runs: Path) -> None:
        target = runs / "new" / "reward.svg"
        shown = call(runs, "plot", "sort", "--svg", str(target))
        assert shown.startswith("sort · reward")
        assert ("┤" in shown, "\x1b" in shown) == (True, False)
        assert target.read_text().startswith("<svg")
        drawn = call_json(runs, "plot", "sort")
        assert drawn["points"] == [[1, 0.0], [2, 0.25], [3, 0.5], [4, 0.75]]
        assert call_json(runs, "plot", "sort", "--metric", "odd")["points"][0] == [1, None]
        with pytest.raises(RunNotFoundError, match="odd, reward"):
            call(runs, "plot", "sort", "--metric", "rewrad")
        with pytest.raises(RunNotFoundError, match="no step yet"):
            call(runs, "plot", "empty")

    def test_a_terminal_gets_colours_unless_no_color_is_set(
        self, runs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("groupwise.cli.output.is_terminal", lambda stream: True)
        shown = list[str]()
        for value in ("", "1"):
            monkeypatch.setenv("NO_COLOR", value)
            arguments = ["plot", "sort", "--dir", str(runs)]
            shown.append(CliRunner().invoke(app, arguments, color=True).stdout)
        assert ["\x1b[" in text for text in shown] == [True, False]


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_the_command_that_export_prints_shows_the_rollouts(
    runs: Path, tmp_path: Path, to: str
) -> None:
    written = call(runs, "export", "sort", "--to", to, "--output", str(tmp_path / "out of here"))
    command = written[written.index("next\n") :].splitlines()[1]
    shown = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], capture_output=True, text=True, check=True
    )
    header, first, *_ = shown.stdout.splitlines()
    assert header.split() == ["completion", "reward"]
    assert float(first.split()[-1]) == 0.0


def test_the_commands_after_a_run_name_its_best_and_its_worst_rollout(runs: Path) -> None:
    with Store.open(runs / "sort" / "run.db") as store:
        ends = (rollout(4, 0, -1.0), rollout(4, 1, 2.0))
        store.keep_unfinished([Group(4, Example(4, "Sort 4", {}), ends)])
    assert "━━ sampled, not trained on yet · group 5" in call(runs, "rollouts", "sort", "--best")
    found = best_and_worst(runs / "sort")
    assert {order: (view.reward, view.step) for order, view in found.items()} == {
        "best": (1.0, 4),
        "worst": (0.0, 1),
    }
    assert best_and_worst(runs / "empty") == {}
    with RunFolder.create(runs, "equal", {}, {}) as run:
        group = Group(0, Example(0, "Sort", {}), (rollout(0, 0, 0.5), rollout(0, 1, 0.5)))
        run.store.commit_step(StepRecord(0, 0, 1, "f", (0,), 1e-5, 0.0), [group], {"reward": 0.5})
        for step, name in ((0, "before"), (1, "after")):
            answers = ({"example": 0, "sample": 0, "reward": 0.5},)
            run.store.add_evaluation(
                EvaluationRecord(step, name, "equal", {"reward": 0.5}, answers)
            )
    assert list(best_and_worst(runs / "equal")) == ["best"]
    comparing = "groupwise runs compare equal@0 equal"
    assert any(line.startswith(comparing) for line, _ in commands_after_run(runs / "equal"))
    assert "compare" not in str(commands_after_run(runs / "sort")), "only one evaluation"
    lines = [line for line, _ in commands_after_run(runs / "sort")]
    for line in lines[1:3]:
        assert "Sort" in call(runs, *shlex.split(line)[2:4], line.split()[4])
    assert [shlex.split(line)[-1] for line, _ in commands_after_sft(runs / "sort", "task.py")] == [
        str(runs / "sort")
    ] * 2


def test_an_unfinished_run_is_shown_with_the_command_that_continues_it(runs: Path) -> None:
    facts = {"kind": "sft", "task_module": "sort_words"}
    with RunFolder.create(runs, "cut", {"run": {"dir": str(runs)}}, facts):
        pass
    line = call(runs, "show", "cut").splitlines()[-2]
    config = str((runs / "cut" / "config.json").resolve())
    assert shlex.split(line) == ["groupwise", "sft", "-c", config, "-t", "sort_words", "--resume"]
    assert "next" not in call(runs, "show", "empty"), "a client led it"


def test_large_numbers_are_whole_and_small_ones_have_four_digits() -> None:
    numbers = [25410.0, 9999.4, -1234567.0, 0.0645678, 3, None]
    shown = ["25,410", "9999", "-1,234,567", "0.06457", "3", ""]
    assert [round_number(number) for number in numbers] == shown


def test_the_outcome_of_a_run_says_its_warnings_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warning = {"step": 3, "signal": "length", "kind": "begins", "message": "grows"}
    write_outcome({"run": "sort", "warnings": [warning]}, as_json=False)
    assert (
        capsys.readouterr().out == "run  sort\n\nwarnings\n  after 3 steps  length begins: grows\n"
    )


def test_the_outcome_of_a_run_has_its_evaluations_side_by_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    low, high = ({"value": v, "low": v / 2, "high": v * 1.5} for v in (0.1, 0.6))
    length = {"value": 48.0}
    held_out = {
        "prompts": 128,
        "change": {"value": 0.5, "low": 0.4, "high": 0.6},
        "rises": True,
        "before": {"reward": low, "completions/mean_length": length},
        "after": {"reward": high, "completions/mean_length": {"value": 12.5}},
    }
    write_outcome({"run": "sort", "held_out": held_out}, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "run  sort",
        "",
        "the same 128 held-out prompts, with 95 % intervals",
        "  metric                   before                after",
        "  reward                   0.100 [0.050, 0.150]  0.600 [0.300, 0.900]",
        "  completions/mean_length  48                    12.5",
        "  change in reward: 0.500 [0.400, 0.600]; it rises",
    ]
    write_outcome({"held_out": {**held_out, "base": held_out["before"]}}, as_json=False)
    assert "  metric                   base model            before  " in capsys.readouterr().out
