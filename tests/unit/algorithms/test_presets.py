"""Presets are real settings: each makes its algorithm, names its source, and is listed on the page with its values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from groupwise.algorithms.presets import PRESETS
from groupwise.algorithms.registry import make

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")


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
