"""What every built-in task is held to. A new one is covered by being there.

    1. Its rows are a function of the config: the same in another process with another hash seed.
    2. Training, validation and test rows have nothing in common: neither a prompt nor what makes the problem (`IDENTITY`).
    3. Every gold completion earns full marks (`FULL`, or what all gold earns). Nothing, nonsense, the question and another row's gold
       earn less.
    4. What a completion earns does not depend on the others of its call.
    5. `groupwise check` finds no problem.
    6. By its config in configs/, gold counts as a success in an evaluation, and neither nothing, nonsense, the question nor a near miss
       (`NEAR_MISSES`) does.

A row of `get_sft_dataset` is a row of `get_rl_dataset` with its gold completion in `completion`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.reward_call.request import MemberScore, ScoreRequest
from groupwise.core.reward_call.text import as_completion
from groupwise.core.settings.view import View
from groupwise.core.types import Example, Rollout
from groupwise.tasks.builtin import reasoning_gym
from groupwise.tasks.contract import Command, Task, builtin_tasks, load_task, require
from groupwise.tasks.environment import as_step, reset_arguments
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.training.checks.check import check
from groupwise.training.checks.check_gold import GARBAGE, echo
from groupwise.training.config import load_config, view, with_task_schema
from groupwise.training.evaluation.measures import Success

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]

SMALL = {"train_size": 24, "validation_size": 8, "eval_size": 8}
"""Given to tasks that have such keys."""
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "sort_words": [{}, {"preset": "classic", "min_words": 2, "max_words": 5}],
    "math": [{}, {"strict": True}],
    "rubric_answers": [{}, {"rubric_in_prompt": True}],
    "reasoning_gym": [
        {},
        {
            "datasets": [
                {"name": "letter_counting"},
                {"name": "graph_color", "weight": 2.0, "parameters": {"max_num_vertices": 12}},
                {"name": "isomorphic_strings", "level": 0},
            ]
        },
    ],
}
"""Settings of a task beside its defaults; both kinds are tested."""
FULL = {
    "sort_words": 1.0, "sort_words/1": 12.11, "math": 1.1, "math/1": 1.1, "wordle": 0.7,
    "wordle_game": 1.7, "crossword": 1.0, "rush_hour": 1.0, "rubric_answers": 15.0,
    "rubric_answers/1": 15.0, "reasoning_gym": 1.0, "reasoning_gym/1": 1.0,
}  # fmt: skip
"""What gold earns; of others it is what all of their gold earns."""
IDENTITY: dict[str, Callable[[Row], Hashable]] = {
    "sort_words": lambda row: frozenset(row["words"]),
    "wordle": lambda row: row["secret"],
    "wordle_game": lambda row: row["secret"],
    "crossword": lambda row: row["answer"],
    "rush_hour": lambda row: row["board"],
    "rubric_answers": lambda row: row["question"],
}
"""What makes the problem; of others it is the prompt."""
FROZEN: dict[str, Hashable] = {
    "sort_words": frozenset({"mountain", "oyster", "marble"}),
    "crossword": "ORCHESTRA",
    "rush_hour": "ooBBCDAAoCDEoFFDEoGGoEooo",
}
"""What the first held-out row is about, in every release: who compares runs compares them on the same rows."""
SAME_PROMPT = frozenset({"wordle_game"})
"""Tasks that ask everybody the same."""
SEVERAL_RIGHT = frozenset({"wordle", "reasoning_gym"})
"""Tasks in which another row's gold may happen to be right as well, and mostly is not."""


NEAR_MISSES: dict[str, Callable[[Row], list[str]]] = {
    "sort_words": lambda row: [
        joint.join(words)
        for joint in (", ", "\n")
        for words in (sorted(row["words"], reverse=True), sorted(row["words"])[:1], ["zebra"])
    ],
    "math": lambda row: [row["gold_completion"].replace(row["answer"], f"1{row['answer']}")],
    "wordle": lambda row: [row["gold_completion"].partition("<guess>")[0] + "<guess>lwael</guess>"],
    "wordle_game": lambda row: [row["gold_completion"].replace("</guess>", "s</guess>")],
    "crossword": lambda row: [
        row["completion"].replace("</answer>", " 5</answer>"),
        "think " * 80 + row["answer"],
    ],
    "rush_hour": lambda row: [row["completion"].replace("</answer>", ", A<1</answer>")],
    "rubric_answers": lambda row: [" ".join(row["reference"].split()[:4])],
    "reasoning_gym": lambda row: [f"It is {row['answer']}.", "<answer>0.5</answer>"],
}
"""Completions that may earn something and solve nothing."""


