"""The `rollout` section: what one attempt at an example consists of, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from groupwise.core.settings.schema import Conflict, Strict, setting
from groupwise.tasks.rewards.config import START_LIMIT, idle_in_process

HEADERS = 16
"""Tokens that a chat template may put around the two messages of a turn; usual ones put 10 to 14."""


class RolloutConfig(Strict):
    """Keys of one type are refused with another, where they would have no effect."""

    not_yet: ClassVar[frozenset[str]] = frozenset({"tool_choice", "parallel_tool_calls"})

    type: Literal["single", "two_stage", "environment", "external"] = setting(
        "single",
        "single: one completion. two_stage: reasoning, then an answer, each of bounded length. environment: the task's "
        "get_environment answers each completion until it is done. external: an environment of another library plays in a "
        "process of its own and asks the policy (--task-module verifiers:NAME).",
    )
    max_reasoning_length: int = setting(
        800,
        "two_stage: longest reasoning in tokens; it is cut off there, and the answer begins.",
        ge=1,
    )
    max_answer_length: int = setting(100, "two_stage: longest answer in tokens.", ge=1)
    reasoning_end: str = setting(
        "</think>",
        "two_stage: the text that ends the reasoning; it is inserted if the policy did not write it.",
        min_length=1,
    )
    answer_start: str = setting(
        "<answer>", "two_stage: the text inserted before the answer; may be empty."
    )
    max_turns: int = setting(
        10,
        "environment, external: maximum completions of a rollout; it is cut off after them.",
        ge=1,
    )
    max_rollout_length: int | None = setting(
        None,
        "environment, external: maximum tokens of a rollout after its first prompt, observations included; it is cut off there. null: "
        "max_turns × (2 × the longest completion + 16), which leaves room for observations as long as completions, and for the "
        "headers of chat messages.",
        ge=1,
    )
    max_seconds: float = setting(
        300.0,
        "environment, external: seconds that the environment may take for all turns of a rollout together; after that the rollout "
        "counts as timed out and does not teach.",
        on_resume="free",
        gt=0,
    )
    time_limit: float = setting(
        30.0,
        "environment: seconds that it may take for one turn; after that it is ended, and the rollout counts as timed out.",
        on_resume="free",
        gt=0,
    )
    start_limit: float = setting(
        START_LIMIT,
        "environment, external: seconds that a worker may take to start: to import the task file, or the library, and get the environment.",
        on_resume="free",
        gt=0,
    )
    workers: int = setting(
        1,
        "environment, external: processes that hold environments; each gets a part of the groups. With type environment a process "
        "works on one turn at a time, with type external on many attempts.",
        on_resume="free",
        ge=1,
    )
    in_process: bool = setting(
        False,
        "environment: hold them in this process, for a task that cannot be imported again. "
        "A turn that exceeds the time limit then stops the run.",
        on_resume="warn",
    )

    max_concurrent: int = setting(
        64,
        "external: maximum attempts at the same time, in all processes together.",
        on_resume="free",
        ge=1,
    )

    trained_turns: str = setting(
        "all",
        "external: which turns teach: all, last, with_tool_calls, or a function of your own (FILE.py:NAME).",
        min_length=1,
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Keys of another type, and worker keys without workers."""
        for key, owners in OWN_KEYS.items():
            if (
                self.type not in owners
                and getattr(self, key) != self.__class__.model_fields[key].default
            ):
                yield Conflict(
                    f"{key} has no effect where type is {self.type}; set type to {' or '.join(owners)}, or leave it out.",
                    (key, "type"),
                )
        if self.type == "environment":
            yield from idle_in_process(self, "keeps environments in one process")

    def longest(self, max_completion_length: int) -> int:
        """Most tokens that may follow a prompt, given the most tokens of one completion."""
        if self.type == "two_stage":
            # A byte is at most one token.
            inserted = len((self.reasoning_end + self.answer_start).encode())
            return self.max_reasoning_length + inserted + self.max_answer_length
        if self.type in TURNS:
            turn = 2 * max_completion_length + HEADERS
            return self.max_rollout_length or self.max_turns * turn
        return max_completion_length

    def longest_written(self, max_completion_length: int) -> int:
        """Most tokens that the policy itself may write in one rollout."""
        if self.type == "two_stage":
            return self.max_reasoning_length + self.max_answer_length
        if self.type in TURNS:
            tokens = self.max_turns * max_completion_length
            return min(tokens, self.max_rollout_length or tokens)
        return max_completion_length


TURNS = ("environment", "external")
"""Types whose rollouts have several turns."""

OWN_KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("max_reasoning_length", "max_answer_length", "reasoning_end", "answer_start"),
        ("two_stage",),
    ),
    **dict.fromkeys(
        ("max_turns", "max_rollout_length", "max_seconds", "start_limit", "workers"), TURNS
    ),
    "time_limit": ("environment",),
    "in_process": ("environment",),
    "max_concurrent": ("external",),
    "trained_turns": ("external",),
}
"""The keys that belong to some types only, with these types."""
