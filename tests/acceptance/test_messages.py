"""Wordings that are a promise: the command, its exit code, and the words that say what is wrong and what to do.

No message is a traceback of ours. Usage errors (exit 2) come before anything is started; a run that fails (exit 1) leaves a
summary; a reward that misbehaves costs its rollouts and nothing else. Other tests ask for types and keys, and leave words to this file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
  max_num_seqs: 8
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
        assert [word for word in words if word not in self.err] == [], self.err
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


def test_rl_and_eval_succeed_with_the_valid_config(groupwise):
    assert groupwise("rl").code == 0
    said = groupwise("eval")
    assert (said.code, "accuracy" in said.out) == (0, True)


# Usage errors: nothing is started, and no run folder stays behind


@dataclass(frozen=True)
class Case:
    """A command, what was changed before it, and words of its answer."""

    words: str
    said: tuple[str, ...]
    task: tuple[str, str] = ("", "")
    config: tuple[str, str] = ("", "")
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    module: str = "task.py"
    file: str = "c.yaml"

    @property
    def verb(self) -> str:
        return self.words.split()[0]


def case(words: str, *said: str, **more: object) -> Case:
    return Case(words, said, **more)  # type: ignore[arg-type]


BOTH_WRONG = (
    CONFIG.replace("max_steps", "max_step").replace("num_seqs", "num_seqz") + "trainig: {}\n"
)
MISSPELT = (
    "c.yaml:9",
    "training.max_step",
    "c.yaml:7",
    "sampler.max_num_seqz",
    "max_num_seqs",
    "trainig",
)
HOOK = "def get_rl_dataset(config):"
HUB = "(the hub cannot be reached) as 'nobody/nothing-1b'"
REFUSED = [
    # the config
    *(case(verb, *MISSPELT, files={"c.yaml": BOTH_WRONG}) for verb in ("rl", "eval")),
    case("rl", "c.yaml:9", "training.max_steps", config=("max_steps: 1", 'max_steps: "1"')),
    case("rl", "c.yaml", files={"c.yaml": "model: [tiny\n"}),
    case("rl", "nowhere.yaml", file="nowhere.yaml"),
    case("rl training.learning_rate=fast", "training.learning_rate", "fast", "number"),
    case("rl training.max_steps=2.5", "training.max_steps", "2.5"),
    case("rl training.max_steps", "training.max_steps", "="),
    case("rl training.max_steps=null", "are both null; give one"),
    case("rl training.num_generations=1", "training.num_generations", "1", "2"),
    case("rl training.lr=0.1", "training.lr", "training.learning_rate"),
    case(f"rl training.seed={2**63}", "training.seed", str(2**63 - 1)),
    case("rl learning_rate=1", "training.learning_rate"),
    case("rl training.use_vllm=true", "sampler.engine"),
    case("rl training.per_device_train_batch_size=4", "training.prompts_per_step"),
    case("rl training.gradient_accumulation_steps=4", "training.max_tokens_per_microbatch"),
    case("rl sampler.top_p=0.9", "sampler.top_p", "another distribution", "eval.top_p"),
    case("rl sampler.engine=openai", "not in this version", "torch, vllm, sglang"),
    case('rl sampler.stop=[""]', "sampler", "empty text"),
    case("rl sampler.stop_token_ids=[-4]", "stop_token_ids has -4", "begin at 0"),
    *(
        case(f"{verb} sampler.stop_token_ids=[2,99999]", "99999", "tiny", "end at")
        for verb in ("rl", "eval")
    ),
    case("rl model.dtype=float16", "model.dtype", "bfloat16"),
    case("rl algorithm.type=ppo", "algorithm.type", "ppo", "grpo"),
    case("rl algorithm.scale_rewards=group", "not a key of algorithm type dr_grpo", "grpo"),
    case("rl algorithm.preset=dapo_paper algorithm.type=grpo", "Leave type out", "preset=null"),
    case("rl algorithm.preset=trl_default algorithm.type=gspo", "other defaults than epsilon: 0.2"),
    case("rl algorithm.kl_estimator=k2", "kl_estimator is k2", "while beta is 0.0"),
    case("rl algorithm.epsilon='0.2'", "without quotes"),
    case("rl lora.target_modules=all", "all-linear"),
    case("rl run.hub_token=sk-123", "looks like a secret", "environment variable"),
    case("rl run.profile=5", "run.profile names step 5"),
    case("rl run.report_to=nowhere", "run.report_to", "tensorboard"),
    case("rl callbacks=[early_stopp]", "No callback `early_stopp`", "early_stop"),
    case("rl callbacks=[nowhere.py:Own]", "nowhere.py:Own"),
    case("sft sampler.max_num_seqs=8", "sampler", "groupwise rl"),
    # the ways of starting
    case("rl --resume --resume-from r@1", "exclude each other"),
    case("rl --resume", "no run"),
    case("rl --init-from r@1", "no run 'r'"),
    case("eval --policy r@1", "no run 'r'"),
    # the task
    case("rl", "nowhere.py", module="nowhere.py"),
    case("rl", "no.such.module", module="no.such.module"),
    case("rl", "sort_wrods", "sort_words", module="sort_wrods"),
    case(
        "rl", "task.py", "SyntaxError", files={"task.py": "def get_rl_dataset(config)\n    pass\n"}
    ),
    case(
        *("rl", "task.py", "get_rl_dataset(config, split)", "get_rl_dataset(config)"),
        task=(HOOK, "def get_rl_dataset(config, split):"),
    ),
    case(
        *("rl", "task.py", "get_rl_dataset failed", "words.txt"),
        task=(HOOK, f'{HOOK}\n    raise FileNotFoundError("words.txt")'),
    ),
    *(
        case(
            *(verb, "task.py", f"has no {hook}", f"{hook}({parameters}", f"{hook}x", "Rename"),
            task=(f"def {hook}(", f"def {hook}x("),
        )
        for verb, hook, parameters in (
            ("rl", "get_rl_dataset", "config)"),
            ("rl", "get_reward_funcs", "config, tokenizer)"),
            ("eval", "get_eval_dataset", "config)"),
        )
    ),
    case("sft", "has no get_sft_dataset", config=(CONFIG, "model: {name: tiny}\n")),
    # the data
    case("rl", "task.py", "get_rl_dataset", "empty dataset", task=(HOOK, f"{HOOK}\n    return []")),
    case(
        *("eval", "task.py", "get_eval_dataset", "empty dataset"),
        task=("return get_rl_dataset(config)", "return []"),
    ),
    case("rl", "get_rl_dataset", "prompt", "question", task=('"prompt": f', '"question": f')),
    case("rl", "`gold`", "answer", "`right`", task=("completions, answer,", "completions, gold,")),
    case("rl data.max_prompt_length=3", "data.max_prompt_length = 3", "all 4 prompts"),
    case("rl model.max_seq_length=6", "4 of 4 prompts do not fit", "room for 2"),
    case("rl model.max_seq_length=4", "max_completion_length", "no room"),
    case(
        *("rl model.chat_template=none.jinja", "chat template"),
        task=('f"say {letter}"', '[{"role": "user", "content": letter}]'),
        files={"none.jinja": ""},
    ),
    # models and adapters
    *(
        case(f"{verb} model.name={name}", *said)
        for verb in ("rl", "eval")
        for name, said in {
            "./models/mine": ("there is no folder './models/mine'", "looked in"),
            "mine.gguf": ("there is no file 'mine.gguf'",),
            "nobody/nothing-1b": (HUB, "tiny, smollm2-135m-instruct"),
            ".": ("has no config.json", "task.py"),
        }.items()
    ),
    *(
        case(f"rl model.adapter={adapter}", "model.adapter", "adapter_config.json")
        for adapter in ("./nowhere", ".")
    ),
    case("rl model.adapter=a lora=null", "model.adapter", "lora", files={"a/x": ""}),
    case("rl lora.target_modules=[q_proj,w_proj]", "w_proj", "o_proj, q_proj"),
    case("eval --output out.json", "out.json exists", "--output", files={"out.json": "mine"}),
]


@pytest.mark.parametrize(
    "given", REFUSED, ids=lambda given: f"{given.words} {'-'.join(given.said)[:30]}"
)
def test_usage_errors_say_what_is_wrong_and_start_nothing(groupwise, given):
    if given.task[0]:
        task(*given.task)
    if given.config[0]:
        Path("c.yaml").write_text(CONFIG.replace(*given.config))
    for name, text in given.files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    said = groupwise(*given.words.split(" "), config=given.file, task=given.module)
    if "SyntaxError" not in given.said and "words.txt" not in given.said:
        said.has(*given.said)
    assert (said.code, [word for word in given.said if word not in said.err]) == (2, []), said.err
    assert not list(Path("runs").glob("*"))
    assert all(Path(name).read_text() == text for name, text in given.files.items())
    assert "sk-123" not in said.err


def test_with_json_the_error_has_a_code(groupwise):
    said = groupwise("rl", "training.lr=1", "--json")
    assert said.code == 2
    assert json.loads(said.out)["error"]["code"] == "config"


def test_a_broken_task_shows_the_users_own_lines_only(groupwise):
    Path("helper.py").write_text("def deep():\n    return undefined_name\n")
    Path("task.py").write_text("import helper\nhelper.deep()\n")
    said = groupwise("rl")
    assert said.code == 2
    for word in ("task.py", "helper.py:2", "undefined_name", "NameError"):
        assert word in said.err
    assert "importlib" not in said.err
    assert "groupwise/core/plugins.py" not in said.err


# Runs that are there


def test_runs_that_are_there_are_listed_and_not_overwritten(groupwise):
    assert groupwise("rl", "run.name=first").code == 0
    RunFolder.create(Path("runs"), "half", {}).close()
    from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer

    tiny_model(hidden_size=32).save_pretrained("bigger")
    tiny_tokenizer().save_pretrained("bigger")
    with RunFolder.create(Path("runs"), "busy", {}):
        for words, said in {
            ("eval", "--policy", "frist"): ("no run 'frist'", "Did you mean 'first'?"),
            ("eval", "--policy", "first@7"): ("no checkpoint after 7 steps", "first@1"),
            ("rl", "run.name=busy"): ("in use by process", "run.name="),
            ("rl", "run.name=half"): ("unfinished run", "--resume", "run.name="),
            ("rl", "--resume", "run.name=never"): ("no run 'never'",),
            ("rl", "--resume", "run.name=first"): ("nothing to resume", "finished"),
            ("eval", "model.name=./bigger", "--policy", "first"): (
                "do not match the model",
                "instead of",
            ),
        }.items():
            found = groupwise(*words)
            assert found.code == 2, words
            found.has(*said)


# Rewards that misbehave

MISBEHAVING = """\
import time

