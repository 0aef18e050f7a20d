"""What every engine keeps (`groupwise.server.engine.engine_protocol.Engine`):

1. A new run gets the name that the config has, or the next free one; what is wrong is refused, and nothing is left.
2. A group has the members asked for, each with the seed of its draw, and says which policy drew it, after how many steps.
3. The same draw gives the same group, whatever else is asked at the same time.
4. What cannot be asked is refused with UsageError, and disturbs nobody.
5. A cancelled request disturbs nobody.
6. A step learns, publishes and is in the record before it is answered; one in which nothing teaches counts, and the version stays.
7. Only the plan of the next step is taken.
8. A successor goes back to the last checkpoint, has manifests and metrics of all steps, and takes the later ones again to the same weights.
9. What a client calls the tokenizer has the hash that was told.
10. A closed run stays readable on the disk; a finished one has its final weights. An engine can be closed twice.
11. A request that is under way can be read as it grows: what is shown is always the beginning of what it becomes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.core.types import Group
from groupwise.server.engine.engine_protocol import (
    Engine,
    GroupSampleRequest,
    OpenRun,
    Plan,
    Sampled,
)
from groupwise.tasks.openai.sampling import Sampling
from groupwise.tasks.rollouts.seeds import member_seed

LONGEST_PROMPT = 16
MEMBERS = 3
SEED = 5
STEPS = 5
SAVE_STEPS = 2


@dataclass(frozen=True)
class Host:
    """One implementation, and a place for its runs."""

    make: Callable[[], Awaitable[Engine]]
    config: Mapping[str, Any]
    grows: bool
    """Whether what it writes is shown as it grows."""

    def order(self, **given: Any) -> OpenRun:
        return OpenRun(self.config, LONGEST_PROMPT, **given)


async def _fake() -> Engine:
    from tests.fake_engine import FakeEngine

    return FakeEngine()


async def _process() -> Engine:
    from groupwise.server.engine.engine_process import EngineProcess

    return await EngineProcess("tests.fake_engine:make").start()


async def _core() -> Engine:
    from groupwise.server.engine.core import EngineCore

    return EngineCore()


MAKERS = {"fake": _fake, "process": _process, "core": _core}
HERE = pytest.mark.parametrize("host", ["fake", "core"], indirect=True)
"""Of what another process has no part in."""


@pytest.fixture(params=MAKERS)
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Host]:
    made: list[Engine] = []

    async def make() -> Engine:
        made.append(await MAKERS[request.param]())
        return made[-1]

    config = {
        "model": {"name": "tiny"}, "lora": {"r": 4, "alpha": 8}, "sampler": {"max_completion_length": 6, "max_num_seqs": 8},
        "training": {"max_steps": STEPS, "num_generations": MEMBERS, "learning_rate": 0.05, "seed": SEED},
        "run": {"name": "contract", "dir": str(tmp_path), "save_steps": SAVE_STEPS, "threads": 1},
    }  # fmt: skip
    yield Host(make, config, request.param == "core")
    for engine in made:
        await engine.close()


def files(folder: str | Path) -> list[Path]:
    """What is in a folder; nothing where it is not there."""
    return [*Path(folder).iterdir()] if Path(folder).is_dir() else []


def rewarded(group: Group, reward: Callable[[int], float] = float) -> Group:
    """Every member scored, by its place."""
    scored = tuple(
        replace(each, outcome="scored", reward=reward(each.member)) for each in group.rollouts
    )
    return replace(group, rollouts=scored)


async def plan(engine: Engine, step: int, **given: Any) -> Plan:
    sampled = await engine.sample(GroupSampleRequest(100 + step, "sort these"))
    return Plan(step, (rewarded(sampled.group, **given),))


@HERE
async def test_a_failed_open_leaves_no_files(host: Host):
    wrong = replace(host.order(), config={**host.config, "model": {"name": "no-such-model"}})
    for order in (wrong, host.order(run="no-such-run")):
        engine = await host.make()
        with pytest.raises(UsageError, match="no-such"):
            await engine.open(order)
        await engine.close()
    assert files(host.config["run"]["dir"]) == []


@HERE
async def test_a_group_follows_from_its_draw(host: Host):
    engine = await host.make()
    opened = await engine.open(host.order())
    first = await engine.sample(GroupSampleRequest(7, "sort these"))
    assert (first.step, first.version) == (0, 0)
    assert first.fingerprint == opened.policy.fingerprint
    assert (first.group.draw, first.group.example.prompt) == (7, "sort these")
    segments = [rollout.segments[0] for rollout in first.group.rollouts]
    assert [each.seed for each in segments] == [member_seed(SEED, 7, m) for m in range(MEMBERS)]
    for rollout, segment in zip(first.group.rollouts, segments, strict=True):
        assert rollout.outcome == "pending"
        assert len(segment.token_ids) == len(segment.sampling_logprobs or ()) <= 6
        assert (segment.policy_version, segment.fingerprint) == (0, first.fingerprint)
        assert rollout.prompt_ids == await engine.tokens_of("sort these")
    together = await asyncio.gather(
        *(engine.sample(GroupSampleRequest(draw, "sort these")) for draw in (3, 7, 4))
    )
    assert together[1] == first
    assert together[0].group.rollouts != first.group.rollouts


IMPOSSIBLE = {
    "too long": GroupSampleRequest(1, "sort these " * LONGEST_PROMPT),
    "empty": GroupSampleRequest(1, ""),
    "top_p": GroupSampleRequest(1, "sort", sampling=Sampling(top_p=0.9)),
    "greedy": GroupSampleRequest(1, "sort", sampling=Sampling(temperature=0.0)),
    "too many tokens": GroupSampleRequest(1, "sort", sampling=Sampling(max_tokens=10_000)),
    "more than the most": GroupSampleRequest(
        1, "sort", sampling=Sampling(max_tokens=2, min_tokens=3)
    ),
    "other tokens": GroupSampleRequest(1, "sort", prompt_ids=(0,)),
}


async def test_invalid_sample_requests_raise_and_change_nothing(host: Host):
    engine = await host.make()
    with pytest.raises(UsageError):
        await engine.sample(GroupSampleRequest(1, "sort"))
    await engine.open(host.order())
    before = await engine.sample(GroupSampleRequest(7, "sort these"))
    for why, order in IMPOSSIBLE.items():
        found = await asyncio.gather(engine.sample(order), return_exceptions=True)
        assert isinstance(found[0], UsageError), why
    own = await engine.tokens_of("sort these")
    assert await engine.sample(GroupSampleRequest(7, "sort these", prompt_ids=own)) == before


@HERE
@pytest.mark.parametrize("steps", [0, 1])
async def test_a_successor_starts_again_before_the_first_checkpoint(host: Host, steps: int):
    engine = await host.make()
    first = await engine.open(host.order())
    plans = [await plan(engine, step) for step in range(steps)]
    done = [await engine.step(each) for each in plans]
    await engine.close()
    engine = await host.make()
    again = await engine.open(host.order(run=first.run))
    assert (again.run, again.step, again.policy.fingerprint) == (
        first.run,
        0,
        first.policy.fingerprint,
    )
    assert again.manifests == tuple(each.record for each in done)
    for each, before in zip(plans, done, strict=True):
        assert (await engine.step(each)).policy.fingerprint == before.policy.fingerprint
    await engine.close()


@HERE
async def test_a_successor_takes_later_steps_again(host: Host):
    engine = await host.make()
    first = await engine.open(host.order())
    plans, records, samples = [], [], []
    for step in range(3):
        plans.append(await plan(engine, step))
        records.append((await engine.step(plans[-1])).record)
        samples.append(await engine.sample(GroupSampleRequest(7, "sort these")))
    await engine.close()
    engine = await host.make()
    opened = await engine.open(host.order(run=first.run))
    assert (opened.run, opened.folder, opened.step) == (first.run, first.folder, SAVE_STEPS)
    assert opened.manifests == tuple(records)
    assert opened.policy.fingerprint == records[SAVE_STEPS - 1].fingerprint_out
    assert [(await engine.metrics_of(step))["reward"] for step in range(3)] == [1.0] * 3
    assert await engine.metrics_of(3) == {}
    assert await engine.sample(GroupSampleRequest(7, "sort these")) == samples[SAVE_STEPS - 1]
    await engine.close()
    engine = await host.make()
    undone = await engine.open(host.order(run=first.run))
    assert undone.manifests == tuple(records[:SAVE_STEPS])
    again = await engine.step(plans[2])
    assert _timeless(again.record) == _timeless(records[2])
    assert await engine.sample(GroupSampleRequest(7, "sort these")) == samples[2]
    saved = await engine.save()
    assert saved.step == 3
    assert files(saved.path)
    await engine.close()
    engine = await host.make()
    assert (await engine.open(host.order(run=first.run))).step == 3
    fourth = await engine.step(await plan(engine, 3))
    assert fourth.record.step == 3


def _timeless(record: Any) -> Any:
    return replace(record, finished_at=0.0)


@HERE
@pytest.mark.parametrize("finished", [True, False])
async def test_a_closed_run(host: Host, finished: bool):
    engine = await host.make()
    opened = await engine.open(host.order())
    await engine.step(await plan(engine, 0))
    assert await engine.close_run(finished) == opened.folder
    assert bool(files(Path(opened.folder, "final"))) == finished
    sampled: Sampled = await engine.sample(GroupSampleRequest(7, "sort these"))
    assert sampled.step == 1
    await engine.close()
    await engine.close()
    if finished:
        another = await host.make()
        assert (await another.open(host.order())).run == "contract-2"


@HERE
async def test_a_new_run(host: Host):
    engine = await host.make()
    opened = await engine.open(host.order())
    assert (opened.run, opened.step, opened.max_steps) == ("contract", 0, STEPS)
    assert (opened.policy.run, opened.policy.version) == ("contract", 0)
    assert (opened.manifests, opened.longest_prompt) == ((), LONGEST_PROMPT)
    assert opened.longest_completion == 6
    folder = Path(opened.folder)
    assert folder == Path(host.config["run"]["dir"], "contract")
    words = folder / "tokenizer" / "tokenizer.json"
    assert words.is_file() == host.grows, "the fakes have none"
    digest = hashlib.sha256()
    for name, content in sorted((await engine.tokenizer_files()).items()):
        digest.update(f"{name}|{len(content)}|".encode())
        digest.update(content)
    assert opened.tokenizer_hash == digest.hexdigest()[:16]
    losing = asyncio.create_task(engine.lost())
    await engine.probe()
    await engine.close()
    assert not losing.done(), "it was asked to end"
    losing.cancel()


async def test_results_are_read_as_they_grow_and_a_cancelled_request_disturbs_no_other(host: Host):
    engine = await host.make()
    await engine.open(host.order())
    order = GroupSampleRequest(7, "sort these", sampling=Sampling(seed=1))
    task = asyncio.create_task(engine.sample(order))
    given_up = asyncio.create_task(engine.sample(GroupSampleRequest(8, "sort these")))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    seen = []
    while not task.done():
        seen.append(await engine.partial(7))
        await asyncio.sleep(0)
    group = task.result().group
    for texts in filter(None, seen):
        for text, rollout in zip(texts, group.rollouts, strict=True):
            assert rollout.completion.startswith(text)
    assert len({*seen}) > 3 or not host.grows
    ids = group.rollouts[0].completion_ids
    texts = await engine.token_texts(ids)
    assert len(texts) == len(ids)
    written = group.rollouts[0].completion
    assert "".join(text for text in texts if text in written) == written
    assert (await engine.sample(order)).group == group
    assert await engine.partial(8) == ()
    assert (await engine.probe()).sampling == 0


async def test_a_step(host: Host):
    engine = await host.make()
    opened = await engine.open(host.order())
    before = await engine.sample(GroupSampleRequest(7, "sort these"))
    order = Plan(0, (rewarded(before.group),), learning_rate=0.2)
    done = await engine.step(order)
    record = done.record
    assert (record.step, record.version_in, record.version_out) == (0, 0, 1)
    assert (record.draws, record.learning_rate) == ((7,), 0.2)
    assert record.fingerprint_out == done.policy.fingerprint != opened.policy.fingerprint
    assert done.metrics["reward"] == 1.0
    after = await engine.sample(GroupSampleRequest(7, "sort these"))
    assert (after.step, after.version, after.fingerprint) == (1, 1, done.policy.fingerprint)
    for wrong in (0, 2):
        with pytest.raises(GroupwiseError, match=f"step {wrong + 1},.*1 steps"):
            await engine.step(replace(order, step=wrong))
    idle = await engine.step(await plan(engine, 1, reward=lambda member: 1.0))
    assert (idle.record.step, idle.record.version_out) == (1, 1)
    assert idle.policy.fingerprint == done.policy.fingerprint
    (group,) = (await plan(engine, 2)).groups
    failed = replace(group.rollouts[0], outcome="failed", reason="by the client", reward=None)
    third = await engine.step(Plan(2, (replace(group, rollouts=(failed, *group.rollouts[1:])),)))
    assert (third.record.version_in, third.record.version_out) == (1, 2)
    assert third.metrics["reward"] == 1.5
