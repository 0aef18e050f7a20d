"""From a teacher's rows to what is trained and what is recorded:

1. What is trained is what the row says, and nothing else; a row of which nothing is trained is an error that names it.
2. Rows that are too long are cut where it was asked, and counted; those that would teach nothing any more are left out.
"""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.types import NumberedRow
from groupwise.engine.models.tokens import prompt_ids
from groupwise.tasks.rollouts.dialogue import with_tool_descriptions
from groupwise.tasks.rollouts.teacher import (
    TeacherOptions,
    read_lessons,
    teacher_group,
    teacher_row,
)
from tests.chat import SPECIAL, chat_tokenizer

CHAT = {
    "messages": [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "ef"},
        {"role": "assistant", "content": "gh"},
    ]
}
ANSWER = CHAT["messages"][1]
TEXT = {"text": "abcdef"}
PAIR = {"prompt": "ab", "completion": "cd"}
TOKENS = {"input_ids": [10, 11, 12, 13], "labels": [-100, 11, -100, 13]}
END = "<|im_end|>"


def read(rows: list[dict[str, Any]], family: str = "chatml", **way: Any):
    return read_lessons(chat_tokenizer(family), rows, TeacherOptions(**way), where="W")


def trained(row: dict[str, Any], family: str = "chatml", **way: Any) -> list[str]:
    """The trained tokens of each row, as text."""
    tokenizer = chat_tokenizer(family)
    (lesson,) = read([row], family, **way).lessons
    return [
        tokenizer.decode([token for token, mark in zip(r.ids, r.mask, strict=True) if mark])
        for r in lesson.rows
    ]


