"""From names to reward functions: built-in, announced, in files; with weights and parameters.

1. What a name stands for, and what its part is called.
2. Parameters are checked as the config's own keys are.
3. What cannot be had is a TaskError that says what there is, all entries at once.
4. The config's section `rewards` as a rubric or a router.
"""

import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.settings.view import View
from groupwise.tasks.rewards import registry
from groupwise.tasks.rewards.registry import (
    configured_rubric,
    get_reward_funcs,
    registered_rewards,
    reward,
)
from groupwise.tasks.rewards.router import Router
from groupwise.tasks.rewards.rubric import Rubric


@dataclass(frozen=True, slots=True)
class Scaled:
    factor: float = 1.0
    answer_column: str | None = None

    def __post_init__(self) -> None:
        if self.factor < 0:
            raise ValueError("factor is below 0; a longer text would earn less.")

    def __call__(self, completions, **columns):
        gold = columns.get(self.answer_column or "", [""] * len(completions))
        return [
            self.factor * len(text) + (text == g) for text, g in zip(completions, gold, strict=True)
        ]


def plain(completions, **columns):
    return [1.0] * len(completions)


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    monkeypatch.setattr(registry, "_REWARDS", dict(registered_rewards()))
    reward("test_scaled")(Scaled)
    reward("test_plain")(plain)
    yield
    vars(plain).clear()


def only(names, config=None):
    ((function, weight),) = get_reward_funcs(names, config)
    return function, weight


def refused(names, config=None) -> str:
    with pytest.raises(TaskError) as caught:
        get_reward_funcs(names, config)
    return str(caught.value)


# 1. names


def test_a_name_or_a_section_with_weight_and_parameters():
    (a, one), (b, half) = get_reward_funcs(
        ["test_plain", {"name": "test_scaled", "weight": 0.5, "factor": 2}]
    )
    assert (one, half) == (1.0, 0.5)
    assert a(completions=["ab"]) == [1.0]
    assert b(completions=["ab"]) == [4.0]
    assert b(prompts=["p"], completions=[["a", "bc"]]) == [[2.0, 4.0]]
    assert Rubric([a, b, b]).names == ("test_plain", "test_scaled", "test_scaled_2")


def test_tags_by_their_marks():
    names = [
        {"name": "match_format", "reasoning_tag": ["(", ")"], "answer_tag": ["[", "]"]},
        {"name": "math_answer", "answer_tag": ["[", "]"], "tolerant": True},
        {"name": "correctness_xml", "answer_tag": ["[", "]"]},
    ]
    said = ["(2 and 2) [4]", "(2 and 2) [ 4 ]", "[4", "4"]
    values = [
        f(prompts=[""] * 4, completions=said, answer=["4"] * 4) for f, _ in get_reward_funcs(names)
    ]
    assert values == [[2, 2, 0.5, -1], [3, 1.5, -0.5, -0.5], [2, 2, 0, 0]]


FILE = """
from dataclasses import dataclass

def polite(completions, **columns):
    return [float("please" in text) for text in completions]

@dataclass(frozen=True)
class Loud:
    above: int = 3

    def __call__(self, completions, **columns):
        return [float(sum(map(str.isupper, text)) > self.above) for text in completions]

quiet = Loud(0)
"""


def test_functions_classes_and_instances_of_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    file = str(tmp_path / "mine.py")
    polite, loud, quiet = get_reward_funcs(
        [f"{file}:polite", {"name": f"{file}:Loud", "above": 1}, f"{file}:quiet"]
    )
    assert polite[0](completions=["please"]) == [1.0]
    assert loud[0](completions=["AB", "A"]) == [1.0, 0.0]
    assert quiet[0](completions=["a"]) == [0.0]
    assert Rubric([polite, loud]).names == ("polite", "Loud")
    message = refused([file])
    assert "is a module." in message
    assert "polite" in message


def test_entry_points_are_called_by_their_own_name(tmp_path, monkeypatch):
    (tmp_path / "announced_rewards.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint(
        "kind", "announced_rewards:polite", "groupwise.tasks.rewards"
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [point])
    assert Rubric(get_reward_funcs(["kind"])).names == ("kind",)


