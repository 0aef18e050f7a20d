"""Adding two numbers: a whole task in one file. Copy it and change what is asked and what is rewarded."""

import random
import re

PAIRS = [(a, b) for a in range(1, 41) for b in range(a, 41)]
random.Random(0).shuffle(PAIRS)
HELD_OUT = 128


def row(a, b):
    """A question with its answer; every column beside `prompt` reaches the rewards."""
    messages = [
        {"role": "system", "content": "Answer with the number only."},
        {"role": "user", "content": f"What is {a} + {b}?"},
    ]
    return {"prompt": messages, "answer": str(a + b)}


def get_rl_dataset(config):
    """Rows to train on."""
    return [row(a, b) for a, b in PAIRS[HELD_OUT:]][: config["task"].get("train_size")]


def get_eval_dataset(config):
    """Other rows, to see whether what was learnt holds elsewhere."""
    return [row(a, b) for a, b in PAIRS[:HELD_OUT]]


def is_right(text, answer):
    """Whether the last number is the answer."""
    return re.findall(r"\d+", text)[-1:] == [answer]


def correct(completions, answer, **kwargs):
    """1 where the completion ends with the answer."""
    pairs = zip(completions, answer, strict=True)
    return [float(is_right(completion[0]["content"], gold)) for completion, gold in pairs]


def brief(completions, **kwargs):
    """1 where the completion is a number and nothing else: what a prompt asks for may have a part of its own."""
    return [float(completion[0]["content"].strip().isdecimal()) for completion in completions]


def get_reward_funcs(config, tokenizer):
    """What is rewarded, and how much."""
    return [(correct, 1.0), (brief, 0.2)]


def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    """What an evaluation reports."""
    pairs = zip(completions, dataset_rows, strict=True)
    right = [is_right(text, row["answer"]) for text, row in pairs]
    return {"metrics": {"accuracy": sum(right) / len(right)}, "right": right}