@pytest.mark.parametrize(("row", "way", "wanted"), [
    (CHAT, {}, [f"cd{END}gh{END}"]), (CHAT, {"completion_only": True}, [f"cd{END}gh{END}"]),
    (CHAT, {"last_turn_only": True}, [f"gh{END}"]),
    (CHAT, {"completion_only": False}, [f"user\nab{END}\n<|im_start|>assistant\ncd{END}\n"
      f"<|im_start|>user\nef{END}\n<|im_start|>assistant\ngh{END}\n"]),
    (TEXT, {}, [f"bcdef{END}"]), (PAIR, {}, [f"cd{END}"]), (PAIR, {"completion_only": False}, [f"bcd{END}"]), (TOKENS, {}, ["bd"]),
    ({"prompt": CHAT["messages"][:3], "completion": CHAT["messages"][3:]}, {}, [f"gh{END}"]),
    ({"prompt": CHAT["messages"][:2], "completion": "ij"}, {}, [f"ij{END}"]),
    ({"prompt": CHAT["messages"][:2], "completion": CHAT["messages"][1:], "tools": [{}]}, {}, [f"cd{END}gh{END}"]),
    ({"messages": CHAT["messages"][1:]}, {}, [f"gh{END}"]),
    ({"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]}, {}, [f"cd{END}"]),
])  # fmt: skip
def test_trained_tokens_of_a_supervised_row(row, way, wanted):
    """The first token of all is never: nothing stands before it that could predict it."""
    assert trained(row, **way) == wanted


@pytest.mark.parametrize("family", sorted(SPECIAL))
def test_words_that_the_prompt_begins_the_answer_with_are_seen_as_asked_and_not_trained(family):
    tokenizer = chat_tokenizer(family)
    begun = [*CHAT["messages"][:1], {**ANSWER, "content": " <think>\n"}]
    (lesson,) = read([{"prompt": begun, "completion": "ef\n</think>gh"}], family).lessons
    row = teacher_row(lesson.rows[0])
    assert row.prompt_ids == prompt_ids(tokenizer, begun)
    assert tokenizer.decode(row.completion_ids).rstrip() == f"ef\n</think>gh{SPECIAL[family][-1]}"


def test_a_row_that_the_template_does_not_take_is_left_out_and_counted():
    greeting = {"messages": [{"role": "assistant", "content": "hi"}]}
    found = read([CHAT, greeting, greeting, TEXT])
    assert [lesson.example.index for lesson in found.lessons] == [0, 3]
    ((reason, count),) = found.refused.items()
    assert ("begins with the assistant" in reason, count) == (True, 2)
    twice = {"messages": [*CHAT["messages"][:2], ANSWER]}
    apart = {"prompt": CHAT["messages"][:2], "completion": [{**ANSWER, "reasoning_content": "r"}]}
    for row, told in ((twice, "follow each other"), (apart, "given apart")):
        ((reason, count),) = read([CHAT, row], "qwen3").refused.items()
        assert (told in reason, count) == (True, 1)
    for rows, strict in (([greeting], False), ([CHAT, greeting], True)):
        with pytest.raises(TaskError, match=r"^W: row \d.*begins with the assistant"):
            read(rows, strict=strict)


def test_a_message_has_the_number_that_its_row_has_in_the_data():
    row = NumberedRow({"words": "a"}, 7)
    with pytest.raises(TaskError, match=r"^W: row 7 "):
        read([{**PAIR}, row])


def test_tools_stand_in_the_system_message_where_the_template_has_no_place_for_them():
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    (lesson,) = read([{**CHAT, "tools": [tool]}]).lessons
    assert "weather" in chat_tokenizer("chatml").decode(lesson.rows[0].ids)
    for said in ("", "Be kind."):
        (told,) = with_tool_descriptions([{"role": "developer", "content": said}], [tool])
        assert told["content"].startswith(said or with_tool_descriptions([], [tool])[0]["content"])


def test_a_template_that_rewrites_turns_gives_several_rows_which_are_members_of_a_group():
    thought = "<think>\n\n</think>\n\n"
    assert trained(CHAT, "qwen3") == [f"{thought}cd{END}", f"{thought}gh{END}"]
    (lesson,) = read([CHAT], "qwen3").lessons
    group = teacher_group(chat_tokenizer("qwen3"), lesson, 0)
    assert [rollout.member for rollout in group.rollouts] == [0, 1]


def test_a_collators_masks_are_used_as_they_are():
    def collator(features):
        (feature,) = features
        ids = feature["input_ids"]
        return {"input_ids": [ids], "labels": [[-100, -100, *ids[2:4], *[-100] * (len(ids) - 4)]]}

    assert trained(TEXT, collator=collator) == ["cd"]
    assert trained(PAIR, collator=collator) == ["cd"]


@pytest.mark.parametrize(("row", "way", "said"), [
    ({"input_ids": [1, 2], "labels": [-100, -100]}, {}, "no token of it is trained"),
    ({"input_ids": [1, 2], "labels": [1, -100]}, {}, "no token of it is trained"),
    (TEXT, {"completion_only": True}, "data.completion_only_loss"), ({"words": "a"}, {}, "has none of the forms"),
    ({"input_ids": [10, 260, 11], "labels": [-100, 260, 11]}, {"vocabulary": 260}, "token 1 has the id 260"),
    ({"input_ids": [10, -1]}, {}, "token 1 has the id -1"),
])  # fmt: skip
def test_a_row_that_cannot_teach_is_named(row, way, said):
    with pytest.raises(TaskError, match=f"^W: row 1.*{said}"):
        read([{**PAIR} if not way else {**CHAT}, row], **way)


@pytest.mark.parametrize(
    ("mode", "kept"), [("keep_start", "abcd"), ("keep_end", f"def{END}"), ("drop", None)]
)
def test_rows_that_are_too_long(mode, kept):
    tokenizer = chat_tokenizer("chatml")
    found = read([TEXT, PAIR, {"text": "a"}], max_length=4, truncation=mode)
    texts = [tokenizer.decode(list(lesson.rows[0].ids)) for lesson in found.lessons]
    if mode == "drop":
        assert texts == [f"a{END}"]
        assert (found.cut, found.dropped) == (0, 2)
    else:
        pair = "abcd" if mode == "keep_start" else f"bcd{END}"
        assert texts == [kept, pair, f"a{END}"]
        assert (found.cut, found.dropped) == (2, 0)


def test_a_cut_row_that_teaches_nothing_any_more_is_left_out():
    """A truncated row has no end token, and none is added."""
    found = read([{"prompt": "abcdef", "completion": "g"}, PAIR], max_length=4)
    assert [lesson.example.index for lesson in found.lessons] == [1]
    assert (found.cut, found.dropped) == (1, 1)
    assert sum(found.lessons[0].rows[0].mask) == 2
    with pytest.raises(TaskError, match="none of the 1 rows"):
        read([{"prompt": "abcdef", "completion": "g"}], max_length=4)


def test_learner_rows_begin_and_end_with_a_trained_token():
    (lesson,) = read([CHAT]).lessons
    masked = lesson.rows[0]
    row = teacher_row(masked)
    assert row.prompt_ids + row.completion_ids == masked.ids[:-1], "the last line break is left out"
    assert (row.mask[0], row.mask[-1], sum(row.mask)) == (1, 1, 6)
    assert len(row.mask) == len(row.completion_ids) == len(row.sampling_logprobs)
    assert (row.scale, row.temperature) == (1.0, 1.0)