# 2. parameters


@pytest.mark.parametrize(("entry", "parts"), [
    ({"name": "test_scaled", "facto": 1.0}, ["no parameter `facto`", "did you mean factor?"]),
    ({"name": "test_scaled", "factor": "2"}, ['factor is "2"']), ({"name": "test_scaled", "factor": -1.0}, ["factor is below 0"]),
    ({"name": "test_plain", "factor": 1.0}, ["not a class", "(factor)", "make it a dataclass"]),
    ({"name": "test_scaled", "weight": "2"}, ["weight is '2'"]), ({"name": "test_scaled", "weight": True}, ["weight is True"]),
    ({"name": "test_scaled", "weight": float("nan")}, ["weight is nan"]), ({"factor": 1.0}, ["does not say which reward it is"]),
    (3, ["does not say which reward it is"]), ("math:pi", ["math:pi: expected a function"]),
])  # fmt: skip
def test_entries_that_cannot_work(entry, parts):
    message = refused([entry])
    assert message.startswith("get_reward_funcs: ")
    for part in parts:
        assert part in message


def test_answer_column_reaches_the_rewards_that_have_it():
    config = View({"rewards": {"answer_column": "capital"}})
    function, _ = only(["test_scaled"], config)
    assert function(completions=["ab", "c"], capital=["ab", "x"]) == [3.0, 1.0]
    own, _ = only([{"name": "test_scaled", "answer_column": "town"}], config)
    assert own(completions=["ab", "c"], capital=["ab", "x"], town=["", "c"]) == [2.0, 2.0]
    assert only(["test_plain"], config)[0](completions=["a"]) == [1.0]


def test_rewards_with_an_answer_column_need_gold_in_every_row():
    rubric = Rubric(get_reward_funcs(["test_scaled", "test_plain"]), where="t")
    rubric.check_rows({0: {"answer": "a"}, 1: {"gold": 3}})
    with pytest.raises(TaskError, match=r"`test_scaled` .*2 of 3 rows(.|\n)*row 1(.|\n)*row 2"):
        rubric.check_rows({0: {"answer": "a"}, 1: {"answer": ""}, 2: {"level": 1}})


# 3. refusals


def test_unknown_names_are_reported_all_at_once_with_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(["test_scald", "test_plain", "no_such.module:f", "none.py:f"])
    for part in ("Did you mean `test_scaled`", "Built-in: ", "`no_such.module:f`", "`none.py:f`"):
        assert part in message
    for names in ("test_plain", {"name": "test_plain"}, None):
        assert "expected a list of names" in refused(names)


# 4. the section


def test_section_with_a_list_and_with_a_router():
    assert configured_rubric({"reward_funcs": None, "router": None}) is None
    rubric = configured_rubric(
        {"reward_funcs": ["test_plain", {"name": "test_scaled", "weight": 3}]}
    )
    assert rubric is not None
    assert (rubric.names, rubric.weights) == (("test_plain", "test_scaled"), (1.0, 3.0))
    router = configured_rubric(
        {"router": {"a": ["test_plain"], "b": ["test_scaled"]}, "default_task": "b"}
    )
    assert isinstance(router, Router)
    assert (router.names, router.default) == (("a/test_plain", "b/test_scaled"), "b")
    assert configured_rubric({"reward_funcs": ["test_scaled"], "answer_column": "x"})
    for section, said in (
        ({"reward_funcs": ["test_plain"], "answer_column": "x"}, "test_plain looks for a gold"),
        ({"router": {"a": [{"name": "test_scaled", "x": 1}]}}, r"^rewards\.router\.a: test_scaled"),
    ):
        with pytest.raises(TaskError, match=said):
            configured_rubric(section)


def test_the_registry_imports_nothing_heavy():
    code = """
import sys
from groupwise.tasks.rewards.registry import registered_rewards
registered_rewards()
heavy = ["torch", "transformers", "datasets", "numpy", "pandas", "sympy", "math_verify", "httpx2"]
print([name for name in heavy if name in sys.modules])
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
