"""`groupwise serve` with the fake engine in place of the real one, which begins in a quarter of a second: OUTPUT_DIR PORT [key=value …]."""

from __future__ import annotations

import sys

from groupwise.server.engine.port import Engine
from groupwise.server.engine.remote import EngineProcess
from groupwise.server.ledger.writer import Ledger
from groupwise.server.serve import LEDGER, serve
from groupwise.server.service import Service
from groupwise.server.settings import ServerConfig, read_settings


async def build(config: ServerConfig) -> Service:
    """As `groupwise.server.serve.build_service`."""

    async def make_engine() -> Engine:
        return await EngineProcess.start("groupwise.testing.fake_engine:make")

    return Service(config, Ledger.open(config.folder / LEDGER), make_engine)


if __name__ == "__main__":
    options = {"output_dir": sys.argv[1], "port": int(sys.argv[2])}
    sys.exit(serve(read_settings(None, {}, options, sys.argv[3:]), None, build=build))
