"""Bad input, as a person meets it: the command, its exit code, and words that say what is wrong and what to do.

No message is a traceback of ours. Usage errors (exit 2) come before anything is started; a run that fails (exit 1) leaves a
summary; a reward that misbehaves costs its rollouts and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from groupwise.cli.main import main
from groupwise.runs.folder import RunFolder
from groupwise.runs.store import Store

CONFIG = """\
model:
  name: tiny
lora:
  r: 4
sampler:
  max_completion_length: 4
  slots: 8
training:
  max_steps: 1
  prompts_per_step: 2
  num_generations: 2
rewards:
  in_process: true
eval:
  max_prompts: 2
run:
  threads: 1
"""
TASK = """\
def get_rl_dataset(config):
    return [{"prompt": f"say {letter}", "answer": letter} for letter in "abcd"]

def get_eval_dataset(config):
    return get_rl_dataset(config)

def get_reward_funcs(config, tokenizer):
    return [right]

def right(completions, answer, **columns):
    return [float(len(text)) for text in completions]

def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    return {"accuracy": 0.5}
"""


@dataclass(frozen=True)
class Said:
    """What a command left behind on the screen."""

    code: int
    out: str
    err: str

    def has(self, *words: str) -> None:
        """Every word is there, and no traceback."""
        for word in words:
            assert word in self.err, f"{word!r} is not in:\n{self.err}"
        assert "Traceback" not in self.err
        assert "this is a bug" not in self.err


Command = Callable[..., Said]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working folder with a config and a task that work."""
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    Path("task.py").write_text(TASK)
    return tmp_path


@pytest.fixture
def groupwise(capsys) -> Command:
    def run(verb: str, *more: str, config: str = "c.yaml", task: str = "task.py") -> Said:
        capsys.readouterr()
        code = main([verb, "--config", config, "--task-module", task, *more])
        shown = capsys.readouterr()
        return Said(code, shown.out, shown.err)

    return run


def task(old: str, new: str) -> None:
    """The task with one thing changed."""
    assert old in TASK
    Path("task.py").write_text(TASK.replace(old, new))


def refused(said: Said, *words: str) -> None:
    """Exit 2 with these words, and nothing was started."""
    assert said.code == 2
    said.has(*words)
    assert not list(Path("runs").glob("*")), "no run folder stays behind"


def test_what_works_works(groupwise):
    assert groupwise("rl").code == 0
    said = groupwise("eval")
    assert (said.code, "accuracy" in said.out) == (0, True)


# The config


@pytest.mark.parametrize("verb", ["rl", "eval"])
def test_misspelt_keys_are_all_told_at_once_with_line_and_nearest_key(groupwise, verb):
    text = CONFIG.replace("max_steps", "max_step").replace("slots", "slotz")
    Path("c.yaml").write_text(text + "trainig: {}\n")
    refused(
        groupwise(verb),
        "c.yaml:9",
        "training.max_step",
        "max_steps",
        "c.yaml:7",
        "sampler.slotz",
        "slots",
        "trainig",
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.learning_rate=fast", ("training.learning_rate", "fast", "number")),
        ("training.max_steps=2.5", ("training.max_steps", "2.5")),
        ("training.num_generations=1", ("training.num_generations", "1", "2")),
        ("training.lr=0.1", ("training.lr", "training.learning_rate")),
        ("sampler.top_p=0.9", ("sampler.top_p", "another distribution", "eval.top_p")),
        ("model.dtype=float16", ("model.dtype", "bfloat16")),
        ("algorithm.type=ppo", ("algorithm.type", "ppo", "grpo")),
        ("training.max_steps", ("training.max_steps", "=")),
        (f"training.seed={2**63}", ("training.seed", str(2**63 - 1))),
        ('sampler.stop=[""]', ("sampler", "empty text")),
        ("sampler.stop_token_ids=[-4]", ("stop_token_ids has -4", "begin at 0")),
    ],
)
def test_wrong_values_name_the_key_and_what_is_allowed(groupwise, override, words):
    refused(groupwise("rl", override), *words)


