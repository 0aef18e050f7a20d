"""The server dies at every durable write of its own and of its engine, once each, and its successor ends with the same policy.

Service, ledger and fake engine run in one forked process, which dies at the write of a number; clients go on with the successor. What
they were told before stands: it is in a file that they append to, and each draw in it is part of exactly one step afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import GroupAnswer
from groupwise.core import atomic_files
from groupwise.core.types import Group, from_json
from groupwise.server.ledger import groups, plans, runs
from groupwise.server.run import ledger_operations
from tests.integration.toy_run import crash_at
from tests.rotation import rotating_params
from tests.unit.server.serving import ME, Served

STEPS = 4
SIZE = 2
SETTINGS = {"max_steps": STEPS, "save_steps": 2, "groups_per_step": SIZE, "run_name": "run"}
DIED = 17
"""Exit status of a child that came to the write."""


async def _course(folder: Path) -> None:
    """A server and its clients, from wherever they stand, until the run is finished."""
    server = Served(folder)
    await server.service.begin()
    if (await server.service.status()).phase == "idle":
        await server.start(**SETTINGS)
    await server.until(lambda seen: seen.phase in ("running", "finished"))
    await asyncio.gather(*(_client(server, draw) for draw in range(STEPS * SIZE)))
    await server.until(lambda seen: seen.phase == "finished")
    if not any(each.name for each in (await server.service.checkpoints()).checkpoints):
        await server.service.save_checkpoint("kept", ME)
    await server.service.shut_down(5)


async def _client(server: Served, draw: int) -> None:
    """One draw, asked for and rewarded, whatever was done for it before."""
    group = _answered(server.folder, draw)
    while True:
        try:
            if group is None:
                group = await server.ask(draw=draw)
                _append(server.folder / "answered.jsonl", group.model_dump(mode="json"))
            await server.reward(group)
            _append(server.folder / "acknowledged.jsonl", draw)
            return
        except Refusal as refusal:
            if (
                refusal.code == "draw_taken"
            ):  # its answer was lost with the server: the lease would free it
                group = await _group_of(server, draw)
            elif refusal.code == "finished":
                return
            elif refusal.code not in ("too_busy", "engine_recovering"):
                raise
            await asyncio.sleep(0.005)


async def _group_of(server: Served, draw: int) -> GroupAnswer:
    """What an Idempotency-Key would bring back."""

    def look(transaction: Any) -> GroupAnswer:
        (id_,) = transaction.first("SELECT id FROM groups WHERE draw = ?", (draw,))
        record = groups.read_record(transaction, id_)
        assert record is not None
        row = groups.read_group(transaction, id_)
        return ledger_operations.group_answer(transaction, row, from_json(Group, record))

    return await server.ledger.do(look)


def _append(file: Path, value: Any) -> None:
    with file.open("a") as out:
        out.write(json.dumps(value) + "\n")
        out.flush()
        os.fsync(out.fileno())


def _answered(folder: Path, draw: int) -> GroupAnswer | None:
    file = folder / "answered.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    groups = [GroupAnswer.model_validate_json(line) for line in lines]
    return next((group for group in groups if group.draw == draw), None)


def _outcome(folder: Path) -> list[tuple[int, str, tuple[int, ...]]]:
    """Of each step its index, what came of it, its draws: the same in the ledger and in the run's record."""

    async def look() -> tuple[str, list[Any]]:
        server = Served(folder)
        (run,) = await server.ledger.do(runs.list_runs)
        plan_rows = await server.ledger.do(plans.plans_from, run.run, 0)
        await server.ledger.close()
        return run.run, plan_rows

    run, plan_rows = asyncio.run(
        look()
    )  # its name has a number where the first one died before the ledger knew of it
    manifests = json.loads((folder / "runs" / run / "run.json").read_text())["manifests"]
    assert [plan.trained.fingerprint_out for plan in plan_rows] == [
        each["fingerprint_out"] for each in manifests
    ]
    return [(each["step"], each["fingerprint_out"], tuple(each["draws"])) for each in manifests]


def _run(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    asyncio.run(_course(folder))


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], int]:
    """What comes of it undisturbed, and how many durable writes that takes."""
    folder = tmp_path_factory.mktemp("calm") / "output"
    names: list[str] = []
    before, atomic_files.on_write = atomic_files.on_write, names.append
    try:
        _run(folder)
    finally:
        atomic_files.on_write = before
    return _outcome(folder), len(names)


def _crash(number: int, folder: Path, calm: list[Any]) -> bool:
    """Die at that write, go on with a successor, and compare; whether it came to it."""
    status = crash_at(number, lambda: _run(folder))
    if status != DIED:
        return False
    _run(folder)
    assert _outcome(folder) == calm
    acknowledged = (folder / "acknowledged.jsonl").read_text().split()
    trained = [draw for _, _, draws in calm for draw in draws]
    assert {int(draw) for draw in acknowledged} <= set(trained)
    assert sorted(trained) == list(range(STEPS * SIZE))
    prefixes = (atomic_files.BUILDING, atomic_files.REMOVING)
    unfinished = {path for path in folder.rglob(".*") if path.name.startswith(prefixes)}
    assert unfinished <= {*(folder / "runs" / "run").rglob(".*")}, "in its own run is the engine's"
    return True


@pytest.mark.parametrize("first", rotating_params(range(6), 6, "kills", str))
def test_every_durable_write(first: int, tmp_path: Path, calm: tuple[list[Any], int]) -> None:
    """Every sixth of them from one on, which the commit chooses; all sixths are soak tests."""
    outcome, writes = calm
    came = [_crash(each, tmp_path / str(each), outcome) for each in range(first, writes, 6)]
    # Commits of several callers fall together by chance, so that the last writes may not come.
    assert all(came[:-2])
