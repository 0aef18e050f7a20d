"""What makes two trainings the same: rows, marks and the code of the rewards, but not what functions collect."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from groupwise.notebook import Criterion, Rubric
from groupwise.notebook.identity import differences, digest, told_of

BEGIN = """
LIMIT = 3
seen = []
calls = 0

def helper(text):
    return len(text) > LIMIT

def reward(completions, scale=2.0, **columns):
    global calls
    calls += 1
    seen.append(completions)
    return [helper(text) * scale for text in completions]
"""


def made(source: str = BEGIN, call: bool = False) -> str:
    """The fingerprint of the reward of a cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    if call:
        names["reward"](["a text"])
    return digest(told_of(names["reward"]))


def test_the_same_code_is_the_same_whatever_it_collected():
    assert made() == made() == made(call=True)
    assert made(BEGIN.replace("global calls", "global calls  # a remark")) == made()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("len(text) >", "len(text) >="),
        ("scale=2.0", "scale=3.0"),
        ("* scale for", "+ scale for"),
        ("helper(text) *", 'helper("a" + text) *'),
    ],
)
def test_a_change_of_code_number_helper_or_default_is_another(old, new):
    assert made(BEGIN.replace(old, new)) != made()


def test_objects_methods_and_partials():
    class Reward:
        factor = 2.0

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, completions: Any, **columns: Any) -> list[float]:
            self.calls += 1
            return [self.factor for _ in completions]

    one, other = Reward(), Reward()
    other(["a"])
    assert digest(told_of(one)) == digest(told_of(other))

    def scaled(completions: Any, by: float, **columns: Any) -> list[float]:
        return [by for _ in completions]

    partials = [functools.partial(scaled, by=by) for by in (1.0, 1.0, 2.0)]
    first, same, third = (digest(told_of(each)) for each in partials)
    assert first == same != third


def test_rubrics_by_their_content():
    def reward(word: str) -> str:
        criteria = [Criterion(name="order", description="d", keywords=[word])]
        return digest(told_of(Rubric(name="steps", criteria=criteria).reward()))

    assert reward("first") == reward("first") != reward("second")


def test_differences_in_words():
    before = {"marks": "a", "rewards": {"right": "1", "near": "2"}}
    assert differences(before, before) == []
    now = {"marks": "b", "rewards": {"right": "1", "near": "3", "short": "4"}}
    assert differences(before, now) == ["marks", "the reward near", "the reward short"]
    assert differences({}, {"marks": "b"}) == ["marks"]