@pytest.mark.parametrize("verb", ["rl", "eval"])
def test_stop_tokens_that_the_model_does_not_have(groupwise, verb):
    refused(groupwise(verb, "sampler.stop_token_ids=[2,99999]"), "99999", "tiny", "end at")


def test_a_wrong_type_in_the_file_has_its_line(groupwise):
    Path("c.yaml").write_text(CONFIG.replace("max_steps: 1", 'max_steps: "1"'))
    refused(groupwise("rl"), "c.yaml:9", "training.max_steps")


def test_a_config_file_that_is_not_there(groupwise):
    refused(groupwise("rl", config="nowhere.yaml"), "nowhere.yaml")


def test_a_file_that_is_no_yaml(groupwise):
    Path("c.yaml").write_text("model: [tiny\n")
    refused(groupwise("rl"), "c.yaml")


def test_with_json_the_error_has_a_code(groupwise):
    said = groupwise("rl", "training.lr=1", "--json")
    assert said.code == 2
    assert json.loads(said.out)["error"]["code"] == "config"


# The task


@pytest.mark.parametrize("name", ["nowhere.py", "no.such.module", "sort_wrods"])
def test_a_task_that_is_not_there(groupwise, name):
    refused(groupwise("rl", task=name), name)


def test_a_builtin_task_that_is_misspelt_is_suggested(groupwise):
    refused(groupwise("rl", task="sort_wrods"), "sort_words")


def test_a_broken_task_shows_the_users_own_lines_only(groupwise):
    Path("helper.py").write_text("def deep():\n    return undefined_name\n")
    Path("task.py").write_text("import helper\nhelper.deep()\n")
    said = groupwise("rl")
    assert said.code == 2
    for word in ("task.py", "helper.py:2", "undefined_name", "NameError"):
        assert word in said.err
    assert "importlib" not in said.err
    assert "groupwise/plugins.py" not in said.err


def test_a_task_with_a_syntax_error(groupwise):
    Path("task.py").write_text("def get_rl_dataset(config)\n    return []\n")
    said = groupwise("rl")
    assert said.code == 2
    assert "task.py" in said.err
    assert "SyntaxError" in said.err


@pytest.mark.parametrize(
    ("verb", "hook", "signature"),
    [
        ("rl", "get_rl_dataset", "get_rl_dataset(config)"),
        ("rl", "get_reward_funcs", "get_reward_funcs(config, tokenizer)"),
        ("eval", "compute_metrics", "compute_metrics(prompts, completions, dataset_rows, config"),
    ],
)
def test_a_missing_hook_has_its_signature_and_what_there_is(groupwise, verb, hook, signature):
    task(f"def {hook}(", f"def {hook}x(")
    refused(groupwise(verb), "task.py", f"has no {hook}", signature, f"{hook}x", "Rename")


def test_a_hook_of_the_wrong_signature(groupwise):
    task("def get_rl_dataset(config):", "def get_rl_dataset(config, split):")
    refused(groupwise("rl"), "task.py", "get_rl_dataset(config, split)", "get_rl_dataset(config)")


def test_a_hook_that_raises(groupwise):
    task('return [{"prompt"', 'raise FileNotFoundError("words.txt")\n    return [{"prompt"')
    said = groupwise("rl")
    assert said.code == 2
    for word in ("task.py", "get_rl_dataset failed", "words.txt"):
        assert word in said.err


# The data


@pytest.mark.parametrize(("verb", "hook"), [("rl", "get_rl_dataset"), ("eval", "get_eval_dataset")])
def test_an_empty_dataset(groupwise, verb, hook):
    text = TASK.replace(f"def {hook}(config):", f"def {hook}(config):\n    return []")
    Path("task.py").write_text(text)
    refused(groupwise(verb), "task.py", hook, "empty dataset")


