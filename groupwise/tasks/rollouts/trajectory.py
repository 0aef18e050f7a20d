"""Joins the calls of an agent, one completion each, into one rollout.

The caller renders its conversation again for each call, so the server sees only prompts as tokens. A turn continues a row if its prompt
begins with every token of that row; the tokens after them are the environment's and are masked. Otherwise it starts a row of its own, whose
prompt is everything that the policy saw. So each sampled token is trained once, after exactly the tokens that it was sampled after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from groupwise.core.types import Message, Prompt, Rollout, Segment
from groupwise.engine.models.tool_calls import calls_as_text


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the agent."""

    prompt: Prompt
    rollout: Rollout
    """The conversation as it was sampled: the prompt's tokens, and one segment of the policy."""


@dataclass(slots=True)
class _OpenRow:
    """A row that later turns may continue."""

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    """All tokens of the row so far, its prompt's included."""
    temperature: float | None
    segments: list[Segment] = field(default_factory=list[Segment])

    def continues_with(self, turn: Segment, prompt_ids: tuple[int, ...]) -> bool:
        """True if the turn can be appended. A row has one temperature."""
        return (
            prompt_ids[: len(self.tokens)] == self.tokens and _temperature(turn) == self.temperature
        )


def join_turns(draw: int, member: int, turns: Sequence[Turn], prompt: Prompt) -> Rollout:
    """The turns of a trajectory, in order and at least one, as one pending rollout of this member. `prompt` is the group's."""
    assert turns, "a trajectory has at least one turn"
    rows: list[_OpenRow] = []
    for turn in turns:
        (segment,), prompt_ids = turn.rollout.segments, turn.rollout.prompt_ids
        candidates = [row for row in rows if row.continues_with(segment, prompt_ids)]
        if candidates:
            row = max(candidates, key=lambda candidate: len(candidate.tokens))
            if observed := prompt_ids[len(row.tokens) :]:
                row.segments.append(Segment("environment", observed))
        else:
            row = _OpenRow(prompt_ids, prompt_ids, _temperature(segment))
            rows.append(row)
        row.segments.append(segment)
        row.tokens = prompt_ids + segment.token_ids
    for row in rows[1:]:
        row.segments[0] = replace(row.segments[0], prompt_ids=row.prompt_ids)
    last = turns[-1].rollout
    several = len(turns) > 1
    return Rollout(
        draw=draw,
        member=member,
        attempt=0,
        prompt_ids=rows[0].prompt_ids,
        segments=tuple(segment for row in rows for segment in row.segments),
        completion=_conversation_text(turns, prompt),
        messages=_messages(turns),
        ended_by=("tokens" if last.finish_reason == "length" else "environment")
        if several
        else None,
    )


def _temperature(segment: Segment) -> float | None:
    return None if segment.params is None else segment.params.temperature


def _messages(turns: Sequence[Turn]) -> tuple[Message, ...] | None:
    """The messages after the first prompt; None for one turn, for text, and if a turn does not continue the one before it."""
    first, last = turns[0].prompt, turns[-1].prompt
    if len(turns) == 1 or isinstance(first, str) or isinstance(last, str):
        return None
    if any(_observed(turn.prompt, earlier) is None for earlier, turn in pairwise(turns)):
        return None
    answer = {"role": "assistant", "content": turns[-1].rollout.completion}
    return (*last[len(first) :], answer)


def _conversation_text(turns: Sequence[Turn], prompt: Prompt) -> str:
    """The trajectory for readers, who see `prompt` above it: what was sampled in each turn, after what is new in the turn's prompt.

    A heading stands above a turn that does not continue the one before it.
    """
    texts: list[str] = []
    for index, turn in enumerate(turns):
        heading, new = "", turn.prompt[:0]
        if index or turn.prompt != prompt:
            heading, new = _heading(turns[:index], turn.prompt, prompt)
        texts += [f"[call {index + 1} {heading}]"] if heading else []
        texts += _written(new)
        sampled = turn.rollout.completion
        alone = isinstance(turn.prompt, str) or len(turns) == 1
        texts.append(sampled if alone else f"assistant: {sampled}")
    return "\n\n".join(texts)


def _heading(earlier: Sequence[Turn], prompt: Prompt, first: Prompt) -> tuple[str, Prompt]:
    """How a call relates to those before it ("" if it continues the last one), and the part of its prompt that readers have not seen."""
    for number, turn in reversed(list(enumerate(earlier, 1))):
        if (observed := _observed(prompt, turn)) is not None:
            return "" if number == len(earlier) else f"continues call {number}", observed
    if prompt == first:
        return "has the prompt again", prompt[:0]
    if not isinstance(prompt, str) and prompt[: len(first)] == first:
        return "has another history, as the agent sent it", prompt[len(first) :]
    return "has another prompt", prompt


def _observed(prompt: Prompt, turn: Turn) -> Prompt | None:
    """What a prompt has after an earlier turn and its answer; None if it does not begin with them."""
    earlier, sampled = turn.prompt, turn.rollout.completion
    if isinstance(prompt, str) or isinstance(earlier, str):
        begins = isinstance(prompt, str) and prompt.startswith(f"{earlier}{sampled}")
        return prompt[len(earlier) + len(sampled) :] if begins else None
    added = prompt[len(earlier) :]
    begins = prompt[: len(earlier)] == earlier and added and _is_answer(added[0], sampled)
    return added[1:] if begins else None


def _is_answer(message: Message, sampled: str) -> bool:
    """True if an agent's message is what was sampled, perhaps without its reasoning, and with its calls parsed."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    said = [(message.get("content") or "").strip(), *(call["name"] for call in calls)]
    return message["role"] == "assistant" and all(text in sampled for text in said)


def _written(prompt: Prompt) -> list[str]:
    """The messages of a part of a prompt, each as `role: content`, with its calls of tools written out; a text stays one text."""
    if isinstance(prompt, str):
        return [prompt] if prompt.strip() else []
    messages = [calls_as_text(message) for message in prompt]
    return [f"{message['role']}: {message.get('content') or ''}" for message in messages]
