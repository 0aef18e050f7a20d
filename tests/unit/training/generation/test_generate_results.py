from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.api.openai_client.response_parsing import Choices, Usage
from groupwise.core.reward_call.request import MemberScore
from groupwise.tasks.data.sft import Conversation, teacher_example
from groupwise.training.generation.config import read_options
from groupwise.training.generation.journal import Answers, Journal
from groupwise.training.generation.prompts import Item
from groupwise.training.generation.results import Counts, write_results
from groupwise.training.generation.row_requests import Failure

Given = Mapping[str, Sequence[tuple[str, str | None]]]

CHAT = [{"role": "user", "content": "q"}]


def item(index: int, prompt: Any = None, **columns: Any) -> Item:
    return Item(index, prompt or CHAT, {"prompt": "q", **columns}, f"k{index}")


def results(
    folder: Path,
    items: list[Item],
    given: Given,
    scores: dict[str, list[float | None]] | None = None,
    failures: tuple[Failure, ...] = (),
    **options: Any,
) -> tuple[Counts, list[dict[str, Any]], list[dict[str, Any]]]:
    answers = Answers()
    with Journal(folder / "answers.jsonl", answers) as journal:
        for key, choices in given.items():
            texts, reasons = zip(*choices, strict=True)
            nothing = (None,) * len(texts)
            journal.append(key, 0, Choices(texts, reasons, Usage(5, 3), "m", nothing))
    told = {
        key: tuple(
            MemberScore("failed" if value is None else "scored", "broke", value) for value in values
        )
        for key, values in (scores or {}).items()
    }
    config = read_options({"dataset": "d", "output": str(folder), **options})
    counts = write_results(folder, config, items, answers, told, failures)
    return counts, lines(folder / "generations.jsonl"), lines(folder / "train.jsonl")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_several_generations_of_a_row_are_grouped(tmp_path: Path) -> None:
    given = {"k0": [("a", "stop"), ("b", "length")], "k1": [("only one", "stop")]}
    failures = (Failure(2, "is empty"), Failure(1, "refused"))
    counts, generations, train = results(
        tmp_path, [item(0), item(1)], given, failures=failures, num_generations=2
    )
    assert [row["generation"] for row in generations] == [["a", "b"]]
    assert generations[0]["finish_reason"] == ["stop", "length"]
    assert [row["generation"] for row in train] == ["a"]
    assert lines(tmp_path / "failures.jsonl") == [
        {"row": 1, "key": "k1", "prompt": "q", "reason": "refused"},
        {"row": 2, "key": None, "prompt": None, "reason": "is empty"},
    ]
    assert counts.summary == {
        "answered": 1, "generations": 2, "kept": 1, "left_out": {"cut off": 1},
    }  # fmt: skip


def test_rows_train_as_conversations_or_as_text(tmp_path: Path) -> None:
    old = [{"role": "assistant", "content": "old"}]
    items = [item(0, messages=old, input_ids=[1], text="t"), item(1, "continue")]
    _, _, train = results(tmp_path, items, {k: [("new", "stop")] for k in ("k0", "k1")})
    chat = teacher_example(0, train[0], text_field="text", where="here").content
    assert isinstance(chat, Conversation)
    assert chat.messages == (*CHAT, {"role": "assistant", "content": "new"})
    assert chat.completion_start == 1
    text: Any = teacher_example(1, train[1], text_field="text", where="here").content
    assert (text.prompt, text.completion) == ("continue", "new")


def test_truncated_answers_train_only_with_keep_truncated(tmp_path: Path) -> None:
    given: Given = {
        "k0": [("half", "length"), ("  ", "stop"), ("bad", "content_filter"), ("good", None)]
    }
    counts, _, train = results(tmp_path, [item(0)], given, num_generations=4)
    assert [row["generation"] for row in train] == ["good"]
    assert dict(counts.left_out) == {"cut off": 2, "empty": 1}
    _, _, train = results(tmp_path, [item(0)], given, num_generations=4, keep_truncated=True)
    assert [row["generation"] for row in train] == ["half", "bad", "good"]


SCORED: dict[str, Any] = {"rewards": ["r"], "num_generations": 3}
ANSWERS: Given = {
    "k0": [("a", "stop"), ("b", "stop"), ("c", "stop")],
    "k1": [("d", "stop"), ("e", "stop"), ("f", "stop")],
    "k2": [("g", "length"), ("h", "stop"), ("i", "stop")],
}
SCORES: dict[str, list[float | None]] = {
    "k0": [0.5, 1.0, 1.0],
    "k1": [0.4, None, 0.0],
    "k2": [2.0, 0.5, 0.0],
}


def test_rows_are_kept_for_their_best_generation(tmp_path: Path) -> None:
    items = [item(n) for n in range(3)]
    counts, generations, train = results(tmp_path, items, ANSWERS, SCORES, min_reward=0.5, **SCORED)
    assert [(row["generation"], row["reward"]) for row in train] == [("b", 1.0), ("h", 0.5)]
    assert [row["reward"] for row in generations] == [[0.5, 1, 1], [0.4, None, 0], [2, 0.5, 0]]
    assert counts.left_out == {
        "not the best": 2, "reward too low": 3, "unscored": 1, "cut off": 1,
    }  # fmt: skip
    assert counts.summary["unscored"] == {"broke": 1}
    assert counts.summary["reward"]["mean_of_best"] == (1.0 + 0.4 + 2.0) / 3


def test_the_training_file_is_kept_if_no_answer_could_be_scored(tmp_path: Path) -> None:
    items = [item(n) for n in range(3)]
    _, _, before = results(tmp_path, items, ANSWERS, SCORES, min_reward=0.5, **SCORED)
    broken: dict[str, list[float | None]] = {key: [None] * 3 for key in SCORES}
    counts, generations, train = results(tmp_path, items, {}, broken, min_reward=0.5, **SCORED)
    assert counts.kept == 0
    assert train == before != []
    assert generations[0]["reward"] == [None] * 3
    one_low = {**broken, "k1": [0.4, None, None]}
    counts, _, train = results(tmp_path, items, {}, one_low, min_reward=0.5, **SCORED)
    assert (counts.kept, train) == (0, []), "a low reward is a verdict"
    _, _, train = results(tmp_path, items, {}, broken, **SCORED)
    assert len(train) == 8, "without a limit nothing depends on rewards"