def test_a_missing_prompt_column(groupwise):
    task('"prompt": f', '"question": f')
    refused(groupwise("rl"), "task.py", "get_rl_dataset", "prompt", "question")


def test_a_column_that_a_reward_wants(groupwise):
    task("right(completions, answer,", "right(completions, gold,")
    refused(groupwise("rl"), "`gold`", "answer", "`right`")


def test_prompts_that_are_too_long(groupwise):
    refused(
        groupwise("rl", "data.max_prompt_length=3"), "data.max_prompt_length = 3", "all 4 prompts"
    )
    refused(groupwise("rl", "model.max_seq_length=6"), "4 of 4 prompts do not fit", "room for 2")


def test_a_completion_that_fills_the_model_alone(groupwise):
    refused(groupwise("rl", "model.max_seq_length=4"), "max_completion_length", "no room")


def test_chat_prompts_without_a_template(groupwise):
    Path("none.jinja").write_text("")
    task('f"say {letter}"', '[{"role": "user", "content": letter}]')
    refused(groupwise("rl", "model.chat_template=none.jinja"), "chat template")


# Models, adapters, runs


@pytest.mark.parametrize("verb", ["rl", "eval"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./models/mine", ("there is no folder './models/mine'", "looked in")),
        ("mine.gguf", ("there is no file 'mine.gguf'",)),
        (
            "nobody/nothing-1b",
            ("(the hub cannot be reached) as 'nobody/nothing-1b'", "tiny, smollm2-135m-instruct"),
        ),
        (".", ("has no config.json", "task.py")),
    ],
)
def test_a_model_that_is_not_there(groupwise, verb, name, words):
    refused(groupwise(verb, f"model.name={name}"), *words)


@pytest.mark.parametrize("adapter", ["./nowhere", "."])
def test_an_adapter_that_is_not_there(groupwise, adapter):
    refused(groupwise("rl", f"model.adapter={adapter}"), "model.adapter", "adapter_config.json")


def test_an_adapter_without_lora(groupwise):
    Path("a").mkdir()
    refused(groupwise("rl", "model.adapter=a", "lora=null"), "model.adapter", "lora")


def test_layers_that_are_not_there(groupwise):
    refused(groupwise("rl", "lora.target_modules=[q_proj,w_proj]"), "w_proj", "o_proj, q_proj")


def test_an_unknown_run_lists_those_there_are(groupwise):
    assert groupwise("rl", "run.name=first").code == 0
    said = groupwise("eval", "--policy", "frist")
    assert said.code == 2
    said.has("no run 'frist'", "Did you mean 'first'?")
    said = groupwise("eval", "--policy", "first@7")
    assert said.code == 2
    said.has("no checkpoint after 7 steps", "first@1")


def test_a_policy_of_another_model_is_refused(groupwise):
    assert groupwise("rl", "run.name=first").code == 0
    Path("c.yaml").write_text(CONFIG.replace("name: tiny", "name: bigger"))
    from groupwise.models.tiny import tiny_model, tiny_tokenizer

    tiny_model(hidden_size=32).save_pretrained("bigger")
    tiny_tokenizer().save_pretrained("bigger")
    said = groupwise("eval", "model.name=./bigger", "--policy", "first")
    assert said.code == 2
    said.has("do not match the model", "instead of")


def test_results_are_not_overwritten(groupwise):
    Path("out.json").write_text("mine")
    refused(groupwise("eval", "--output", "out.json"), "out.json exists", "--output")
    assert Path("out.json").read_text() == "mine"


def test_a_folder_in_use_by_a_live_run(groupwise):
    with RunFolder.create(Path("runs"), "busy", {}):
        said = groupwise("rl", "run.name=busy")
    assert said.code == 2
    said.has("in use by process", "run.name=")


def test_a_folder_with_an_unfinished_run(groupwise):
    RunFolder.create(Path("runs"), "half", {}).close()
    said = groupwise("rl", "run.name=half")
    assert said.code == 2
    said.has("unfinished run", "--resume", "run.name=")


