"""The contract of tasks: how they are found, how hooks are called, and one clear message for every mistake."""

import sys
import types

import pytest
from pydantic import BaseModel

from groupwise.core import plugins
from groupwise.core.errors import TaskError
from groupwise.core.settings.view import View
from groupwise.tasks.contract import (
    builtin_tasks,
    check_reward_columns,
    load_task,
    require,
)
from groupwise.tasks.rewards.rubric import Rubric

CONFIG = View({"task": {"size": 3}})
WHOLE = """
def get_rl_dataset(config):
    return [{"prompt": str(i), "answer": i} for i in range(config["task"]["size"])]
def get_eval_dataset(config):
    return [{"prompt": "held out", "answer": -1}]
def reward(completions, answer, **kwargs):
    return [1.0 for _ in completions]
def get_reward_funcs(config, tokenizer):
    return [reward]
def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    return {"metrics": {"n": len(prompts)}, "texts": completions, "rows": dataset_rows}
"""


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_user_folders", set())


@pytest.fixture
def task_of(tmp_path):
    def make(text: str, name: str = "task.py"):
        (tmp_path / name).write_text(text)
        return load_task(tmp_path / name)

    return make


def refused(call) -> str:
    with pytest.raises(TaskError) as caught:
        call()
    return str(caught.value)


# finding it


class Chess:
    def get_rl_dataset(self, config):
        return [{"prompt": "e4"}]

    def get_reward_funcs(self, config, tokenizer):
        return [lambda completions: [1.0] * len(completions)]


def test_file(task_of, tmp_path):
    task = task_of(WHOLE, "chess.py")
    path = str(tmp_path / "chess.py")
    assert (task.name, task.spec, task.file) == ("chess", path, path)
    for verb in ("rl", "eval"):
        require(task, verb)
    assert load_task(task.spec).rl_examples(CONFIG) == task.rl_examples(CONFIG)


def test_built_in_tasks_and_modules_in_memory(tmp_path):
    import groupwise.tasks.builtin.sort_words as module

    for given in ("sort_words", module):
        task = load_task(given)
        assert (task.name, task.spec) == ("sort_words", "groupwise.tasks.builtin.sort_words")
    assert {"contract", "environment", "tools", "configured"}.isdisjoint(builtin_tasks())
    assert load_task(types.ModuleType("__main__")).spec is None
    (tmp_path / "t.py").write_text("class A:\n    def get_rl_dataset(self, config): ...\n")
    assert load_task(f"{tmp_path / 't.py'}:A").name == "A"


def test_class_and_object_in_memory():
    task = load_task(Chess)
    assert task.name == "Chess"
    require(task, "rl")
    assert load_task(Chess()).spec is None

    class Local(Chess):
        pass

    assert load_task(Local).spec is None


# calling it


def test_examples_rubric_and_metrics(task_of):
    task = task_of(WHOLE)
    examples = task.rl_examples(CONFIG)
    assert [(e.index, e.prompt, e.columns) for e in examples] == [
        (i, str(i), {"answer": i}) for i in range(3)
    ]
    rubric = task.rubric(CONFIG, None, weights=[0.5])
    assert (rubric.names, rubric.weights) == (("reward",), (0.5,))
    check_reward_columns(task, rubric, examples)
    chat = [{"role": "assistant", "content": "hi"}]
    found = task.compute_metrics(["p"], [chat], [{"x": 1}], CONFIG, None)
    assert found == {"metrics": {"n": 1}, "texts": ["hi"], "rows": [{"x": 1}]}
    task = task_of(f"{WHOLE}\ncompute_metrics.reads_messages = True\n", "whole.py")
    found = task.compute_metrics(["p", "p"], [chat, "text"], [{}, {}], CONFIG, None)
    assert found["texts"] == [chat, "text"]


