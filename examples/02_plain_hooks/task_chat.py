"""Chat prompts, which go through the model's template: answer in at most so many words.

Nothing but `datasets` is imported, and the reward functions take what those of TRL take: a completion is a list with
the assistant's message.
"""

from datasets import Dataset

QUESTIONS = [
    "What is rain?",
    "Why do cats purr?",
    "How does a wheel work?",
    "What is bread made of?",
]


def get_rl_dataset(config):
    """Rows to train on."""
    rows = [
        {"prompt": [{"role": "user", "content": question}], "limit": 5 + index}
        for index, question in enumerate(QUESTIONS)
    ]
    return Dataset.from_list(rows)


def within_limit(prompts, completions, limit, **kwargs) -> list[float]:
    """1 where the answer has no more words than the row allows."""
    counts = [len(completion[0]["content"].split()) for completion in completions]
    return [float(0 < count <= most) for count, most in zip(counts, limit, strict=True)]


def whole_sentence(prompts, completions, **kwargs) -> list[float]:
    """1 where the answer ends as a sentence does."""
    return [float(completion[0]["content"].strip().endswith(".")) for completion in completions]


def get_reward_funcs(config, tokenizer):
    """Both count the same."""
    return [within_limit, whole_sentence]
