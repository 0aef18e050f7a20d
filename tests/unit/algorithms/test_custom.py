"""Algorithms in a user's file: how they are named, cached, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.algorithms.custom import is_custom, load_custom
from groupwise.algorithms.registry import from_spec, make
from groupwise.core.errors import TaskError
from groupwise.core.types import LossSpec, from_json, to_json

HEAD = """
from dataclasses import dataclass, field
from groupwise.algorithms.grpo import Grpo

"""
OWN_ALGORITHM = """
@dataclass(frozen=True, kw_only=True)
class Mine(Grpo):
    power: float = field(default=0.5, metadata={"description": "of the length", "ge": 0.0})
    note: str = "any text"

    def scale(self, rollout):
        return rollout.written**-self.power
"""


BASE = "from groupwise.algorithms.group_relative import GroupRelative\n"


def _file(folder: Path, text: str = OWN_ALGORITHM) -> str:
    file = folder / "own.py"
    file.write_text(HEAD + text)
    return f"{file}:Mine"


def test_names_of_files_are_distinguished_from_names_of_algorithms() -> None:
    assert is_custom("own.py:Mine")
    assert is_custom("/a/b.py:Mine")
    assert not any(map(is_custom, ("grpo", "own.py", "own:Mine", "own.py:", "own.py:1")))


def test_another_process_finds_it_by_its_spec(tmp_path: Path, monkeypatch, rollout) -> None:
    _file(tmp_path)
    monkeypatch.chdir(tmp_path)
    algorithm = make("own.py:Mine", {"power": 2.0})
    spec = from_json(LossSpec, to_json(algorithm.loss_spec()))
    assert spec.name == f"{tmp_path}/own.py:Mine"
    assert from_spec(spec) == algorithm
    assert algorithm.scale(rollout(0, 1.0, tokens=4)) == 1 / 16  # pyright: ignore[reportAttributeAccessIssue]


def test_a_file_is_read_again_only_for_a_new_config(tmp_path: Path) -> None:
    name = _file(tmp_path)
    first = load_custom(name)
    assert load_custom(name, again=True) is first
    _file(tmp_path, OWN_ALGORITHM.replace("0.5", "0.25"))
    assert load_custom(name) is first
    assert load_custom(name, again=True)().power == 0.25  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Mine = 3", "must be a class"),
        ("class Mine: pass", "derives from"),
        ("class Mine(Grpo): power: float = 0.5", "not a dataclass"),
        (OWN_ALGORITHM.replace("default=0.5, ", ""), "power has no default"),
        (OWN_ALGORITHM.replace("power: float", "power: list"), "power is 0.5; it must be a number, text"),
        (BASE + OWN_ALGORITHM.replace("Grpo", "GroupRelative"), "lacks advantages, surrogate"),
        ("class Other: pass", "no `Mine`"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_file_without_an_algorithm_is_refused_with_advice(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(TaskError, match=told):
        load_custom(_file(tmp_path, text))


def test_knobs_are_checked_like_ours(tmp_path: Path) -> None:
    name = _file(tmp_path)
    with pytest.raises(ValueError, match="has no knob 'powr'; did you mean 'power'"):
        make(name, {"powr": 1.0})
    with pytest.raises(ValueError, match="power is -1; it must be at least 0"):
        make(name, {"power": -1})
