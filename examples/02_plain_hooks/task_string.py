"""String prompts, which are tokenised as they stand: continue a line with words in lower case.

Nothing but `datasets` is imported, and the reward functions take what those of TRL take.
"""

from datasets import Dataset

OPENINGS = [
    "The sea is",
    "My garden has",
    "On the table there is",
    "In winter I like",
    "A good story needs",
]


def get_rl_dataset(config):
    """Rows to train on."""
    return Dataset.from_list([{"prompt": text, "forbidden": "the"} for text in OPENINGS])


def lower_case(prompts, completions, **kwargs) -> list[float]:
    """Share of letters in lower case."""
    return [sum(c.islower() for c in text) / max(len(text), 1) for text in completions]


def avoids_word(prompts, completions, forbidden, **kwargs) -> list[float]:
    """1 where the forbidden word does not occur."""
    pairs = zip(completions, forbidden, strict=True)
    return [float(word not in text.lower().split()) for text, word in pairs]


def get_reward_funcs(config, tokenizer):
    """Both count the same."""
    return [lower_case, avoids_word]