@pytest.mark.parametrize(
    ("read", "key"),
    [("rl_examples", "training.max_steps"), ("eval_examples", "eval.max_prompts")],
)
def test_rows_end_at_the_limit_and_an_endless_stream_needs_one(task_of, read, key):
    task = task_of(
        "from itertools import count\n"
        "def get_rl_dataset(config):\n    return ({'prompt': str(i)} for i in count())\n"
        "get_eval_dataset = get_rl_dataset\n"
    )
    assert key in refused(lambda: getattr(task, read)(CONFIG))
    assert len(getattr(task, read)(CONFIG, limit=3)) == 3
    task = task_of("def get_eval_dataset(config):\n    return [{'prompt': 'a'}] * 5\n")
    assert [len(task.eval_examples(CONFIG, limit=most)) for most in (None, 2)] == [5, 2]


def test_an_environment_is_made_once_for_a_config(task_of):
    """To check it and to run it: it may start servers of tools."""
    task = task_of("""
made = []

def get_rl_dataset(config):
    return [{"prompt": "a"}]

def get_environment(config):
    made.append(config["task"]["size"])

    class Game:
        def reset(self, prompt):
            return prompt

        def step(self, action):
            return "", 1.0, True

    return Game
""")
    first = task.check_environment(View({"task": {"size": 3}}), task.rl_examples(View({})))
    assert task.environment(View({"task": {"size": 3}})) is first
    assert task.environment(View({"task": {"size": 4}})) is not first
    assert sys.modules[first.__module__].made == [3, 4]


def test_hooks_may_name_their_parameters_freely_or_in_any_order(task_of):
    task = task_of(
        "def get_rl_dataset(cfg):\n    return [{'prompt': cfg['task']['size'] * 'x'}]\n"
        "def f(completions): return [1]\n"
        "def get_reward_funcs(tokenizer, config):\n    assert tokenizer == 'tok'\n    return [f]\n"
    )
    require(task, "rl")
    assert task.rl_examples(CONFIG)[0].prompt == "xxx"
    assert isinstance(task.rubric(CONFIG, "tok"), Rubric)


def test_schema(task_of):
    assert task_of(WHOLE).config_schema() is None
    text = "from pydantic import BaseModel\nclass C(BaseModel):\n    size: int = 1\n"
    schema = task_of(text + "def get_config_schema():\n    return C\n").config_schema()
    assert schema is not None
    assert issubclass(schema, BaseModel)
    message = refused(task_of("def get_config_schema():\n    return {}\n").config_schema)
    assert "BaseModel" in message


# what is wrong with it


def test_means_of_rewards_are_metrics_enough_for_an_evaluation(task_of):
    held_out = "def get_eval_dataset(config): ...\n"
    require(task_of(f"{held_out}def get_reward_funcs(config, tokenizer): ...\n", "a.py"), "eval")
    require(task_of(f"{held_out}def get_environment(config): ...\n", "b.py"), "eval")
    message = refused(lambda: require(task_of(held_out, "c.py"), "eval"))
    assert "no compute_metrics, which `eval` needs (or get_reward_funcs" in message


def test_missing_hook_shows_signature_and_near_misses(task_of, tmp_path):
    task = task_of("import json\ndef get_dataset(config): ...\ndef get_rewards(c, t): ...\n")
    message = refused(lambda: require(task, "rl"))
    for part in (
        str(tmp_path / "task.py"),
        "no get_rl_dataset, which `rl` needs.",
        "def get_rl_dataset(config)",
        "Is it `get_dataset`? Rename it.",
        "no get_reward_funcs",
        "Is it `get_rewards`? Rename it.",
    ):
        assert part in message


