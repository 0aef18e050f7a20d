"""The faults and gates of the fake engine; what it shares with others is in tests/contract/test_engine_contract.py."""

from dataclasses import replace

import pytest

from groupwise.core.errors import RunError
from groupwise.server.engine.engine_protocol import EngineLost, GroupSampleRequest, OpenRun, Plan
from tests.fake_engine import FakeEngine, Fault

PROMPT = "sort these"


@pytest.fixture
def order(tmp_path):
    training = {"max_steps": 3, "num_generations": 4}
    return OpenRun({"training": training, "run": {"dir": str(tmp_path), "save_steps": 2}}, 16)


async def opened(order, *faults, **options):
    engine = FakeEngine(faults, **options)
    await engine.open(order)
    return engine


async def plan(engine, step):
    group = (await engine.sample(GroupSampleRequest(step, PROMPT))).group
    scored = tuple(
        replace(each, outcome="scored", reward=float(each.member)) for each in group.rollouts
    )
    return Plan(step, (replace(group, rollouts=scored),))


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
