"""The run that is, or was last: shared by everything that serves clients.

`lifecycle.py` puts a run here and takes it away, `service.py` says when the server ends; the others only look.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from groupwise.api.schemas.problems import Refusal
from groupwise.core.condition import Pulse
from groupwise.runs import find
from groupwise.server.ledger.runs import RunRow
from groupwise.server.ledger.tokenizers import Tokenizer
from groupwise.server.run.conductor import Conductor, RunStatus
from groupwise.server.run.named_checkpoints import NamedCheckpoints
from groupwise.server.run.policy_versions import Versions
from groupwise.server.settings import ServerConfig

TOKENIZERS = "tokenizers"
"""Folder of the server's output that holds tokenizers by their hash."""
ENDED = ("finished", "stopped", "failed")
"""Phases of a run that takes nothing more."""


class Current:
    """The run that is, or was last, and whether the server takes anything new for it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.conductor: Conductor | None = None
        """Conductor of the run since the server began."""
        self.latest: RunRow | None = None
        """The run that is, or was last."""
        self.changed = Pulse()
        """Beats whenever a client may want to look again."""
        self.shutting_down = False

    def conducted(self) -> Conductor | None:
        """The run that has an engine, or is about to have one again."""
        conductor = self.conductor
        return None if conductor is None or conductor.phase in ENDED else conductor

    def active(self) -> Conductor:
        """The run that takes something new. Refused as `not_started`, or as what has become of it."""
        self.refuse_when_shutting_down()
        if self.conductor is None:
            raise Refusal("not_started" if self.latest is None else "finished")
        if self.conductor.phase in ENDED:
            raise self.conductor.refusal()
        return self.conductor

    def any_run(self) -> RunRow:
        """The run that is, or was last. Refused as `not_started` before the first."""
        if self.latest is None:
            raise Refusal("not_started")
        return self.latest

    def refuse_when_shutting_down(self) -> None:
        """Raise Refusal `shutting_down` if the server is."""
        if self.shutting_down:
            raise Refusal("shutting_down", retry_after=5)

    @property
    def standing(self) -> RunStatus | None:
        """The run's status; None if no engine has opened it since the server began."""
        return self.conductor.standing if self.conductor else None

    async def next_beat(self, beat: asyncio.Event, deadline: float) -> bool:
        """Wait for a beat of `changed`; False if the deadline, by the monotonic clock, comes first."""
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                await beat.wait()
        except TimeoutError:
            return False
        return True

    def is_manual(self) -> bool:
        """True if steps are taken only on a client's request."""
        return self.conductor is not None and self.conductor.request.steps == "manual"

    def is_over(self) -> bool:
        """True if no more steps will be taken."""
        conductor = self.conductor
        return self.shutting_down or conductor is None or conductor.phase in ENDED

    def versions(self, row: RunRow) -> Versions:
        """Versions of a run that can be read."""
        standing = self.standing
        named_checkpoints = NamedCheckpoints(self.config.folder).of_run(row.run)
        if standing is None or standing.run != row.run:
            folder = self.config.folder / row.folder
            steps, published, tokenizer = find.run_info(folder).steps, {}, row.tokenizer
        else:
            folder, tokenizer = standing.folder, Tokenizer.of(standing.opened)
            steps, published = standing.step, dict(standing.versions)
        tokenizer_folder = self.tokenizer_folder(tokenizer.hash if tokenizer else "")
        return Versions(row.run, folder, steps, published, named_checkpoints, tokenizer_folder)

    def tokenizer_folder(self, tokenizer_hash: str) -> Path:
        """Folder in which a tokenizer is kept, so that it can be served without an engine."""
        return self.config.folder / TOKENIZERS / tokenizer_hash
