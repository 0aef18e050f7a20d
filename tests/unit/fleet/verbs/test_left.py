"""What may be fetched is remembered for all files of a job, and worked out anew where it has changed."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete

from groupwise.fleet.direct import DirectFleet
from groupwise.fleet.store.database import Database
from groupwise.fleet.store.tables import Checkpoint
from groupwise.fleet.verbs import left
from groupwise.fleet.verbs.actor import Actor
from groupwise.hosts.files import BlobStore
from groupwise.wire.problems import Refusal
from tests.fleet_api import place_in

ADA = Actor("user:ada")
COMMAND = {"arguments": ["true"], "resources": {"gpus": 0}}


@pytest.fixture
def direct(database: Database, tmp_path: Path) -> DirectFleet:
    return DirectFleet(place_in(tmp_path / "fleet"), database, ADA)


def manifest(files: dict[str, bytes]) -> dict[str, Any]:
    return {
        path: [hashlib.sha256(data).hexdigest(), 0o644, len(data)] for path, data in files.items()
    }


def leave(direct: DirectFleet, job: str, files: dict[str, bytes]) -> None:
    """As its newest artefacts."""
    folder = direct.place.artefacts / job / "9"
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    written = folder.with_name("9.json.new")
    written.write_text(json.dumps({"files": manifest(files), "left_out": []}))
    written.replace(folder.with_name("9.json"))
    if not folder.with_name("current").is_symlink():
        folder.with_name("current").symlink_to("9")


def mirrored(direct: DirectFleet, job: str, step: int, files: dict[str, bytes]) -> None:
    store = BlobStore(direct.place.blobs)
    for data in files.values():
        store.put(data)
    about = {"job_id": job, "generation": 0, "epoch": 5, "path": f"outputs/{step}", "step": step}
    row = Checkpoint(**about, manifest=manifest(files), mirrored_at=float(step))
    direct.database.run(lambda session: session.add(row))


def test_what_a_record_names_is_asked_anew_when_it_is_another(direct: DirectFleet) -> None:
    job = direct.submit(COMMAND)["job_id"]
    about = {"job_id": job, "status": "completed"}
    for path, other in (("outputs/one", "outputs/two"), ("outputs/two", "outputs/one")):
        leave(direct, job, {path: b"x"})
        found = left.artefact(direct.place.artefacts, about, path, None)
        assert found == direct.place.artefacts / job / "9" / path
        with pytest.raises(Refusal, check=lambda refusal: refusal.code == "unknown_file"):
            left.artefact(direct.place.artefacts, about, other, None)


def test_what_checkpoints_name_is_asked_anew_when_they_are_others(direct: DirectFleet) -> None:
    job = direct.submit(COMMAND)["job_id"]
    first, second = (hashlib.sha256(data).hexdigest() for data in (b"first", b"second"))
    mirrored(direct, job, 1, {"outputs/1/w": b"first"})
    assert direct.read(left.checkpoint_file, job, first) == first
    mirrored(direct, job, 2, {"outputs/2/w": b"second"})
    assert direct.read(left.checkpoint_file, job, second) == second
    forgotten = delete(Checkpoint).where(Checkpoint.step == 1)
    direct.database.run(lambda session: session.execute(forgotten))
    with pytest.raises(Refusal, check=lambda refusal: refusal.code == "unknown_file"):
        direct.read(left.checkpoint_file, job, first)
    other = direct.submit(COMMAND)["job_id"]
    with pytest.raises(Refusal, check=lambda refusal: refusal.code == "unknown_file"):
        direct.read(left.checkpoint_file, other, second)
