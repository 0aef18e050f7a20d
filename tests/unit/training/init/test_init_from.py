"""Configs of TRL, open-r1 and Unsloth become ours, and what is lost is reported."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.trainer_utils import SchedulerType

from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.findings import Report
from groupwise.core.plugins import load
from groupwise.core.settings.tree import read_yaml
from groupwise.tasks.contract import load_task
from groupwise.training.config import load_config
from groupwise.training.init.foreign_config import ALIASES
from groupwise.training.init.foreign_names import SCHEDULES
from groupwise.training.init.init_from import init_from

OPEN_R1 = """
{model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct, model_revision: main, torch_dtype: bfloat16, attn_implementation: flash_attention_2,
dataset_name: open-r1/OpenR1-Math-220k, dataset_prompt_column: problem, system_prompt: "Think first.", bf16: true, use_vllm: true,
do_eval: false, gradient_accumulation_steps: 4, gradient_checkpointing: true, learning_rate: 2.0e-05, max_steps: -1,
lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1}, max_prompt_length: 512, max_completion_length: 1024,
num_generations: 16, num_train_epochs: 1, output_dir: data/Qwen2.5-1.5B-Open-R1-GRPO, per_device_train_batch_size: 16,
reward_funcs: [accuracy, format, cosine, tag_count, my_rewards.py:polite], cosine_max_len: 2000, save_strategy: epoch,
reward_weights: [1.0, 1.0, 0.5, 1.0, 0.2], report_to: [wandb], seed: 42, top_p: 0.9, warmup_ratio: 0.1, mystery: 3}
"""
UNSLOTH = """
%pip install unsloth
max_seq_length = 1024
max_prompt_length = 256
model, tokenizer = FastLanguageModel.from_pretrained("meta-llama/Llama-3.2-3B-Instruct", max_seq_length=max_seq_length,
    load_in_4bit=True, fast_inference=True, max_lora_rank=64, gpu_memory_utilization=0.6)
model = FastLanguageModel.get_peft_model(model, r=64, target_modules=["q_proj", "v_proj"], lora_alpha=64, use_rslora=True,
    use_gradient_checkpointing="unsloth", random_state=3407)
vllm_sampling_params = SamplingParams(min_p=0.1, seed=3407, include_stop_str_in_output=True)
training_args = GRPOConfig(learning_rate=5e-6, adam_beta2=0.99, warmup_ratio=0.1, optim="adamw_8bit", per_device_train_batch_size=6,
    num_generations=6, max_prompt_length=max_prompt_length, max_completion_length=max_seq_length - max_prompt_length, max_steps=250,
    vllm_sampling_params=vllm_sampling_params, loss_type="dr_grpo", report_to="none", output_dir="outputs")
trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[xmlcount_reward_func, polite], args=training_args)
if False: model = FastLanguageModel.from_pretrained("lora_model")
"""
SCRIPT = """
from trl.rewards import think_format_reward, get_cosine_scaled_reward
from my_rewards import polite as nice
base = {"learning_rate": 1e-5, "num_generations": 4, **more}
merged = dict(base, beta=0.04) | {"adam_beta2": 0.99}
merged["temperature"] = 0.7
merged.update(max_steps=7)
tokenizer = AutoTokenizer.from_pretrained("other/tokenizer")
model = AutoModelForCausalLM.from_pretrained("Qwen/Q")
args = dataclasses.replace(GRPOConfig("out", **merged), seed=5)
parser.add_argument("--max-completion", default=99)
args.max_completion_length = parser.parse_args().max_completion
if cuda():
    args.epsilon = 0.3
later = GRPOConfig(output_dir="never", beta=9)
def main(rank):
    rewards = [think_format_reward, nice, own, get_cosine_scaled_reward(max_len=9), "org/reward-model"]
    trainer = GRPOTrainer(model, rewards, args, rows, peft_config=LoraConfig(r=rank, lora_alpha=4), *rest)
    trainer.train()
main(4)
trainer.train()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(name: str, text: str, **more: Any) -> tuple[dict[str, Any], Report]:
    """What was written, which is a config of ours, and the report."""
    Path(name).write_text(text)
    report = init_from(Path(name), force=True, **more)
    load_config(Path(report.details["file"]))
    return read_yaml(Path(report.details["file"])).values, report


def findings_of(report: Report, level: str = "warning") -> set[str]:
    return {finding.name for finding in report.findings if finding.level == level}


def small(line: str) -> tuple[dict[str, Any], Report]:
    return made("a.yaml", f"model_name_or_path: tiny\nnum_generations: 8\n{line}\n")


