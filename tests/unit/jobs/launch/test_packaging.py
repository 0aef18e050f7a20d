"""From a project and a command to an order."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.machines import packing
from groupwise.jobs.fleet.machines.locks import Lock
from groupwise.jobs.fleet.machines.plans import Plan
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.launch import packaging
from groupwise.jobs.launch.packaging import (
    BOOTSTRAP_COMMAND,
    DEFAULT_RESULTS,
    LaunchRequest,
    PackedJob,
    pack,
)

CANARY = "canary-of-a-secret-4711"
COMMAND = ("groupwise", "rl", "--config", "a b")
PLAN = Plan(packing.Packed("1.0", b"a wheel"), Lock(("six==1.17.0",)))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "task.py").write_text("task")
    (folder / "sub/data.jsonl").write_text("{}")
    run = folder / "runs/warm"
    (run / "final").mkdir(parents=True)
    (run / "run.db").write_text("record")
    (run / "config.json").write_text("{}")
    (run / "final/weights").write_text("w")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


Packs = Callable[..., PackedJob]


@pytest.fixture
def packs(project: Path, store: BlobStore) -> Packs:
    """Of the project, with what is wanted."""

    def of(*more: str, **wanted: Any) -> PackedJob:
        return pack(LaunchRequest("job", project, (*COMMAND, *more), **wanted), store)

    return of


def test_the_project_travels_by_hashes(packs: Packs, store: BlobStore) -> None:
    packed = packs(gpus=2, hours=1.5)
    spec = packed.order.spec
    found = {path: store.read(entry.sha256) for path, entry in spec.files.items()}
    assert found == {"task.py": b"task", "sub/data.jsonl": b"{}"}
    assert packed.bundle.left_out == {"runs/warm/": "the folder of a run"}
    assert (packed.order.name, packed.order.gpus) == ("job", 2)
    assert (spec.arguments, spec.limits.time_seconds) == (COMMAND, 5400.0)
    packed.order.check()


def test_secrets_are_named_and_nothing_more(packs: Packs, store: BlobStore) -> None:
    order = packs(secrets={"TOKEN": CANARY}).order
    assert (order.spec.secrets, order.secrets) == (("TOKEN",), {"TOKEN": CANARY})
    assert CANARY not in json.dumps(order.document()) + repr(order)
    blobs = [path.read_bytes() for path in store.root.rglob("*") if path.is_file()]
    assert not any(CANARY.encode() in data for data in blobs)
    with pytest.raises(UsageError, match="value of TOKEN") as refused:
        packs(f"--token={CANARY}", secrets={"TOKEN": CANARY})
    assert CANARY not in str(refused.value)


def test_packed_files_are_readable_only_by_their_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packaging.local_store().root.parent.stat().st_mode & 0o777 == 0o700


def test_an_environment_is_made_by_the_jobs_first_step(
    packs: Packs, project: Path, store: BlobStore
) -> None:
    spec = packs(environment=PLAN).order.spec
    assert spec.arguments == (*BOOTSTRAP_COMMAND, *COMMAND)
    names = {
        "bootstrap.py",
        "builder.py",
        "lock.txt",
        "order.json",
        f"wheels/{PLAN.packed.file_name}",
    }
    own = {path for path in spec.files if path.startswith(".groupwise/")}
    assert own == {f".groupwise/{name}" for name in names}
    order = json.loads(store.read(spec.files[".groupwise/order.json"].sha256))
    assert (order["folder"], order["name"]) == ("~/groupwise-launch/environments", PLAN.name)
    (project / ".groupwise").mkdir()
    (project / ".groupwise/x").touch()
    with pytest.raises(UsageError, match=r"\.groupwise"):
        packs()


def test_results_are_fetched_from_inside_the_project(packs: Packs) -> None:
    spec = packs(results=("./mine/out.json", "runs")).order.spec
    assert spec.artefacts == spec.checkpoints == (*DEFAULT_RESULTS, "mine/out.json")
    for path in ("/tmp/runs", "../runs", "a/../../b", ""):
        with pytest.raises(UsageError, match="does not come back"):
            packs(results=(path,))
    for path in ("launch-result.json", "earlier/x", ".incoming", "."):
        with pytest.raises(UsageError, match=r"is taken|name what"):
            packs(results=(path,))


def test_files_named_with_take_are_packed(packs: Packs, project: Path) -> None:
    """Not what is elsewhere, and a credential only if it is named itself."""
    packed = packs(take=("runs/warm/final", "task.py"))
    assert set(packed.bundle.files) == {"task.py", "sub/data.jsonl", "runs/warm/final/weights"}
    for path, told in (("../x", "outside of the project"), ("none", "there is no such file")):
        with pytest.raises(UsageError, match=told):
            packs(take=(path,))
    (project / ".env").write_text("A=1")
    assert packs(take=(".",)).bundle.left_out[".env"] == "credentials, by its name"
    assert ".env" in packs(take=(".env",)).bundle.files


def test_files_that_the_command_reads_must_be_packed(packs: Packs, project: Path) -> None:
    needs, outside = (str(project / "runs/warm/final"), "task.py"), (str(project.parent),)
    with pytest.raises(UsageError, match=r" --file runs/warm$"):
        packs(needs=needs)
    packs(needs=needs, take=("runs/warm",))
    with pytest.raises(UsageError, match="outside of the project"):
        packs(needs=outside)
    packs(needs=outside, is_remote=False)
