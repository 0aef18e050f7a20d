"""Tokens of a rollout by the learner's probability over the sampler's."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.core.types import Example, Group, Rollout, Segment
from groupwise.dashboard.runs.tokens import ratio_of
from groupwise.runs.records import StepRecord
from groupwise.runs.store import Store
from tests.unit.dashboard.dashboard_client import asking
from tests.web_runs import write_run


def test_a_ratio_is_the_learners_probability_over_the_samplers() -> None:
    assert ratio_of(math.log(0.3), math.log(0.2)) == pytest.approx(1.5)
    assert ratio_of(-1.0, -1.0) == 1.0
    assert ratio_of(None, -1.0) is None
    assert ratio_of(-1.0, None) is None
    for strange in (math.nan, -math.inf):
        assert ratio_of(strange, -1.0) is None
        assert ratio_of(-1.0, strange) is None
    extreme = ratio_of(0.0, -1e6)
    assert extreme is not None
    assert math.isfinite(extreme)


def group_of(draw: int, segments: tuple[Segment, ...], *advantages: float | None) -> Group:
    rollouts = tuple(
        Rollout(draw, member, 0, (1,), segments, "text", "scored", reward=1.0, advantage=advantage)
        for member, advantage in enumerate(advantages)
    )
    return Group(draw, Example(0, "question"), rollouts)


DRAWN = Segment("policy", (7, 8, 9), (-1.0, -2.0, -0.5))
LEARNT = replace(DRAWN, learner_logprobs=(-1.0, -1.75, -2.5))
READ = Segment("environment", (5,))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    write_run(tmp_path / "one", 0)
    with Store.open(tmp_path / "one" / "run.db") as store:
        groups = [group_of(0, (LEARNT, READ), 0.5), group_of(1, (DRAWN,), 0.25)]
        store.commit_step(StepRecord(0, 0, 1, "f", (0, 1), 0.1, 1.0), groups, {})
    async with asking(tmp_path) as found:
        yield found


async def test_the_page_shows_the_ratio_of_each_token(client: httpx2.AsyncClient) -> None:
    answer: dict[str, Any] = (await client.get("/runs/one/rollouts/1?format=json")).json()
    assert answer["without_ratios"] is None
    drawn, read = answer["segments"]
    ratios = [1.0, math.exp(0.25), math.exp(-2.0)]
    assert [each["ratio"] for each in drawn["tokens"]] == pytest.approx(ratios)
    assert [each["learner_logprob"] for each in drawn["tokens"]] == [-1.0, -1.75, -2.5]
    assert [each["ratio_shade"] for each in drawn["tokens"]] == [0, 5, -8]
    assert [each["ratio"] for each in read["tokens"]] == [None]
    page = (await client.get("/runs/one/rollouts/1", headers={"accept": "text/html"})).text
    assert 'name="colour" value="ratio"' in page
    assert 'class="token p3 more5" title="8 · -2.000 nats · ratio 1.284"' in page
    assert 'class="token p1 less8" title="9 · -0.500 nats · ratio 0.135"' in page
    without = await client.get("/runs/one/rollouts/2", headers={"accept": "text/html"})
    assert 'value="ratio"' not in without.text
