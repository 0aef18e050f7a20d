"""Leases count the time that a server is up."""

from __future__ import annotations

from groupwise.server.ledger.groups import add_groups, expire_overdue
from groupwise.server.ledger.transaction import store_uptime
from groupwise.server.ledger.writer import Ledger
from tests.unit.server.ledger.making import RUN, begin, new


async def test_a_lease_counts_uptime_and_a_kill_loses_what_came_after_the_last_tick(tmp_path, time):
    ledger = Ledger.open(tmp_path / "server.db", time.timing)
    await ledger.do(begin)
    await ledger.do(add_groups, RUN, [new(0)], key_id="k", lease=60.0)
    await ledger.do(store_uptime)
    time.pass_(40)
    assert await ledger.do(store_uptime) == 40
    time.pass_(10)
    assert await ledger.do(expire_overdue) == []
    killed = ledger  # its file is opened by another, while it has not kept anything more
    ledger = Ledger.open(tmp_path / "server.db", time.timing)
    time.pass_(19)
    assert await ledger.do(expire_overdue) == []
    time.pass_(1)
    assert [row.id for row in await ledger.do(expire_overdue)] == ["g-0"]
    await ledger.close()
    await killed.close()
