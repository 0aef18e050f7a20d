"""Whatever process ends at whatever time: nothing acknowledged is lost, nothing is trained twice, and the policy is the same.

The engine dies at every point of every call that changes something; the server's process dies at every durable write of its own.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest.mock import Mock

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import GroupAnswer, StatusAnswer, StepAnswer
from groupwise.server.ledger import events, plans
from groupwise.server.ledger.file import DiskFull
from groupwise.server.run import ledger_operations
from tests.fake_engine import FakeEngine, Fault, Point, Verb
from tests.unit.server.serving import Served, expect_refusal, served

STEPS = 5


async def persist(server: Served, steps: int = STEPS, size: int = 2) -> None:
    """What clients do who ask again whenever they are told to: every draw of every step, until the run is finished."""

    async def one(draw: int) -> None:
        group: GroupAnswer | None = None
        while True:
            try:
                if group is None:
                    group = await server.ask(draw=draw)
                await server.reward(group)
                return
            except Refusal as refusal:
                if refusal.code not in ("too_busy", "engine_recovering"):
                    raise
                await asyncio.sleep(0.01)

    await asyncio.wait_for(asyncio.gather(*(one(draw) for draw in range(steps * size))), 20)


def finished(status: StatusAnswer) -> bool:
    return status.phase == "finished"


async def outcome(server: Served) -> list[tuple[int, str, tuple[int, ...]]]:
    """Of each step its index, what came of it, and the draws that it learnt from."""
    run = (await server.service.status()).run_id
    assert run is not None
    plan_rows = await server.ledger.do(plans.plans_from, run, 0)
    manifests = json.loads((server.folder / "runs" / run / "run.json").read_text())["manifests"]
    assert [each["step"] for each in manifests] == list(range(len(plan_rows)))
    assert [each["fingerprint_out"] for each in manifests] == [
        plan.trained and plan.trained.fingerprint_out for plan in plan_rows
    ]
    return [(each["step"], each["fingerprint_out"], tuple(each["draws"])) for each in manifests]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, tuple[int, ...]]]:
    async def course() -> list[tuple[int, str, tuple[int, ...]]]:
        async with served(tmp_path_factory.mktemp("undisturbed")) as server:
            await server.start()
            await persist(server)
            await server.until(finished)
            return await outcome(server)

    return asyncio.run(course())


POINTS: dict[Verb, tuple[Point, ...]] = {
    "step": ("begun", "before_write", "after_write", "done"),
    "sample": ("begun", "done"),
}
CLOSING: tuple[Point, ...] = ("begun", "after_write", "done")
ENGINE_FAULTS = [
    *(pytest.param(verb, point, 3) for verb in POINTS for point in POINTS[verb]),
    *(pytest.param("close_run", point, 1) for point in CLOSING),
    *(
        pytest.param(verb, point, call, marks=pytest.mark.soak(suite="kills"))
        for verb in POINTS
        for point in POINTS[verb]
        for call in (1, 2)
    ),
]


@pytest.mark.parametrize(("verb", "point", "call"), ENGINE_FAULTS)
async def test_the_engine_dies_at_every_point(
    verb: Verb,
    point: Point,
    call: int,
    tmp_path: Path,
    undisturbed: list[tuple[int, str, tuple[int, ...]]],
) -> None:
    happened = tmp_path / "happened"
    fault = Fault(verb, "die", point, (call,), once=str(happened))
    async with served(tmp_path, [fault]) as server:
        await server.start()
        await persist(server)
        status = await server.until(finished)
        assert happened.exists()
        assert await outcome(server) == undisturbed
        assert (status.counters.trained, status.counters.rewarded) == (2 * STEPS, 0)
        assert (status.incarnation, status.engine_restarts) == (0, 1)
        event_list = await server.ledger.do(events.events_after, 0, 1000)
        steps = [event.data["step"] for event in event_list if event.kind == "step"]
        assert steps == list(range(STEPS))  # each once, whatever was taken again


@pytest.mark.parametrize("point", ["begun", "after_write", "done", "ledger"])
async def test_a_start_that_was_broken_off_leaves_its_name_to_the_next(
    point: Point | Literal["ledger"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[Fault] = []
    if point == "ledger":
        start_run = Mock(side_effect=DiskFull("no room"), __name__="start_run")
        monkeypatch.setattr(ledger_operations, "start_run", start_run)
    else:
        faults = [Fault("open", "die", point, (1,), once=str(tmp_path / "happened"))]
    async with served(tmp_path, faults) as server:
        with pytest.raises((Refusal, DiskFull)) as broken:
            await server.start(run_name="mine")
        assert broken.value.code in ("engine_recovering", "disk_full")
        monkeypatch.undo()
        assert await server.start(run_name="mine") == "mine"
        assert len(server.engines) == 2
        assert [path.name for path in (server.folder / "runs").iterdir()] == ["mine"]


class Healed(Served):
    """Its third engine survives."""

    async def _engine(self) -> FakeEngine:
        if len(self.engines) == 2:
            self._faults = ()
        return await super()._engine()


async def test_a_plan_that_ends_the_engine_twice_is_put_aside_and_the_run_continues(
    tmp_path: Path,
) -> None:
    server = Healed(tmp_path, [Fault("step", "die", "begun", step=1)])
    await server.service.begin()
    try:
        await server.start()
        await server.round(0)
        bad = [await server.ask(draw=draw) for draw in (2, 3)]
        waiting = [asyncio.create_task(server.reward(each, wait=True)) for each in bad]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [getattr(result, "code", None) for result in results] == ["group_quarantined"] * 2
        assert len(server.engines) == 3
        status = await server.until(lambda seen: seen.phase == "running")
        (aside,) = status.quarantined
        assert (aside.step, aside.group_ids) == (1, [each.group_id for each in bad])
        assert status.counters.quarantined == 2
        good = [await server.ask(draw=draw) for draw in (4, 5)]
        answers = await asyncio.gather(*(server.reward(each, wait=True) for each in good))
        assert {answer.step for answer in answers} == {1}
    finally:
        await server.service.shut_down(5)
        await server.ledger.close()


async def test_an_engine_that_ends_too_often_is_not_begun_again(tmp_path: Path) -> None:
    broken = [Fault("step", "die"), Fault("open", "die", calls=())]
    async with served(tmp_path, broken[:1], max_engine_restarts=1) as server:
        await server.start()
        server._faults = broken  # pyright: ignore[reportPrivateUsage]
        groups = [await server.ask(), await server.ask()]
        for group in groups:
            await server.reward(group)
        status = await server.until(lambda seen: seen.phase == "failed")
        assert "ended 2 times" in (status.last_error or "")
        assert status.counters.planned == 2  # kept
        await expect_refusal("engine_failed", server.ask())


async def test_a_step_committed_before_a_crash_is_reported_once_by_the_next_server(
    tmp_path: Path,
) -> None:
    """The server dies with the step committed, and before it knows: the engine's record says so, and the step is told once."""
    server = Served(tmp_path)
    await server.service.begin()
    await server.start(save_steps=1)
    held = server.engines[0].hold("step", "done")
    groups = [await server.ask(draw=draw) for draw in (0, 1)]
    for group in groups:
        await server.reward(group)
    record = tmp_path / "runs" / "tiny" / "run.json"
    while not json.loads(record.read_text())["manifests"]:  # noqa: ASYNC110 — it has no event
        await asyncio.sleep(0.005)
    await server.kill()
    held.set()
    async with served(tmp_path) as after:
        status = await after.until(lambda seen: seen.phase == "running")
        assert (status.step, status.counters.trained) == (1, 2)
        event_list = await after.ledger.do(events.events_after, 0, 100)
        assert [event.data["step"] for event in event_list if event.kind == "step"] == [0]


