"""The callback `push_to_hub_revision`: uploads each checkpoint as a branch of a Hugging Face repository while training continues.

The callback only queues uploads in the run's folder (`groupwise.engine.models.hub_queue`). A thread uploads them one after the other; a
round that failed is repeated at the next checkpoint. So a slow or unreachable hub does not delay training, and uploads that a killed
run has left are made by a resume or by `groupwise runs push`. Queued weights take disk space, so the queue is limited; if it is full,
the oldest checkpoint is dropped from it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.processes.threads import DaemonThreads
from groupwise.core.settings.view import View
from groupwise.engine.models import hub_queue
from groupwise.engine.models.card import WeightsLocation, model_card
from groupwise.engine.models.hub_push import Target, check_access
from groupwise.engine.models.hub_queue import Queue
from groupwise.training.callbacks.base import Callback, RunEnd, RunHandle

logger = logging.getLogger(__name__)

MAX_WAIT = 600.0
"""Default of `max_wait`: seconds that a finished run waits for its uploads."""
MAX_WAITING = 10
"""Default of `max_waiting`: the largest number of checkpoints that are kept on disk while the hub cannot be reached."""
CHECK_INTERVAL = 0.2
"""Seconds between two checks for Ctrl-C while a run waits for its uploads."""


class PushToHubRevision(Callback):
    """Pushes each checkpoint to its own branch of `repo_id`, such as `<revision>-step-000000120` after 120 steps.

    `repo_id` defaults to `run.hub.repo_id`. A new repository is private if `private`. A branch that contains other files is replaced only
    with `overwrite`. A finished run waits at most `max_wait` seconds for its uploads. At most `max_waiting` checkpoints are queued: if
    there are more, the oldest is dropped.
    """

    def __init__(
        self,
        repo_id: str | None = None,
        revision: str = "main",
        private: bool = True,
        overwrite: bool = False,
        max_wait: float = MAX_WAIT,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        if max_waiting < 1:
            raise ValueError(f"max_waiting is {max_waiting}; it must be at least 1.")
        if max_wait < 0:
            raise ValueError(f"max_wait is {max_wait}; it is a time in seconds, 0 or more.")
        self.repo_id = repo_id
        self.revision = revision
        self.private = private
        self.overwrite = overwrite
        self.max_wait = max_wait
        self.max_waiting = max_waiting
        self._thread: DaemonThreads[Callable[[], None]] | None = None
        self._round: Future[None] | None = None
        """The last requested round; a round uploads everything that is queued when it starts."""
        self._warned: set[str] = set()
        """Causes that were already logged as a warning, such as branches that refuse."""
        self._hub_failures: set[str] = set()
        """Causes of failed uploads that were logged as a warning since the last successful one. Only the uploading thread uses them."""
        self._no_answer: str | None = None
        """The hub's error if it did not answer `check`, so it is not known whether the run may write; otherwise None."""
        self._lock = threading.Lock()
        self._uploading: int | None = None
        """Step of the entry that the thread is uploading, which must not be dropped; set under the lock."""
        self._dropped_steps: list[int] = []
        """Steps of the checkpoints that were dropped from the full queue."""

    def claim(self) -> str:
        """Refuse a second callback for the same branches: each would refuse to replace the other's files."""
        return f"the branches {self.repo_id}@{self.revision}-step-…"

    def check(self, config: View) -> None:
        """Raise ValueError if the user may not write to the repository. If the hub does not answer now, only warn: training may start."""
        self.repo_id = self.repo_id or config["run"]["hub"]["repo_id"]
        if self.repo_id is None:
            raise ValueError("repo_id is not given: name OWNER/NAME, here or as run.hub.repo_id.")
        try:
            self._no_answer = check_access(self._target(0))
        except UsageError as error:
            raise ValueError(str(error)) from error
        if self._no_answer:
            logger.warning(
                "push_to_hub_revision: %s. Training goes on; it is tried again", self._no_answer
            )

    def on_run_begin(self, run: RunHandle) -> None:
        """Resume the uploads that an earlier process has left."""
        if self._no_answer:  # `check` ran before the run had a log
            logger.info("push_to_hub_revision: before the run %s", self._no_answer)
        queue = self._queue(run)
        queue.drop_after(run.step)
        self._thread = DaemonThreads([_Uploader()], "hub")
        if queue.waiting():
            self._request_round(queue)

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        """Queue the checkpoint for upload."""
        queue = self._queue(run)
        if any(entry.step == run.step for entry in queue.waiting()):
            return  # an earlier process has queued it
        target = self._target(run.step)
        location = WeightsLocation(target.repo_id, target.revision)
        card = model_card(run.folder, checkpoint, run.step, location=location)
        # Drop the oldest entries if this one would be too many, but not the entry that is being uploaded.
        with self._lock:
            # Read before the queue: an upload that ends meanwhile removes its entry first.
            uploading, waiting = self._uploading, queue.waiting()
            candidates = [entry for entry in waiting if entry.step != uploading]
            for entry in candidates[: max(0, len(waiting) + 1 - self.max_waiting)]:
                entry.drop()
                self._dropped_steps.append(entry.step)
                self._warn_once(
                    self._warned,
                    "given up",
                    f"{entry.target} is given up, because {self.max_waiting} later checkpoints wait for the hub (max_waiting). As long "
                    f"as its checkpoint is there, `groupwise runs export {run.name}@{entry.step} --dir {run.folder.parent} --to adapter "
                    "-o FOLDER` writes it (merged, where there is no adapter), and `hf upload` brings it there",
                )
        queue.add(run.step, target, checkpoint, card, run.tokenizer)
        self._request_round(queue)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """Wait for a finished run's uploads. The uploads of any other run are left to a resume."""
        if self._thread is None:
            return
        queue = self._queue(run)
        if end.state == "finished" and queue.waiting():
            self._request_round(queue)
            self._wait_for_round(run)
        self._thread.close()
        if self._dropped_steps:
            logger.warning(
                "given up, because more than %d checkpoints waited for the hub: those after %s steps",
                self.max_waiting,
                ", ".join(map(str, self._dropped_steps)),
            )
        if remaining := queue.waiting():
            logger.warning(
                "not uploaded yet: %s. %s",
                ", ".join(str(entry.target) for entry in remaining),
                f"Upload it by: groupwise runs push {run.name} --dir {run.folder.parent}"
                if end.state == "finished"
                else "A resume goes on with it",
            )

    def _target(self, step: int) -> Target:
        assert self.repo_id is not None, "`check` has seen to that"
        revision = f"{self.revision}-step-{step:09d}"
        return Target(self.repo_id, revision, self.private, self.overwrite)

    def _queue(self, run: RunHandle) -> Queue:
        return hub_queue.queue(run.folder, f"{self.repo_id}@{self.revision}")

    def _request_round(self, queue: Queue) -> None:
        assert self._thread is not None
        self._round = self._thread.submit(lambda: self._upload_all(queue))

    def _wait_for_round(self, run: RunHandle) -> None:
        """Wait for the last round until `max_wait` seconds are over or Ctrl-C is pressed."""
        assert self._round is not None
        run.say("waiting for the hub; Ctrl-C leaves what is not uploaded to `groupwise runs push`")
        end = time.monotonic() + self.max_wait
        while not wait((self._round,), timeout=min(CHECK_INTERVAL, self.max_wait)).done:
            if run.interrupted:
                return
            if time.monotonic() >= end:
                logger.warning("gave up waiting for the hub after %g seconds", self.max_wait)
                return

    def _upload_all(self, queue: Queue) -> None:
        """Upload all queued entries in order. A failure of the hub ends the round; a branch that refuses is skipped."""
        for entry in queue.waiting():
            with self._lock:
                if not entry.is_there:
                    continue
                self._uploading = entry.step
            try:
                upload = entry.push()
                logger.info("uploaded %s, commit %s", upload.url, upload.commit)
                self._hub_failures.clear()
            except UsageError as error:
                self._warn_once(self._warned, entry.target.revision, str(error))
            except EndpointError as error:
                # The messages of equal failures may differ by a request id, so the cause is keyed by type and HTTP status.
                answer = getattr(error.__cause__, "response", None)
                self._warn_once(
                    self._hub_failures,
                    f"{type(error.__cause__).__name__} {getattr(answer, 'status_code', '')}",
                    f"{error} The run goes on; it is tried again at each checkpoint",
                )
                return
            finally:
                self._uploading = None

    def _warn_once(self, warned: set[str], cause: str, text: str) -> None:
        """Log a warning and add the cause to `warned`; if it is there already, log an info line."""
        logger.log(logging.INFO if cause in warned else logging.WARNING, "%s", text)
        warned.add(cause)


class _Uploader:
    """Runs the upload rounds in the thread."""

    def begin(self) -> None:
        pass

    def do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 — otherwise it would go unnoticed
            logger.warning("uploading failed: %s: %s", type(error).__name__, error)

    def end(self) -> None:
        pass
