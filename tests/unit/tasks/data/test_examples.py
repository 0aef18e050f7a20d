"""From rows to examples: what is accepted, and the messages about the rest."""

from itertools import count

import pytest
from datasets import Dataset, DatasetDict

from groupwise.core.errors import TaskError
from groupwise.core.types import Example
from groupwise.tasks.data.examples import examples_from_rows, fingerprint

CHAT = [{"role": "user", "content": "hi"}]


def refused(rows, limit: int | None = 9) -> str:
    with pytest.raises(TaskError) as caught:
        examples_from_rows(rows, where="task.py: get_rl_dataset", limit=limit)
    assert str(caught.value).startswith("task.py: get_rl_dataset")
    return str(caught.value)


def test_lists_and_datasets_give_the_same():
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    expected = [Example(0, "a", {"answer": "1"}), Example(1, "b", {"answer": "2"})]
    assert examples_from_rows(rows, where="") == expected
    assert examples_from_rows(Dataset.from_list(rows), where="") == expected
    assert examples_from_rows(iter(rows), where="", limit=5) == expected


def test_chat_prompts_lose_the_nones_that_tables_add():
    rows = Dataset.from_list([{"prompt": CHAT}, {"prompt": [{**CHAT[0], "name": "x"}]}])
    first, second = examples_from_rows(rows, where="")
    assert first.prompt == CHAT
    assert second.prompt == [{**CHAT[0], "name": "x"}]


def test_an_endless_stream_is_read_up_to_its_limit_and_what_has_a_length_whole():
    endless = ({"prompt": str(i)} for i in count())
    assert len(examples_from_rows(endless, where="", limit=5)) == 5
    assert "which has no length" in refused(endless, limit=None)
    assert len(examples_from_rows([{"prompt": "a"}] * 9, where="", limit=5)) == 9


@pytest.mark.parametrize(("row", "place"), [
    ({"prompt": "half \ud83d"}, "row 1, column `prompt`"),
    ({"prompt": [{"role": "user", "content": "\ude00"}]}, "row 1, column `prompt`"),
    ({"prompt": "a", "answer": ["whole", "\ud83d"]}, "row 1, column `answer`"),
    ({"prompt": "a", "meta": {"k\ud83d": 1}}, "row 1, column `meta`"),
])  # fmt: skip
def test_half_a_character_is_refused_by_its_row(row, place):
    message = refused([{"prompt": "whole \U0001f600"}, row])
    assert place in message
    assert "\\ud" in message
    message.encode()


@pytest.mark.parametrize(("rows", "parts"), [
    ([], ["empty dataset"]), (iter([]), ["empty dataset"]),
    ([{"question": "x", "answer": "y"}], ["row 0", "no column `prompt`", "question, answer"]),
    ([{"prompt": "a"}, {"prompt": 3}], ["row 1", "type int: 3"]),
    ([{"prompt": ""}], ["row 0", "empty"]), ([{"prompt": []}], ["row 0", "no messages"]),
    ([{"prompt": None}], ["NoneType"]), ([{"prompt": ["hi"]}], ["row 0, message 0"]),
    ([{"prompt": [*CHAT, {"role": "user", "content": 3}]}], ["message 1", "`content`"]),
    (Dataset.from_list([{"prompt": "a"}, {"prompt": ""}]).select([1, 0]), ["row 1: ", "empty"]),
    (["a"], ["row 0 is str"]), ("text", ["returned str"]), (None, ["returned NoneType"]),
    (DatasetDict({"train": Dataset.from_list([{"prompt": "a"}])}), ["not one dataset"]),
])  # fmt: skip
def test_errors_of_rows_name_the_row_and_the_column(rows, parts):
    message = refused(rows)
    for part in parts:
        assert part in message


def test_fingerprint_sees_content_and_order_only():
    a, b = Example(0, "a", {"x": 1, "y": 2}), Example(1, CHAT, {})
    assert fingerprint([a, b]) == fingerprint([Example(5, "a", {"y": 2, "x": 1}), b])
    assert fingerprint([a, b]) != fingerprint([b, a])
    assert fingerprint([a]) != fingerprint([Example(0, "a", {"x": 1, "y": 3})])
    assert fingerprint([Example(0, "a", {"x": "1"})]) != fingerprint([Example(0, "a", {"x": 1})])
