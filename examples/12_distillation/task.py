"""Spelling out letters: `x3:` is answered by `ab`. A model of a few thousand parameters learns it in seconds, and then teaches another."""

WORDS = {"x": "ab", "y": "cd", "z": "ef"}
SEEN, UNSEEN = range(6), range(6, 10)


def rows(digits):
    """Each letter with each digit; the digit means nothing."""
    return [
        {"prompt": f"{letter}{digit}:", "answer": word}
        for digit in digits
        for letter, word in WORDS.items()
    ]


def get_sft_dataset(config, tokenizer):
    """Answers for the teacher, which learns from examples."""
    return [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows(SEEN)]


def get_rl_dataset(config):
    """Prompts for the policy, which learns from the teacher."""
    return rows(SEEN)


def get_eval_dataset(config):
    """Digits that neither has seen."""
    return rows(UNSEEN)


def right(completions, answer, **kwargs):
    """1 for the two letters: measured, not trained on."""
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def get_reward_funcs(config, tokenizer):
    """What is measured."""
    return [right]


def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    """What an evaluation reports."""
    scores = right(completions, [row["answer"] for row in dataset_rows])
    return {"metrics": {"accuracy": sum(scores) / len(scores)}}
