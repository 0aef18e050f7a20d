"""A teacher that a random model can follow: the letters after a given one."""

import random

LETTERS = "abcde"


def rows(count, seed):
    generator = random.Random(seed)
    return [
        {"prompt": f"after {letter}{index % 10}:", "completion": LETTERS, "number": index}
        for index, letter in enumerate(generator.choices(LETTERS, k=count))
    ]


def get_sft_dataset(config, tokenizer):
    return rows(11, seed=0)


def get_sft_eval_dataset(config, tokenizer):
    return rows(4, seed=1)