def test_open_r1() -> None:
    config, report = made("recipe.yaml", OPEN_R1, processes=8)
    assert config["model"] == {"name": "Qwen/Qwen2.5-1.5B-Instruct", "revision": "main"}
    assert config["lora"] is None
    training, data, think = config["training"], config["data"], {"reasoning_tag": "think"}
    assert (training["prompts_per_step"], training["num_generations"]) == (16 * 4 * 8 // 16, 16)
    assert (training["max_steps"], training["num_train_epochs"]) == (None, 1)
    assert training["lr_scheduler_type"] == "cosine"
    assert config["algorithm"] == {"preset": "trl_default"}
    assert (data["prompt_column"], data["max_prompt_length"]) == ("problem", 512)
    assert (data["prompt_format"], data["system_prompt"]) == ("chat", "Think first.")
    assert config["rewards"]["reward_funcs"] == [
        "math_answer", {"name": "strict_format", **think, "right": 1.0},
        {"name": "length", "max_length": 2000, "wrong_short": 0.0, "wrong_long": -0.5}, {"name": "xml_count", **think, "each": 0.25},
        "my_rewards.py:polite",
    ]  # fmt: skip
    assert config["rewards"]["reward_weights"] == [1.0, 1.0, 0.5, 1.0, 0.2]
    assert (config["run"]["dir"], config["run"]["name"]) == ("data", "Qwen2.5-1.5B-Open-R1-GRPO")
    assert findings_of(report) == {"top_p", "lr_scheduler_kwargs", "mystery"}
    text = Path(report.details["file"]).read_text()
    assert "# From learning_rate of recipe.yaml." in text
    assert "per_device_train_batch_size 16 × gradient_accumulation_steps 4 × 8 processes" in text


def test_rewards_for_code_mixtures_and_weights_that_go_with_their_rewards() -> None:
    sets = "{datasets: [{id: a/b, weight: 0.5, columns: [x]}, {id: c/d}], seed: 3, test_split_size: 0.1}"
    rewards = "reward_funcs: [reasoning_steps, binary_code, code_format]\nreward_weights: [3, 2, 1]"
    config, report = small(f"{rewards}\nchat_template: '{{{{ x }}}}'\ndataset_mixture: {sets}")
    tests = {"name": "python_tests", "partial": False}
    assert config["rewards"]["reward_funcs"][1:] == [tests, "python_tests"]
    assert config["rewards"]["reward_weights"] == [3, 2, 1]
    data = config["data"]
    assert data["dataset_mixture"] == [{"source": "a/b", "weight": 0.5}, {"source": "c/d"}]
    assert (data["seed"], data["test_split_size"], data["prompt_format"]) == (3, 0.1, "chat")
    assert data["columns"] == {"test_cases": "verification_info.test_cases"}
    assert Path(config["model"]["chat_template"]).read_text() == "{{ x }}"
    config, report = small(
        "dataset_prompt_column: q\nreward_funcs: [org/model, code]\nreward_weights: [3, 2]"
    )
    assert config["rewards"] == {"reward_funcs": ["python_tests"], "reward_weights": [2]}
    assert findings_of(report) == {"reward_funcs", "dataset_prompt_column"}  # of no data


def test_a_notebook_of_unsloth_as_a_python_file_and_as_it_is() -> None:
    config, report = made("train.py", UNSLOTH)
    assert config["model"] == {
        "name": "meta-llama/Llama-3.2-3B-Instruct", "backend": "unsloth", "load_in_4bit": True, "max_seq_length": 1024,
    }  # fmt: skip
    modules = ["q_proj", "v_proj"]
    assert config["lora"] == {"r": 64, "alpha": 64, "target_modules": modules, "rslora": True}
    assert (config["training"]["prompts_per_step"], config["training"]["seed"]) == (1, 3407)
    assert config["sampler"]["max_completion_length"] == 768
    assert config["algorithm"] == {"type": "dr_grpo"}
    own = ["train.py:xmlcount_reward_func", "train.py:polite"]
    assert config["rewards"]["reward_funcs"] == own
    assert findings_of(report) == {"min_p"}
    sources = ["%%bash\npip list 007", "x = 1 2", UNSLOTH.splitlines(keepends=True)]
    cells = [{"cell_type": "code", "source": source} for source in sources]
    again, report = made("book.ipynb", json.dumps({"cells": cells}))
    assert (again["training"], findings_of(report)) == (config["training"], {"min_p", "line 1"})


def test_a_script_is_followed_as_far_as_it_is_plain_and_the_rest_is_reported_with_its_line() -> (
    None
):
    config, report = made("a.py", SCRIPT)
    training = config["training"]
    keys = ("learning_rate", "num_generations", "adam_beta2", "max_steps", "seed")
    assert [training[key] for key in keys] == [1e-5, 4, 0.99, 7, 5]
    assert config["sampler"] == {"max_completion_length": 99, "temperature": 0.7}
    assert config["algorithm"] == {"preset": "trl_default", "beta": 0.04}
    assert (config["model"]["name"], config["lora"]) == ("Qwen/Q", {"r": 8, "alpha": 4})
    rewards = ["think_format", "my_rewards:polite", "a.py:own", "length"]
    assert config["rewards"]["reward_funcs"] == rewards
    lost = "**more,epsilon,r,GRPOConfig of line 15,GRPOTrainer argument 5,command line"
    assert findings_of(report) == {*lost.split(","), "reward_funcs", "train_dataset"}
    said = " ".join(finding.measured for finding in report.findings)
    assert all(f"line {at}" in said for at in ("4: only", "14: its", "21: trainer.train()"))


def test_values_that_only_running_tells_and_numbers_that_do_not_fit_are_reported() -> None:
    numbers = "learning_rate=1/2**20, num_generations=n(), save_steps=0.1, max_steps='auto', beta=b, adam_beta1=3"
    rewards = "['a.b.f', 'get_soft_overlong_punishment']"
    config, report = made("a.py", f"GRPOConfig({numbers})\nGRPOTrainer(m, reward_funcs={rewards})")
    training = config["training"]
    assert (training["learning_rate"], training["num_generations"]) == (2**-20, 8)
    overlong = {"name": "overlong", "max_length": 1280, "cache": 256}
    assert config["rewards"]["reward_funcs"] == ["a.b:f", overlong]
    lost = "model num_generations save_steps max_steps beta adam_beta1"
    assert findings_of(report) == set(lost.split())


def test_a_text_that_is_cut_ends_in_a_mark_and_names_of_flags_are_not_cut() -> None:
    flags = [f"a_long_name_of_a_flag_{number}" for number in range(9)]
    text = "\n".join(
        f"add_argument('--{flag}', default=1)\nx{flag} = parse_args().{flag}" for flag in flags
    )
    _, report = made("a.py", f"{text}\nGRPOTrainer('tiny', f, GRPOConfig(beta=b({'a' * 99})))")
    said = {finding.name: finding.measured for finding in report.findings}
    assert [flag for flag in flags if flag in said["command line"]] == flags
    assert ".sh file" in said["command line"]
    assert "aaa…" in said["beta"]


def test_steps_that_count_updates_there_are_divided_by_the_updates_of_a_step_here() -> None:
    lines = "max_steps: 10\nwarmup_steps: 8\nsave_steps: 6\nlogging_steps: 1\neval_strategy: steps\neval_steps: 3"
    config, report = small(f"num_iterations: 2\nsteps_per_generation: 2\n{lines}")
    assert (config["training"]["max_steps"], config["training"]["warmup_steps"]) == (3, 2)
    assert (config["run"]["save_steps"], config["eval"]["eval_steps"]) == (2, 1)
    assert config["run"].get("logging_steps", 1) == 1
    assert "10 ÷ 4, rounded up" in Path(report.details["file"]).read_text()
    one_each, _ = small(lines)
    assert (one_each["training"]["max_steps"], one_each["run"]["save_steps"]) == (10, 6)
    epochs, _ = small("num_iterations: 2")  # an epoch has each prompt once in both
    assert epochs["training"]["max_steps"] is None
    assert epochs["training"]["num_train_epochs"] == 3


@pytest.mark.parametrize(("line", "folder", "name"), [
    ("output_dir: outputs/grpo", "outputs", "grpo"),
    ("output_dir: grpo", "runs", "grpo"),
    ("output_dir: outputs/grpo\nrun_name: first", "outputs/grpo", "first"),
])  # fmt: skip
def test_a_run_is_where_output_dir_says(line: str, folder: str, name: str) -> None:
    run = small(line)[0]["run"]
    assert (run["dir"], run["name"]) == (folder, name)


def test_settings_without_equivalent_are_left_out_with_their_dependants() -> None:
    config, report = small(
        "dataset_name: 3\ndataset_prompt_column: q\nlora_target_modules: 3\ntemperature: -1"
    )
    kept = {*config, *config["lora"], *config["sampler"]}
    assert not {"data", "target_modules", "temperature"} & kept
    lost = "dataset_name dataset_prompt_column lora_target_modules temperature"
    assert findings_of(report) == set(lost.split())


def test_the_flags_of_a_command() -> None:
    Path("base.yaml").write_text("{beta: 0.1, seed: 1}")
    command = "accelerate launch --num_processes 4 \\\n grpo.py --model_name_or_path m/n --num-generations 4 --lora_r 8 --use_peft"
    flags = "--reward_funcs accuracy mine.f --learning_rate=1e-6 --config base.yaml --seed 2 --output_dir $OUT --lr_scheduler_type cosine"
    config, report = made("run.sh", f"# --beta 3\n{command} {flags}\necho done\n")
    assert config["model"] == {"name": "m/n"}
    assert config["lora"] == {"r": 8, "alpha": 32, "dropout": 0.05}
    assert config["training"]["prompts_per_step"] == 8 * 4 // 4
    assert (config["training"]["learning_rate"], config["training"]["seed"]) == (1e-6, 2)
    assert config["algorithm"]["beta"] == 0.1
    assert config["rewards"]["reward_funcs"] == ["math_answer", "mine:f"]
    assert findings_of(report) == {"output_dir"}


@pytest.mark.parametrize(("reward", "ours"), [
    ("check_answer", "a-groupwise.py:check_answer"), ("accuracy", "a-groupwise.py:accuracy"), ("math_answer", "a-groupwise.py:math_answer"),
    ("format_reward", "utils:format_reward"), ("cosine", "math_answer"), ("trl_rewards.accuracy_reward", "math_answer"),
    ("get_cosine_scaled_reward(max_len=9)", None), ("partial(accuracy, n=1)", None), ("self.accuracy_reward", None),
])  # fmt: skip
def test_a_users_own_reward_is_never_one_of_ours(reward: str, ours: str | None) -> None:
    imports = "from trl import rewards as trl_rewards\nfrom trl.rewards import accuracy_reward as cosine, accuracy\nfrom utils import *"
    own = "check_answer accuracy math_answer get_cosine_scaled_reward".split()
    functions = "\n".join(f"def {name}(completions): return [0.0]" for name in own)
    trainer = f"GRPOTrainer('tiny', [{reward}], GRPOConfig(beta=0.1, reward_weights=[2]))"
    config, report = made("a.py", f"{imports}\n{functions}\n{trainer}")
    expected = {"reward_funcs": [ours], "reward_weights": [2]} if ours else None
    assert config.get("rewards") == expected
    assert findings_of(report) == (set() if ours else {"reward_funcs", "reward_weights"})
    warnings = [each for each in report.findings if each.level == "warning"]
    assert ours or warnings[0].meaning == "the config cannot train yet"


def test_an_unknown_reward_in_a_recipe_becomes_a_function_to_write() -> None:
    config, report = small("reward_funcs: [check_answer]")
    assert config["rewards"]["reward_funcs"] == ["rewards.py:check_answer"]
    assert findings_of(report) == {"reward_funcs"}


X = {"dataset_split": "x"}


@pytest.mark.parametrize(("rows", "data", "lost"), [
    ('load_dataset("a/b", split="train")', {"dataset_name": "a/b"}, False),
    ('load_dataset("a/b", "m", revision="c")["x"]', {"dataset_name": "a/b", "dataset_config": "m", "dataset_revision": "c", **X}, False),
    ('load_dataset("json", data_files="a.jsonl", split="x").shuffle(seed=1)', {"dataset_name": "a.jsonl", **X}, False),
    ('load_dataset("csv", data_files={"x": "a.csv"}, split="x[:9]")', {"dataset_name": "a.csv", "dataset_split": "train[:9]"}, False),
    ('load_dataset("json", data_files={"x": "a.jsonl", "y": "b"})["x"].shuffle()', {"dataset_name": "a.jsonl"}, False),
    ('load_dataset("json", data_files={"x": parse_args().f, "y": "b"})["x"]', None, True),
    ('load_dataset("a/b").train_test_split(test_size=0.1)["train"]', {"dataset_name": "a/b", "test_split_size": 0.1}, False),
    ('load_dataset("a/b").train_test_split(train_size=0.7, seed=1)["train"]', {"dataset_name": "a/b", "test_split_size": 0.3}, False),
    ('load_dataset("a/b").train_test_split()["train"].select(range(9))', {"dataset_name": "a/b", "test_split_size": 0.25}, True),
    ('load_dataset("a/b", split="x").map(f).filter(g)', {"dataset_name": "a/b", **X}, True), ("Dataset.from_list([])", None, True),
    ("made_by_a_function()", {"dataset_name": "in/it", **X}, True), ("load_dataset(name_of(), split='x')", None, True),
])  # fmt: skip
def test_the_data_of_a_python_file(rows: str, data: dict[str, Any] | None, lost: bool) -> None:
    function = "def made_by_a_function():\n    return load_dataset('in/it', split='x').map(f)\n"
    text = f"rows = {rows}\nGRPOTrainer('tiny', f, GRPOConfig(beta=0.1), rows)"
    config, report = made("a.py", function * ("made_by" in rows) + text)
    assert config.get("data") == data
    assert findings_of(report) == ({"train_dataset"} if lost else set())
    assert ("--task-module" in str(report.details["next"])) == (data is None)


MAPPED = """
from __future__ import annotations
from datasets import load_dataset
import re  # for the numbers
from trl import GRPOConfig, GRPOTrainer
SYSTEM = "Think."
def number(text): return re.findall(r"[0-9]+", text)[-1]
def get_rows(split="train"):
    rows = load_dataset("a/b", "main")[split]
    rows = rows.filter(lambda row: row["level"] < 3)
    return rows.map(lambda x: {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": x["q"]}],
                               "answer": number(x["a"])}, remove_columns=["a"])
CALLS = 0
def right(completions, answer, **kwargs):
    global CALLS
    CALLS = CALLS + 1
    return [float(number(c) == a) for c, a in zip(completions, answer)]
rows = get_rows()
trainer = GRPOTrainer("tiny", right, GRPOConfig(beta=0.1), rows, peft_config=LoraConfig(r=4))
trainer.train()
"""


def test_rewards_and_row_functions_of_a_training_script_are_copied_into_a_module() -> None:
    config, report = made("a.py", MAPPED)
    pipeline = "a-groupwise.py:process_row"
    assert config["data"] == {
        "dataset_name": "a/b", "dataset_config": "main", "preprocessing_pipeline": pipeline,
    }  # fmt: skip
    assert config["rewards"] == {"reward_funcs": ["a-groupwise.py:right"]}
    assert report.details["files_beside"] == ["a-groupwise.py"]
    assert findings_of(report) == set()
    assert "# From r of a.py." in Path("a-groupwise.yaml").read_text()
    copied = Path("a-groupwise.py").read_text()
    assert "import re  # for the numbers" in copied
    assert "trl" not in copied
    row = load("a-groupwise.py:process_row").object({"q": "2+3?", "a": "it is 5", "level": 1})
    assert [message["content"] for message in row.pop("prompt")] == ["Think.", "2+3?"]
    assert row == {"q": "2+3?", "answer": "5", "level": 1}
    assert load(pipeline).object({"q": "", "a": "", "level": 3}) is None
    assert load("a-groupwise.py:right").object(completions=["5"], answer=["5"]) == [1.0]
    with pytest.raises(UsageError, match=r"a-groupwise\.yaml exists"):
        init_from(Path("a.py"))
    with pytest.raises(UsageError, match=r"a\.py, where .* exists and is kept"):
        init_from(Path("a.py"), out=Path("a.yaml"), force=True)
    assert Path("a.py").read_text() == MAPPED


def test_a_script_keeps_its_own_function_of_the_name_that_the_copied_one_would_have():
    config, _ = made("a.py", MAPPED.replace("number(", "process_row("))
    assert config["data"]["preprocessing_pipeline"] == "a-groupwise.py:process_row_2"
    row = load("a-groupwise.py:process_row_2").object({"q": "", "a": "it is 5", "level": 1})
    assert row["answer"] == "5"
    assert load("a-groupwise.py:right").object(completions=["5"], answer=["5"]) == [1.0]


@pytest.mark.parametrize(("before", "after"), [
    ("level", "limit"), ("remove_columns=", "batched=True, remove_columns="), ("rows.map", "rows.cast(x).map"),
    ("number(x", "split(x"),
])  # fmt: skip
def test_a_map_function_that_needs_more_than_its_row_is_reported_and_not_copied(
    before: str, after: str
) -> None:
    """The first stays as it is, for the comparison."""
    text = re.sub(r"(?m)^trainer.*\n", "", MAPPED.replace(before, after))
    text += "if __name__ == '__main__': GRPOTrainer('tiny', right, GRPOConfig(beta=0.1), rows)"
    config, report = made("a.py", text)
    is_copied = before == "level"
    assert ("preprocessing_pipeline" in config["data"]) == is_copied
    assert findings_of(report) == (set() if is_copied else {"train_dataset"})
    assert ("data.preprocessing_pipeline=" in report.details["next"][0]) != is_copied
    assert config["rewards"]["reward_funcs"] == ["a-groupwise.py:right"]
    assert "trl" not in Path("a-groupwise.py").read_text()


TWO_SETS = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
def right(completions, **kwargs): return [0.0 for _ in completions]
def asked(row): return {"prompt": row["q"] + "?"}
ALL = load_dataset("json", data_files={"train": "x/train.jsonl", "test": "x/test.jsonl"})
train = ALL["train"].map(asked)TRAIN
held = ALL["test"]HELD
GRPOTrainer("tiny", right, GRPOConfig(eval_strategy="steps"), train_dataset=train, eval_dataset=held).train()
"""


@pytest.mark.parametrize(("train", "held", "prompts"), [
    (".filter(lambda row: row['level'] < 3)", ".map(asked)", ["1?", "3?,4?"]),
    ("", ".map(lambda row: {'prompt': 'Q' + row['q']})", ["1?,2?", "Q3,Q4"]),
    ("", ".map(asked)", []), ("", ".map(lambda row: {'prompt': parse_args().start})", None),
])  # fmt: skip
def test_held_out_rows_that_are_changed_otherwise_are_made_as_the_script_makes_them(
    train: str, held: str, prompts: list[str] | None
) -> None:
    Path("x").mkdir()
    for name, rows in {"train": "12", "test": "34"}.items():
        lines = [json.dumps({"q": each, "level": int(each) % 2 * 2 or 5}) for each in rows]
        Path(f"x/{name}.jsonl").write_text("\n".join(lines))
    values, report = made("a.py", TWO_SETS.replace("TRAIN", train).replace("HELD", held))
    assert findings_of(report) == ({"eval_dataset"} if prompts is None else set())
    assert ("data" in values) == (not prompts)
    if prompts:
        task, config = load_task("a-groupwise.py"), load_config("a-groupwise.yaml").config
        sets = task.rl_examples(config), task.eval_examples(config)
        assert [",".join(str(each.prompt) for each in rows) for rows in sets] == prompts


MADE = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
MARK = "="
def right(completions, answer, **kwargs): return [float(c.endswith(MARK)) for c in completions]
def make_rows(): return [{"q": str(n), "answer": n} for n in range(10)]
def main(seed=0):
    mark = '''
  +'''
    def chat(row):
        # of one row
        return {"prompt": row["q"] + mark}
    rows = Dataset.from_list(make_rows())
    split = rows.map(chat).train_test_split(test_size=2, seed=1)
    trainer = GRPOTrainer("tiny", right, GRPOConfig(beta=0.1), split["train"], eval_dataset=split["test"])
    trainer.train()
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("seed", ["", "set_seed(HfArgumentParser().parse_args().seed)"])
def test_rows_that_a_script_makes_itself_come_from_a_task_file(seed: str) -> None:
    """A seed of the command line does not matter to rows that are not drawn."""
    values, report = made("a.py", MADE.replace("def chat", f"{seed}\n    def chat"))
    assert findings_of(report) == set()
    assert "data" not in values
    assert "--task-module a-groupwise.py" in report.details["next"][0]
    task = load_task("a-groupwise.py")
    config = load_config("a-groupwise.yaml").config
    train, held_out = task.rl_examples(config), task.eval_examples(config)
    assert (len(train), len(held_out)) == (8, 2)
    assert {str(example.prompt) for example in [*train, *held_out]} == {
        f"{n}\n  +" for n in range(10)
    }


@pytest.mark.parametrize(("held_out", "prompts"), [
    ("", []), (", eval_dataset=rows", ["a+", "b+"]), (", eval_dataset=rows.select([1])", ["b+"]),
])  # fmt: skip
@pytest.mark.parametrize(
    "again", ["", "rows = rows.map(lambda row: {'prompt': row['prompt'] + '+'})"]
)
def test_rows_of_a_variable_are_written_and_changed_once(held_out: str, prompts: list[str], again: str) -> None:  # fmt: skip
    made("a.py", f"""from datasets import Dataset
def right(completions, **kwargs): return [0.0 for _ in completions]
rows = Dataset.from_list([{{"prompt": "a"}}, {{"prompt": "b"}}])
{again}
GRPOTrainer("tiny", right, GRPOConfig(beta=0.1), train_dataset=rows{held_out}).train()""")  # fmt: skip
    assert Path("a-groupwise.py").read_text().count("from_list") == 1
    task, config = load_task("a-groupwise.py"), load_config("a-groupwise.yaml").config
    end = "+" if again else ""
    assert [each.prompt for each in task.rl_examples(config)] == [f"a{end}", f"b{end}"]
    if prompts:
        held = [str(each.prompt) for each in task.eval_examples(config)]
        assert held == [prompt.replace("+", end) for prompt in prompts]


IN_PLACE = """
import json, random
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
def right(completions, **kwargs): return [0.0 for _ in completions]
def add(rows, text): rows.append({"prompt": text})
shared = [{"prompt": "s"}]
def share(): shared.append({"prompt": "t"})
random.seed(3)
def main():
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    STATEMENT
    trainer = GRPOTrainer("tiny", right, GRPOConfig(beta=0.1), train_dataset=Dataset.from_list(rows))
    rows.clear()
    trainer.train()
main()
"""


@pytest.mark.parametrize(("statement", "prompts"), [
    ("for n in range(2): rows.append({'prompt': str(n)})", "ab01"), ("rows.extend({'prompt': c} for c in 'cd')", "abcd"),
    ("rows[0] = {'prompt': 'c'}", "cb"), ("rows[0]['prompt'] = 'c'", "cb"), ("del rows[0]", "b"), ("rows += rows[:1]", "aba"),
    ("for row in rows: row['prompt'] += row['prompt']", "aabb"), ("for i, row in enumerate(rows): row.update(prompt=str(i))", "01"),
    ("again = rows; again.append({'prompt': 'c'})", "abc"), ("first = rows.pop()", "a"), ("rows.reverse()", "ba"),
    ("random.shuffle(rows); rows = rows[:1]", "b"), ("rows.sort(key=lambda row: -ord(row['prompt']))", "ba"),
    ("add(rows, 'c')", "abc"), ("done = add(rows, text='c')", "abc"), ("share(); rows = shared[1:]", "t"),
    ("if rows: add(rows, 'c')", "abc"), ("while len(rows) < 3: add(rows, 'c')", "abc"), ("(lambda: rows.append({'prompt': 'c'}))()", "abc"),
    ("with open('a.jsonl') as f: [rows.append(json.loads(line)) for line in f]", "abj"), ("rows[1:] = []", "a"),
    ("texts = iter('hj'); head = next(texts); rows = [{'prompt': each} for each in texts]", "j"),
    ("extra = {}; extra['rows'] = rows[:1]; rows = extra['rows']", "a"),
])  # fmt: skip
def test_statements_that_change_rows_in_place_are_copied(statement: str, prompts: str) -> None:
    Path("a.jsonl").write_text('{"prompt": "j"}\n')
    _, report = made("a.py", IN_PLACE.replace("STATEMENT", statement))
    assert findings_of(report) == set()
    rows = load("a-groupwise.py:get_rl_dataset").object(load_config("a-groupwise.yaml").config)
    assert "".join(str(row["prompt"]) for row in rows) == prompts


BOUND_AGAIN = """
import random
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
def make(n):
    out = []
    for i in range(n):
        out.append({"question": str(i)})
    return out
SIZE = 3
def right(completions, **kwargs): return [float(str(SIZE) in each) for each in completions]
rows = Dataset.from_list(make(3))
rows = rows.map(lambda row: {"prompt": row["question"]})
GRPOTrainer("tiny", right, GRPOConfig(beta=0.1), train_dataset=rows).train()
"""


@pytest.mark.parametrize(("before", "after"), [
    ("SIZE = 3", "SIZE = 3"), ("rows = Data", "make = make\nrows = Data"), ("SIZE = 3\n", ""), ("rows.map", "rows.shuffle().map"),
    ("make(3))", "make(3))\nrandom = random.Random(3)\nrows = rows.select(random.sample(range(3), 3))"),
    ("make(3))", "make(3))\nfor i in range(2): rows = rows.shuffle(seed=i)"), ("make(3))", "make(3))\nrows = rows.shuffle(seed=1)"),
])  # fmt: skip
def test_a_name_that_is_bound_several_times_is_bound_in_one_place(before: str, after: str) -> None:
    text = BOUND_AGAIN.replace(before, after)
    if "SIZE = 3" not in text:
        text = text.replace("rows = Data", "SIZE, rows = 3, Data")
    _, report = made("a.py", text)
    assert findings_of(report) == set()
    rows = load("a-groupwise.py:get_rl_dataset").object(load_config("a-groupwise.yaml").config)
    assert sorted(row["prompt"] for row in rows) == ["0", "1", "2"]
    assert load("a-groupwise.py:right").object(completions=["3"]) == [1.0]


@pytest.mark.parametrize("statement", [
    "if rows: rows.append(1); return", "rows = more + rows\n    more = []",
])  # fmt: skip
def test_a_module_that_could_not_run_is_not_written(statement: str) -> None:
    _, report = made("a.py", IN_PLACE.replace("STATEMENT", statement))
    assert findings_of(report) == {"train_dataset"}


def test_a_change_in_place_that_cannot_be_copied_is_reported() -> None:
    change = "if HfArgumentParser().parse_args().short: rows.pop()"
    _, report = made("a.py", IN_PLACE.replace("STATEMENT", change))
    assert findings_of(report) == {"train_dataset"}
    assert "--task-module TASK.py" in report.details["next"][0]


ADAPTER = """
parser = argparse.ArgumentParser()
parser.add_argument("--full", action="store_true")
parser.add_argument("--lora", default=False)
args = parser.parse_args()
%s
GRPOTrainer("tiny", "a.b", GRPOConfig(beta=0.1), peft_config=peft)
"""


@pytest.mark.parametrize(("adapter", "lora", "said"), [
    ("peft = None\nif not args.full: peft = LoraConfig(r=4)", {"r": 4, "alpha": 8}, "`not args.full` in line 7 is True"),
    ("peft = None\nif args.lora: peft = LoraConfig(r=4)", None, "`args.lora` in line 7 is False"),
    ("peft = LoraConfig(r=4) if args.lora else None", None, "`args.lora` in line 6 is False"),
    ("peft = LoraConfig(r=4) if cuda() else None", {"r": 4, "alpha": 8}, "line 6: its value depends"),
    ("peft = None\nif cuda(): peft = LoraConfig(r=4)", {"r": 4, "alpha": 8}, "line 7: its value depends"),
    ("peft = get_peft_config(model_args)", None, "lora is null"),
])  # fmt: skip
def test_an_adapter_that_depends_on_a_condition_is_reported(adapter: str, lora: Any, said: str) -> None:  # fmt: skip
    config, report = made("a.py", ADAPTER % adapter)
    assert config["lora"] == lora
    (finding,) = [each for each in report.findings if said in each.measured]
    assert finding.level == "warning"
    assert findings_of(report) == {finding.name}


def test_flags_that_a_script_reads_for_itself_are_not_reported_as_lost() -> None:
    Path("a.py").write_text(ADAPTER % "peft = LoraConfig(r=args.rank) if args.full else None")
    config, report = made("a.sh", "python a.py --full --rank 4 --mystery 3")
    assert config["lora"]["r"] == 4
    assert findings_of(report) == {"mystery"}
    said = {each.name: each.measured for each in report.findings}
    assert "`args.full` in line 6 is True" in said["full"]
    assert "line 6 reads it" in said["rank"]


PARSED = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
MARK = "="
def right(completions, **kwargs): return [float(MARK in each) for each in completions]
if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    rows = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    rows = rows.map(lambda row: {"prompt": row["q"] + MARK})
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, args=training_args, reward_funcs=[right], peft_config=get_peft_config(model_args),
        train_dataset=rows[script_args.dataset_train_split],
        eval_dataset=rows[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None)
    trainer.train()
"""


@pytest.mark.parametrize(("more", "data"), [
    ("", {}), ("--eval_strategy steps --eval_steps 3", {"dataset_test_split": "test"}),
    ("--dataset_config b --dataset_train_split x", {"dataset_config": "b", "dataset_split": "x"}),
])  # fmt: skip
def test_rewards_and_rows_of_the_script_that_a_command_runs(more: str, data: Any) -> None:
    Path("a.py").write_text(PARSED)
    flags = "--model_name_or_path tiny --dataset_name d/e --num_generations 4 --use_peft --lora_r 8"
    Path("prepare.py").write_text("rows()")
    config, report = made("a.sh", f"python prepare.py\naccelerate launch a.py {flags} {more}")
    assert (config["model"], config["lora"]["r"]) == ({"name": "tiny"}, 8)
    assert config["training"]["num_generations"] == 4
    assert config["rewards"] == {"reward_funcs": ["a-groupwise.py:right"]}
    pipeline = {"preprocessing_pipeline": "a-groupwise.py:process_row"}
    assert config["data"] == {"dataset_name": "d/e", **pipeline, **data}
    assert load("a-groupwise.py:process_row").object({"q": "1"}) == {"q": "1", "prompt": "1="}
    assert findings_of(report) == set()


def test_what_the_command_line_would_say_is_reported_and_so_is_a_script_that_is_not_there() -> None:
    _, report = made("a.py", PARSED)
    lost = {"args", "model", "peft_config", "train_dataset", "eval_dataset"}
    assert findings_of(report) == lost
    (arguments,) = [each for each in report.findings if each.name == "args"]
    assert ".sh file" in arguments.measured
    _, report = made("a.sh", "python gone.py --model_name_or_path tiny --num_generations 4")
    assert findings_of(report) == {"reward_funcs"}


SEEDS = "import random, numpy\nfrom transformers import set_seed as fix_seed\nSEED = 42\n"


@pytest.mark.parametrize(
    "seed", ["random.seed(SEED)", "numpy.random.seed(seed=SEED)", "fix_seed(SEED)"]
)
@pytest.mark.parametrize("by_function", [True, False])
def test_rows_that_a_script_draws_with_a_seed_are_the_same_in_each_process(
    seed: str, by_function: bool
) -> None:
    draw = "[f'{random.random()} {numpy.random.random()}' for _ in range(9)]"
    rows = (
        "[{'prompt': p} for p in draw()]" if by_function else f"[{{'prompt': p}} for p in {draw}]"
    )
    made("a.py", f"""{SEEDS}{seed}
def right(completions, **kwargs): return [0.0 for _ in completions]
def draw(): return {draw}
GRPOTrainer("tiny", right, GRPOConfig(beta=0.1), train_dataset={rows}).train()""")  # fmt: skip
    prompts: list[list[list[str]]] = []
    for state in range(2):
        random.seed(state)
        numpy.random.seed(state)
        Path(f"{state}.py").write_text(Path("a-groupwise.py").read_text())
        examples = load_task(f"{state}.py").rl_examples(load_config("a-groupwise.yaml").config)
        prompts.append([str(each.prompt).split() for each in examples])
    first, second = prompts
    same = [index for index in (0, 1) if first[0][index] == second[0][index]]
    assert same == {"r": [0], "n": [1], "f": [0, 1]}[seed[0]]


@pytest.mark.parametrize(("before", "after"), [
    ("    rows =", "    random.seed(HfArgumentParser().parse_args().seed)\n    rows ="),
    ("seed=1", "seed=seed"), ("rows = Data", "a = HfArgumentParser().parse_args()\n    rows = a and Data"),
])  # fmt: skip
def test_rows_that_need_more_than_the_file_are_reported(before: str, after: str) -> None:
    drawn = MADE.replace("str(n)", "str(n + random.random())")
    _, report = made("a.py", f"import random\n{drawn.replace(before, after)}")
    assert findings_of(report) == {"train_dataset", "eval_dataset"}
    assert "--task-module TASK.py" in report.details["next"][0]


def test_held_out_rows_and_the_system_prompt_of_a_python_file() -> None:
    text = """ALL, S = load_dataset("a/b"), "Think."
def f(row): return {"prompt": [{"role": "system", "content": S}, row]}
GRPOTrainer("tiny", f, GRPOConfig(eval_strategy="steps"), ALL["train"], eval_dataset=%s)"""
    data = {"dataset_name": "a/b", "system_prompt": "Think."}
    config, report = made("a.py", text % 'ALL["test"]')
    assert (config["data"], findings_of(report)) == (data | {"dataset_test_split": "test"}, set())
    config, report = made("a.py", text % "other()" + "\n{'role': 'system', 'content': 'No.'}")
    assert config["data"] == {"dataset_name": "a/b"}
    assert findings_of(report) == {"eval_dataset", "system_prompt"}


@pytest.mark.parametrize(
    "files", ["{'x': FILES, 'y': 'held.jsonl'}", "dict(x=FILES, y='held.jsonl')"]
)
@pytest.mark.parametrize("rows", ["['a.jsonl', 'b.jsonl']", "'a.jsonl'"])
def test_rows_from_files_of_their_own(files: str, rows: str) -> None:
    """Several files together are loaded as the script loads them; two single ones become two splits of their folder."""
    for name in ("a", "b", "held"):
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": name, "answer": "2"}))
    values, report = made("a.py", f"""from datasets import load_dataset
def f(completions, **kwargs): return [0.0 for _ in completions]
DATA = load_dataset("json", data_files={files.replace("FILES", rows)})
GRPOTrainer("tiny", f, GRPOConfig(eval_strategy="steps"), DATA["x"].shuffle(seed=1), eval_dataset=DATA["y"]).train()""")  # fmt: skip
    if rows[0] == "[":
        task, config = load_task("a-groupwise.py"), load_config("a-groupwise.yaml").config
        assert findings_of(report) == set()
        assert {str(each.prompt) for each in task.rl_examples(config)} == {"a", "b"}
        assert [str(each.prompt) for each in task.eval_examples(config)] == ["held"]
    else:
        split = {"dataset_split": "a", "dataset_test_split": "held"}
        assert values["data"] == {"dataset_name": ".", **split}
        assert findings_of(report) == set()


@pytest.mark.parametrize(("train", "held_out"), [
    ("a/train.jsonl", "b/test.jsonl"), ("a/my-train.jsonl", "a/my-test.jsonl"), ("a/train-1.jsonl", "a/test.jsonl"),
])  # fmt: skip
def test_files_that_are_no_splits_of_one_folder_are_reported(train: str, held_out: str) -> None:
    for name in (train, held_out, "a/train.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}")
    data = f"load_dataset('json', data_files={{'train': '{train}', 'test': '{held_out}'}})"
    values, report = made("a.py", f"""D = {data}
GRPOTrainer("tiny", "a.b", GRPOConfig(beta=0.1), D["train"], eval_dataset=D["test"])""")  # fmt: skip
    assert values["data"] == {"dataset_name": train}
    assert findings_of(report) == {"eval_dataset"}


@pytest.mark.parametrize(("rewards", "part"), [
    ("[m.short, m.exact_match]\nreward_weights: [0.2, 2]", "exact_match"), ("[m.accuracy]\nreward_weights: [2]", "accuracy"),
    ("[m.short, m.long]", "is not set"), ("[accuracy, m.short]", "math_answer"), ("[m.exact]\nreward_weights: [1.0]", None),
])  # fmt: skip
def test_success_is_that_of_one_reward_if_there_are_several(rewards: str, part: str | None) -> None:
    config, report = small(f"reward_funcs: {rewards}")
    said = [each.measured for each in report.findings if each.name == "eval.success_part"]
    assert len(said) == (part is not None)
    assert part is None or part in said[0]
    chosen = None if part == "is not set" else part
    assert config.get("eval", {}).get("success_part") == chosen
    assert config.get("signals", {}).get("accuracy_part") == chosen


@pytest.mark.parametrize(("callbacks", "names"), [
    ("callbacks=[Stop()])", [":Stop"]), ("callbacks=[Early(), Stop()])", ["transformers:EarlyStoppingCallback", ":Stop"]),
    (")\ntrainer.add_callback(Stop())", [":Stop"]), ("callbacks=[Stop])", [":Stop"]),
    ("callbacks=[Stop(least=1.3)])", [{"name": ":Stop", "least": 1.3}]),
    ("callbacks=[Stop(3)])", "{name: FILE.py:Stop, PARAMETER: 3}"), ("callbacks=[Rich()])", "the trainer of TRL"),
    ("callbacks=[Stop(least=f())])", "{name: FILE.py:Stop, least: f()}"), ("callbacks=[Lost()])", "cannot be copied"),
    ("callbacks=make())", "callbacks"),
])  # fmt: skip
@pytest.mark.parametrize("more", ["", "Stop(), "])
def test_callbacks_of_the_file_are_copied(
    callbacks: str, names: list[Any] | str, more: str
) -> None:
    """Each by itself: one that is reported does not keep the others from being taken."""
    callbacks = callbacks.replace("[", f"[{more}")
    config, report = made("a.py", f"""from transformers import EarlyStoppingCallback as Early, TrainerCallback
from trl import RichProgressCallback as Rich
LIMIT = 2
class Stop(TrainerCallback):
    limit = LIMIT
class Lost(TrainerCallback):
    limit = parse_args().limit
trainer = GRPOTrainer("tiny", "a.b", GRPOConfig(beta=0.1), {callbacks}""")  # fmt: skip
    taken = [":Stop"] * (more != "" and "[" in callbacks)
    taken += names if isinstance(names, list) else []
    (said,) = [each.measured for each in report.findings if each.level == "warning"] or [""]
    assert (names in said) if isinstance(names, str) else not said
    text = json.dumps(taken).replace('":Stop"', '"a-groupwise.py:Stop"')
    assert config.get("callbacks", []) == json.loads(text)
    if taken:
        assert load("a-groupwise.py:Stop", instantiate=False).object.limit == 2


@pytest.mark.parametrize("name", ["callbacks", "optimizers"])
def test_what_runs_beside_the_trainer_is_reported_as_not_taken_over(name: str) -> None:
    _, report = made("a.py", f"GRPOTrainer('tiny', f, GRPOConfig(beta=0.1), {name}=[Own()])")
    assert (findings_of(report), report.details["keys"][name]) == ({name}, "no equivalent")


def test_a_completion_of_unknown_length_leaves_room_for_its_prompt() -> None:
    config, _ = small("max_seq_length: 300")
    assert config["sampler"]["max_completion_length"] == 150


@pytest.mark.parametrize("scale", ["false", "none", "true", "batch"])
def test_dr_grpo_says_what_became_of_the_scale(scale: str) -> None:
    """Not that it has its default value: TRL divides by the spread unless told otherwise."""
    _, report = small(f"loss_type: dr_grpo\nscale_rewards: {scale}")
    (finding,) = [
        each for each in report.findings if "scale_rewards" in f"{each.name} {each.measured}"
    ]
    assert finding.name == "scale_rewards"
    assert report.details["keys"]["scale_rewards"] == "taken"


def test_several_completions_of_an_evaluation_have_the_temperature_of_training() -> None:
    config, _ = small(
        "num_generations_eval: 4\ntemperature: 0.7\neval_strategy: steps\neval_steps: 5"
    )
    assert config["eval"] == {"eval_steps": 5, "samples_per_prompt": 4, "temperature": 0.7}


def test_texts_that_end_a_completion() -> None:
    config, report = small("generation_kwargs: {stop_strings: ['</a>'], min_new_tokens: 3}")
    assert config["sampler"]["stop"] == ["</a>"]
    assert config["sampler"]["min_completion_length"] == 3
    sampled = "GRPOConfig(beta=0.1, vllm_sampling_params=SamplingParams(stop='x'))"
    config, again = made("a.py", f"GRPOTrainer('tiny', f, {sampled})")
    assert (config["sampler"]["stop"], findings_of(report) | findings_of(again)) == (["x"], set())


@pytest.mark.parametrize(("lines", "statuses"), [
    ("num_train_epochs: 1\nmax_steps: 9", "no effect, taken"), ("warmup_ratio: 0.1\nwarmup_steps: 2", "no effect, taken"),
    ("per_device_train_batch_size: 4\nsteps_per_generation: 2", "taken, taken"), ("lora_r: 4\nuse_peft: false", "no effect, default"),
    ("eval_steps: 3\nlearning_rate: 1.0e-06", "no effect, taken"), ("warmup_ratio: 0\ntemperature: 0.5", "default, taken"),
])  # fmt: skip
def test_only_a_default_value_is_reported_as_one(lines: str, statuses: str) -> None:
    _, report = small(lines)
    keys = [line.partition(":")[0] for line in lines.split("\n")]
    assert ", ".join(report.details["keys"][key] for key in keys) == statuses


@pytest.mark.parametrize(("lines", "name"), [
    ("loss_type: bnpo\nimportance_sampling_level: sequence", "loss_type"), ("importance_sampling_level: sequence", "loss_type"),
    ("steps_per_generation: 2\ngradient_accumulation_steps: 4", "steps_per_generation"), ("use_peft: true", "use_peft"),
    ("use_vllm: true", "sampler.engine=vllm"),
    ("use_peft: true", "lora_dropout 0.05"), ("lora_r: 4\nlora_dropout: 0.1", "lora_dropout 0.1"),
    ("use_peft: true", "mostly q_proj and v_proj"),
    ("use_peft: true\nlora_target_modules: all-linear", "lora_target_modules"),
    ("eval_strategy: steps\neval_steps: 5", "one, always the most"),
    ("system_prompt: x\nreward_funcs: [cosine]\ncosine_min_value_wrong: 0.2", "cosine_min_value_wrong"),
    ("load_best_model_at_end: true", "run.save_total_limit"),
    ("optim: adamw_torch", "optim"), ("max_steps: -1", "max_steps"), ("importance_sampling_level: token", "importance_sampling_level"),
])  # fmt: skip
def test_how_each_key_ended_is_reported(lines: str, name: str) -> None:
    _, report = small(lines)
    said = " ".join(f"{each.name} {each.measured} {each.meaning}" for each in report.findings)
    assert name in said


@pytest.mark.parametrize(("line", "expected"), [
    ("loss_type: bnpo", {"preset": "trl_default"}),
    ("importance_sampling_level: sequence", {"type": "gspo", "epsilon": 0.2, "epsilon_high": 0.2}),
    ("scale_rewards: false", {"preset": "trl_default", "scale_rewards": "none"}),
    ("{loss_type: cispo, epsilon_high: 5.0, num_generations: 8}", {"type": "cispo", "epsilon_high": 4.0}),
])  # fmt: skip
def test_losses(line: str, expected: dict[str, Any]) -> None:
    text = line if line[0] == "{" else f"num_generations: 8\n{line}"
    assert made("a.yaml", text)[0]["algorithm"] == expected


@pytest.mark.parametrize(("lines", "expected", "lost"), [
    *((f"lr_scheduler_type: {each.value}", SCHEDULES[each.value][0], bool(SCHEDULES[each.value][2])) for each in SchedulerType),
    ("lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 3}", "cosine", True),
    ("lr_scheduler_type: polynomial\nlr_scheduler_kwargs: '{\"power\": 1.0}'", "linear", False),
    ("lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {power: 2.0}", "linear", True),
    ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1.0e-7}", "cosine", True),
    ("lr_scheduler_type: other", "linear", True),
])  # fmt: skip
def test_schedules(lines: str, expected: str, lost: bool) -> None:
    config, report = small(f"warmup_steps: 0.1\nwarmup_ratio: 0.5\n{lines}")
    assert config["training"]["lr_scheduler_type"] == expected
    assert bool(findings_of(report)) == lost
    warm = None if lines.endswith(": constant") else 0.1
    assert config["training"].get("warmup_ratio") == warm


