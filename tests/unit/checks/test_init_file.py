"""The file that `groupwise init` writes says what was chosen, reads back as that, and gives the reasons."""

from __future__ import annotations

from typing import Any

from groupwise.checks.init_choices import Choice
from groupwise.checks.init_file import WIDTH, rendered
from groupwise.settings.tree import read_yaml

CHOICES = [
    Choice(("model", "name"), "org/model", ""),
    Choice(("lora",), None, "all weights are trained"),
    Choice(("training", "learning_rate"), 1e-5, "a reason " * 30),
    Choice(("training", "gradient_checkpointing"), True, "it has to be"),
    Choice(("sampler", "stop"), ["\n", "# no comment"], "as given"),
    Choice(("task", "text"), "yes: no", "line one\n  line two"),
    Choice(("task", "deep"), {"list": [1, None], "date": "2026-01-02"}, ""),
]
VALUES: dict[str, Any] = {
    "model": {"name": "org/model"},
    "lora": None,
    "training": {"learning_rate": 1e-5, "gradient_checkpointing": True},
    "sampler": {"stop": ["\n", "# no comment"]},
    "task": {"text": "yes: no", "deep": {"list": [1, None], "date": "2026-01-02"}},
}


def test_the_file_reads_back_as_what_was_chosen(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(rendered("Written.", ["groupwise rl"], CHOICES))
    tree = read_yaml(file)
    assert tree.values == VALUES
    assert tree.problems == []


def test_reasons_stand_above_their_keys_and_commands_at_the_top():
    lines = rendered("Written.", ["groupwise check", "groupwise rl"], CHOICES).splitlines()
    assert lines[:5] == ["# Written.", "#", "# groupwise check", "# groupwise rl", ""]
    assert lines[lines.index("lora: null") - 1] == "# all weights are trained"
    assert lines[lines.index("  text: 'yes: no'") - 1] == "  # line one line two"
    assert max(map(len, lines)) <= WIDTH + 2
