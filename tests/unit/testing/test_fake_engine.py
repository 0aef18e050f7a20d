"""The faults and gates of the fake engine; what it shares with others is in tests/contract/test_engine_contract.py."""

import asyncio
import json
from dataclasses import replace

import pytest

from groupwise.errors import RunError, UsageError
from groupwise.server.engine.port import EngineLost, OpenRun, Plan, SampleOrder
from groupwise.server.engine.remote import EngineProcess
from groupwise.testing.fake_engine import EXIT_CODE, VARIABLE, FakeEngine, Fault

PROMPT = "sort these"


@pytest.fixture
def order(tmp_path):
    training = {"max_steps": 3, "num_generations": 4}
    return OpenRun({"training": training, "run": {"dir": str(tmp_path), "save_steps": 2}}, 16)


async def opened(order, *faults, **given):
    engine = FakeEngine(faults, **given)
    await engine.open(order)
    return engine


async def plan(engine, step):
    group = (await engine.sample(SampleOrder(step, PROMPT))).group
    scored = tuple(
        replace(each, outcome="scored", reward=float(each.member)) for each in group.rollouts
    )
    return Plan(step, (replace(group, rollouts=scored),))


def steps_on_disk(folder):
    return len(json.loads((folder / "run" / "run.json").read_text())["manifests"])


async def reached(engine, verb):
    while not engine.calls[verb]:  # noqa: ASYNC110 — as soon as the loop comes round
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_call_is_held_until_it_is_let_go(order):
    engine = await opened(order)
    gates = {"sample": engine.hold("sample"), "save": engine.hold("save", "done")}
    tasks = {
        "sample": asyncio.create_task(engine.sample(SampleOrder(0, PROMPT))),
        "save": asyncio.create_task(engine.save()),
    }
    for verb, task in tasks.items():
        await reached(engine, verb)
        assert not task.done()
        gates[verb].set()
        await task
    await engine.sample(SampleOrder(1, PROMPT))


async def test_what_is_held_is_lost_with_the_engine(order):
    engine = await opened(order)
    engine.hold("sample")
    task = asyncio.create_task(engine.sample(SampleOrder(0, PROMPT)))
    await reached(engine, "sample")
    await engine.close()
    for call in (task, engine.probe()):
        with pytest.raises(EngineLost, match="closed"):
            await call


async def test_tokens_appear_one_by_one(order):
    engine = await opened(order, pace=1e-4)
    task = asyncio.create_task(engine.sample(SampleOrder(0, PROMPT)))
    seen = []
    while not task.done():
        seen.append(await engine.partial(0))
        await asyncio.sleep(0)
    drawn = [each.completion for each in task.result().group.rollouts]
    lengths = [sum(map(len, each)) for each in seen]
    assert len({*lengths}) > 3
    assert lengths[:-1] == sorted(lengths[:-1])
    assert all(
        text[: len(part)] == part for each in seen for text, part in zip(drawn, each, strict=False)
    )
    assert await engine.partial(0) == ()


@pytest.mark.parametrize(
    ("point", "kept"), [("begun", 0), ("before_write", 0), ("after_write", 1), ("done", 1)]
)
async def test_death_at_every_point_of_a_step(order, tmp_path, point, kept):
    engine = await opened(order, Fault("step", "die", point))
    first = await plan(engine, 0)
    engine.hold("sample", "done")
    waiting = asyncio.create_task(engine.sample(SampleOrder(1, PROMPT)))
    await asyncio.sleep(0)
    for call in (engine.step(first), waiting, engine.probe()):
        with pytest.raises(EngineLost, match="A fault was asked for"):
            await call
    assert "A fault was asked for" in str(await engine.lost())
    await engine.close()
    assert steps_on_disk(tmp_path) == kept
    successor = FakeEngine()
    again = await successor.open(replace(order, run="run"))
    assert (again.step, len(again.manifests)) == (0, kept)
    done = await successor.step(first)
    assert not kept or done.record.fingerprint_out == again.manifests[0].fingerprint_out


async def test_faults_have_their_time(order, tmp_path):
    engine = await opened(
        order,
        Fault("probe", "raise", calls=(2,)),
        Fault("step", "raise", "before_write", step=1, message="no"),
        Fault("save", "raise", once=str(tmp_path / "it-happened")),
        Fault("tokens_of", "hang"),
    )
    await engine.probe()
    with pytest.raises(RunError, match="A fault"):
        await engine.probe()
    await engine.probe()
    await engine.step(await plan(engine, 0))
    second = await plan(engine, 1)
    for _ in range(2):
        with pytest.raises(RunError, match="no"):
            await engine.step(second)
    assert steps_on_disk(tmp_path) == 1
    with pytest.raises(RunError, match="A fault"):
        await engine.save()
    assert (await engine.save()).step == 1
    hanging = asyncio.create_task(engine.tokens_of(PROMPT))
    await reached(engine, "tokens_of")
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging


async def test_a_step_that_failed_before_it_was_written_can_be_taken_again(order):
    engine = await opened(order, Fault("step", "raise", "before_write", calls=(1,)))
    first = await plan(engine, 0)
    with pytest.raises(RunError):
        await engine.step(first)
    done = await engine.step(first)
    (order.config["run"]).update(name="other")
    assert (
        done.record.fingerprint_out
        == (await (await opened(order)).step(first)).record.fingerprint_out
    )


async def test_no_step_beyond_the_last(order):
    engine = await opened(order)
    for step in range(3):
        await engine.step(await plan(engine, step))
    with pytest.raises(RunError, match="All 3 steps"):
        await engine.step(await plan(engine, 3))


async def test_a_plan_with_pending_rollouts(order):
    engine = await opened(order)
    pending = (await engine.sample(SampleOrder(4, PROMPT))).group
    with pytest.raises(UsageError, match=r"\(4, 0\)"):
        await engine.step(Plan(0, (pending,)))
    await engine.step(await plan(engine, 0))


async def test_faults_in_a_process_of_its_own(order, tmp_path):
    fault = {
        "verb": "step",
        "kind": "die",
        "point": "after_write",
        "once": str(tmp_path / "it-happened"),
        "message": "as asked",
    }
    environment = {VARIABLE: json.dumps({"faults": [fault]})}
    make = "groupwise.testing.fake_engine:make"
    engine = await EngineProcess.start(make, environment=environment)
    await engine.open(order)
    first = await plan(engine, 0)
    with pytest.raises(EngineLost, match=rf"exit code {EXIT_CODE}(.|\n)*as asked"):
        await engine.step(first)
    engine = await EngineProcess.start(make, environment=environment)
    assert len((await engine.open(replace(order, run="run"))).manifests) == 1
    await engine.step(first)
    await engine.close()


async def test_a_fault_that_blocks_the_loop_is_noticed():
    faults = [{"verb": "probe", "kind": "block"}]
    engine = await EngineProcess.start(
        "groupwise.testing.fake_engine:make",
        environment={VARIABLE: json.dumps({"faults": faults})},
        silence_limit=0.5,
    )
    with pytest.raises(EngineLost, match="nothing was heard"):
        await engine.probe()
