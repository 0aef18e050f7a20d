"""Configs of TRL, open-r1 and Unsloth become ours, and what is lost is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.checks.findings import Report
from groupwise.checks.init_from import init_from
from groupwise.config import load_config
from groupwise.errors import UsageError
from groupwise.settings.tree import read_yaml

OPEN_R1 = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: open-r1/OpenR1-Math-220k
dataset_prompt_column: problem
system_prompt: "Think first."
bf16: true
use_vllm: true
do_eval: false
gradient_accumulation_steps: 4
gradient_checkpointing: true
learning_rate: 2.0e-05
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
max_prompt_length: 512
max_completion_length: 1024
max_steps: -1
num_generations: 16
num_train_epochs: 1
output_dir: data/Qwen2.5-1.5B-Open-R1-GRPO
per_device_train_batch_size: 16
reward_funcs: [accuracy, format, cosine, tag_count, my_rewards.py:polite]
cosine_max_len: 2000
reward_weights: [1.0, 1.0, 0.5, 1.0, 0.2]
report_to: [wandb]
save_strategy: epoch
seed: 42
top_p: 0.9
warmup_ratio: 0.1
mystery: 3
"""

UNSLOTH = """
import os
max_seq_length = 1024
max_prompt_length = 256
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="meta-llama/Llama-3.2-3B-Instruct", max_seq_length=max_seq_length, load_in_4bit=True, fast_inference=True,
    max_lora_rank=64, gpu_memory_utilization=0.6)
model = FastLanguageModel.get_peft_model(
    model, r=64, target_modules=["q_proj", "v_proj"], lora_alpha=64, use_gradient_checkpointing="unsloth", random_state=3407,
    use_rslora=True)
training_args = GRPOConfig(
    learning_rate=5e-6, adam_beta2=0.99, warmup_ratio=0.1, optim="adamw_8bit", per_device_train_batch_size=6, num_generations=6,
    max_prompt_length=max_prompt_length, max_completion_length=max_seq_length - max_prompt_length, max_steps=250,
    loss_type="dr_grpo", report_to="none", output_dir="outputs")
trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[xmlcount_reward_func, polite], args=training_args)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(name: str, text: str, **more: Any) -> tuple[dict[str, Any], Report]:
    """What was written, which is a config of ours, and the report."""
    Path(name).write_text(text)
    report = init_from(Path(name), **more)
    load_config(Path(report.details["file"]))
    return read_yaml(Path(report.details["file"])).values, report


def told(report: Report, level: str) -> set[str]:
    return {finding.name for finding in report.findings if finding.level == level}


def test_open_r1() -> None:
    config, report = made("recipe.yaml", OPEN_R1, processes=8)
    assert config["model"] == {"name": "Qwen/Qwen2.5-1.5B-Instruct", "revision": "main"}
    assert config["lora"] is None
    training = config["training"]
    assert (training["prompts_per_step"], training["num_generations"]) == (16 * 4 * 8 // 16, 16)
    assert (training["max_steps"], training["num_train_epochs"]) == (None, 1)
    assert training["lr_scheduler_type"] == "cosine"
    assert config["algorithm"] == {"preset": "trl_default"}
    data, think = config["data"], {"reasoning_tag": "think"}
    assert (data["prompt_column"], data["max_prompt_length"]) == ("problem", 512)
    assert config["rewards"]["reward_funcs"] == [
        "math_answer", {"name": "strict_format", **think}, {"name": "length", "max_length": 2000}, {"name": "xml_count", **think},
        "my_rewards.py:polite",
    ]  # fmt: skip
    assert config["rewards"]["reward_weights"] == [1.0, 1.0, 0.5, 1.0, 0.2]
    assert (config["run"]["dir"], config["run"]["name"]) == ("data", "Qwen2.5-1.5B-Open-R1-GRPO")
    assert told(report, "warning") == {"top_p", "lr_scheduler_kwargs", "mystery"}
    text = Path(report.details["file"]).read_text()
    assert "# From learning_rate of recipe.yaml." in text
    assert "per_device_train_batch_size 16 × gradient_accumulation_steps 4 × 8 processes" in text


def test_a_notebook_of_unsloth_as_a_python_file() -> None:
    config, report = made("train.py", UNSLOTH)
    assert config["model"] == {
        "name": "meta-llama/Llama-3.2-3B-Instruct", "backend": "unsloth", "load_in_4bit": True, "max_seq_length": 1024,
    }  # fmt: skip
    modules = ["q_proj", "v_proj"]
    assert config["lora"] == {"r": 64, "alpha": 64, "target_modules": modules, "rslora": True}
    assert config["training"]["prompts_per_step"] == 1
    assert config["training"]["seed"] == 3407
    assert config["sampler"]["max_completion_length"] == 768
    assert config["algorithm"] == {"type": "dr_grpo"}
    assert config["rewards"]["reward_funcs"] == ["xml_count", "train.py:polite"]
    assert told(report, "warning") == set()


def test_a_dump_of_grpo_config_says_nothing_of_what_stands_at_its_default() -> None:
    dump = {
        "output_dir": "out", "beta": 0.04, "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 50, "fp16": False,
        "dataloader_num_workers": 0, "hub_model_id": None, "push_to_hub": False, "top_k": None, "top_p": 1.0, "scale_rewards": "none",
        "loss_type": "grpo", "jit_mode_eval": False, "label_names": None, "average_tokens_across_devices": True, "warmup_steps": 0,
    }  # fmt: skip
    config, report = made("config.json", json.dumps(dump))
    assert config["algorithm"] == {"type": "grpo", "beta": 0.04, "scale_rewards": "none"}
    assert config["training"]["prompts_per_step"] == 2
    assert told(report, "warning") == {"model_name_or_path"}


def test_values_that_only_running_tells_and_numbers_that_do_not_fit_are_told() -> None:
    numbers = "learning_rate=1/2**20, num_generations=n(), save_steps=0.1, max_steps='auto', beta=b"
    config, report = made(
        "a.py",
        f"GRPOConfig({numbers})\nGRPOTrainer(m, reward_funcs=['a.b.f', 'get_soft_overlong_punishment'])",
    )
    training = config["training"]
    assert (training["learning_rate"], training["num_generations"]) == (2**-20, 8)
    own, long = config["rewards"]["reward_funcs"]
    assert (own, long) == ("a.b:f", {"name": "overlong", "max_length": 256})
    lost = "model_name_or_path num_generations save_steps max_steps beta"
    assert told(report, "warning") == set(lost.split())


@pytest.mark.parametrize(("line", "expected"), [
    ("loss_type: bnpo", {"preset": "trl_default"}), ("importance_sampling_level: sequence", {"type": "gspo"}),
    ("scale_rewards: false", {"preset": "trl_default", "scale_rewards": "none"}), ("loss_type: cispo", {"type": "cispo"}),
])  # fmt: skip
def test_losses(line: str, expected: dict[str, Any]) -> None:
    config, _ = made("a.yaml", f"model_name_or_path: tiny\nnum_generations: 8\n{line}\n")
    assert config["algorithm"] == expected


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.yaml", "model: {name: tiny}\n", "no key of a GRPO config"), ("a.json", "[1]", "not keys"), ("a.py", "def f(:", "no Python"),
])  # fmt: skip
def test_files_that_are_no_such_config(name: str, text: str, said: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(UsageError, match=said):
        init_from(Path(name))
    with pytest.raises(UsageError, match="there is no file"):
        init_from(Path("gone.yaml"))


def test_an_existing_file_is_kept() -> None:
    made("a.yaml", "num_generations: 8\nmodel_name_or_path: tiny\n")
    with pytest.raises(UsageError, match="--force"):
        init_from(Path("a.yaml"))
    init_from(Path("a.yaml"), force=True)
