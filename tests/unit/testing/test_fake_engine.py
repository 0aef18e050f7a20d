"""The faults and gates of the fake engine; what it shares with others is in tests/contract/test_engine_contract.py."""

import asyncio
import json
from dataclasses import replace

import pytest

from groupwise.errors import RunError
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


async def test_what_is_held_waits_and_is_lost_with_the_engine(order):
    engine = await opened(order)
    gate = engine.hold("save", "done")
    saving = asyncio.create_task(engine.save())
    while not engine.calls["save"]:  # noqa: ASYNC110 — as soon as the loop comes round
        await asyncio.sleep(0)
    assert not saving.done()
    gate.set()
    await saving
    engine.hold("sample")
    sampling = asyncio.create_task(engine.sample(SampleOrder(0, PROMPT)))
    await asyncio.sleep(0)
    await engine.close()
    for call in (sampling, engine.probe()):
        with pytest.raises(EngineLost):
            await call


@pytest.mark.parametrize(
    ("point", "kept"), [("begun", 0), ("before_write", 0), ("after_write", 1), ("done", 1)]
)
async def test_death_at_every_point_of_a_step(order, tmp_path, point, kept):
    engine = await opened(order, Fault("step", "die", point))
    first = await plan(engine, 0)
    for call in (engine.step(first), engine.probe()):
        with pytest.raises(EngineLost, match="A fault was asked for"):
            await call
    await engine.close()
    successor = FakeEngine()
    again = await successor.open(replace(order, run="run"))
    assert (again.step, len(again.manifests)) == (0, kept)
    done = await successor.step(first)
    assert not kept or done.record.fingerprint_out == again.manifests[0].fingerprint_out


async def test_faults_have_their_time_and_what_failed_can_be_done_again(order, tmp_path):
    engine = await opened(
        order,
        Fault("probe", "raise", calls=(2,)),
        Fault("step", "raise", "before_write", step=1, calls=(2,)),
        Fault("save", "raise", once=str(tmp_path / "it-happened")),
    )
    await engine.step(await plan(engine, 0))
    second = await plan(engine, 1)
    await engine.probe()
    for call in (engine.probe(), engine.step(second), engine.save()):
        with pytest.raises(RunError):
            await call
    await engine.probe()
    assert (await engine.step(second)).record.step == 1
    assert (await engine.save()).step == 2


async def test_faults_in_a_process_of_its_own(order, tmp_path):
    happened = str(tmp_path / "it-happened")
    fault = {"verb": "step", "kind": "die", "point": "after_write", "once": happened}
    environment = {VARIABLE: json.dumps({"faults": [fault]})}
    make = "groupwise.testing.fake_engine:make"
    engine = await EngineProcess.start(make, environment=environment)
    await engine.open(order)
    first = await plan(engine, 0)
    with pytest.raises(EngineLost, match=f"exit code {EXIT_CODE}"):
        await engine.step(first)
    engine = await EngineProcess.start(make, environment=environment)
    assert len((await engine.open(replace(order, run="run"))).manifests) == 1
    await engine.step(first)
    await engine.close()
