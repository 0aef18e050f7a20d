"""`groupwise check` and `groupwise doctor` on the command line: what is handed on, what is shown, how they end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from groupwise.checks.findings import Finding, Report
from groupwise.cli import findings
from groupwise.cli.main import main

GOOD = Finding("hooks", "ok", "all there", "enough for `rl`", "never shown")
BAD = Finding("spread", "problem", "one line\nanother", "nothing is learnt", "mend it")
DETAILS = {
    "prompts": ["Say \x1b[31mred"],
    "prompts_rendered_by": "tiny",
    "table": [
        {"completion": "gold", "count": 2, "failed": 0, "reward": 1.0, "parts": {"right": 1.0}},
        {"completion": "empty", "count": 2, "failed": 2, "reward": None, "parts": {}},
    ],
}


class Verb:
    """Stands in for what a command calls; tells its findings to whoever listens."""

    def __init__(self, *found: Finding) -> None:
        self.found = found
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *given: Any, on_finding: Any, **named: Any) -> Report:
        self.calls.append((given, {**named, "listens": on_finding is not None}))
        for finding in self.found:
            if on_finding:
                on_finding(finding)
        return Report("it", self.found, "check_failed", DETAILS)


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, *found: Finding) -> Verb:
    verb, fake = Verb(*found), ModuleType(f"groupwise.checks.{name}")
    setattr(fake, name, verb)
    monkeypatch.setitem(sys.modules, f"groupwise.checks.{name}", fake)
    return verb


def test_check_hands_everything_on(monkeypatch: pytest.MonkeyPatch):
    assert main(["check"]) == 2, "it needs a task"
    verb = replaced(monkeypatch, "check", GOOD)
    words = "-t t.py -c c.yaml --completions run --rows 4 task.x=1 --json"
    assert main(["check", *words.split()]) == 0
    named = {"overrides": ("task.x=1",), "completions": "run", "rows": 4, "listens": False}
    assert verb.calls == [(("t.py", Path("c.yaml")), named)]
    assert main(["check", "-t", "t.py"]) == 0
    assert verb.calls[1][0] == ("t.py", None)


def test_doctor_needs_nothing(monkeypatch: pytest.MonkeyPatch):
    verb = replaced(monkeypatch, "doctor", GOOD)
    assert main(["doctor"]) == 0
    assert main(["doctor", "-c", "c.yaml", "-t", "t.py", "run.threads=1"]) == 0
    assert [given for given, _ in verb.calls] == [(None, None), (Path("c.yaml"), "t.py")]
    assert verb.calls[1][1]["overrides"] == ("run.threads=1",)


def test_check_shows_what_was_earned_and_harmless_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    replaced(monkeypatch, "check", GOOD)
    main(["check", "-t", "t"])
    shown = capsys.readouterr().out
    assert "  completion  count  failed  reward  right\n" in shown
    assert "  gold            2       0   1.000  1.000\n" in shown
    assert "  empty           2       2       -      -\n" in shown
    assert "prompt 0, as the model sees it\n  Say ␛[31mred\n" in shown
    assert shown.endswith("\nnothing to complain of\n")


def test_problems_end_with_1_and_json_is_one_object_with_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("check", "doctor"):
        replaced(monkeypatch, name, GOOD, BAD)
        assert main([name, "-t", "t", "--json"]) == 1
        written = json.loads(capsys.readouterr().out)
        assert written["error"]["code"] == "check_failed"
        assert [each["name"] for each in written["findings"]] == ["hooks", "spread"]
        assert written["table"] == DETAILS["table"]


LONG = Finding("part very_long_name_of_a_reward", "warning", "word " * 40, "more " * 30, "do " * 40)


def test_findings_are_one_line_each_in_a_pipe_and_folded_behind_their_names_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    findings.show_finding(LONG)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("warning  part very_long_name_of_a_reward word word")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    findings.show_finding(LONG)
    findings.show_finding(BAD)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    gap = " " * 33
    assert [line for line in lines if not line.startswith(gap)] == [
        "warning  part very_long_name_of_a_reward",
        "problem  spread                  one line",
    ]
    assert lines[-3:] == [f"{gap}another", f"{gap}nothing is learnt", f"{gap}→ mend it"]
