"""Column addition: a task for both ways of learning, from worked solutions and from rewards.

`groupwise sft` shows the model how a sum is worked out, digit by digit; `groupwise rl` then rewards right results. The solutions teach
how to write a sum out; rewards alone would have to wait until the model does that by chance.
"""

import random
import re
from statistics import fmean

DIGITS = 3
HELD_OUT, WORKED, REWARDED = 200, 64, 2000
RULE = "Add the columns from right to left, with the carry, one line each. Then write Answer: and the sum."


def get_sft_dataset(config, tokenizer):
    """Worked solutions."""
    return [worked(*pair) for pair in pairs()[HELD_OUT : HELD_OUT + WORKED]]


def get_sft_eval_dataset(config, tokenizer):
    """Solutions of the held-out sums."""
    return [worked(*pair) for pair in pairs()[:HELD_OUT]]


def get_rl_dataset(config):
    """Sums without solutions."""
    return [asked(*pair) for pair in pairs()[HELD_OUT + WORKED :]]


def get_eval_dataset(config):
    """The held-out sums."""
    return [asked(*pair) for pair in pairs()[:HELD_OUT]]


def get_reward_funcs(config, tokenizer):
    """A right answer counts most; any answer is worth a little."""
    return [(right, 1.0), (written_out, 0.1)]


def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    """The share of right sums."""
    sums = [row["sum"] for row in dataset_rows]
    return {"metrics": {"accuracy": fmean(right(completions, sums))}}


def right(completions, sum, **kwargs):
    """1 for the right number after `Answer:`."""
    return [float(answer(text) == wanted) for text, wanted in zip(completions, sum, strict=True)]


def written_out(completions, **kwargs):
    """1 where there is an answer at all: something to begin with for a model that has seen no solution."""
    return [float(answer(text) is not None) for text in completions]


def pairs():
    """Numbers to add, no pair twice: held out, worked out and rewarded ones have none in common."""
    least, most = 10 ** (DIGITS - 1), 10**DIGITS
    numbers = random.Random(0).sample(range((most - least) ** 2), HELD_OUT + WORKED + REWARDED)
    return [(least + n // (most - least), least + n % (most - least)) for n in numbers]


def asked(a, b):
    """A row for rewards."""
    return {"prompt": [{"role": "user", "content": f"{RULE}\n{a} + {b}"}], "sum": a + b}


def worked(a, b):
    """A row of a teacher."""
    return {**asked(a, b), "completion": [{"role": "assistant", "content": solution(a, b)}]}


def solution(a, b):
    """347 + 285: `7+5+0=12`, `4+8+1=13`, `3+2+1=6`, `Answer: 632`."""
    lines, carry = [], 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        lines.append(f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return "\n".join([*lines, f"Answer: {a + b}"])


def answer(completion):
    """The number after the last `Answer:`, or None. Chat prompts have chat completions: a list of one message."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    found = re.findall(r"Answer:\s*(\d+)", text)
    return int(found[-1]) if found else None
