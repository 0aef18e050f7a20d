"""Tests of a full upload queue; tests/integration/test_pushing.py runs the callback in a training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.core import atomic_files
from groupwise.engine.models.hub_push import Target
from groupwise.engine.models.hub_queue import TARGET, Queue
from groupwise.training.callbacks import push_to_hub_revision
from groupwise.training.callbacks.push_to_hub_revision import PushToHubRevision
from tests.meanwhile import right_after


def test_an_upload_that_ends_while_the_queue_is_read_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    callback: Any = PushToHubRevision("me/model", max_waiting=1)
    run: Any = SimpleNamespace(folder=tmp_path, step=2, tokenizer=None, name="toy")
    queue: Queue = callback._queue(run)
    folder = queue.folder / "step-000000001"
    folder.mkdir(parents=True)
    atomic_files.write_json(folder / TARGET, asdict(Target("me/model", "main-step-1", True, False)))
    (uploading,) = queue.waiting()
    callback._uploading = 1

    def end_upload() -> None:
        uploading.drop()
        callback._uploading = None

    added: list[int] = []
    monkeypatch.setattr(push_to_hub_revision, "model_card", lambda *_, **__: "card")
    monkeypatch.setattr(Queue, "add", lambda _, step, *__: added.append(step))
    monkeypatch.setattr(callback, "_request_round", lambda _: None)
    right_after(monkeypatch, Queue, "waiting", end_upload, lambda _: callback._lock.locked())
    callback.on_save(run, tmp_path)
    assert (added, callback._dropped_steps, caplog.messages) == ([2], [], [])
