"""The calls of an agent become one rollout, whose rows hold each sampled token after the tokens that it was sampled after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from groupwise.core.types import (
    Example,
    Group,
    Prompt,
    Rollout,
    RolloutCredit,
    Row,
    SamplingParams,
    Segment,
)
from groupwise.tasks.rollouts.rows import training_rows
from groupwise.tasks.rollouts.trajectory import Turn, join_turns

PARAMS = SamplingParams(8)


def turn(
    prompt: Prompt, prompt_ids: tuple[int, ...], ids: tuple[int, ...], temperature: float = 1.0
) -> Turn:
    params = replace(PARAMS, temperature=temperature)
    logprobs = tuple(-token / 10 for token in ids)
    segment = Segment("policy", ids, logprobs, 0, "f", params, finish_reason="stop")
    return Turn(prompt, Rollout(9, 0, 0, prompt_ids, (segment,), f"said {ids}"))


def rows_of(*turns: Turn) -> list[Row]:
    rollout = join_turns(4, 2, turns, "a")
    assert (rollout.draw, rollout.member, rollout.outcome) == (4, 2, "pending")
    group = Group(4, Example(0, "a"), (rollout,))
    return training_rows([group], [(RolloutCredit(0.5, 1.0),)])


def parts(row: Row) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return row.prompt_ids, row.completion_ids, row.mask


def test_a_turn_that_begins_with_the_earlier_tokens_continues_the_row() -> None:
    first, second = turn("a", (1, 2), (3, 4)), turn("a", (1, 2, 3, 4, 8, 9), (5,))
    (row,) = rows_of(first, second)
    assert parts(row) == ((1, 2), (3, 4, 8, 9, 5), (1, 1, 0, 0, 1))
    assert row.sampling_logprobs == (-0.3, -0.4, 0.0, 0.0, -0.5)
    assert (row.rollout, row.advantage) == ((4, 2), 0.5)


def test_a_turn_that_renders_the_earlier_ones_differently_starts_a_row() -> None:
    first, second = turn("a", (1, 2), (3, 4)), turn("a", (1, 2, 3, 7, 8), (5,))
    third = turn("a", (1, 2, 3, 7, 8, 5, 6), (9,))
    one, two = rows_of(first, second, third)
    assert parts(one) == ((1, 2), (3, 4), (1, 1))
    assert parts(two) == ((1, 2, 3, 7, 8), (5, 6, 9), (1, 0, 1))
    assert one.rollout == two.rollout == (4, 2)


def test_branches_and_temperatures_have_rows_of_their_own() -> None:
    root = turn("a", (1,), (2,))
    left, right = turn("a", (1, 2, 3), (4,)), turn("a", (1, 2, 5), (6,))
    again = turn("a", (1, 2, 3, 4, 7), (8,))
    assert [parts(row) for row in rows_of(root, left, right, again)] == [
        ((1,), (2, 3, 4, 7, 8), (1, 0, 1, 0, 1)),
        ((1, 2, 5), (6,), (1,)),
    ]
    cooler = turn("a", (1, 2, 3), (4,), temperature=0.5)
    assert [row.temperature for row in rows_of(root, cooler)] == [1.0, 0.5]


QUESTION = {"role": "user", "content": "How many?"}
TOOL = {"role": "tool", "content": "7"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def call(prompt: Prompt, text: str, **changes: Any) -> Turn:
    """A call for a test of what readers see, where tokens do not matter."""
    rollout = turn(prompt, (1,), (2,)).rollout
    segment = replace(rollout.segments[0], **changes)
    return Turn(prompt, replace(rollout, segments=(segment,), completion=text))


def text_of(*turns: Turn, prompt: Prompt) -> list[str]:
    return join_turns(0, 0, turns, prompt).completion.split("\n\n")


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_readers_see_the_conversation(finish) -> None:
    between = [said("I look."), TOOL]
    turns = [
        call([QUESTION], "<think>Where?</think> I look."),
        call([QUESTION, *between], "Seven.", finish_reason=finish),
    ]
    rollout = join_turns(0, 0, turns, [QUESTION])
    assert rollout.messages == (*between, said("Seven."))
    assert rollout.completion == (
        "assistant: <think>Where?</think> I look.\n\ntool: 7\n\nassistant: Seven."
    )
    assert rollout.truncated == (finish == "length")


def test_one_turn_is_a_plain_rollout() -> None:
    rollout = join_turns(0, 1, [call("a", "b")], "a")
    assert (rollout.completion, rollout.messages, rollout.ended_by) == ("b", None, None)


def test_readers_see_which_tool_was_called() -> None:
    function = {"name": "price", "arguments": {"item": "cup"}}
    between = [{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}, TOOL]
    sampled = '<tool_call>{"name": "price"}</tool_call>'
    turns = [call([QUESTION], sampled), call([QUESTION, *between], "Seven.")]
    rollout = join_turns(4, 2, turns, [QUESTION])
    assert rollout.completion == f"assistant: {sampled}\n\ntool: 7\n\nassistant: Seven."
    assert rollout.messages == (*between, said("Seven.")), "the call itself stays what it was"


def test_readers_see_every_sampled_text_once_under_the_call_that_it_continues() -> None:
    other = [{"role": "user", "content": "And now?"}]
    turns = [
        call([QUESTION], "Six."),
        call([QUESTION, said("Six."), TOOL], "Seven."),
        call([QUESTION, {"role": "assistant", "tool_calls": [{"name": "f"}]}, TOOL], "Eight."),
        call([QUESTION, said("Six."), TOOL], "Nine."),
        call([QUESTION], "Ten."),
        call(other, "Eleven."),
    ]
    assert text_of(*turns, prompt=[QUESTION]) == [
        *("assistant: Six.", "tool: 7", "assistant: Seven."),
        "[call 3 has another history, as the agent sent it]",
        'assistant: <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        *("tool: 7", "assistant: Eight."),
        *("[call 4 continues call 1]", "tool: 7", "assistant: Nine."),
        *("[call 5 has the prompt again]", "assistant: Ten."),
        *("[call 6 has another prompt]", "user: And now?", "assistant: Eleven."),
    ]
    assert join_turns(0, 0, turns, [QUESTION]).messages is None


def test_readers_see_a_prompt_that_is_not_the_groups() -> None:
    assert text_of(call("b", "c"), prompt="a") == ["[call 1 has another prompt]", "b", "c"]


def test_readers_see_what_stands_between_completions() -> None:
    turns = [call("a", "b"), call("ab\nc", "d"), call("ab\ncd", "e")]
    assert text_of(*turns, prompt="a") == ["b", "\nc", "d", "e"]
