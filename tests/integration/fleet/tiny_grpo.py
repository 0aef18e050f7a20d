"""A job of the kind GRPO that trains in seconds on any CPU: its files, its row and its command, and what it leaves behind.

    write_files(work)          what has to lie in the working folder
    row(job_id="…")            the columns of a full submission; `dataset` travels with it
    ARGUMENTS                  the same as a command line
    EXPECTED                   files that are there when it has ended, relative to the working folder

Every second step is a checkpoint, in `CHECKPOINTS`/step-N.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = "letters.jsonl"
REWARDS = "letter_rewards.py"
STEPS = 6
SAVE_STEPS = 2
CHECKPOINTS = "outputs/grpo/checkpoints"

ROWS = [
    {"prompt": f"{first}{second}?", "answer": second, "wanted": "abcdefghijklm"}
    for first in "abcdef"
    for second in "uvwxyz"
]

SOURCE = '''\
"""Rewards that a model without any knowledge can learn: which letters it writes."""


def share(completions, wanted, **columns):
    """The share of characters that are wanted, of six."""
    pairs = zip(completions, wanted, strict=True)
    return [sum(letter in letters for letter in text) / 6 for text, letters in pairs]
'''

HYPERPARAMS: dict[str, Any] = {
    "max_completion_length": 6, "lora.r": 4, "lora.alpha": 8, "run.save_steps": SAVE_STEPS,
    "run.threads": 1, "rewards.in_process": True,
}  # fmt: skip
COLUMNS: dict[str, Any] = {
    "job_type": "GRPO", "model": "tiny", "dataset": f"file:{DATA}",
    "reward_function": f"{REWARDS}:share,correctness", "preprocessing_pipeline": "generic",
    "hyperparams": HYPERPARAMS, "use_unsloth": False, "output_dir": "outputs", "max_steps": STEPS,
    "learning_rate": 0.01, "batch_size": 2, "num_generations": 4,
}  # fmt: skip
ARGUMENTS = (
    "groupwise-train-grpo", "--model=tiny", f"--dataset=./{DATA}",
    "--preprocessing_pipeline=generic", f"--max_steps={STEPS}", "--learning_rate=0.01",
    "--batch_size=2", "--num_generations=4", "--max_prompt_length=256", "--max_completion_length=6",
    "--output_dir=outputs", f"--reward_function={REWARDS}:share", "--reward_function=correctness",
    "lora.r=4", "lora.alpha=8", f"run.save_steps={SAVE_STEPS}", "run.threads=1",
    "rewards.in_process=true",
)  # fmt: skip
EXPECTED = (
    "outputs/config.json", "outputs/model.safetensors", "outputs/tokenizer.json",
    "outputs/tokenizer_config.json", "outputs/README.md", "outputs/grpo/config.json",
    "outputs/grpo/run.db", "outputs/grpo/summary.json",
    "outputs/grpo/final/adapter_model.safetensors", f"{CHECKPOINTS}/step-{STEPS}/manifest.json",
)  # fmt: skip


def files() -> dict[str, bytes]:
    """What travels with the job, by path in the working folder."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    return {DATA: lines.encode(), REWARDS: SOURCE.encode()}


def write_files(work: Path) -> None:
    """Make the working folder ready."""
    for name, content in files().items():
        (work / name).write_bytes(content)


def row(**columns: Any) -> dict[str, Any]:
    """A row of `jobs`, as whoever submits it writes it."""
    return {**COLUMNS, **columns}
