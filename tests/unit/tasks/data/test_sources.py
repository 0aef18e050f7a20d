"""Sources of rows: every kind of file, splits and columns, the hub, and messages about what cannot be read."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.core.errors import TaskError
from groupwise.core.types import number_of
from groupwise.tasks.data.sources import is_local, read_source

ROWS = [{"question": f"q{n}", "answer": str(n)} for n in range(10)]
NESTED = {"prompt": [{"role": "user", "content": "hé\u2028llo"}], "meta": {"gold": [1, None]}}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(name: str, text: str | bytes) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def jsonl(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    return written(name, "\n".join(lines) + "\n")


def refused(*arguments: Any, **keywords: Any) -> str:
    with pytest.raises(TaskError) as caught:
        read_source(*arguments, **keywords)
    return str(caught.value)


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [number_of(row, place) for place, row in enumerate(rows)]


# Kinds of files


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "with a byte order mark"])
def test_json_lines_keep_what_is_nested(mark: bytes) -> None:
    line = json.dumps(NESTED, ensure_ascii=False).encode()
    source = written("a.jsonl", mark + line + b"\n\n  \r\n" + line + b"\r\n")
    assert read_source(source) == [NESTED, NESTED]


def test_parquet_keeps_what_is_nested() -> None:
    datasets.Dataset.from_list([NESTED, NESTED]).to_parquet("a.parquet")
    assert read_source("a.parquet") == [NESTED, NESTED]


LONG = "x" * 200_000
"""Longer than Python wants the cells of CSV to be."""


@pytest.mark.parametrize(("name", "text", "rows"), [
    ("a.json", json.dumps([NESTED]), [NESTED]), ("b.json", json.dumps({"version": 1, "data": [NESTED]}), [NESTED]),
    ("a.csv", '\ufeffprompt,answer\r\n"one, two\nthree",007\r\n\r\na\u2028b,1e3\r\n',
     [{"prompt": "one, two\nthree", "answer": "007"}, {"prompt": "a\u2028b", "answer": "1e3"}]),
    ("a.tsv", 'prompt\tanswer\none, two\t007\n"a\tb"\t1e3\n',
     [{"prompt": "one, two", "answer": "007"}, {"prompt": "a\tb", "answer": "1e3"}]),
    ("a.csv", f"prompt\n{LONG}\n", [{"prompt": LONG}]), ("a.txt", "one\r\n\ntwo\u2028x\n", [{"text": "one"}, {"text": "two\u2028x"}]),
], ids=["json", "json under data", "csv", "tsv", "long cells", "text"])  # fmt: skip
def test_each_kind_of_file_is_read(name: str, text: str, rows: list[dict[str, Any]]) -> None:
    assert read_source(written(name, text)) == rows


@settings(max_examples=30)
@given(
    st.lists(
        st.dictionaries(
            st.text(min_size=1), st.none() | st.booleans() | st.integers() | st.text(), min_size=1
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_json_lines_are_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_source(str(path)) == rows


# Splits


@pytest.mark.parametrize(("split", "expected"), [
    ("train", range(10)), ("train[:3]", range(3)), ("train[-2:]", range(8, 10)),
    ("train[20%:50%]", range(2, 5)), ("train[:25%]", range(2)), ("train[2:-7]", range(2, 3)),
])  # fmt: skip
def test_split_has_slices_as_the_hub_has_them(split: str, expected: range) -> None:
    found = read_source(jsonl(ROWS), split=split)
    assert found == [ROWS[n] for n in expected]
    assert numbers(found) == [*expected]


def test_limit_stops_reading() -> None:
    source = written("a.jsonl", Path(jsonl(ROWS[:3])).read_text() + "no JSON at all\n")
    assert read_source(source, limit=2) == ROWS[:2]
    assert read_source(jsonl(ROWS, "b.jsonl"), split="train[5:]", limit=2) == ROWS[5:7]


@pytest.mark.parametrize("split", ["train", "train[2:]"])
def test_limit_with_a_seed_takes_a_sample_in_the_order_of_the_file(split: str) -> None:
    source, there = jsonl(ROWS), read_source(jsonl(ROWS), split=split)
    found = [read_source(source, split=split, limit=4, seed=seed) for seed in range(20)]
    assert all(rows == [row for row in there if row in rows] for rows in found)
    assert all(len(rows) == 4 for rows in found)
    assert all(any(row in rows for rows in found) for row in there)
    assert numbers(found[3]) == [int(row["answer"]) for row in found[3]]
    assert found[3] == read_source(source, split=split, limit=4, seed=3)
    assert read_source(source, split=split, limit=99, seed=3) == there
    assert read_source(source, split=split, seed=3) == there


def test_a_sample_of_a_large_file_holds_no_more_than_itself() -> None:
    source = jsonl([{"question": "x" * 1000, "n": n} for n in range(5_000)])
    tracemalloc.start()
    found = read_source(source, limit=10, seed=1)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 10
    assert most < 1_000_000


def test_folder_has_a_file_for_each_split_or_several() -> None:
    jsonl(ROWS[:2], "set/train.jsonl")
    jsonl(ROWS[2:4], "set/test-00000-of-00002.jsonl")
    jsonl(ROWS[4:5], "set/test-00001-of-00002.jsonl")
    assert read_source("set") == ROWS[:2]
    assert read_source("./set", split="test") == ROWS[2:5]
    assert "test-00000-of-00002.jsonl, test-00001" in refused("set", split="valid")


# Columns


def test_columns_get_our_names_and_the_others_stay() -> None:
    rows = [{"q": "1+1", "meta": {"gold": {"x": 2}}, "id": 7, "prompt": "old"}]
    found = read_source(jsonl(rows), columns={"prompt": "q", "answer": "meta.gold.x"})
    assert found == [
        {"prompt": "1+1", "answer": 2, "q": "1+1", "meta": {"gold": {"x": 2}}, "id": 7}
    ]
    found = read_source(jsonl([{"a": 1, "b": 2}, {"a": 3}]), columns={"a": "b", "b": "a"})
    assert found == [{"a": 2, "b": 1}, {"b": 3}], "they may change places, and a row may lack one"


def test_missing_column_is_reported_with_the_nearest() -> None:
    message = refused(jsonl(ROWS), columns={"prompt": "questoin"})
    assert "'question'? It has: question, answer." in message


def test_folders_saved_by_datasets_are_read() -> None:
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk("one")
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk("splits")
    assert read_source("one") == read_source("splits") == read_source("splits/train") == ROWS
    assert read_source("splits", split="test") == [ROWS[1]]
    assert "saved" in refused("one", split="test")


@pytest.mark.parametrize("content", [
    '{"_data_files": [{"filename": "../secret.txt"}]}', '{"_data_files": [{"filename": "/secret.txt"}]}', "{}",
    '{"_data_files": [{"filename": 5}]}', '{"_data_files": 3}',
])  # fmt: skip
def test_a_saved_dataset_that_names_files_elsewhere_is_refused(content: str) -> None:
    Path("saved").mkdir()
    written("secret.txt", "hunter2")
    written("saved/state.json", content)
    assert "has `_data_files`" in refused("saved")


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_an_arrow_file_whose_offsets_lead_out_of_it_is_refused(new: Any) -> None:
    table = pa.table({"prompt": ["hello", "world"]})
    with pa.OSFile("a.arrow", "wb") as file, new(file, table.schema) as stream:
        stream.write_table(table)
    assert [row["prompt"] for row in read_source("a.arrow")] == ["hello", "world"]
    told, forged = struct.pack("<3i", 0, 5, 10), struct.pack("<3i", 0, 2**30, 2**30 + 5)
    content = Path("a.arrow").read_bytes()
    assert told in content
    Path("a.arrow").write_bytes(content.replace(told, forged))
    assert "a.arrow cannot be read as Arrow" in refused("a.arrow")


# What cannot be read


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl, line 2 is not JSON"), ("a.jsonl", "[1]\n", "a.jsonl, line 1 holds a list. Expected a row"),
    ("a.jsonl", b'{"a": "\xff"}\n', "a.jsonl, line 1: byte 7 is not UTF-8 (0xff)"),
    ("a.jsonl", "\n\n", "has no rows in its split 'train'"), ("a.json", '{"a": 1}\n{"a": 2}\n', "One row per line is .jsonl"),
    ("a.json", '{"rows": []}', "a.json holds an object. Expected a list of rows"),
    ("a.json", '[{"a": 1}, "x"]', "a.json, entry 1 holds text"),
    ("a.csv", "a,b\n1,2\n1,2,3\n", "a.csv, line 3: 3 values for 2 columns (a, b)"), ("a.csv", "a,a\n1,2\n", "names the column 'a' twice"),
    ("a.csv", 'a\n"open\n', "a.csv cannot be read as CSV"), ("a.csv", "", "has no rows"),
    ("a.tsv", "a\tb\n1\n", "a.tsv, line 2: 1 values for 2 columns"),
    ("a.parquet", "nothing of the kind", "a.parquet cannot be read as Parquet"),
    ("a.jsonl", '{"a": ' + "[" * 100_000, "a.jsonl, line 1 is nested too deep"),
    ("./a.xlsx", "x", "of a kind that is not read here (.xlsx)"), ("a.txt", "", "has no rows"),
])  # fmt: skip
def test_errors_of_a_data_file_name_the_line(name: str, content: str | bytes, said: str) -> None:
    assert said in refused(written(name, content))


# The hub


@pytest.mark.parametrize(("source", "local"), [
    ("openai/gsm8k", False), ("imdb", False), ("./gsm8k", True), ("~/gsm8k", True), ("a/b/c", True),
    ("openai/gsm8k.jsonl", True),
])  # fmt: skip
def test_files_are_distinguished_from_names_on_the_hub(source: str, local: bool) -> None:
    assert is_local(source) is local


def test_folder_that_exists_comes_before_the_hub() -> None:
    jsonl(ROWS, "openai/gsm8k/train.jsonl")
    assert read_source("openai/gsm8k") == ROWS


def test_hub_is_asked_for_just_that(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*arguments: Any, **keywords: Any) -> datasets.Dataset:
        asked.append((arguments, keywords))
        found = datasets.Dataset.from_list(ROWS, split=datasets.NamedSplit("test[-10:]"))
        found.info.splits = datasets.SplitDict(test=datasets.SplitInfo("test", num_examples=12))
        return found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = read_source(
        "openai/gsm8k", "main", "test[-10:]", {"prompt": "question"}, 2, revision="e53f048"
    )
    assert found == [{"prompt": row["question"], **row} for row in ROWS[:2]]
    assert numbers(found) == [2, 3]
    sampled = read_source("openai/gsm8k", "main", "test[-10:]", limit=2, seed=0, revision="e53f048")
    assert sampled == read_source(jsonl(ROWS), limit=2, seed=0)
    assert numbers(sampled) == [int(row["answer"]) + 2 for row in sampled]
    assert asked.pop() == asked[0]
    assert asked == [(("openai/gsm8k", "main"), {"split": "test[-10:]", "revision": "e53f048"})]


@pytest.mark.parametrize(("error", "said"), [
    (ConnectionError("offline"), "The hub cannot be reached"), (ValueError('Unknown split "x"'), 'Unknown split "x"'),
    (DatasetNotFoundError("gone"), "Look at its page"), (DatasetGenerationError("broken"), "Look at its page"),
])  # fmt: skip
def test_a_failure_of_the_hub_is_reported_with_what_was_tried(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = refused("openai/gsm8k", "main", "x")
    assert "'openai/gsm8k' (config 'main', split 'x')" in message
    assert f"a file or folder of that name in {Path.cwd()}" in message
    assert said in message