@pytest.mark.parametrize(("verb", "hook", "given"), [
    ("rl", "get_eval_dataset", "def get_eval_dataset(): ..."),
    ("rl", "compute_metrics", "def compute_metrics(completions): ..."),
    ("rl", "get_config_schema", "def get_config_schema(config): ..."),
    ("rl", "get_rl_callbacks", "def get_rl_callbacks(): ..."),
    ("eval", "get_reward_funcs", "def get_reward_funcs(): ..."),
    ("eval", "get_config_schema", "async def get_config_schema(): ..."),
    ("rl", "get_rl_dataset", "async def get_rl_dataset(config): ..."),
])  # fmt: skip
def test_optional_hooks_are_checked_as_well(task_of, verb, hook, given):
    require(task_of(WHOLE + "def get_sft_dataset(config, tokenizer): ...\n"), "rl")
    message = refused(lambda: require(task_of(f"{WHOLE}{given}\n"), verb))
    assert f": {hook} " in message


@pytest.mark.parametrize(
    ("returned", "callbacks"),
    [("[output_dir, 1]", ["out", 1]), ("()", ()), ("None", ())],
)
def test_callbacks_are_those_that_the_hook_returns(task_of, returned, callbacks):
    hook = "def get_rl_callbacks(config, tokenizer, output_dir):\n    return "
    assert task_of(hook + returned).rl_callbacks(CONFIG, None, "out") == callbacks
    assert task_of(WHOLE).rl_callbacks(CONFIG, None, "out") == ()
    message = refused(lambda: task_of(hook + "'stop'").rl_callbacks(CONFIG, None, "out"))
    assert "rl_callbacks returned str" in message


@pytest.mark.parametrize(("body", "parts"), [
    ("return []", ["get_rl_dataset", "empty dataset"]),
    ("return [{'question': 'x'}]", ["no column `prompt`", "question"]),
    ("return [{'prompt': 'x', 'completions': 1}]", ["column `completions`", "Rename"]),
    ("return None", ["returned NoneType"]),
    ("return [{'prompt': config['task']['sise']}]", ["task.py:2", "sise", "Did you mean size"]),
    ("yield {'prompt': 'a'}\n    1 / 0", ["task.py:3", "1 / 0", "ZeroDivisionError"]),
])  # fmt: skip
def test_bad_datasets_and_failing_hooks(task_of, tmp_path, body, parts):
    task = task_of(
        f"def get_rl_dataset(config):\n    {body}\ndef get_reward_funcs(config, tokenizer): ...\n"
    )
    message = refused(lambda: task.rl_examples(CONFIG, limit=9))
    for part in [str(tmp_path / "task.py"), *parts]:
        assert part in message
    assert "contract.py" not in message


@pytest.mark.parametrize(("returned", "part"), [
    ("[]", "empty"), ("[3]", "entry 0"), ("None", "got NoneType"), ("1 / 0", "ZeroDivisionError"),
])  # fmt: skip
def test_bad_rewards(task_of, returned, part):
    task = task_of(f"def get_reward_funcs(config, tokenizer):\n    return {returned}\n")
    message = refused(lambda: task.rubric(CONFIG, None))
    assert "get_reward_funcs" in message
    assert part in message
    assert "2 weights" in refused(lambda: task_of(WHOLE).rubric(CONFIG, None, [1.0, 2.0]))
    task = task_of(f"{WHOLE}def compute_metrics(*given): ...\n")
    assert "NoneType" in refused(lambda: task.compute_metrics([], [], [], CONFIG, None))


def test_column_that_a_reward_needs_is_missing_in_some_row(task_of):
    text = WHOLE.replace('"answer": i}', '**({"answer": i} if i else {})}')
    task = task_of(text)
    examples, rubric = task.rl_examples(CONFIG), task.rubric(CONFIG, None)
    message = refused(lambda: check_reward_columns(task, rubric, examples))
    assert "asks for `answer`" in message


def test_column_that_no_worker_can_get_is_found_at_once(task_of):
    task = task_of(WHOLE.replace('"answer": i}', '"answer": i, "check": lambda: i}'))
    examples, rubric = task.rl_examples(CONFIG), task.rubric(CONFIG, None)
    check_reward_columns(task, rubric, examples)
    message = refused(lambda: check_reward_columns(task, rubric, examples, in_workers=True))
    assert "column `check`" in message
    assert "rewards.in_process" in message
