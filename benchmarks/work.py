"""The fixed work of the benchmarks: how many prompts of which length, how many completions, how long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

MODEL = "smollm2-135m-instruct"
RANK, ALPHA = 16, 32
LEARNING_RATE = 1e-5


@dataclass(frozen=True, slots=True)
class Workload:
    """What one step samples and learns from."""

    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    members: int
    """Completions of each prompt."""
    new_tokens: int
    """Of each completion, exactly; with `natural` at most."""
    natural: bool = False
    """Whether questions are asked that completions answer and then stop; the lengths of prompts are then limits, too."""

    @property
    def described(self) -> str:
        """In words."""
        if self.natural:
            return (
                f"{len(self.prompts)} questions × {self.members} completions that stop where they will, "
                f"after {self.new_tokens} tokens at the latest"
            )
        lengths = ", ".join(map(str, self.prompts))
        return (
            f"prompts of {lengths} tokens × {self.members} completions of {self.new_tokens} tokens"
        )

    @property
    def sampled(self) -> int:
        """Tokens that a step samples (at most)."""
        return len(self.prompts) * self.members * self.new_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.prompts)


@dataclass(frozen=True, slots=True)
class Rules:
    """What both sides of a comparison keep to."""

    dtype: str
    """Number format of the base."""
    model: str = MODEL
    """Name or folder."""
    vllm: bool = False
    """Whether TRL samples by vLLM in its own process, on the GPU on which it learns."""
    groups: int = 1
    """Groups in a micro-batch of TRL."""


W1 = Workload((53, 73, 86, 91), 8, 48)
CORNERS = {
    "short": Workload((50,) * 4, 4, 48),
    "many": Workload((50, 50), 32, 48),
    "long prompts": Workload((800,) * 4, 8, 48),
    "long completions": Workload((50,) * 4, 8, 256),
    "one long group": Workload((200,), 16, 256),
    "long everything": Workload((800, 800), 4, 256),
}
ON_A_GPU = Workload((512,) * 32, 8, 256)
NATURAL = Workload((80,) * 4, 8, 128, natural=True)
QUESTIONS = (
    "What is {} + {}? Answer with the number only.",
    "Name {} animals and {} plants, nothing else.",
    "Write a sentence of {} words about the number {}.",
    "Is {} larger than {}? Explain in one sentence.",
)


def prompts(work: Workload, tokenizer: Any, step: int) -> tuple[str, ...]:
    """Texts of exactly so many tokens, or questions in the model's chat format; others in each step."""
    rng = random.Random(step)
    if work.natural:
        return tuple(
            _question(QUESTIONS[number % len(QUESTIONS)], rng, tokenizer)
            for number in range(len(work.prompts))
        )
    words = _words(tokenizer)
    return tuple(_text(words, length, rng, tokenizer) for length in work.prompts)


def _question(form: str, rng: random.Random, tokenizer: Any) -> str:
    messages = [{"role": "user", "content": form.format(rng.randint(2, 9), rng.randint(2, 9))}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _text(words: Sequence[str], length: int, rng: random.Random, tokenizer: Any) -> str:
    text = "".join(rng.choice(words) for _ in range(length))
    assert len(tokenizer(text)["input_ids"]) == length, "words are one token each"
    return text


@cache
def _words(tokenizer: Any) -> list[str]:
    """Words that are one token with the space before them, alone and beside each other."""
    found = [tokenizer.decode([token]) for token in range(1000, 20_000)]
    return sorted(
        {
            word
            for word in found
            if word[0] == " " and word[1:].isascii() and word[1:].islower() and word[1:].isalpha()
        }
    )
