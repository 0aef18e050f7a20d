"""The verbs in a server."""

from __future__ import annotations

from pathlib import Path

from groupwise.server.engine.port import Engine
from groupwise.server.verbs.mount import Verbs
from groupwise.wire.training import ByVerbs
from tests.unit.server.serving import Served, served


async def test_the_status_tells_of_them_also_where_no_run_was_begun(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        assert (await server.service.status()).verbs == ByVerbs()
        verbs = Verbs(server.config, server.ledger, server.service, lambda: no_engine(server))
        await verbs.begin()
        session = await verbs.service.opened.create_session(None)
        status = await server.service.status()
        assert (status.phase, status.verbs) == ("idle", ByVerbs(sessions=1))
        await server.start()
        assert (await server.service.status()).verbs == ByVerbs(sessions=1)
        await verbs.service.opened.finish(session)
        assert (await server.service.status()).verbs == ByVerbs()
        await verbs.shut_down()


async def no_engine(server: Served) -> Engine:
    raise AssertionError(f"nothing needs a model in {server.folder}")
