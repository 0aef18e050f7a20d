"""The current or most recent run: state shared by all parts that serve clients.

`lifecycle.py` sets and clears the run, `service.py` sets `shutting_down`; the others only read.
"""

from __future__ import annotations

import time
from pathlib import Path

from groupwise.api.schemas.problems import Refusal
from groupwise.core.waiting import ChangeNotifier, wait_at_most
from groupwise.runs import find
from groupwise.server.ledger.runs import RunRow, Tokenizer
from groupwise.server.run.conductor import Conductor, RunStatus
from groupwise.server.run.named_checkpoints import NamedCheckpoints
from groupwise.server.run.policy_versions import Versions
from groupwise.server.settings import ServerConfig

TOKENIZERS = "tokenizers"
"""Subfolder of the server's output with tokenizers, by their hash."""
ENDED = ("finished", "stopped", "failed")
"""Phases of a run that accepts nothing more."""


class ActiveRun:
    """The current or most recent run, and whether the server accepts anything new for it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.conductor: Conductor | None = None
        """The conductor of the newest run that this process has run; None before the first."""
        self.latest: RunRow | None = None
        """The current or most recent run; None before the first."""
        self.changed = ChangeNotifier()
        """Beats at every change that a waiting client may be interested in."""
        self.shutting_down = False

    def active_conductor(self) -> Conductor | None:
        """The conductor of a run that has an engine, or will soon have one again."""
        conductor = self.conductor
        return None if conductor is None or conductor.phase in ENDED else conductor

    def active(self) -> Conductor:
        """The run that accepts new requests. Refuses with `not_started`, or with the reason why the run has ended."""
        self.refuse_when_shutting_down()
        if self.conductor is None:
            raise Refusal("not_started" if self.latest is None else "finished")
        if self.conductor.phase in ENDED:
            raise self.conductor.refusal()
        return self.conductor

    async def wait_for_engine(self) -> Conductor:
        """Wait until the engine of the active run accepts calls, and return the run. The engine may just be starting, or recovering.

        Refuses if the engine accepts no calls after `completions_wait` seconds, or never will.
        """
        deadline = time.monotonic() + self.config.completions_wait
        while True:
            changed = self.changed.next_event
            conductor = self.active()
            if conductor.is_serving:
                return conductor
            left = deadline - time.monotonic()
            if conductor.phase not in ("starting", "recovering") or left <= 0:
                raise conductor.refusal()
            await wait_at_most(left, changed)

    def any_run(self) -> RunRow:
        """The current or most recent run. Refuses with `not_started` before the first."""
        if self.latest is None:
            raise Refusal("not_started")
        return self.latest

    def refuse_when_shutting_down(self) -> None:
        """Raise Refusal `shutting_down` if the server is shutting down."""
        if self.shutting_down:
            raise Refusal("shutting_down", retry_after=5)

    @property
    def last_status(self) -> RunStatus | None:
        """The run's status; None if no engine has opened it since the server started."""
        return self.conductor.last_status if self.conductor else None

    def is_manual(self) -> bool:
        """True if steps are taken only on a client's request."""
        return self.conductor is not None and self.conductor.request.steps == "manual"

    def is_over(self) -> bool:
        """True if no more steps will be taken."""
        conductor = self.conductor
        return self.shutting_down or conductor is None or conductor.phase in ENDED

    def versions(self, row: RunRow) -> Versions:
        """The readable policy versions of a run."""
        status = self.last_status
        named_checkpoints = NamedCheckpoints(self.config.folder).of_run(row.run)
        if status is None or status.run != row.run:
            folder = self.config.folder / row.folder
            steps, published, tokenizer = find.run_info(folder).steps, {}, row.tokenizer
        else:
            folder, tokenizer = status.folder, Tokenizer.of(status.opened)
            steps, published = status.step, dict(status.versions)
        tokenizer_folder = self.tokenizer_folder(tokenizer.hash if tokenizer else "")
        return Versions(row.run, folder, steps, published, named_checkpoints, tokenizer_folder)

    def tokenizer_folder(self, tokenizer_hash: str) -> Path:
        """Folder with the files of a tokenizer, stored so that it can be served without an engine."""
        return self.config.folder / TOKENIZERS / tokenizer_hash
