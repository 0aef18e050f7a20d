"""What an engine makes for a loop elsewhere, and what it does not."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from groupwise.errors import UsageError
from groupwise.server.engine.parts import EngineParts


async def test_an_engine_asks_no_other_server_for_a_client():
    config = {
        "model": {"name": "tiny"},
        "sampler": {"engine": "vllm", "url": "http://169.254.169.254"},
    }
    async with AsyncExitStack() as scope:
        with pytest.raises(UsageError, match="a training server samples itself"):
            await EngineParts(scope).plan("training", config, 20)