MODES = ["good", "raises", "short", "inf", "hangs", "exits"]

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
    return {"short": [1.0], "inf": [float("inf")] * count}.get(mode, [1.0, 2.0])
"""


def test_a_reward_that_misbehaves_costs_its_rollouts_and_nothing_else(groupwise):
    Path("task.py").write_text(MISBEHAVING)
    limits = ["rewards.in_process=false", "rewards.time_limit=0.5", "training.prompts_per_step=6"]
    said = groupwise("rl", *limits, "run.name=moody")
    assert said.code == 0
    said.has()
    with Store.open(Path("runs/moody/run.db"), readonly=True) as store:
        found = {
            group.example.columns["mode"]: [(each.outcome, each.reason) for each in group.rollouts]
            for group in store.groups(0)
        }
        metrics = store.step_metrics(0)
    outcomes = {mode: {outcome for outcome, _ in each} for mode, each in found.items()}
    failed = {mode: {"failed"} for mode in ("raises", "short", "inf", "exits")}
    assert outcomes == {"good": {"scored"}, "hangs": {"timed_out"}, **failed}
    reasons = {mode: each[0][1] or "" for mode, each in found.items()}
    assert "moody" in reasons["raises"]
    assert "no such word" in reasons["raises"]
    assert "1 value for 2 completions" in reasons["short"]
    assert "inf" in reasons["inf"]
    assert "0.5" in reasons["hangs"]
    assert metrics["rollouts/scored"] == 2
    assert metrics["reward"] == 1.5, "failures do not count as low rewards"


def test_rewards_that_always_fail_stop_the_run_with_a_summary(groupwise):
    task("return [float(len(text)) for text in completions]", 'raise KeyError("gold")')
    said = groupwise("rl", "eval.before_and_after=false")
    assert said.code == 2
    said.has("No rollout could be scored in step 1 (the whole run)", "then start the run again")
    said = groupwise(
        "rl", "training.max_steps=9", "run.name=hopeless", "eval.before_and_after=false"
    )
    assert said.code == 2
    said.has("3 steps in a row", "4 ×", "right", "KeyError", "--resume")
    summary = json.loads(Path("runs/hopeless/summary.json").read_text())
    assert (summary["state"], summary["error"]["code"]) == ("failed", "nothing_scored")
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
