"""From a project and a command to an order."""

import json
from pathlib import Path

import pytest

from groupwise.errors import UsageError
from groupwise.fleet.machines.locks import Lock
from groupwise.fleet.machines.packing import Packed
from groupwise.fleet.machines.plans import Plan
from groupwise.hosts.files import BlobStore
from groupwise.launch import orders
from groupwise.launch.orders import BEGIN, RESULTS, Wanted, pack

CANARY = "canary-of-a-secret-4711"
COMMAND = ("groupwise", "rl", "--config", "a b")
PLAN = Plan(Packed("1.0", b"a wheel"), Lock(("six==1.17.0",)))


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


def test_the_project_travels_by_hashes(project: Path, store: BlobStore) -> None:
    packed = pack(Wanted("job", project, COMMAND, gpus=2, hours=1.5), store)
    spec = packed.order.spec
    found = {path: store.read(entry.sha256) for path, entry in spec.files.items()}
    assert found == {"task.py": b"task", "sub/data.jsonl": b"{}"}
    assert packed.bundle.left_out == {"runs/warm/": "the folder of a run"}
    assert (packed.order.name, packed.order.gpus) == ("job", 2)
    assert spec.arguments == COMMAND
    assert spec.limits.time_seconds == 5400.0
    assert packed.order.problems() == []


def test_secrets_are_named_and_nothing_more(project: Path, store: BlobStore) -> None:
    order = pack(Wanted("job", project, COMMAND, secrets={"TOKEN": CANARY}), store).order
    assert order.spec.secrets == ("TOKEN",)
    assert order.secrets == {"TOKEN": CANARY}
    assert CANARY not in json.dumps(order.document()) + repr(order)
    blobs = [path.read_bytes() for path in store.root.rglob("*") if path.is_file()]
    assert not any(CANARY.encode() in data for data in blobs)


def test_a_secret_in_the_command_is_refused(project: Path, store: BlobStore) -> None:
    words = (*COMMAND, f"--token={CANARY}")
    with pytest.raises(UsageError, match="the value of TOKEN stands in the command") as refused:
        pack(Wanted("job", project, words, secrets={"TOKEN": CANARY}), store)
    assert CANARY not in str(refused.value)


def test_files_on_their_way_are_for_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert orders.files_here().root.parent.stat().st_mode & 0o777 == 0o700


def test_an_environment_is_made_by_the_jobs_first_step(project: Path, store: BlobStore) -> None:
    spec = pack(Wanted("job", project, COMMAND, environment=PLAN), store).order.spec
    assert spec.arguments == (*BEGIN, *COMMAND)
    names = {"begin.py", "builder.py", "lock.txt", "order.json", f"wheels/{PLAN.packed.file_name}"}
    own = {path for path in spec.files if path.startswith(".groupwise/")}
    assert own == {f".groupwise/{name}" for name in names}
    order = json.loads(store.read(spec.files[".groupwise/order.json"].sha256))
    assert (order["folder"], order["name"]) == ("~/groupwise-launch/environments", PLAN.name)
    (project / ".groupwise").mkdir()
    (project / ".groupwise/x").touch()
    with pytest.raises(UsageError, match=r"\.groupwise"):
        pack(Wanted("job", project, COMMAND), store)


def test_results_are_fetched_from_inside_the_project(project: Path, store: BlobStore) -> None:
    wanted = Wanted("job", project, COMMAND, results=("./mine/out.json", "runs"))
    spec = pack(wanted, store).order.spec
    assert spec.artefacts == spec.checkpoints == (*RESULTS, "mine/out.json")


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        (("/tmp/runs", "../runs", "a/../../b", ""), "does not come back"),
        (("launch-result.json", "earlier/x", ".incoming", "."), r"this name is taken|name what"),
    ],
)
def test_names_where_results_would_be_lost_are_told(
    project: Path, store: BlobStore, paths: tuple[str, ...], why: str
) -> None:
    for path in paths:
        with pytest.raises(UsageError, match=why):
            pack(Wanted("job", project, COMMAND, results=(path,)), store)


def test_what_is_taken_along_travels_though_a_run_made_it(project: Path, store: BlobStore) -> None:
    packed = pack(Wanted("job", project, COMMAND, take=("runs/warm/final", "task.py")), store)
    assert set(packed.bundle.files) == {"task.py", "sub/data.jsonl", "runs/warm/final/weights"}


@pytest.mark.parametrize(
    ("path", "told"), [("../x", "outside of the project"), ("none", "there is no such file")]
)
def test_what_cannot_be_taken_is_told(
    project: Path, store: BlobStore, path: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        pack(Wanted("job", project, COMMAND, take=(path,)), store)


def test_a_credential_is_not_taken_by_name_either(project: Path, store: BlobStore) -> None:
    (project / ".env").write_text("A=1")
    packed = pack(Wanted("job", project, COMMAND, take=(".env",)), store)
    assert packed.bundle.left_out[".env"] == "credentials, by its name"


def test_what_the_command_reads_has_to_travel(project: Path, store: BlobStore) -> None:
    needs = (str(project / "runs/warm/final"), "task.py")
    with pytest.raises(UsageError, match=r"does not travel .* --take runs/warm$"):
        pack(Wanted("job", project, COMMAND, needs=needs), store)
    pack(Wanted("job", project, COMMAND, needs=needs, take=("runs/warm",)), store)


def test_what_it_reads_elsewhere_cannot_travel(project: Path, store: BlobStore) -> None:
    outside = (str(project.parent),)
    with pytest.raises(UsageError, match="outside of the project"):
        pack(Wanted("job", project, COMMAND, needs=outside), store)
    pack(Wanted("job", project, COMMAND, needs=outside, elsewhere=False), store)
