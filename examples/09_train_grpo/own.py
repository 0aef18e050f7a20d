"""A reward and a pipeline of your own for `groupwise-train-grpo`; see docs/how-to/init.md."""


def brief(completions, **columns):
    """Shorter completions earn more."""
    return [1 / (1 + len(text)) for text in completions]


def with_a_hint(row):
    """Leave out sums that begin with 0, and add a hint to the others."""
    if row["prompt"].startswith("0+"):
        return None
    return {**row, "prompt": f"Add: {row['prompt']}", "reference": row["answer"]}
