"""A reward and a pipeline of one's own, for `groupwise-train-grpo`; docs/how-to/init.md speaks of them."""


def brief(completions, **columns):
    """More for less."""
    return [1 / (1 + len(text)) for text in completions]


def with_a_hint(row):
    """Sums with nothing to add are left out."""
    if row["prompt"].startswith("0+"):
        return None
    return {**row, "prompt": f"Add: {row['prompt']}", "reference": row["answer"]}
