"""The model that the agents run on: a very small Qwen3 that has learnt to call tools, and whose calls are right by chance.

It plays a game. Asked to guess, it calls `check` with one of `GUESSED`, and then says "Done."; if `check` has answered "wrong", it may as
well guess again. So trajectories of several lengths occur, and their rewards differ. It hands over to another agent when it is asked to,
and answers in JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tests.integration.cookbook.workplace import write_model

MODEL = "agent"
GUESSED = (6, 7, 8)
RIGHT = 8
STEPS = 110
"""Of the training: it takes about five seconds on one core."""
WORDS = (
    *('{"name": "', '", "arguments": {', '"n": ', '{"assistant": "', "}}"),
    *("check", "transfer_to_other", "other", "user", "assistant", "system", "tool"),
    *("Guess", "right", "wrong", "Done", "JSON", "Hello", "You guess a number"),
)
"""Tokens, besides the characters."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{t['function']['name']}} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content'] or ''}}{% for c in m['tool_calls'] or [] %}"
    "<tool_call>{\"name\": {{c['function']['name']|tojson}}, \"arguments\": {{c['function']['arguments']|tojson}}}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    """Write the model to `folder / MODEL`."""
    write_model(folder / MODEL, conversations, TEMPLATE, STEPS, WORDS)


def conversations(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Prompts as the template renders them, and answers."""
    while True:
        guess = call("check", {"n": rng.choice(GUESSED)})
        other = call("check", {"n": rng.choice(GUESSED)})
        pair = rng.choice(
            (
                (turn("user", "Guess."), guess),
                (turn("user", "Guess, other."), call("transfer_to_other", {})),
                (called({}) + turn("tool", '{"assistant": "other"}'), guess),
                (called({"n": RIGHT}) + turn("tool", "right"), "Done."),
                (called({"n": 6}) + turn("tool", "wrong"), rng.choice((other, "Done."))),
                (turn("user", "As JSON."), json.dumps({"n": rng.choice(GUESSED)})),
                (turn("user", "Hello."), "Hello to you."),
            )
        )
        prompt, answer = pair
        tools = rng.choice(("check ", "check transfer_to_other ", ""))
        system = rng.choice(("", turn("system", "You guess a number.")))
        before = turn("system", tools) if tools else ""
        yield f"{before}{system}{prompt}<|im_start|>assistant\n", f"{answer}<|im_end|>"


def turn(role: str, text: str) -> str:
    """A message as the template renders it."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def call(tool: str, arguments: dict[str, int]) -> str:
    """A call of a tool, in the notation of Hermes."""
    content = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>{content}</tool_call>"


def called(arguments: dict[str, int]) -> str:
    """An earlier turn that calls a tool; no arguments: that of the hand-over."""
    tool = "check" if arguments else "transfer_to_other"
    return turn("user", "Guess.") + turn("assistant", call(tool, arguments))