@pytest.fixture(scope="module")
def dump() -> dict[str, Any]:
    """All keys of TRL, as its config writes them."""
    from trl import GRPOConfig

    names = ("activation_checkpointing", "gradient_checkpointing")  # the second is the older one
    recompute = next(name for name in names if name in GRPOConfig.__dataclass_fields__)
    settings: dict[str, Any] = {recompute: True}
    config = GRPOConfig("out", use_cpu=True, bf16=False, **settings)
    return json.loads(config.to_json_string())


def test_nothing_of_a_full_dump_is_lost(dump: dict[str, Any]) -> None:
    _, whole = made("a.json", json.dumps(dump))
    usual = {ALIASES.get(name, name) for name in dump}
    assert usual == set(whole.details["keys"])
    assert findings_of(whole) == {"model_name_or_path"}
    off, _ = made("a.json", json.dumps({**dump, "max_grad_norm": 0, "seed": float("inf")}))
    assert (off["training"]["max_grad_norm"], off["run"]["save_total_limit"]) == (None, None)

    @given(st.sampled_from(sorted(dump)), st.sampled_from([True, 7, 0.5, "x", ["y"]]))
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def each_change_is_seen(name: str, value: Any) -> None:
        _, report = made("a.json", json.dumps({**dump, name: value}))
        known = ALIASES.get(name, name)
        its, texts = (
            report.details["keys"][known],
            [f"{f.name} {f.measured}" for f in report.findings],
        )
        named = any(name in text or known in text for text in texts)
        same = report.details["config"] == whole.details["config"]
        assert its == "default" or named or not same or value is True  # scale_rewards, as group

    each_change_is_seen()


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.yaml", "model: {name: tiny}\n", "no key of a GRPO config"), ("a.json", "[1]", "not keys"), ("a.py", "def f(:", "not Python"),
    ("a.yaml", "actor_rollout_ref: {rollout: {n: 8}}", r"of verl(.|\n)*rollout.n 8: here it is training.num_generations"),
    ("a.sh", "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_response_length=9", r"of verl(.|\n)*max_completion_"),
    ("a.toml", "[orchestrator]\nrollouts_per_example = 8", "of prime-rl"), ("a.py", "import art\nart.gather()", "of ART"),
    ("a.sh", "python -m openrlhf.cli.train_ppo_ray --init_kl_coef 0.1", r"of OpenRLHF(.|\n)*algorithm.beta"),
    ("a.yaml", "{trainer: {algorithm: {}}, generator: {}}", "of SkyRL"), ("a.yaml", "{base_model: x, rl: grpo}", "of Axolotl"),
])  # fmt: skip
def test_files_that_are_no_such_config(name: str, text: str, said: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(UsageError, match=said):
        init_from(Path(name))


@pytest.mark.parametrize(("overrides", "section", "values"), [
    ("training.seed=3 training.learning_rate=1e-4", "training", {"seed": 3, "learning_rate": 1e-4}),
    ("lora.r=4 lora.alpha=9", "lora", {"r": 4, "alpha": 9}), ("training.max_steps=5", "training", {"max_steps": 5}),
    ("algorithm.type=grpo", "algorithm", {"type": "grpo"}), ("data.dataset_name=x.jsonl", "data", {"dataset_name": "x.jsonl"}),
])  # fmt: skip
def test_values_of_the_command_line_replace_those_of_the_file(
    overrides: str, section: str, values: dict[str, Any]
) -> None:
    text = "{model_name_or_path: tiny, num_generations: 8, num_train_epochs: 2, seed: 1}"
    config, report = made("a.yaml", text, overrides=overrides.split())
    assert {key: config[section].get(key) for key in values} == values
    excluded = {"training.max_steps=5": "num_train_epochs", "algorithm.type=grpo": "preset"}
    assert excluded.get(overrides) not in config[section]
    assert ("--task-module" in report.details["next"][0]) == (section != "data")


def test_an_impossible_value_of_the_command_line_writes_no_file() -> None:
    Path("a.yaml").write_text("num_generations: 8")
    with pytest.raises(ConfigError, match="sed"):
        init_from(Path("a.yaml"), overrides=["training.sed=3"])
    assert not Path("a-groupwise.yaml").exists()


def test_an_existing_file_is_kept() -> None:
    small("")
    with pytest.raises(UsageError, match="--force"):
        init_from(Path("a.yaml"))
    with pytest.raises(UsageError, match="there is no file"):
        init_from(Path("gone.yaml"))
