"""`serve` with a fake service, as a process of its own: `python -m tests.unit.server.run_server FOLDER [settings.yaml | slow | continues]`.

A request for completions waits for as long as the service is not shut down, and is told as an event. A slow service is never done
with shutting down; one that continues has an active run from the start.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import (
    CompletionsRequest,
    GroupAnswer,
    StartAnswer,
    StartRequest,
)
from groupwise.core.errors import GroupwiseError
from groupwise.server.run.service import Service
from groupwise.server.serve import Services, read_start, serve
from groupwise.server.settings import ServerConfig, read_settings
from tests.unit.server.fake_service import FakeService

REFUSED = {"bad": "model_not_allowed", "active": "run_active"}
"""Names of runs that cannot be begun, and why."""


class Telling(FakeService):
    def __init__(self, *, slow: bool) -> None:
        super().__init__()
        self.slow = slow
        self.blocked.add("completions")
        self.happen("started", run_id="tiny")

    async def start(self, request: StartRequest, caller: Caller) -> StartAnswer:
        if request.run_name in REFUSED:
            raise Refusal(REFUSED[request.run_name], "for a reason")
        return await super().start(request, caller)

    async def completions(
        self, request: CompletionsRequest, caller: Caller
    ) -> Sequence[GroupAnswer]:
        self.happen("warning", message="somebody waits")
        return await super().completions(request, caller)

    async def shut_down(self, seconds: float) -> None:
        if self.slow:
            await asyncio.Event().wait()
        await super().shut_down(seconds)


def main(folder: str, more: str | None = None) -> int:
    settings = {"output_dir": folder, "port": 0, "shutdown_seconds": 60.0}
    config = read_settings(None, os.environ, settings, ())
    start_with = read_start(Path(more)) if more and more not in ("slow", "continues") else None
    service = Telling(slow=more == "slow")
    service.has_run = more == "continues"

    async def build(_: ServerConfig) -> Services:
        return Services(cast("Service", service))

    try:
        return serve(config, None, start_with, build)
    except GroupwiseError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
