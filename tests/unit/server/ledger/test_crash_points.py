"""A crash at every commit of a server's life.

What is on the disk afterwards is exactly what was there after the last operation that was acknowledged, or after the one that was
under way: never less, never half of one. Whoever then repeats the request that was not answered, and goes on, gets to the same end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.schemas.idempotency import AnswerKey
from groupwise.api.schemas.keys import Caller, Role
from groupwise.core import atomic_files
from groupwise.server.ledger.events import COMPLETION_REQUESTS, REWARD_REQUESTS, add_event, count
from groupwise.server.ledger.groups import (
    add_groups,
    expire_overdue,
    give_up,
    mark_stale,
    prune_records,
)
from groupwise.server.ledger.idempotency import StoredResponse, run_idempotent
from groupwise.server.ledger.plans import (
    Trained,
    count_loss,
    make_plan,
    mark_trained,
    plan_of_step,
    quarantine,
)
from groupwise.server.ledger.rewards import Post, accept_rewards
from groupwise.server.ledger.runs import active_run, set_run_state
from groupwise.server.ledger.transaction import Transaction, store_uptime
from groupwise.server.ledger.writer import Ledger
from tests.rotation import rotating_params
from tests.unit.server.ledger.making import LEASE, REWARDS, RUN, FakeTime, begin, new, open_groups

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def asking(route: str, key: str) -> Caller:
    return Caller("k", Role.TRAIN, answer_key=AnswerKey(route, key, "h"))


def start(transaction: Transaction) -> None:
    if active_run(transaction) is None:
        begin(transaction)
        add_event(transaction, RUN, "started", {})


def complete(transaction: Transaction) -> None:
    def work() -> StoredResponse:
        add_groups(transaction, RUN, [new(0), new(1)], key_id="k", lease=LEASE)
        count(transaction, RUN, COMPLETION_REQUESTS)
        return StoredResponse(200, b'["g-0", "g-1"]')

    answer = run_idempotent(transaction, asking("POST /completions", "1"), work)
    assert answer is not None
    assert answer.status == 200


def complete_more(transaction: Transaction) -> None:
    def work() -> StoredResponse:
        open_groups(transaction, 2, 3, 4, 5)
        return StoredResponse(200, b"more")

    answer = run_idempotent(transaction, asking("POST /completions", "3"), work)
    assert answer is not None
    assert answer.body == b"more"


def reward_one(transaction: Transaction) -> None:
    def work() -> StoredResponse:
        accept_rewards(transaction, RUN, Post("g-0", REWARDS, {"n": 0}))
        count(transaction, RUN, REWARD_REQUESTS)
        add_event(transaction, RUN, "rewarded", {"group": "g-0"})
        return StoredResponse(200, b"0")

    answer = run_idempotent(transaction, asking("POST /rewards", "2"), work)
    assert answer is not None
    assert answer.body == b"0"


def reward_several(transaction: Transaction) -> None:
    posts = [
        Post("g-1", REWARDS, {"n": 1}),
        Post("g-2", REWARDS, {"n": 2}, include="hold"),
        Post("g-4", (None, None), {"n": 4}),
    ]
    assert [accept_rewards(transaction, RUN, each).answer["n"] for each in posts] == [1, 2, 4]


def release(transaction: Transaction) -> None:
    posted = accept_rewards(transaction, RUN, Post("g-2", REWARDS, {"n": 22}))
    assert (posted.state, posted.answer) == ("rewarded", {"n": 22})


def plan_and_lose(step: int, *groups: str) -> Callable[[Transaction], None]:
    def planned(transaction: Transaction) -> None:
        if plan_of_step(transaction, RUN, step) is None:
            make_plan(transaction, RUN, step, groups, {"learning_rate": 0.1})
            count_loss(transaction, RUN, step)

    return planned


def trained(transaction: Transaction) -> None:
    plan = plan_of_step(transaction, RUN, 0)
    mark_trained(transaction, RUN, 0, Trained("f", 1, "/p", {"loss": 0.5}))
    if plan is not None and plan.state == "planned":
        add_event(transaction, RUN, "step", {"step": 0})


def put_aside(transaction: Transaction) -> None:
    if plan_of_step(transaction, RUN, 1) is not None:
        quarantine(transaction, RUN, 1, "it ended the engine twice")


LIFE: list[tuple[Any, ...]] = [
    (start,), (complete,), (complete_more,), (reward_one,), (reward_several,), (release,),
    (give_up, "g-3"), (plan_and_lose(0, "g-1", "g-0"),), (store_uptime,), (trained,),
    (plan_and_lose(1, "g-2"),), (put_aside,), (mark_stale, RUN, 1), (prune_records, RUN, 1),
    (set_run_state, RUN, "finished"),
]  # fmt: skip
"""What is done to the ledger, one after another. Each may be repeated at once."""


def content(path: Path) -> dict[str, list[Any]]:
    """All that is in the file, table by table."""
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        ).fetchall()
        return {
            name: sorted(connection.execute(f"SELECT * FROM {name}"), key=repr)
            for (name,) in tables
        }


def live(path: Path, first: int, acknowledged: Callable[[], object]) -> None:
    """From an operation on to the end; told of the opening, each operation, and the end."""

    async def operations() -> None:
        time = FakeTime()
        ledger = Ledger.open(path, time.timing)
        acknowledged()
        for operation, *arguments in LIFE[first:]:
            await ledger.do(operation, *arguments)
            acknowledged()
        time.pass_(LEASE)
        await ledger.do(expire_overdue)
        acknowledged()
        await ledger.close()
        acknowledged()

    asyncio.run(operations())


def die_at(number: int, path: Path, log: Path) -> int:
    """Live in a forked child that dies at its crash point of that number; its exit status. `log` grows with what is acknowledged."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    child = os.fork()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        left = iter(range(number))
        atomic_files.on_write = lambda name: os._exit(17) if next(left, None) is None else None
        with log.open("ab", buffering=0) as acknowledgements:
            live(path, 0, lambda: acknowledgements.write(b"."))
    except BaseException:  # noqa: BLE001 — a child must never return into the tests
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


SHARES = 3


@pytest.mark.parametrize("first", rotating_params(range(SHARES), SHARES, "kills", str))
def test_a_crash_at_every_commit(tmp_path, monkeypatch, first):
    """Every third of them from one on, so before and after commits alike; which third, the commit chooses. All are soak tests."""
    points: list[str] = []
    stood: list[dict[str, list[Any]]] = [{}]
    whole = tmp_path / "whole.db"
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "on_write", points.append)
        live(whole, 0, lambda: stood.append(content(whole)))
    assert len(stood) == len(LIFE) + 4
    assert len(points) == 2 * (len(LIFE) + 3), "each of them commits something, once"
    for number in range(first, len(points), SHARES):
        point = points[number]
        path, log = tmp_path / f"{number}.db", tmp_path / f"{number}.log"
        assert die_at(number, path, log) == 17, point
        acknowledged = log.stat().st_size
        expected = stood[acknowledged + point.endswith(":after")]
        assert content(path) == expected, (number, point)
        live(path, max(acknowledged - 1, 0), lambda: None)
        # Where it died at its very end, it has been up once more.
        assert content(path) | {"meta": []} == stood[-1] | {"meta": []}, (number, point)
