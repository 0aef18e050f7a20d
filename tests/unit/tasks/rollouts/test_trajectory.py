"""The calls of an agent become one rollout, whose rows hold each sampled token after the tokens that it was sampled after."""

from __future__ import annotations

from dataclasses import replace

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
    rollout = join_turns(4, 2, turns)
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


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_readers_see_the_conversation(finish) -> None:
    question = {"role": "user", "content": "How many?"}
    between = [{"role": "assistant", "content": None}, {"role": "tool", "content": "7"}]
    last = turn([question, *between], (1, 3, 4), (5,))
    (segment,) = last.rollout.segments
    cut = replace(last.rollout, segments=(replace(segment, finish_reason=finish),))
    rollout = join_turns(0, 0, [turn([question], (1,), (3,)), Turn(last.prompt, cut)])
    assert rollout.messages == (*between, {"role": "assistant", "content": "said (5,)"})
    assert rollout.completion == "assistant: \n\ntool: 7\n\nassistant: said (5,)"
    assert rollout.truncated == (finish == "length")


def test_one_turn_is_a_plain_rollout() -> None:
    rollout = join_turns(0, 1, [turn("a", (1,), (2,))])
    assert (rollout.completion, rollout.messages, rollout.ended_by) == ("said (2,)", None, None)


def test_readers_see_which_tool_was_called() -> None:
    question = {"role": "user", "content": "What does the cup cost?"}
    call = {"function": {"name": "price", "arguments": {"item": "cup"}}}
    between = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "7"}]
    rollout = join_turns(
        4, 2, [turn([question], (1,), (2,)), turn([question, *between], (1, 3, 4), (5,))]
    )
    shown = '<tool_call>\n{"name": "price", "arguments": {"item": "cup"}}\n</tool_call>'
    assert rollout.completion == f"assistant: {shown}\n\ntool: 7\n\nassistant: said (5,)"
    assert rollout.messages is not None
    assert rollout.messages[0] == between[0], "the call itself stays what it was"
