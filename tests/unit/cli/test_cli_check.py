"""`groupwise check` and `groupwise doctor` on the command line: what is handed on, what is shown, how they end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from groupwise.cli.main import main
from groupwise.core.findings import Finding, Report

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
    verb, fake = Verb(*found), ModuleType(f"groupwise.training.checks.{name}")
    setattr(fake, name, verb)
    monkeypatch.setitem(sys.modules, f"groupwise.training.checks.{name}", fake)
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


def test_a_report_reads_as_text():
    lines = repr(Report("it", (GOOD, BAD), "check_failed")).splitlines()
    assert lines[0] == "it"
    assert lines[1] == f"ok       {GOOD.name}: {GOOD.measured}"
    assert f"         → {BAD.remedy}" in lines
    assert lines[-1] == "1 problem"


@pytest.mark.parametrize(
    ("words", "following"),
    [
        (["-t", "t"], "init -t t -m smollm2-135m-instruct"),
        (["-t", "t", "model.name=tiny"], "rl -t t model.name=tiny"),
        (["-t", "t", "-c", "c.yaml"], "rl -c c.yaml -t t"),
        ([], "check -t TASK.py"),
    ],
)
def test_a_doctor_names_a_command_that_runs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    following: str,
):
    replaced(monkeypatch, "doctor", GOOD)
    assert main(["doctor", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == f"  groupwise {following}"
