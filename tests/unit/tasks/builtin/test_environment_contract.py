"""The hook get_environment: what it may return, and the messages before anything starts."""

from functools import partial

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.types import Example
from groupwise.tasks.contract import load_task, require
from groupwise.tasks.environment import Step
from groupwise.tasks.tools import Tools

ROWS = [Example(0, "p", {"secret": 1, "level": 2}), Example(1, "p", {"secret": 3})]


class Game:
    def reset(self, secret, seed, hints=()): ...

    def step(self, completion):
        return Step(done=True)


class Shop:
    def reset(self, money): ...

    def buy(self, name: str) -> str:
        """Buy something."""
        return name

    def reward(self):
        return 1.0


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def task_with(given, **hooks):
    more = {name: staticmethod(hook) for name, hook in hooks.items()}
    kind = type("Plays", (), {"get_environment": lambda self, config: given, **more})
    return load_task(kind())


def refused(given, examples=(), **hooks) -> str:
    with pytest.raises(TaskError) as caught:
        task_with(given, **hooks).check_environment({}, examples)
    return str(caught.value)


@pytest.mark.parametrize("factory", [Game, partial(Game), Tools(Shop)])
def test_classes_and_functions_that_make_environments_are_taken(factory):
    assert task_with(factory).environment({}) is factory
    tools = Tools([add])
    task = task_with(tools, get_reward_funcs=lambda config, tokenizer: [])
    assert task.environment({}) is tools


def test_columns_that_reset_asks_for_must_be_in_every_row():
    assert task_with(Game).check_environment({}, ROWS) is Game

    class Level:
        def reset(self, secret, level): ...

        def step(self, completion): ...

    assert "`level`" in refused(Level, ROWS)
    assert "`money`" in refused(Tools(Shop), ROWS)
    assert "`seed`" in refused(Game, [Example(0, "p", {"secret": 1, "seed": 2})])


@pytest.mark.parametrize(("method", "said"), [
    ("def step(self): ...", "expected: step(self, completion)\n  found:    step(self)"),
    ("async def step(self, completion, turn): ...", "found:    step(self, completion, turn)"),
    ("@staticmethod\ndef step(): ...", "expected: step(completion)\n  found:    step()"),
    ("def reward(self, completions): ...", "expected: reward(self)"), ("def metrics(self, config): ...", "expected: metrics(self)"),
    ("def close(self, error): ...", "expected: close(self)"), ("metrics = {}", "`Odd.metrics` is dict {}, no method"),
])  # fmt: skip
def test_methods_that_cannot_be_called_are_refused_before_the_start(method, said):
    methods: dict[str, object] = {}
    exec(method, methods)
    del methods["__builtins__"]
    said_of_it = refused(type("Odd", (Game,), methods))
    assert said in said_of_it
    assert "get_environment: `Odd." in said_of_it


def test_environment_stands_in_for_reward_functions():
    rows = {"get_rl_dataset": lambda config: []}
    require(task_with(Game, **rows), "rl")
    assert task_with(Game, **rows).gives_rewards
    with pytest.raises(TaskError, match="no get_reward_funcs"):
        require(load_task(type("Mute", (), {n: staticmethod(f) for n, f in rows.items()})()), "rl")
    hooks = {"get_environment": lambda self: Game, "get_rl_dataset": lambda self, config: []}
    with pytest.raises(TaskError, match=r"get_environment\(config\)"):
        require(load_task(type("Plays", (), hooks)()), "rl")
