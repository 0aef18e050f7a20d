"""Prompts from whatever a column holds, and the account of rows that hold none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data.chat import (
    Account,
    PromptWay,
    Rows,
    messages_of,
    with_prompts,
    with_teacher,
    without_blocks,
)
from groupwise.errors import TaskError

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
TAGS = ("think", "answer")


def prompts(*given: Any, strict: bool = False, **way: Any) -> Rows:
    rows = [{"prompt": value} for value in given]
    return with_prompts(rows, PromptWay(**way), "set", strict=strict)


def prompt(given: Any, **way: Any) -> Any:
    return prompts(given, **way)[0]["prompt"]


def left_out(value: Any, **way: Any) -> str:
    """The reason why a row is left out beside a good one."""
    rows = prompts(value, "a good one", **way)
    assert len(rows) == 1
    (reason,) = rows.account.left_out
    return reason


# Forms


@pytest.mark.parametrize(
    "given",
    [
        "hi",
        [USER],
        USER,
        {"role": ["user"], "content": ["hi"]},
        [{**USER, "name": None}],
        [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
        [USER, ASSISTANT],
        [USER, ASSISTANT, ASSISTANT],
        {"role": ["user", "assistant"], "content": ["hi", "hello"]},
    ],
)  # fmt: skip
def test_every_form_is_the_same_chat(given: Any) -> None:
    assert prompt(given) == [USER]


def test_turns_before_the_last_question_stay() -> None:
    assert prompt([SYSTEM, USER, ASSISTANT, USER, ASSISTANT]) == [SYSTEM, USER, ASSISTANT, USER]


def test_text_stays_text_where_it_is_to() -> None:
    assert prompt("  Once\n<think>", format="text", strip_tags=TAGS) == "  Once\n<think>"
    assert prompt([USER], format="text") == [USER]


def test_result_of_a_tool_may_be_the_last_word() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
    tool = {"role": "tool", "content": "4"}
    assert prompt([USER, call, tool]) == [USER, call, tool]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "there is no prompt"),
        ("", "the prompt is empty"),
        (" \n", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([{"role": "user", "content": " "}], "the prompt is empty"),
        (3, "the prompt is no text and no messages"),
        (["hi"], "a message is no mapping of role and content"),
        ([{"content": "hi"}], "a message has no role"),
        ([{"from": "human", "value": "hi"}], "ShareGPT"),
        ([{"role": "human", "content": "hi"}], "the role 'human'"),
        ([{"role": "user"}], "a message has no text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a message holds more than text"),
        ({"role": ["user"], "content": []}, "not as many roles as contents"),
        ([SYSTEM], "no message is the user's"),
        ([ASSISTANT], "no message is the user's"),
        ([USER, SYSTEM], "do not end with the user"),
        ([USER, SYSTEM, ASSISTANT], "do not end with the user"),
    ],
)
def test_rows_without_a_prompt_are_left_out_by_reason(given: Any, reason: str) -> None:
    assert reason in left_out(given)


# What is done to them


def test_system_prompt_is_put_before_those_that_have_none() -> None:
    rows = prompts("hi", [USER], [SYSTEM, USER], system_prompt="Think.")
    think = {"role": "system", "content": "Think."}
    assert [row["prompt"] for row in rows] == [[think, USER], [think, USER], [SYSTEM, USER]]
    assert list(rows.account.changed.values()) == [2]
    developer = {"role": "developer", "content": "x"}
    assert prompt([developer, USER], system_prompt="Think.") == [developer, USER]


def test_blocks_are_taken_out_of_what_users_say_alone() -> None:
    said = "<think>old\nthoughts</think> 2+2? <ANSWER>5</ANSWER>"
    rows = prompts(
        [{"role": "user", "content": said}, {**ASSISTANT, "content": said}, USER], strip_tags=TAGS
    )
    assert rows[0]["prompt"] == [
        {"role": "user", "content": "2+2?"},
        {**ASSISTANT, "content": said},
        USER,
    ]
    assert list(rows.account.changed.values()) == [1]
    assert prompt(said) == [{"role": "user", "content": said}]
    assert "empty" in left_out("<think>all of it</think>", strip_tags=TAGS)


def test_blocks_end_where_they_first_end_and_tags_are_no_patterns() -> None:
    assert without_blocks("a<think>x</think>b<think>y</think>c", TAGS) == "abc"
    assert without_blocks("<t.k>x</t.k><tik>y</tik>", ("t.k",)) == "<tik>y</tik>"
    assert without_blocks(" <think> open", TAGS) == " <think> open"


def test_columns_follow_the_last_question_as_lines() -> None:
    rows = [{"prompt": [USER, ASSISTANT, USER], "hint": "wave", "level": 0, "none": None}]
    way = PromptWay(lines=("hint", "level", "none"))
    (row,) = with_prompts(rows, way, "set", strict=False)
    assert [m["content"] for m in row["prompt"]] == ["hi", "hello", "hi\nhint: wave\nlevel: 0"]
    tool = {"role": "tool", "content": "4"}
    (row,) = with_prompts(
        [{"prompt": [USER, {"role": "assistant", "tool_calls": [{}]}, tool], "hint": "wave"}],
        way,
        "set",
        strict=False,
    )
    assert row["prompt"][0]["content"] == "hi\nhint: wave"
    assert row["prompt"][-1] == tool
    text = PromptWay(lines=("hint",), format="text")
    (row,) = with_prompts([{"prompt": "hi", "hint": "wave"}], text, "set", strict=False)
    assert row["prompt"] == "hi\nhint: wave"


def test_duplicates_are_told_by_the_prompt_as_it_is_in_the_end() -> None:
    given = ("hi", [USER], "hello", [USER, ASSISTANT])
    assert len(prompts(*given)) == 4
    rows = prompts(*given, drop_duplicates=True)
    assert [row["prompt"][0]["content"] for row in rows] == ["hi", "hello"]
    assert list(rows.account.left_out.values()) == [2]


def test_rows_are_not_changed_in_place() -> None:
    message = {"role": "user", "content": "<think>x</think>hi"}
    given = [message, ASSISTANT]
    assert prompt(given, strip_tags=TAGS, system_prompt="Think.") != given
    assert given == [{"role": "user", "content": "<think>x</think>hi"}, ASSISTANT]


@given(
    st.lists(
        st.sampled_from([SYSTEM, USER, ASSISTANT, {"role": "tool", "content": "4"}]), max_size=6
    )
)
def test_a_chat_ends_with_who_is_answered_or_is_left_out(messages: list[dict[str, Any]]) -> None:
    rows = prompts(messages, [USER], system_prompt="Think.")
    assert len(rows) + sum(rows.account.left_out.values()) == 2
    for row in rows:
        assert row["prompt"][-1]["role"] in ("user", "tool")
        assert any(message["role"] == "system" for message in row["prompt"])


# Accounts


def test_refusal_counts_the_reasons_and_names_rows() -> None:
    with pytest.raises(TaskError) as caught:
        prompts("hi", "", "", "", "", None, strict=True)
    message = str(caught.value)
    assert "set: 5 of 6 rows cannot be used, and data.strict is true:" in message
    assert "4 × the prompt is empty (rows 1, 2, 3 …)" in message
    assert "1 × there is no prompt (row 5)" in message
    assert prompts("hi", strict=True) == [{"prompt": [USER]}]


def test_rows_of_which_none_is_left_are_refused_anyway() -> None:
    with pytest.raises(TaskError, match="none of 2 rows can be used"):
        prompts("", None)


def test_accounts_add_up() -> None:
    one, two = Account({"a": 1}, {"c": 1}), Account({"a": 2, "b": 3})
    assert one + two == Account({"a": 3, "b": 3}, {"c": 1})
    assert one.under("x") == Account({"x: a": 1}, {"x: c": 1})


# A teacher's rows


def taught(*rows: dict[str, Any], **way: Any) -> Rows:
    return with_teacher(list(rows), PromptWay(**way), "set", strict=False)


def test_teacher_keeps_the_assistants_turns() -> None:
    row = {"messages": {"role": ["user", "assistant"], "content": ["hi", "hello"]}, "id": 3}
    assert taught(row, system_prompt="Be brief.") == [
        {"messages": [SYSTEM, USER, ASSISTANT], "id": 3}
    ]


def test_teachers_prompt_is_made_like_any_other() -> None:
    found = taught({"prompt": "hi", "completion": "hello"}, system_prompt="Be brief.")
    assert found == [{"prompt": [SYSTEM, USER], "completion": "hello"}]


def test_texts_and_tokens_of_a_teacher_stay() -> None:
    rows = [{"text": "once"}, {"input_ids": [1, 2]}]
    assert taught(*rows) == rows


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "hi", "completion": ""}, "the completion is empty"),
        ({"prompt": "", "completion": "x"}, "the prompt is empty"),
        ({"messages": [USER]}, "no message is the assistant's"),
        ({"messages": None, "id": 3}, "there is no messages"),
    ],
)
def test_teachers_rows_are_left_out_by_reason(row: dict[str, Any], reason: str) -> None:
    good = {"messages": [USER, ASSISTANT]}
    assert list(taught(row, good).account.left_out) == [reason]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "there is no prompt and no completion"),
        ({"prompt": "hi"}, "the completion is empty"),
        ({"completion": "hello"}, "there is no prompt"),
    ],
)
def test_teachers_rows_without_what_others_have_are_left_out(
    row: dict[str, Any], reason: str
) -> None:
    good = {"prompt": "hi", "completion": "hello"}
    assert list(taught(row, good).account.left_out) == [reason]


def test_system_prompt_of_plain_texts_is_refused() -> None:
    with pytest.raises(TaskError, match=r"data\.system_prompt has no effect"):
        taught({"text": "once"}, system_prompt="Be brief.")


def test_messages_of_text_is_the_users() -> None:
    assert messages_of("hi") == [USER]