@dataclass(frozen=True)
class Case:
    """A task with one kind of settings."""

    name: str
    own: Mapping[str, Any]
    label: str

    @property
    def task(self) -> Task:
        return load_task(self.name)

    @property
    def config(self) -> View:
        schema = self.task.config_schema()
        assert schema is not None
        small = {key: size for key, size in SMALL.items() if key in schema.model_fields}
        return View({"task": {**small, **self.own}, "sampler": {"max_completion_length": 512}})

    def splits(self) -> dict[str, list[Row]]:
        """Training, validation and test rows; those of the first two with their gold completion."""
        task, config = self.task, self.config
        return {
            "train": task.sft_rows("get_sft_dataset", config, None),
            "validation": task.sft_rows("get_sft_eval_dataset", config, None),
            "test": [_row(example) for example in task.eval_examples(config)],
        }

    def identity(self, row: Row) -> Hashable:
        return IDENTITY.get(self.name, _prompt)(row)


CASES = [
    Case(name, own, f"{name}/{number}" if number else name)
    for name in builtin_tasks()
    for number, own in enumerate(VARIANTS.get(name, [{}]))
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
pytestmark = pytest.mark.filterwarnings("ignore:task.rubric_in_prompt:UserWarning")


SERVING = """
import json, sys
from groupwise.tasks.builtin.reasoning_gym_problems import _rows_by_split
for line in sys.stdin:
    print(json.dumps(_rows_by_split(json.loads(line))), flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def _one_process_of_reasoning_gym() -> Iterator[None]:
    """It takes seconds to start, and would be started for each config."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", "-c", SERVING]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process,
        pytest.MonkeyPatch.context() as patch,
    ):
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None

        def make(request: str, limit: float) -> Any:
            print(request, file=asked, flush=True)
            return json.loads(told.readline())

        patch.setattr(reasoning_gym, "_run_generator", make)
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _row(example: Example) -> Row:
    return {"prompt": example.prompt, **example.columns}


@cache
def splits_of(label: str) -> dict[str, list[Row]]:
    """Those of a case, made once."""
    return next(case for case in CASES if case.label == label).splits()


def _prompt(row: Row) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def _scores(
    rubric: Rubric, row: Row, texts: Sequence[Any], index: int = 0
) -> tuple[MemberScore, ...]:
    count = len(texts)
    columns = {key: [v] * count for key, v in row.items() if key not in ("prompt", "completion")}
    said = [as_completion(row["prompt"], t) if isinstance(t, str) else t for t in texts]
    ids = [[1] * 8 for _ in texts]
    asked = ScoreRequest(index, [row["prompt"]] * count, said, ids, columns, 0, 1)
    return asyncio.run(rubric.score(asked)).members


def _rewards(rubric: Rubric, row: Row, texts: Sequence[Any]) -> list[float]:
    rewards = [member.reward for member in _scores(rubric, row, texts)]
    assert None not in rewards
    return [reward for reward in rewards if reward is not None]


# 1


def digests() -> dict[str, str]:
    """Of the rows of every case; of reasoning-gym, which has a process of its own, of the one that depends on hashes."""
    return {case.label: digest(case.splits()) for case in CASES if case.label != "reasoning_gym"}


def digest(splits: dict[str, list[Row]]) -> str:
    return hashlib.sha256(json.dumps(splits).encode()).hexdigest()


def test_rows_are_the_same_in_another_process(tmp_path: Path) -> None:
    code = (
        "import json, warnings; warnings.simplefilter('ignore'); "
        "from tests.contract.test_builtin_tasks import digests; print(json.dumps(digests()))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "XDG_CACHE_HOME": str(tmp_path / "own")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, check=True
    )
    found = json.loads(done.stdout)
    assert found == {label: digest(splits_of(label)) for label in found}
    assert len(found) == len(CASES) - 1


def test_the_first_held_out_row_is_the_same_in_every_release() -> None:
    assert {name: IDENTITY[name](splits_of(name)["test"][0]) for name in FROZEN} == FROZEN


@each_case
def test_taught_rows_are_those_of_rl(case: Case) -> None:
    taught = splits_of(case.label)["train"]
    untaught = [{k: v for k, v in row.items() if k != "completion"} for row in taught]
    assert untaught == [_row(example) for example in case.task.rl_examples(case.config)]


# 2


@each_case
def test_splits_have_nothing_in_common(case: Case) -> None:
    splits = splits_of(case.label)
    for key in (case.identity, _prompt) if case.name not in SAME_PROMPT else (case.identity,):
        seen = {split: {key(row) for row in rows} for split, rows in splits.items()}
        assert seen["train"].isdisjoint(seen["validation"] | seen["test"])
        assert seen["validation"].isdisjoint(seen["test"])
    if case.name not in SAME_PROMPT:
        assert all(len(set(map(_prompt, rows))) == len(rows) for rows in splits.values())


# 3


