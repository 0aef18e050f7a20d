"""TRL's half of `benchmarks.start_up`: the script that a user of TRL would write.

It imports nothing of Groupwise, which would only delay it. Its argument is JSON: the folder of the `model`, its `dtype`, `lora` and
`settings` in the words of peft and TRL, the `task`'s file, and its `note`.
"""

from __future__ import annotations

import json
import runpy
import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    """Train."""
    given = json.loads(sys.argv[1])
    task, config = runpy.run_path(given["task"]), {"task": {"note": given["note"]}}
    dtype = getattr(torch, given["dtype"])
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype),
        reward_funcs=task["get_reward_funcs"](config, tokenizer),
        args=GRPOConfig(**given["settings"]),
        train_dataset=Dataset.from_list(task["get_rl_dataset"](config)),
        processing_class=tokenizer,
        peft_config=LoraConfig(**given["lora"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
