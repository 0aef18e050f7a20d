"""A loop of `benchmarks.serving`: `groupwise rl` on the given prompts, a step for each line on standard input.

With a third word, the URL of a server, its sampler and learner are there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import groupwise
from benchmarks.serving import PROMPTS, reward
from benchmarks.work import ALPHA, LEARNING_RATE, MODEL, RANK, W1


def _say(text: str) -> None:
    """What callbacks print is shown beside the progress; this goes to whoever measures."""
    os.write(1, f"{text}\n".encode())


class Turns(groupwise.Callback):
    """A callback that begins a step when it is told to, and says how long it took."""

    def on_step_begin(self, run: Any) -> None:
        if run.step == 0:
            _say("ready")
        sys.stdin.readline()
        self._begun = time.perf_counter()

    def on_step_end(self, run: Any, metrics: Any) -> None:
        _say(str(time.perf_counter() - self._begun))


class Task:
    """The prompts in their order."""

    def get_rl_dataset(self, config: Any) -> list[dict[str, str]]:
        with open(os.environ[PROMPTS]) as file:
            return [{"prompt": text} for step in json.load(file) for text in step]

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        return [rewarded]

    def get_rl_callbacks(self, config: Any, tokenizer: Any, output_dir: str) -> list[Any]:
        return [Turns()]


def rewarded(completions: list[str], **_: Any) -> list[float]:
    """As the client rewards."""
    return [reward(text) for text in completions]


if __name__ == "__main__":
    groupwise.rl(
        {
            "model": {"name": MODEL},
            "lora": {"r": RANK, "alpha": ALPHA},
            "sampler": {
                "max_completion_length": W1.new_tokens,
                "min_completion_length": W1.new_tokens,
            },
            "training": {
                "max_steps": int(sys.argv[2]),
                "prompts_per_step": len(W1.prompts),
                "num_generations": W1.members,
                "learning_rate": LEARNING_RATE,
            },
            "data": {"shuffle": False},
            "rewards": {"in_process": True},
            "run": {
                "name": "alone",
                "dir": sys.argv[1],
                "save_steps": 10_000,
                "server": sys.argv[3] if len(sys.argv) > 3 else None,
            },
        },
        Task(),
    )