@each_case
def test_gold_earns_full_marks_and_nothing_else_does(case: Case) -> None:
    rows = splits_of(case.label)["train"][:24]
    rubric = case.task.rubric(case.config, None)
    gold = [_rewards(rubric, row, [row["completion"]])[0] for row in rows]
    full = FULL.get(case.label, gold[0])
    assert gold == pytest.approx([full] * len(rows))
    assert full > 0
    also_right = 0
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        question = echo(Example(0, row["prompt"], {}))
        for reward in _rewards(rubric, row, ["", GARBAGE, question]):
            assert reward < full - 1e-6
        if other["completion"] != row["completion"]:
            also_right += _rewards(rubric, row, [other["completion"]])[0] > full - 1e-6
    assert also_right <= (len(rows) // 2 if case.name in SEVERAL_RIGHT else 0)


# 4


@each_case
def test_a_completion_earns_the_same_in_any_company(case: Case) -> None:
    rows = splits_of(case.label)["train"]
    rubric = case.task.rubric(case.config, None)
    texts = [rows[0]["completion"], rows[1]["completion"], "", GARBAGE]
    together = _rewards(rubric, rows[0], texts)
    assert together == [_rewards(rubric, rows[0], [text])[0] for text in texts]
    assert together == _rewards(rubric, rows[0], texts[::-1])[::-1]


# 5


@each_case
def test_check_finds_no_problem(case: Case) -> None:
    own = case.config["task"].to_dict()
    given = [f"task.{key}={json.dumps(value)}" for key, value in own.items()]
    report = check(case.name, overrides=["rewards.in_process=true", *given], rows=6)
    assert not report.of_level("problem"), report.of_level("problem")


# 6


def _configs() -> list[tuple[str, Path]]:
    """The tasks that the configs of rl are for, as their first lines say."""
    lines = {
        path: path.read_text().partition("\n")[0].split() for path in ROOT.glob("configs/*.yaml")
    }
    return sorted(
        (words[-1], path)
        for path, words in lines.items()
        if words[1:3] == ["groupwise", "rl"] and words[-1] in builtin_tasks()
    )


@pytest.mark.parametrize(("name", "path"), _configs(), ids=[path.name for _, path in _configs()])
def test_a_config_tells_success_from_failure(name: str, path: Path) -> None:
    task = load_task(name)
    schema = task.config_schema()
    assert schema is not None
    small = [f"task.{key}={size}" for key, size in SMALL.items() if key in schema.model_fields]
    loaded = with_task_schema(load_config(path, small), schema)
    of_run = view(loaded.config)
    eval_ = loaded.config.eval
    success = Success(eval_.success_threshold, eval_.success_part)
    rubric = task.rubric(of_run, None)
    for row in task.sft_rows("get_sft_dataset", of_run, None)[:8]:
        question = echo(Example(0, row["prompt"], {}))
        wrong = ["", GARBAGE, question, *NEAR_MISSES[name](row)]
        scores = _scores(rubric, row, [row["completion"], *wrong])
        judged = [success.judge(_rollout(member)) for member in scores]
        assert judged == [True] + [False] * len(wrong), [member.reward for member in scores]


def _rollout(member: MemberScore) -> Rollout:
    return Rollout(
        0, 0, 0, (), (), "", outcome=member.outcome, reward=member.reward, parts=member.parts
    )


each_task = pytest.mark.parametrize("name", builtin_tasks())


@each_task
def test_it_has_what_every_command_needs_a_config_and_a_page(name: str) -> None:
    task = load_task(name)
    for hooks in COMMANDS:
        require(task, hooks)
    assert task.has("get_sft_eval_dataset")
    assert task.config_schema() is not None
    assert name in dict(_configs())
    assert (ROOT / "docs/tasks" / f"{name}.md").is_file()
    assert f"]({name}.md)" in (ROOT / "docs/tasks/index.md").read_text()


@each_case
def test_the_resolved_config_makes_the_rows_of_the_written_one(case: Case) -> None:
    own = case.config["task"].to_dict()
    schema = case.task.config_schema()
    assert schema is not None
    loaded = load_config({"model": {"name": "tiny"}, "task": own})
    resolved = view(with_task_schema(loaded, schema).config)
    assert [_row(each) for each in case.task.eval_examples(resolved)] == (
        splits_of(case.label)["test"]
    )


@each_case
def test_gold_plays_its_environment_to_the_end(case: Case) -> None:
    if not case.task.has("get_environment"):
        return
    make = case.task.environment(case.config)
    for row in splits_of(case.label)["train"][:8]:
        environment: Any = make()
        given = {**row, "seed": 0, "member": 0}
        environment.reset(**reset_arguments(environment.reset, given))
        said: Any = row["completion"]
        said = as_completion([], said) if isinstance(said, str) else said
        turns = [message["content"] for message in said if message["role"] == "assistant"]
        ends = [as_step(environment.step(turn)).done for turn in turns]
        assert ends == [False] * (len(turns) - 1) + [True]


COMMANDS: tuple[Command, ...] = ("rl", "sft", "eval")
