"""The callback `push_to_hub_revision`: each checkpoint as a branch of a repository on the hub, uploaded beside the training.

The callback itself only puts what is to be uploaded into the run's folder (`groupwise.models.hub_queue`); a thread uploads it, one
checkpoint after the other, and goes on with the first that is left whenever there is another one. So a hub that is slow or away costs
training nothing, and what a killed run has not uploaded is uploaded when it goes on, or by `groupwise runs push`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from groupwise.callbacks.base import Callback, RunEnd, RunHandle
from groupwise.errors import EndpointError, UsageError
from groupwise.models import hub_queue
from groupwise.models.card import Place, model_card
from groupwise.models.hub_push import Target, check_access
from groupwise.rewards.threads import DaemonThreads
from groupwise.settings.view import View

logger = logging.getLogger(__name__)

MAX_WAIT = 600.0
"""Seconds that a finished run waits for its uploads."""


class PushToHubRevision(Callback):
    """Pushes the checkpoint after 120 steps to the branch `<revision>-step-000000120` of `repo_id`.

    `repo_id` is `run.hub.repo_id` where it is not given. A repository that is made is `private`. A branch that holds other files is not
    replaced without `overwrite`. A run that has finished waits at most `max_wait` seconds for what is not uploaded yet.
    """

    def __init__(
        self,
        repo_id: str | None = None,
        revision: str = "main",
        private: bool = True,
        overwrite: bool = False,
        max_wait: float = MAX_WAIT,
    ) -> None:
        if max_wait < 0:
            raise ValueError(f"max_wait is {max_wait}; it is a time in seconds, 0 or more.")
        self.repo_id = repo_id
        self.revision = revision
        self.private = private
        self.overwrite = overwrite
        self.max_wait = max_wait
        self._thread: DaemonThreads[Callable[[], None]] | None = None
        self._round: Future[None] | None = None
        """The last that was asked for: it uploads all that was there when it was."""
        self._told: set[str] = set()
        """The branches whose refusal was told."""

    def check(self, config: View) -> None:
        """One must be allowed to write there. That a hub does not answer now is no reason not to train."""
        try:
            warning = check_access(self._target(config, 0))
        except UsageError as error:
            raise ValueError(str(error)) from error
        if warning:
            logger.warning("push_to_hub_revision: %s. Training goes on; it is tried again", warning)

    def on_run_begin(self, run: RunHandle) -> None:
        """Go on with what an earlier process has left."""
        hub_queue.drop_after(run.folder, run.step)
        self._thread = DaemonThreads([_Uploader()], "hub")
        if hub_queue.waiting(run.folder):
            self._upload(run)

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        """Another one to upload."""
        if any(entry.step == run.step for entry in hub_queue.waiting(run.folder)):
            return  # an earlier process has prepared it
        target = self._target(run.config, run.step)
        place = Place(target.repo_id, target.revision)
        card = model_card(run.folder, checkpoint, run.step, place=place)
        hub_queue.add(run.folder, run.step, target, checkpoint, card, run.tokenizer)
        self._upload(run)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """Wait for a finished run's uploads; one that goes on later takes them with it."""
        if self._thread is None:
            return
        if end.state == "finished" and hub_queue.waiting(run.folder):
            self._upload(run)
            assert self._round is not None
            if not wait((self._round,), timeout=self.max_wait).done:
                logger.warning("gave up waiting for the hub after %g seconds", self.max_wait)
        self._thread.close()
        if left := hub_queue.waiting(run.folder):
            logger.warning(
                "not uploaded yet: %s. %s",
                ", ".join(str(entry.target) for entry in left),
                f"Upload it by: groupwise runs push {run.name} --dir {run.folder.parent}"
                if end.state == "finished"
                else "A resume goes on with it",
            )

    def _target(self, config: View, step: int) -> Target:
        repo_id = self.repo_id or config["run"]["hub"]["repo_id"]
        if repo_id is None:
            raise ValueError("repo_id is not given: name OWNER/NAME, here or as run.hub.repo_id.")
        revision = f"{self.revision}-step-{step:09d}"
        return Target(repo_id, revision, self.private, self.overwrite)

    def _upload(self, run: RunHandle) -> None:
        assert self._thread is not None
        folder = run.folder
        self._round = self._thread.submit(lambda: self._upload_all(folder))

    def _upload_all(self, folder: Path) -> None:
        """All that waits, in order. A hub that fails ends the round; a branch that refuses is passed over."""
        for entry in hub_queue.waiting(folder):
            try:
                logger.info("uploaded %s", entry.push())
            except UsageError as error:
                self._warn_once(entry.target.revision, error)
            except EndpointError as error:
                logger.warning(
                    "%s The run goes on; it is tried again at the next checkpoint", error
                )
                return

    def _warn_once(self, revision: str, error: UsageError) -> None:
        if revision not in self._told:
            self._told.add(revision)
            logger.warning("%s", error)


class _Uploader:
    """The thread's work."""

    def begin(self) -> None:
        pass

    def do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 — nobody else would hear of it
            logger.warning("uploading failed: %s: %s", type(error).__name__, error)

    def end(self) -> None:
        pass
