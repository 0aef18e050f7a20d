"""A teacher's rows: every form is accepted, and an error names its row."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from groupwise.core.errors import TaskError
from groupwise.core.types import Example
from groupwise.tasks.data.sft import Completion, Conversation, PlainText, Tokens, teacher_example
from groupwise.tasks.data.sft_functions import collate, format_rows

ASK = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}
QUIET = {"enable_thinking": False}
PADDED = {"input_ids": [9, 1, 2], "attention_mask": [0, 1, 1]}


def content(row: dict[str, Any], text_field: str = "text"):
    return teacher_example(3, row, text_field=text_field, where="W").content


@pytest.mark.parametrize(("row", "wanted"), [
    ({"messages": [ASK, ANSWER]}, Conversation((ASK, ANSWER))), ({"prompt": "a", "completion": "b"}, Completion("a", "b")),
    ({"prompt": [ASK], "completion": [ANSWER]}, Conversation((ASK, ANSWER), 1)),
    ({"prompt": [ASK], "completion": "2"}, Conversation((ASK, ANSWER), 1)),
    ({"prompt": [ASK], "completion": json.dumps([ANSWER])}, Conversation((ASK, ANSWER), 1)),
    ({"conversations": json.dumps([ASK, ANSWER])}, Conversation((ASK, ANSWER))),
    ({"prompt": [ASK, {**ANSWER, "content": "1+"}], "completion": "2"}, Conversation((ASK, {**ANSWER, "content": "1+2"}), 1, prefill="1+")),
    ({"prompt": [ASK, ANSWER], "completion": [ASK, ANSWER]}, Conversation((ASK, ANSWER) * 2, 2)), ({"text": "abc"}, PlainText("abc")),
    ({"input_ids": [1, 2], "labels": [-100, 2]}, Tokens((1, 2), (0, 1))),
    ({"input_ids": [1, 2], "completion_mask": [0, 1]}, Tokens((1, 2), (0, 1))),
    ({"input_ids": [1, 2], "assistant_masks": [True, False]}, Tokens((1, 2), (1, 0))), ({"input_ids": [1, 2]}, Tokens((1, 2), (1, 1))),
    ({**PADDED, "labels": [-100, -100, 2]}, Tokens((1, 2), (0, 1))), ({"messages": None, "text": "abc"}, PlainText("abc")),
    ({"messages": [ASK, ANSWER], "tools": "[]"}, Conversation((ASK, ANSWER))),
    ({"messages": [ASK, ANSWER], "tools": '[{"name": "f"}]', "chat_template_kwargs": QUIET},
     Conversation((ASK, ANSWER), 0, ({"name": "f"},), QUIET)),
])  # fmt: skip
def test_every_form(row, wanted):
    assert content(row) == wanted


def test_the_recorded_prompt_ends_before_the_first_trained_message():
    """The prompt ends before the first trained word; columns that are not part of it stay."""
    found = teacher_example(
        3, {"messages": [ASK, ANSWER, ASK, ANSWER], "level": 2}, text_field="text", where="W"
    )
    assert found.example == Example(3, [ASK], {"level": 2})
    taught = {"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]}
    begun = {"prompt": [ASK, ANSWER], "completion": [ANSWER]}
    for row, prompt in ((taught, [ASK, ANSWER, ASK]), (begun, [ASK, ANSWER])):
        assert teacher_example(0, row, text_field="text", where="W").example.prompt == prompt


@pytest.mark.parametrize(("row", "said"), [
    ({"question": "a"}, "has none of the forms .* It has the columns: question"), ({"prompt": "a"}, "has no column `completion`"),
    ({"prompt": "a", "completion": [ANSWER]}, "`prompt` is text, but `completion` is list"),
    ({"prompt": "a", "completion": json.dumps([ANSWER])}, "but `completion` is JSON text"),
    ({"prompt": "a", "completion": ""}, "`completion` is empty"), ({"messages": "hi"}, "no message is the assistant's"),
    ({"messages": [ASK]}, "no message is the assistant's, .* the roles are: user"),
    ({"prompt": [ASK, ANSWER], "completion": [ASK]}, "no message is the assistant's"),
    ({"messages": [ASK, {"role": "assistant"}]}, "message 1: .*under `content`"),
    ({"messages": [ASK, ANSWER], "tools": "f("}, "`tools` is text, but no JSON"), ({"text": 5}, "`text` is int"),
    ({"text": "a", "chat_template_kwargs": {"b": 1}}, "`chat_template_kwargs` has no effect"),
    ({"input_ids": [1, 2], "labels": [2, -100]}, "label of token 0 is 2, the token 1"),
    ({"input_ids": [1, 2], "labels": [-100]}, "2 input_ids, but 1 labels"), ({"input_ids": ["a"]}, "`input_ids` is .*whole numbers"),
    ({"input_ids": [1, 2], "attention_mask": [1]}, "1 entries in attention_mask"),
])  # fmt: skip
def test_unusable_supervised_rows_are_refused_with_their_number(row, said):
    with pytest.raises(TaskError, match=f"^W: row 3.*{said}"):
        content(row)


# Functions of the task

ROWS = [{"q": "one", "a": 1, "text": "old"}, {"q": "two", "a": 2, "text": "old"}]


def formatted(function, rows=ROWS, field="text"):
    return format_rows(rows, function, text_field=field, where="W")


@pytest.mark.parametrize(
    "function",
    [
        lambda row: f"{row['q']}={row['a']}",
        lambda batch: [f"{q}={a}" for q, a in zip(batch["q"], batch["a"], strict=True)],
        lambda batch: [f"{batch['q'][i]}={batch['a'][i]}" for i in range(len(batch["a"]))],
    ],
    ids=["row", "zipped batch", "indexed batch"],
)
def test_formatting_rows_or_batches_into_text(function):
    assert [row["text"] for row in formatted(function)] == ["one=1", "two=2"]
    assert [row["story"] for row in formatted(function, field="story")] == ["one=1", "two=2"]


def test_formatting_into_messages_replaces_the_other_forms():
    rows = formatted(
        lambda row: [ASK, {**ANSWER, "content": row["q"]}], [*ROWS, {"q": "x", "prompt": "p"}]
    )
    assert rows[0] == {"q": "one", "a": 1, "messages": [ASK, {**ANSWER, "content": "one"}]}
    assert "prompt" not in rows[2]


def collated(collator, row=ROWS[0], tokens=(5, 6, 7)):
    return collate(collator, row, tokens, "W: row 3")


def test_collators_get_tokens_and_their_masks_are_kept():
    def completion_only(features):
        (feature,) = features
        assert set(feature) == {"input_ids", "attention_mask"}, "as transformers' collators want"
        ids = torch.tensor([[0, *feature["input_ids"]]])
        labels = ids.masked_fill(torch.tensor([[True, True, False, False]]), -100)
        seen = torch.tensor([[0, 1, 1, 1]])
        return BatchEncoding({"input_ids": ids, "labels": labels, "attention_mask": seen})

    assert collated(completion_only) == Tokens((5, 6, 7), (0, 1, 1))


@pytest.mark.parametrize("tokens", [(5, 6, 7), None])
def test_collators_that_ask_for_columns_get_the_row(tokens):
    def of_columns(features):
        return {"input_ids": [[f["a"], 9] for f in features], "labels": [[-100, 9]]}

    assert collated(of_columns, tokens=tokens) == Tokens((1, 9), (0, 1))
