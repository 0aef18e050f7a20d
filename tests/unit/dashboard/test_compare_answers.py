"""What two policies answered to the same prompts.

1. Of each prompt that both have answered the newest groups stand side by side, those that differ most first.
2. A side ends where its step says; a run beside itself is shown first against now.
3. Prompts are the same by number and text, or by text alone where the data differ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.core.types import Example, Group, Rollout
from groupwise.runs.records import StepRecord
from groupwise.runs.search import PromptFilter
from groupwise.runs.store import Store
from tests.unit.dashboard.dashboard_client import asking
from tests.web_runs import write_run

Answered = Sequence[tuple[int, str, Sequence[float | None]]]
"""Of a step: examples with their prompts and rewards."""


def record(runs: Path, name: str, steps: Sequence[Answered], **columns: Any) -> None:
    path = write_run(runs / name, 0)
    draw = 0
    with Store.open(path / "run.db") as store:
        for step, asked in enumerate(steps):
            made: list[Group] = []
            for example, prompt, rewards in asked:
                members = tuple(answer(draw, i, step, each) for i, each in enumerate(rewards))
                made.append(Group(draw, Example(example, prompt, dict(columns)), members))
                draw += 1
            draws = tuple(each.draw for each in made)
            store.commit_step(StepRecord(step, step, step + 1, "w", draws, 0.1, 0.0), made, {})


def answer(draw: int, member: int, step: int, reward: float | None) -> Rollout:
    text = f"{member} at {step}"
    outcome = "failed" if reward is None else "scored"
    return Rollout(draw, member, 0, (), (), text, outcome, reward=reward)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    record(
        tmp_path,
        "old",
        [
            [(0, "p", [0.0, 0.5]), (1, "q", [1.0, 1.0]), (2, "r", [0.5])],
            [(0, "p", [0.25, 0.75]), (3, "only here", [1.0]), (4, "s", [None, None])],
        ],
        task="sums",
    )
    record(
        tmp_path,
        "new",
        [[(0, "p", [1.0, 1.0, 0.25]), (1, "q", [0.0]), (2, "r", [0.5]), (4, "s", [1.0])]],
    )
    record(tmp_path, "elsewhere", [[(7, "q", [0.5]), (8, "p", [0.0])]])
    async with asking(tmp_path) as found:
        yield found


async def page(client: httpx2.AsyncClient, query: str) -> Mapping[str, Any]:
    found = await client.get(f"/rollouts/compare?format=json&{query}")
    assert found.status_code == 200, found.text
    return found.json()


def differences(found: Mapping[str, Any]) -> list[tuple[int, float | None]]:
    return [(each["a"]["example"], each["difference"]) for each in found["pairs"]]


async def test_the_newest_answers_of_both_stand_side_by_side(client: httpx2.AsyncClient) -> None:
    found = await page(client, "a=old&b=new")
    assert differences(found) == [(1, -1.0), (0, 0.25), (2, 0.0), (4, None)]
    first = found["pairs"][1]
    assert (first["a"]["step"], first["a"]["mean"], first["a"]["best"]) == (2, 0.5, 0.75)
    assert (first["b"]["mean"], first["b"]["best"]) == (0.75, 1.0)
    assert [each["reward"] for each in first["b"]["members"]] == [1.0, 1.0, 0.25]
    assert [each["completion"] for each in first["a"]["members"]] == ["1 at 1", "0 at 1"]
    assert found["pairs"][3]["a"]["mean"] is None
    assert found["summary"] == {
        "prompts": 4, "compared": 3, "mean_a": pytest.approx(2 / 3),
        "mean_b": pytest.approx(1.25 / 3), "better": 1, "worse": 1, "equal": 1,
    }  # fmt: skip
    assert differences(await page(client, "a=old@1&b=new"))[1] == (0, 0.5)
    shown = (await client.get("/rollouts/compare?a=old&b=new")).text
    assert "mean 0.500 → 0.750" in shown


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("a=old@1&b=old@2&example=0", [(0, 0.25)]),
        ("a=old@2&b=old@2&example=0", []),  # it is the same
        ("a=old&b=old", [(0, 0.25)]),  # first against now
        ("a=old&b=old&task=sums", [(0, 0.25)]),
        ("a=old&b=old&task=none", []),
        ("a=old&b=elsewhere", [(0, -0.5), (1, -0.5)]),
        ("a=old&b=elsewhere&example=1", [(1, -0.5)]),
        ("a=new&b=old&example=1", [(1, 1.0)]),
        ("a=old&b=new&order=better", [(0, 0.25)]),
        ("a=old&b=new&order=worse", [(1, -1.0)]),
        ("a=old&b=new&task=sums", []),
    ],
)
async def test_sides_end_at_their_steps_and_are_matched_and_chosen(
    client: httpx2.AsyncClient, query: str, expected: list[tuple[int, float | None]]
) -> None:
    found = await page(client, query)
    assert differences(found) == expected
    if "old@1" in query:
        [pair] = found["pairs"]
        assert [pair[side]["step"] for side in "ab"] == [1, 2]


def test_completions_of_an_earlier_draw_are_not_counted_again(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run.db") as store:
        groups = [
            Group(0, Example(0, "p"), (answer(0, 0, 0, float("nan")),)),
            Group(1, Example(0, "p"), (answer(1, 0, 0, 1.0),), again=0, origin="replay"),
        ]
        store.commit_step(StepRecord(0, 0, 1, "w", (0, 1), 0.1, 0.0), groups, {})
        store.keep_unfinished([Group(2, Example(0, "p"), ())])
        assert [each.draw for each in store.completed_prompts(PromptFilter())] == [0]
        assert store.scores([0]) == {}, "no number"
        assert store.scores([1])[1].best == 1.0
