"""A task whose rewards take `task.wait` seconds for each group and always teach: what a judge or a test run would cost."""

import time


def get_rl_dataset(config):
    """Prompts of about a dozen tokens."""
    return [{"prompt": f"Write a sentence about the number {number}."} for number in range(512)]


def get_reward_funcs(config, tokenizer):
    """One function, which waits."""
    wait = config["task"]["wait"]

    def waiting(completions, **kwargs):
        time.sleep(wait)
        return [float(index % 2) for index in range(len(completions))]

    return [waiting]
