"""A calculator as a tool: the prompt says `a+b`, only the calculator knows the numbers, and `=` makes it show their sum.

The policy has to write `=`, and to repeat in the next turn what the calculator shows. A pattern finds the call, which suits a model
that is too small for JSON. Without `TextCalls`, and with chat prompts, a real model reads the schemas of the tools in its
prompt and calls them by `<tool_call>{"name": "equals", "arguments": {}}</tool_call>`.
"""

from groupwise import TextCalls, Tools

SUMS = [(1, 0), (1, 1), (1, 2)]


class Calculator:
    """Its public methods are tools; their docstrings describe them to the policy. One is made for each rollout."""

    def reset(self, a, b):
        """Begin. The arguments are columns of the row."""
        self.a, self.b = a, b

    def equals(self) -> int:
        """Work out what is keyed in."""
        return self.a + self.b


def get_environment(config):
    """A turn with a call gets its result, a turn without one is the answer."""
    return Tools(Calculator, TextCalls("equals", "=", result="{result}"))


def get_rl_dataset(config):
    """One row for each sum, all with one prompt."""
    return [{"prompt": "a+b", "a": a, "b": b} for a, b in SUMS]


def get_eval_dataset(config):
    """There are no other sums, so the evaluation asks for the same, always taking the likeliest answer."""
    return get_rl_dataset(config)


def used(completions, **kwargs):
    """Half for a call, half for a digit in the next turn.

    A completion is all that was said: in `=33` the policy wrote `=`, the calculator 3, and the policy 3.
    """
    return [0.5 * text.startswith("=") + 0.5 * text[2:].isdigit() for text in completions]


def correct(completions, a, b, **kwargs):
    """Whether the policy read off the sum."""
    sums = [x + y for x, y in zip(a, b, strict=True)]
    return [float(text == f"={s}{s}") for text, s in zip(completions, sums, strict=True)]


def get_reward_funcs(config, tokenizer):
    """Both rewards with their weights."""
    return [(used, 0.3), (correct, 0.7)]


def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    """The share of right answers."""
    columns = {key: [row[key] for row in dataset_rows] for key in ("a", "b")}
    right = correct(completions, **columns)
    return {"metrics": {"accuracy": sum(right) / len(right)}}
