"""Rewards that the tests of rescoring load by path, some of which misbehave."""

import time


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def backwards(completions, **kwargs):
    return [-float(len(text)) for text in completions]


def raises_at_two(completions, number, **kwargs):
    if number[0] == 2:
        raise ValueError("two is too much")
    return length(completions)


def boo(completions, **kwargs):
    raise ValueError("boo")


def one_too_few(completions, **kwargs):
    return [0.0] * (len(completions) - 1)


def nothing(completions, **kwargs):
    return [None] * len(completions)


def hangs_at_one(completions, number, **kwargs):
    if number[0] == 1:
        time.sleep(600)
    return length(completions)


def ids(completion_ids, **kwargs):
    return [float(len(each)) for each in completion_ids]


def get_reward_funcs(config, tokenizer):
    if config["task"].get("broken"):
        return [(length, 2.0), (boo, 0.0)]
    return [(length, 2.0), (backwards, config["task"].get("backwards", 1.0))]
