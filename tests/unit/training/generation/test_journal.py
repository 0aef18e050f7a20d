from __future__ import annotations

import os
from pathlib import Path

import pytest

from groupwise.api.openai_client.response_parsing import Choices, Usage
from groupwise.core.errors import StoreError
from groupwise.training.generation.journal import Answers, Journal, UsageTotals


def answer(*texts: str, thought: str | None = None) -> Choices:
    count = len(texts)
    return Choices(texts, ("stop",) * count, Usage(5, 2 * count), "m", (thought,) * count)


def texts(answers: Answers, key: str) -> list[str]:
    return [each.text for each in answers.of(key)]


def written(path: Path) -> Answers:
    with Journal(path, Answers()) as journal:
        journal.append("k", 0, answer("a", "b\nü"))
        journal.append("l", 0, answer("x", thought="hm"))
        journal.append("k", 2, answer("c"))
    answers = Answers()
    answers.read(path)
    return answers


def test_usage_totals_and_orphaned_answers_are_counted(tmp_path: Path) -> None:
    answers = written(tmp_path / "a.jsonl")
    assert answers.usage_totals == UsageTotals(3, Usage(15, 8))
    assert [answers.count_orphans(keys) for keys in ({"k", "l"}, {"l"}, {"other"})] == [0, 2, 3]
    answers.add({"key": "k", "first": 3, "choices": [], "usage": {}, "model": "m"})
    assert answers.usage_totals == UsageTotals(4, Usage(15, 8), without_usage=1)


def test_an_answer_is_on_the_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flushed = tmp_path / "a.jsonl", list[bytes]()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append(path.read_bytes())

    with Journal(path, Answers()) as journal:
        monkeypatch.setattr(os, "fsync", note)
        journal.append("k", 0, answer("a"))
    assert flushed
    assert flushed[-1] == path.read_bytes() != b""


def test_a_torn_end_is_cut_off_wherever_it_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written(path)
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for torn in range(last, len(whole)):
        path.write_bytes(whole[:torn])
        answers = Answers()
        with Journal(path, answers) as journal:
            assert texts(answers, "k") == ["a", "b\nü"]
            journal.append("k", 2, answer("again"))
        again = Answers()
        again.read(path)
        assert texts(again, "k") == ["a", "b\nü", "again"]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written(path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b'{"key": 1}', *lines[1:]]))
    with pytest.raises(StoreError, match="line 2 is not an answer"):
        Answers().read(path)


def test_a_disk_that_refuses_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    answers = Answers()
    with Journal(tmp_path / "a.jsonl", answers) as journal:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            journal.append("k", 0, answer("a"))
        assert texts(answers, "k") == [], "nobody counts on it"