async def test_the_server_is_killed_or_shut_down_after_every_step_and_continues(
    tmp_path: Path,
    undisturbed: list[tuple[int, str, tuple[int, ...]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    for step in range(STEPS):
        server = Served(tmp_path)
        await server.service.begin()
        if step == 0:
            await server.start()
        status = await server.until(lambda seen: seen.phase == "running")
        assert (status.step, status.counters.rewarded) == (step, step % 2)
        if step % 2:  # half of it was rewarded by the one before
            await server.reward(await server.ask(draw=2 * step + 1), wait=True)
        else:
            await server.round(step)
        if step + 1 < STEPS:
            if step % 2 == 0:
                await server.reward(await server.ask(draw=2 * step + 2))
            if step < 2:
                await server.kill()
                continue
        else:
            await server.until(finished)
            assert await outcome(server) == undisturbed
        await server.service.shut_down(5)
        await server.ledger.close()
    logged = [record.args for record in caplog.records if "continues at step" in record.msg]
    steps = [args[1] for args in logged if isinstance(args, tuple)]
    repeats = ["again" in str(args) for args in logged]
    assert list(zip(steps, repeats, strict=True)) == [(2, True), (3, False), (4, False), (5, False)]
    assert "checkpoint after 3 steps" in caplog.text
    assert "checkpoint after 4 steps" in caplog.text


def test_a_step_that_was_put_aside_is_named_as_people_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From 1, as in the log and the dashboard; the field `step` is an index."""
    plan = SimpleNamespace(step=1, state="quarantined", reason="it ended the engine twice")
    monkeypatch.setattr(plans, "plan_of", lambda *_: plan)
    answer = StepAnswer(status="accepted", step=1, group_ids=["g-1"])
    with pytest.raises(Refusal, match="step 2 was put aside"):
        ledger_operations.step_after(cast("Any", None), answer)