def test_nothing_to_resume(groupwise):
    said = groupwise("rl", "--resume", "run.name=never")
    assert said.code == 2
    said.has("no run 'never'")
    assert groupwise("rl", "run.name=done").code == 0
    said = groupwise("rl", "--resume", "run.name=done")
    assert said.code == 2
    said.has("nothing to resume", "finished")


# Rewards that misbehave

MISBEHAVING = """\
import time

MODES = ["good", "raises", "short", "nan", "hangs", "exits"]

def get_rl_dataset(config):
    return [{"prompt": f"say {mode}", "mode": mode} for mode in MODES]

def get_reward_funcs(config, tokenizer):
    return [moody]

def moody(completions, mode, **columns):
    mode, count = mode[0], len(completions)
    if mode == "raises":
        raise KeyError("no such word")
    if mode == "hangs":
        time.sleep(60)
    if mode == "exits":
        import os
        os._exit(3)
    return {"short": [1.0], "nan": [float("nan")] * count}.get(mode, [1.0, 2.0])
"""


def test_a_reward_that_misbehaves_costs_its_rollouts_and_nothing_else(groupwise):
    Path("task.py").write_text(MISBEHAVING)
    said = groupwise(
        "rl",
        "rewards.in_process=false",
        "rewards.time_limit=0.5",
        "training.prompts_per_step=6",
        "run.name=moody",
    )
    assert said.code == 0
    said.has()
    with Store.open(Path("runs/moody/run.db"), readonly=True) as store:
        found = {
            group.example.columns["mode"]: [(each.outcome, each.reason) for each in group.rollouts]
            for group in store.groups(0)
        }
        metrics = store.step_metrics(0)
    outcomes = {mode: {outcome for outcome, _ in each} for mode, each in found.items()}
    assert outcomes == {
        "good": {"scored"},
        "raises": {"failed"},
        "short": {"failed"},
        "nan": {"failed"},
        "hangs": {"timed_out"},
        "exits": {"failed"},
    }
    reasons = {mode: each[0][1] or "" for mode, each in found.items()}
    assert "moody" in reasons["raises"]
    assert "no such word" in reasons["raises"]
    assert "1 value for 2 completions" in reasons["short"]
    assert "nan" in reasons["nan"]
    assert "0.5" in reasons["hangs"]
    assert metrics["rollouts/scored"] == 2
    assert metrics["reward"] == 1.5, "failures are no low rewards"


def test_rewards_that_always_fail_stop_the_run_with_a_summary(groupwise):
    task("return [float(len(text)) for text in completions]", 'raise KeyError("gold")')
    said = groupwise(
        "rl", "training.max_steps=9", "run.name=hopeless", "eval.before_and_after=false"
    )
    assert said.code == 1
    said.has("3 steps in a row", "4 ×", "right", "KeyError", "--resume")
    summary = json.loads(Path("runs/hopeless/summary.json").read_text())
    assert summary["state"] == "failed"
    assert summary["error"]["code"] == "nothing_scored"
    with Store.open(Path("runs/hopeless/run.db"), readonly=True) as store:
        assert store.last_step() is not None


def test_a_stateful_reward_that_hangs_costs_its_groups_and_says_why(groupwise):
    task(
        "answer, **columns):\n    return",
        "trainer_state, **columns):\n    import threading\n    trainer_state.global_step or threading.Event().wait(3)\n    return",
    )
    said = groupwise(
        "rl", "training.max_steps=2", "rewards.time_limit=0.2", "eval.before_and_after=false"
    )
    assert said.code == 0
    said.has("failed 4 of 4 (4 timed out)", "the call took longer than 0.2 s; `right` was running")


def test_a_run_of_one_step_without_a_score_has_failed(groupwise):
    task("return [float(len(text)) for text in completions]", "raise KeyError('gold')")
    said = groupwise("rl", "eval.before_and_after=false")
    assert said.code == 1
    said.has("No rollout could be scored in 1 step (the whole run)", "then start the run again")
