"""A task that a random model can learn: write small letters."""

import random

LETTERS = "abcde"


def rows(count, seed):
    generator = random.Random(seed)
    return [
        {"prompt": f"write {generator.choice(LETTERS)}{index % 10}:", "wanted": "abcdefghijklm"}
        for index in range(count)
    ]


def get_rl_dataset(config):
    return rows(40, seed=0)


def get_eval_dataset(config):
    return rows(8, seed=1)


def share(completions, wanted, **kwargs):
    """The share of characters that are wanted, of six."""
    pairs = zip(completions, wanted, strict=True)
    return [sum(letter in letters for letter in text) / 6 for text, letters in pairs]


def get_reward_funcs(config, tokenizer):
    return [share]


def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    shares = share(completions, [row["wanted"] for row in dataset_rows])
    return {"metrics": {"share": sum(shares) / len(shares)}}
