"""What may be listed under `callbacks`, and one message for each thing that may not."""

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.core import plugins
from groupwise.core.errors import ConfigError, TaskError
from groupwise.core.settings.view import View
from groupwise.training.callbacks.base import Callback
from groupwise.training.callbacks.early_stop import EarlyStop
from groupwise.training.callbacks.registry import (
    BUILTIN,
    callbacks_of_task,
    configured_callbacks,
    hook_callbacks,
)
from tests.unit.training.callbacks.fake_run import CONFIG

CONFIG_VIEW = View(CONFIG)
FILE = """
from groupwise import Callback

class Plain(Callback):
    def __init__(self, often: int = 1, *, names: tuple[str, ...] = ("a",), where=None, **others):
        self.given = (often, names, where, others)

class Needy(Callback):
    def __init__(self, url: str, user: "Unknown" = None):
        self.url = url

class Broken(Callback):
    def __init__(self):
        raise RuntimeError("no server")

class Misspelt(Callback):
    def on_step_ended(self, run, metrics): ...

class WrongParameters(Callback):
    def on_step_end(self, run): ...

class Defaults(Callback):
    def on_step_end(self, run, metrics, more=None): ...

class HalfAState(Callback):
    def state(self):
        return 1

class Picky(Callback):
    def check(self, config):
        raise ValueError(f"beta is {config.algorithm.beta}; it must be 0.")

class TrainerCallback:
    pass

class Foreign(TrainerCallback):
    def __init__(self, patience: int = 1):
        self.patience = patience

class Other:
    pass

ready = Plain(5)
"""


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_user_folders", set())


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def one(entry: Any) -> tuple[str, Any]:
    (found,) = configured_callbacks([entry], CONFIG_VIEW, "c.yaml:3")
    return found


def refused(entry: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        one(entry)
    message = str(caught.value)
    assert message.startswith("c.yaml:3: callbacks: ")
    return message.removeprefix("c.yaml:3: callbacks: ")


def test_built_in_ones_by_name():
    names = ["benchmark_on_checkpoint", "early_stop", "loss_logging", "push_to_hub_revision"]
    assert sorted(BUILTIN) == [*names, "success_cache"]
    name, callback = one("early_stop")
    assert name == "early_stop"
    assert isinstance(callback, EarlyStop)
    _, callback = one({"name": "early_stop", "patience": 7, "min_delta": 1, "mode": "min"})
    assert (callback.patience, callback.min_delta, callback.mode) == (7, 1.0, "min")
    _, callback = one({"name": "loss_logging", "metrics": ["kl"]})
    assert callback.metrics == ("kl",)


def test_classes_by_file_and_module(file, tmp_path, monkeypatch):
    name, callback = one(f"{file}:Plain")
    assert (name, callback.given) == ("Plain", (1, ("a",), None, {}))
    given = {"often": 2, "names": ["b", "c"], "where": {"x": 1}, "more": [1]}
    _, callback = one({"name": f"{file}:Plain", **given})
    assert callback.given == (2, ("b", "c"), {"x": 1}, {"more": [1]})
    name, callback = one(f"{file}:ready")
    assert (name, callback.given[0]) == ("Plain", 5)
    monkeypatch.syspath_prepend(tmp_path)
    assert one("mine:Defaults")[0] == "Defaults"


def test_an_installed_package_can_announce_a_callback(monkeypatch, tmp_path, file):
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("notify", "mine:Needy", "groupwise.callbacks")
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point] if group == point.group else []
    )
    name, callback = one({"name": "notify", "url": "x"})
    assert (name, callback.url) == ("notify", "x")


@pytest.mark.parametrize(("entry", "told"), [
    ("erly_stop", "`early_stop`"), ({"name": "early_stop", "pateince": 3}, "did you mean patience? It takes: metric, patience"),
    ({"name": "early_stop", "patience": "3"}, 'patience is "3"'), ({"name": "FILE:Misspelt"}, "Did you mean on_step_end"),
    ("FILE:WrongParameters", "expected: on_step_end(self, run, metrics)"), ("FILE:HalfAState", "`load_state`"),
    ("FILE:Needy", "Needy needs `url`."), ({"name": "FILE:Foreign", "paticence": 1}, "did you mean patience?"),
    ("FILE:Broken", "RuntimeError: no server"), ("FILE:Picky", "Picky: beta is 0.5; it must be 0."), ("FILE:Other", "groupwise.Callback"),
    ("FILE:Nothing", "`Nothing`"), ("FILE", "Plain, Needy, Broken"), ("no/such.py:Class", "no/such.py"),
])  # fmt: skip
def test_invalid_callbacks_are_refused(file, entry, told):
    if isinstance(entry, str):
        entry = entry.replace("FILE", file)
    else:
        entry = {**entry, "name": entry["name"].replace("FILE", file)}
    assert told in refused(entry)


BENCHMARK = {"name": "benchmark_on_checkpoint", "command": [sys.executable, "{output}"]}


@pytest.mark.parametrize(("first", "second", "claim"), [
    (BENCHMARK, {**BENCHMARK, "max_processes": 2}, "the label 'benchmark'"),
    ("loss_logging", {"name": "loss_logging", "metrics": ["kl"]}, "the file loss_history.csv"),
])  # fmt: skip
def test_two_that_would_destroy_each_others_results_are_refused(first, second, claim):
    with pytest.raises(ConfigError, match=f"c: callbacks: .*{claim} can only belong to one"):
        configured_callbacks([first, "early_stop", second], CONFIG_VIEW, "c")
    task: Any = SimpleNamespace(
        rl_callbacks=lambda *given: [one(second)[1]], described="the task toy"
    )
    beside = configured_callbacks([first], CONFIG_VIEW, "c")
    with pytest.raises(TaskError, match=claim):
        callbacks_of_task(task, CONFIG_VIEW, None, "", beside)
    assert len(callbacks_of_task(task, CONFIG_VIEW, None, "")) == 1


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        configured_callbacks(
            ["nobody", "loss_logging", {"name": "early_stop", "x": 1}], CONFIG_VIEW, "c"
        )
    assert len([line for line in str(caught.value).splitlines() if line.startswith("c: ")]) == 2


def test_a_hook_may_return_callback_instances_and_classes():
    class Own(Callback):
        pass

    instance = Own()
    found = hook_callbacks([instance, Own], CONFIG_VIEW, "here")
    assert [name for name, _ in found] == ["Own", "Own"]
    assert found[0][1] is instance
    assert isinstance(found[1][1], Own)


@pytest.mark.parametrize("given", [3, int, "early_stop", object()])
def test_a_hook_that_returns_no_callback_is_refused(given):
    with pytest.raises(TaskError, match=r"^here: \w+ is .* not a callback"):
        hook_callbacks([given], CONFIG_VIEW, "here")
