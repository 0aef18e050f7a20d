"""Prompts from whatever a column holds, and the count of rows that hold none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.errors import TaskError
from groupwise.tasks.data.chat import (
    PromptOptions,
    Rows,
    with_prompts,
    with_teacher,
    without_blocks,
)

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
TOOL = {"role": "tool", "content": "4"}
TAGS = ("think", "answer")


def prompts(*given: Any, strict: bool = False, **way: Any) -> Rows:
    rows = [{"prompt": value} for value in given]
    return with_prompts(rows, PromptOptions(**way), "set", strict=strict)


def prompt(given: Any, **way: Any) -> Any:
    return prompts(given, **way)[0]["prompt"]


def left_out(value: Any, **way: Any) -> str:
    """The reason why a row is left out beside a good one."""
    rows = prompts(value, "a good one", **way)
    assert len(rows) == 1
    (reason,) = rows.account.left_out
    return reason


# Forms, which test_messages tries one by one


def test_text_is_text_or_what_a_user_says() -> None:
    for each in ("hi", [USER], [USER, {**ASSISTANT, "content": " "}]):
        assert prompt(each, format="chat") == [USER]
    assert prompt("hi") == "hi"


def test_prompts_that_need_no_change_are_returned_as_they_are() -> None:
    """Text, turns before the last question, and the result of a tool as the last word."""
    assert prompt("  Once\n<think>", strip_tags=TAGS) == "  Once\n<think>"
    assert prompt([SYSTEM, USER, ASSISTANT, USER]) == [SYSTEM, USER, ASSISTANT, USER]
    called = [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}, TOOL]
    assert prompt(called) == called


@pytest.mark.parametrize("given", [
    [USER, ASSISTANT], {"role": ["user", "assistant"], "content": ["hi", "hello"]}, [USER, TOOL, ASSISTANT],
])  # fmt: skip
def test_final_assistant_messages_are_continued_or_dropped_by_prefill(given: Any) -> None:
    rows = prompts(given)
    assert rows[0]["prompt"][-1] == ASSISTANT
    assert "data.prefill" in next(iter(rows.account.changed))
    dropped = prompts(given, [USER, ASSISTANT, ASSISTANT], prefill="drop")
    assert [row["prompt"][-1]["role"] in ("user", "tool") for row in dropped] == [True, True]
    assert list(dropped.account.changed.values()) == [2]


@pytest.mark.parametrize(("given", "reason"), [
    (None, "there is no prompt"), (" \n", "the prompt is empty"), ([], "there are no messages"), (3, "it is no text and no messages"),
    ([{"role": "user", "content": " "}], "the prompt is empty"), ([SYSTEM], "no message is the user's"),
    ([ASSISTANT], "no message is the user's"), ([USER, SYSTEM], "do not end with the user"),
])  # fmt: skip
def test_rows_without_a_prompt_are_left_out_by_reason(given: Any, reason: str) -> None:
    assert reason in left_out(given)


# What is done to them


def test_system_prompt_is_put_before_those_that_have_none() -> None:
    rows = prompts("hi", [USER], [SYSTEM, USER], system_prompt="Think.", format="chat")
    think = {"role": "system", "content": "Think."}
    assert [row["prompt"] for row in rows] == [[think, USER], [think, USER], [SYSTEM, USER]]
    assert list(rows.account.changed.values()) == [2]
    developer, empty = {"role": "developer", "content": "x"}, {"role": "system", "content": None}
    assert prompt([developer, USER], system_prompt="Think.") == [developer, USER]
    assert prompt([empty, USER], system_prompt="Think.") == [think, USER]
    assert prompt([empty, USER]) == [{**empty, "content": ""}, USER], "it may keep a default away"
    with pytest.raises(TaskError, match=r"data\.prompt_format"):
        prompt("hi", system_prompt="Think.", format="text")


def test_blocks_are_taken_out_of_turns_where_the_config_says_so() -> None:
    said = "<think>old\nthoughts</think> 2+2? <ANSWER>5</ANSWER>"
    chat = [{"role": "user", "content": said}, {**ASSISTANT, "content": said}, USER]
    assert prompt(chat) == chat
    rows = prompts(chat, strip_tags=TAGS)
    assert chat[1]["content"] == said, "rows are not changed in place"
    assert rows[0]["prompt"] == [chat[0], {**ASSISTANT, "content": "2+2?"}, USER]
    assert list(rows.account.changed.values()) == [1]
    both = prompts(chat, strip_tags=TAGS, strip_roles=("user", "assistant"))
    assert [each["content"] for each in both[0]["prompt"]] == ["2+2?", "2+2?", "hi"]


def test_blocks_end_where_they_first_end_and_tags_are_no_patterns() -> None:
    assert without_blocks("a<think>x</think>b<think>y</think>c", TAGS) == "abc"
    assert without_blocks("<t.k>x</t.k><tik>y</tik>", ("t.k",)) == "<tik>y</tik>"
    assert without_blocks(" <think> open", TAGS) == " <think> open"


def test_columns_follow_the_last_question_as_lines() -> None:
    def asked(given: Any, **more: Any) -> Any:
        row = {"prompt": given, "hint": "wave", "level": 0, "none": None}
        way = PromptOptions(lines=("hint", "level", "none"), **more)
        return with_prompts([row], way, "set", strict=False)[0]["prompt"]

    said = "hi\nhint: wave\nlevel: 0"
    assert [m["content"] for m in asked([USER, ASSISTANT, USER])] == ["hi", "hello", said]
    called = asked([USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}, TOOL])
    assert (called[0]["content"], called[-1]) == (said, TOOL)
    assert asked("hi") == said


def test_duplicates_are_recognised_by_the_prompt_as_it_is_in_the_end() -> None:
    given = ("hi", [USER], "hello", [USER, ASSISTANT])
    assert len(prompts(*given)) == 4
    rows = prompts(*given, drop_duplicates=True, format="chat", prefill="drop")
    assert [row["prompt"][0]["content"] for row in rows] == ["hi", "hello"]
    assert list(rows.account.left_out.values()) == [2]


@given(st.lists(st.sampled_from([SYSTEM, USER, ASSISTANT, TOOL]), max_size=6))
def test_a_chat_ends_with_a_user_or_tool_message_or_is_left_out(
    messages: list[dict[str, Any]],
) -> None:
    rows = prompts(messages, [USER], system_prompt="Think.", prefill="drop")
    assert len(rows) + sum(rows.account.left_out.values()) == 2
    for row in rows:
        assert row["prompt"][-1]["role"] in ("user", "tool")
        assert any(message["role"] == "system" for message in row["prompt"])


# A teacher's rows


def taught(*rows: dict[str, Any], **way: Any) -> Rows:
    return with_teacher(list(rows), PromptOptions(**way), "set", strict=False)


def test_rows_of_a_teacher() -> None:
    row = {"messages": {"role": ["user", "assistant"], "content": ["hi", "hello"]}, "id": 3}
    found = taught(row, system_prompt="Be brief.")
    assert found == [{"messages": [SYSTEM, USER, ASSISTANT], "id": 3}]
    found = taught(
        {"prompt": "hi", "completion": "hello"}, system_prompt="Be brief.", format="chat"
    )
    assert found == [{"prompt": [SYSTEM, USER], "completion": "hello"}]
    rows = [{"text": "once"}, {"input_ids": [1, 2]}]
    assert taught(*rows) == rows
    with pytest.raises(TaskError, match=r"data\.system_prompt"):
        taught({"text": "once"}, system_prompt="Be brief.")


CHAT, PAIR = {"messages": [USER, ASSISTANT]}, {"prompt": "hi", "completion": "hello"}


@pytest.mark.parametrize(("row", "good", "reason"), [
    ({"prompt": "hi", "completion": ""}, CHAT, "the completion is empty"),
    ({"prompt": "", "completion": "x"}, CHAT, "the prompt is empty"), ({"messages": [USER]}, CHAT, "no message is the assistant's"),
    ({"messages": None, "id": 3}, CHAT, "there is no messages"), ({}, PAIR, "there is no prompt and no completion"),
    ({"prompt": "hi"}, PAIR, "the completion is empty"), ({"completion": "hello"}, PAIR, "there is no prompt"),
])  # fmt: skip
def test_teachers_rows_are_left_out_by_reason(
    row: dict[str, Any], good: dict[str, Any], reason: str
) -> None:
    assert list(taught(row, good).account.left_out) == [reason]
