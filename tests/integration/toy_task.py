"""A task that a random model can learn: write the letter that is asked for."""

import random

LETTERS = "abcde"


def rows(count, seed):
    generator = random.Random(seed)
    return [
        {"prompt": f"write {generator.choice(LETTERS)}{index % 10}:", "answer": "a"}
        for index in range(count)
    ]


def get_rl_dataset(config):
    return rows(40, seed=0)


def get_eval_dataset(config):
    return rows(8, seed=1)


def share(completions, answer, **kwargs):
    return [text.count(gold) / 8 for text, gold in zip(completions, answer, strict=True)]


def get_reward_funcs(config, tokenizer):
    return [share]


def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    return {
        "metrics": {"share": sum(text.count("a") for text in completions) / (8 * len(completions))}
    }
