"""Presets are real settings: each makes its algorithm, names its source, and is listed on the page with its values."""

from __future__ import annotations

import ast
import json
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from groupwise.algorithms.presets import PRESETS
from groupwise.algorithms.registry import make

PAGE = (Path(__file__).parents[3] / "docs" / "algorithm-settings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_its_algorithm_and_names_its_source(name: str) -> None:
    preset = PRESETS[name]
    made = make(preset.algorithm, preset.knobs).loss_spec()
    assert made.name == preset.algorithm
    assert preset.knobs.items() <= made.knobs.items()
    assert preset.source.startswith("https://")


def test_the_page_shows_every_preset_with_its_values() -> None:
    section = PAGE.split("\n## Presets\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    shown = {
        name.strip(" `"): (kind.strip(" `"), values, source) for name, kind, values, source in rows
    }
    assert shown.keys() == PRESETS.keys()
    for name, preset in PRESETS.items():
        kind, values, source = shown[name]
        assert kind == preset.algorithm
        expected = {
            f"{knob}: {json.dumps(value)}".replace('"', "") for knob, value in preset.knobs.items()
        }
        assert set(re.findall(r"`([^`]+)`", values)) == expected
        assert preset.source.split(",")[0].split("//")[1] in source


def test_the_defaults_of_trl_are_those_of_the_installed_release() -> None:
    """Read as text: importing TRL takes many seconds."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    source = (Path(found.origin).parent / "trainer" / "grpo_config.py").read_text()
    fields = {
        node.target.id: next(
            ast.literal_eval(word.value) for word in node.value.keywords if word.arg == "default"
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Call)
        and any(word.arg == "default" for word in node.value.keywords)
    }
    preset = PRESETS["trl_default"]
    assert f"v{version('trl')}/" in preset.source
    assert fields["loss_type"] == preset.algorithm
    assert fields["importance_sampling_level"] == "token"
    ours = {name: value for name, value in preset.knobs.items() if name in fields}
    assert {name: fields[name] for name in ours} == ours
    assert ours.keys() == {
        "beta", "epsilon", "epsilon_high", "scale_rewards", "mask_truncated_completions",
    }  # fmt: skip
