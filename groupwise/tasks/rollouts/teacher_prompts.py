"""What the teacher of a distillation reads in place of the policy's prompt: the same question with what only the teacher knows.

It comes from the task's hook `teacher_prompt(example)`, which gets the row with its prompt and returns text or messages, or from the
template `teacher.prompt`. A template may name columns of the row, which are the same for a whole group, and what was found out about the
group's rollouts: `{demonstration}`, another completion that did well, and `{feedback}`, what a reward function noted on this one. A rollout
for which one of them is missing keeps the policy's prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.core.errors import ConfigError, TaskError
from groupwise.core.types import Example, Group, Message, Prompt, Rollout
from groupwise.tasks.rollouts.dialogue import first_ids

PLACEHOLDER = re.compile(r"\{(\w+)\}")
PROMPT, DEMONSTRATION, FEEDBACK = "prompt", "demonstration", "feedback"
OF_ROLLOUTS = (DEMONSTRATION, FEEDBACK)
"""What a template may name that is known only after sampling."""


@dataclass(frozen=True, slots=True)
class TeacherPrompts:
    """Writes the teacher's prompts."""

    tokenizer: Any
    room: int
    """Most tokens that such a prompt may have, so that the teacher's context holds it and the longest completion."""
    template: str | None = None
    demonstration_reward: float = 1.0
    """Least reward of a completion that is shown to the teacher of another one."""
    hook: Callable[[Example], Prompt] | None = None
    """The task's `teacher_prompt`; it applies without a template."""

    def check(self, examples: Sequence[Example]) -> None:
        """Write the prompts of all examples as far as they are known before sampling. Raises ConfigError or TaskError."""
        known = {PROMPT: "?", DEMONSTRATION: "?", FEEDBACK: "?"}
        names = () if self.template is None else PLACEHOLDER.findall(self.template)
        for example in examples:
            missing = [name for name in names if name not in {**known, **example.columns}]
            if missing:
                columns = ", ".join(sorted({*known, *example.columns}))
                raise ConfigError(
                    f"teacher.prompt names {{{missing[0]}}}, which row {example.row_number} does not have. It can name: {columns}."
                )
            self._fitting_ids(example, self._prompt(example, known))

    def add(self, group: Group) -> Group:
        """The scored group with the teacher's prompt of each rollout."""
        return replace(
            group, rollouts=tuple(self._with_prompt(group, rollout) for rollout in group.rollouts)
        )

    def _with_prompt(self, group: Group, rollout: Rollout) -> Rollout:
        found = self._found_out(group, rollout)
        named = set(PLACEHOLDER.findall(self.template or "")) - group.example.columns.keys()
        if any(name in named and name not in found for name in OF_ROLLOUTS):
            return rollout
        prompt = self._prompt(group.example, found)
        return replace(rollout, teacher_prompt_ids=self._fitting_ids(group.example, prompt))

    def _found_out(self, group: Group, rollout: Rollout) -> dict[str, Any]:
        """What is known of this rollout and of its group, by the names of a template."""
        others = [
            other
            for other in group.scored
            if other.member != rollout.member
            and other.reward is not None
            and other.reward >= self.demonstration_reward
        ]
        found: dict[str, Any] = {}
        if others:  # the first of the best
            found[DEMONSTRATION] = max(others, key=lambda other: other.reward or 0.0).completion
        if rollout.notes.get(FEEDBACK):
            found[FEEDBACK] = rollout.notes[FEEDBACK]
        return found

    def _prompt(self, example: Example, found: Mapping[str, Any]) -> Prompt:
        if self.template is None:
            assert self.hook is not None, "made with a template or a hook"
            return self.hook(example)
        template = self.template

        def filled(text: str) -> str:
            values = {**found, **example.columns, PROMPT: text}
            return PLACEHOLDER.sub(lambda name: str(values[name[1]]), template)

        if isinstance(example.prompt, str):
            return filled(example.prompt)
        messages = [dict(message) for message in example.prompt]
        last = _last_user_message(messages, example)
        last["content"] = filled(last["content"])
        return messages

    def _fitting_ids(self, example: Example, prompt: Prompt) -> tuple[int, ...]:
        ids = first_ids(self.tokenizer, prompt, (), example.columns)
        if len(ids) > self.room:
            raise TaskError(
                f"row {example.row_number}: the teacher's prompt has {len(ids)} tokens, and beside the longest completion its context has "
                f"room for {self.room}. Shorten teacher.prompt (or what teacher_prompt returns), or sampler.max_completion_length."
            )
        return ids


def _last_user_message(messages: Sequence[Message], example: Example) -> Message:
    for message in reversed(messages):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            return message
    raise TaskError(
        f"row {example.row_number}: teacher.prompt replaces the last user message, but the prompt has none that is text. Give "
        "the task a hook teacher_prompt, which returns the teacher's messages."
    )
