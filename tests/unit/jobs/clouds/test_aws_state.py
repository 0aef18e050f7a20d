"""What is left of a job when its machine is gone, on the machine that launched it."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.jobs.clouds.aws import AwsBackend
from groupwise.jobs.clouds.aws_state import (
    JobRecords,
    cost_of,
    newest_checkpoint,
    usage_of,
    with_forgotten,
)
from groupwise.jobs.clouds.backend import Cost, Ending, Handle, Order, Outcome
from groupwise.jobs.clouds.ec2 import Machine
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.seal import seal
from groupwise.jobs.hosts.spec import JobSpec
from tests.meanwhile import right_after, right_before

HOUR = 3600.0


def checkpoint(results: Path, name: str, step: int, data: str) -> Path:
    folder = results / name
    folder.mkdir(parents=True)
    (folder / "w").write_text(data)
    seal(folder, step)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "store")


def test_the_newest_whole_checkpoint_is_begun_with(tmp_path: Path, store: BlobStore) -> None:
    results = tmp_path / "results"
    assert newest_checkpoint(results, store) is None
    checkpoint(results, "runs/a/checkpoints/step-9", 9, "nine")
    torn = checkpoint(results, "runs/a/checkpoints/step-12", 12, "twelve")
    (torn / "w").write_text("twel")
    (checkpoint(results, "runs/a/checkpoints/step-11", 11, "eleven") / "w").unlink()
    checkpoint(results, "earlier/attempt-1/runs/a/checkpoints/step-40", 40, "of before")
    (tmp_path / "secret").write_text("s")
    elsewhere = {"step": 30, "files": {"../../secret": {"size": 1, "sha256": "0" * 64}}}
    lists = {"": "{}", "outputs": "no JSON", "bad": json.dumps(elsewhere)}
    for name, text in lists.items():
        (results / name).mkdir(exist_ok=True)
        (results / name / "manifest.json").write_text(text)
    found = newest_checkpoint(results, store)
    assert found is not None
    assert (found.step, found.path) == (9, "runs/a/checkpoints/step-9")
    assert set(found.manifest) == {f"{found.path}/w", f"{found.path}/manifest.json"}
    assert store.read(found.manifest[f"{found.path}/w"].sha256) == b"nine"


def test_a_record_comes_back_as_it_was_written(tmp_path: Path, store: BlobStore) -> None:
    kept = JobRecords(tmp_path / "kept")
    assert kept.find("job") is None
    (tmp_path / "in").write_text("in")
    files = store.put_files({"in": tmp_path / "in"})
    spec = JobSpec(("x",), files=files, secrets=("TOKEN",))
    order = Order("job", spec, secrets={"TOKEN": "canary-8"})
    kept.record_start(order, 2, store)
    ending = Ending(Outcome.FAILED, "why", FailureClass.CRASHED, 3, 1.5)
    kept.record_fetch("job", 2, tmp_path / "results", ending)
    kept.record_fetch("job", 1, tmp_path / "results", None)
    record = JobRecords(tmp_path / "kept").find("job")
    assert record is not None
    assert (record.attempt, record.results) == (2, str(tmp_path / "results"))
    assert record.endings == {2: ending}
    assert Order.from_document(record.order or {}).document() == order.document()
    written = [each.read_bytes() for each in kept.folder.rglob("*") if each.is_file()]
    assert written
    assert not any(b"canary-8" in each for each in written)
    empty = BlobStore(tmp_path / "empty")
    kept.copy_files_to(order, empty)
    assert empty.read(files["in"].sha256) == b"in"
    kept.log("job", 2).write_text("said")
    kept.remove("job")
    assert kept.find("job") is None
    assert not kept.log("job", 2).exists()


def machine(name: str, state: str, ended_at: float | None = None, **tags: str) -> Machine:
    return Machine(name, state, tags, ended_at=ended_at)


def cost(*machines: Machine, now: float) -> Cost:
    found = cost_of(usage_of(machines, now))
    assert found is not None
    return found


def test_all_machines_are_counted_each_to_its_end_and_what_has_no_price_is_reported() -> None:
    gone = machine("i-1", "terminated", 2 * HOUR, since="0", price="1.5")
    lives = machine("i-2", "running", since=f"{4 * HOUR}", price="2")
    unknown = machine("i-3", "running", since="0")
    found = cost(gone, lives, unknown, now=5 * HOUR)
    assert found.dollars == 1.5 * 2 + 2 * 1
    assert "i-1 2.00 h at $1.50, i-2 1.00 h at $2.00" in found.counts
    assert "i-3 has no known price" in found.counts
    assert cost_of(usage_of([unknown], HOUR)) is None


def test_a_machine_that_vanished_unseen_is_charged_until_its_deadline() -> None:
    """The state is that of a laptop that was shut as soon as the job began."""
    lives = machine("i-1", "running", since="0", price="1", deadline=f"{24 * HOUR}")
    seen = usage_of([lives], HOUR)
    assert with_forgotten(seen, {"i-1"}, 3 * HOUR)["i-1"].hours == 1
    assert with_forgotten(seen, (), 3 * HOUR)["i-1"].hours == 3
    assert with_forgotten(seen, (), 48 * HOUR)["i-1"].hours == 24
    ended = usage_of([machine("i-1", "terminated", HOUR, since="0", price="1")], 2 * HOUR)
    assert with_forgotten(ended, (), 48 * HOUR)["i-1"].hours == 1


def test_results_that_are_fetched_again_meanwhile_are_no_error(
    tmp_path: Path, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    checkpoint(results, "run/checkpoints/step-9", 9, "nine")
    old = results / "run" / "checkpoints" / "step-8"
    old.mkdir()
    right_before(monkeypatch, os, "scandir", old.rmdir, lambda path: str(path) == str(old))
    found = newest_checkpoint(results, store)
    assert found is not None
    assert (found.step, old.exists()) == (9, False)


def test_the_log_of_a_job_that_is_removed_meanwhile_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = JobRecords(tmp_path)
    log = records.log("job", 1)
    log.write_text("said")
    ending = Ending(Outcome.SUCCEEDED, "done")
    records.record_fetch("job", 1, tmp_path / "results", ending)
    backend: Any = SimpleNamespace(_records=records, _where="AWS")
    handle = Handle("aws", "job", 1)
    look = AwsBackend._status_without_machine  # pyright: ignore[reportPrivateUsage]
    right_after(monkeypatch, Path, "exists", log.unlink, lambda path: path == log)
    assert look(backend, handle, None).log_size == len("said")
    log.unlink(missing_ok=True)
    assert look(backend, handle, None).log_size == 0
