"""Jobs on several machines at once, two real sshds, two nodes of a real Slurm and of a real Ray, as somebody types them.

1. A training on two machines, with samplers of its own, is that of one process up to rounding; what it makes comes from the first machine.
2. A learner that is killed on the second machine ends all with code 75; resumed, it is the undisturbed training to the bit.
3. Each attempt meets at a port of its own; every process is told by torchrun which it is.
4. All machines begin, or none; submitted again by whomever, what was begun in part is completed.
5. Stopped, it saves on the first machine, and nothing is left on any.
"""

import asyncio
import json
import os
import re
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from groupwise.clouds.gang import GangBackend
from groupwise.clouds.machine import ROOT, MachineBackend
from groupwise.clouds.port import CloudError, Handle, NameTaken, Order, Outcome, Unreachable
from groupwise.errors import UsageError
from groupwise.hosts.driver import Runner
from groupwise.hosts.files import BlobStore
from groupwise.hosts.meeting import KEY, port_of
from groupwise.hosts.spec import JobSpec, Limits
from groupwise.hosts.ssh import Address, SshHost
from tests import ray, slurm
from tests.integration.launch.person import Person
from tests.integration.launch.test_local import TRAINS, pids_of
from tests.integration.running import what_must_be_equal
from tests.ray import Ray
from tests.slurm import Cluster
from tests.ssh_hosts import LoopbackHost, loopback_hosts

pytestmark = [pytest.mark.launch, pytest.mark.timeout(600)]
ONE = (*TRAINS[:-1], "model.dtype=float32", "run.threads=1")
"""Whose results those of all others are compared with."""
LEARNERS = (*TRAINS[:-1], "model.dtype=float32", "run.threads=2", "scale.learners=2")
BOTH = (*LEARNERS, "run.threads=4", "scale.samplers=2")
"""Two learners, one on each machine, and two samplers on the first."""
TELLS = """\
import json, os, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
told = {name: os.environ[name] for name in names}
os.makedirs("outputs", exist_ok=True)
with open(f"outputs/{told['RANK']}.json", "w") as file:
    json.dump({**told, "words": sys.argv[1:], "ray": os.environ.get("RAY_ADDRESS")}, file)
sys.stdout.write(f"process {told['RANK']}\\n")
"""
NEAR = "GLOO_SOCKET_IFNAME=lo\n"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[LoopbackHost]]:
    with loopback_hosts(2) as found:
        yield found


@pytest.fixture
def way(person: Person, hosts: list[LoopbackHost]) -> list[str]:
    """To both of them, whom the person knows."""
    rows = [host.vm_row() for host in hosts]
    known = person.home / ".ssh" / "known_hosts"
    known.parent.mkdir(exist_ok=True)
    lines = [
        f"[{row['ip_address']}]:{row['port']} {host.host_key}\n"
        for row, host in zip(rows, hosts, strict=True)
    ]
    known.write_text("".join(lines))
    (person.project / "near.env").write_text(NEAR)
    named = [f"{row['user']}@{row['ip_address']}:{row['port']}" for row in rows]
    words = [word for each in named for word in ("--host", each)]
    key = rows[0]["ssh_key_path"]
    return [*words, "--key", key, "--python", sys.executable, "--env-file", "near.env"]


def adapter(folder: Path) -> dict[str, list[float]]:
    found = load_file(folder / "final" / "adapter_model.safetensors")
    return {name: tensor.ravel().tolist() for name, tensor in found.items()}


def assert_close(one: Path, other: Path) -> None:
    first, second = adapter(one), adapter(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert second[name] == pytest.approx(values, rel=1e-3, abs=1e-4), name


def test_two_machines_train_as_one_process_does_and_go_on_to_the_same_bits(
    person: Person, way: list[str]
) -> None:
    """The second time a learner on the second machine is killed."""
    steps = "training.max_steps=20"
    alone = ("local", "--detach", "--name", "alone", "--no-preflight", "--", *ONE, steps)
    person.types(*alone)
    typed = person.types("ssh", *way, "--nodes", "2", "--name", "whole", "--", *BOTH, steps)
    assert "step 20/20" in typed.out
    again = ("ssh", *way, "--name", "killed", "--no-preflight", "--", *BOTH, steps)
    with person.held_at(5):
        begun = person.begins(*again)
        person.sees("step  4/20")
        os.kill(process_of(rank=1), signal.SIGKILL)
    assert begun.wait(240) == 75
    found = person.result("killed")
    assert (found["state"], found["exit_code"]) == ("failed", 75)
    assert "Learner 2 of 2" in person.said()
    person.types("resume", "killed", "--env-file", "near.env")
    assert person.result("killed")["attempt"] == 2
    person.types("logs", "-f", "alone")
    at = person.project / "launches"
    assert what_must_be_equal(at / "whole/runs/toy") == what_must_be_equal(at / "killed/runs/toy")
    assert_close(at / "alone/runs/toy", at / "whole/runs/toy")
    assert (at / "whole/nodes/1.log").is_file()


ENDLESS = ("training.max_steps=2000", "run.save_steps=1000")


def assert_saved(person: Person, name: str) -> None:
    """All steps that it has told of: however many processes were told to end, and how often, none hurried."""
    kept = person.project / "launches" / name / "runs/toy/checkpoints"
    steps = [int(each.name.removeprefix("step-")) for each in kept.glob("step-*")]
    told = [int(each) for each in re.findall(r"step +(\d+)/2000", person.said())]
    assert steps, person.said()
    assert max(steps) >= max(told) >= 3


def process_of(rank: int, job: str = "killed") -> int:
    """The training that torchrun has begun as this rank."""
    found: list[int] = []
    for pid in pids_of(f"attempts/{job}.1/work"):
        with suppress(OSError):  # it ends meanwhile
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    [process] = found
    return process


def test_a_script_is_told_which_process_it_is_and_words_arrive_as_they_are(
    person: Person, way: list[str], hosts: list[LoopbackHost]
) -> None:
    (person.project / "job.py").write_text(TELLS)
    odd = ["--flag", "", "a b", "it's", "$(touch x)", "two\nlines", "--", "-v", "--processes"]
    words = ("ssh", *way, "--nproc-per-node", "2", "--name", "odd", "--script", "job.py", *odd)
    typed = person.types(*words)
    assert "process 0" in typed.out
    folders = [host.home / ROOT / "attempts/odd.1" / "work/outputs" for host in hosts]
    told = [
        json.loads((folder / f"{2 * node + local}.json").read_text())
        for node, folder in enumerate(folders)
        for local in range(2)
    ]
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in told] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "1"),
    ]
    assert all(each["words"] == odd for each in told)
    assert {each["WORLD_SIZE"] for each in told} == {"4"}
    assert "process 3" in (person.project / "launches/odd/nodes/1.log").read_text()
    person.types("remove", "odd")
    assert not any(folder.parent.parent.exists() for folder in folders)


def test_what_does_not_go_together_is_said_before_anything_is_sent(
    person: Person, way: list[str]
) -> None:
    (person.project / "job.py").write_text("")
    for words, why in (
        (("--nodes", "3", "--", *LEARNERS), "--host names 2 machines"),
        (("--", *TRAINS), "scale.learners is 1"),
        (("--", *LEARNERS, "scale.learners=4"), "scale.learners is 4"),
        (("--", "eval", "--task-module", "task.py"), "runs on one machine"),
        ((*way[:2], "--script", "job.py"), "is named twice"),
    ):
        typed = person.types("ssh", *way, *words, code=2)
        assert why in typed.err, typed.err
    one = way[2:]
    typed = person.types("ssh", *one, "--nproc-per-node", "2", "--script", "job.py", code=2)
    assert "is for several machines" in typed.err


# --- the backend -----------------------------------------------------------------------------------


def gang(hosts: list[LoopbackHost], meets_at: str = "127.0.0.1") -> GangBackend:
    rows = [host.vm_row() for host in hosts]
    ways = [
        SshHost(
            Address(
                row["ip_address"],
                row["user"],
                row["port"],
                row["ssh_key_path"],
                row["host_key"],
            )
        )
        for row in rows
    ]
    machines = [(Runner(way, root=ROOT), f"machine {n}") for n, way in enumerate(ways)]
    return GangBackend("ssh", machines, meets_at)


def order(name: str, script: str, meets_at: str | None = None) -> Order:
    limits = Limits(time_seconds=600, grace_seconds=5)
    spec = JobSpec(("python3", "-c", script), limits=limits)
    return Order(name, spec, nodes=2, meets_at=meets_at)


async def ended_on(backend: MachineBackend, handle: Handle) -> Any:
    status = await backend.status(handle)
    while status.ending is None:
        status = await backend.wait(handle, status, 20.0)
    return status


async def ended(backend: GangBackend, handle: Handle) -> Any:
    return await ended_on(backend, handle)


MARKS = (
    "import os; key = open(os.environ['GROUPWISE_KEY_FILE']).read(); "
    "open(os.path.expanduser('~/{}'), 'a').write(os.environ['NODE_RANK'] + ' ' + key)"
)
"""Which machine it is, and the secret that all have."""


async def test_submitted_by_several_at_once_each_machine_runs_it_once(
    hosts: list[LoopbackHost], tmp_path: Path
) -> None:
    store = BlobStore(tmp_path / "blobs")
    asked = order("once", MARKS.format("once"))
    people = [gang(hosts) for _ in range(3)]
    handles = await asyncio.gather(*(each.submit(asked, store) for each in people))
    assert len({each.attempt for each in handles}) == 1
    await ended(people[0], handles[0])
    folders = [host.home / ROOT / "attempts/once.1/work" for host in hosts]
    assert {stat.S_IMODE((folder / KEY).stat().st_mode) for folder in folders} == {0o600}
    await people[0].cleanup(handles[0])
    marks = [(host.home / "once").read_text().split() for host in hosts]
    assert [rank for rank, _ in marks] == ["0", "1"]
    assert len(marks[0][1]) == 64
    assert marks[0][1] == marks[1][1]
    for each in people:
        await each.close()


async def test_who_asks_late_ends_nothing_of_what_another_has_begun(
    hosts: list[LoopbackHost], tmp_path: Path
) -> None:
    """It was placed, or gone on with, between this one's question and its deed."""
    store = BlobStore(tmp_path / "blobs")
    waits = "import os, time; os.environ['ATTEMPT'] == '1' and exit(3); time.sleep(1000)"
    asked = order("late", waits)
    people = [gang(hosts) for _ in range(2)]
    await ended(people[0], await people[0].submit(asked, store))
    second = await people[0].resume("late", {}, store)
    attempts = people[1]._attempts

    async def before(name: str | None = None) -> list[Any]:
        people[1]._attempts = attempts  # pyright: ignore[reportAttributeAccessIssue]
        return [each for each in await attempts(name) if each.epoch == 1]

    people[1]._attempts = before  # pyright: ignore[reportAttributeAccessIssue]
    assert await people[1].resume("late", {}, store) == second
    for each in (people[0], people[0]._others[0]):
        assert (await each.status(second)).ending is None
    await people[0].cancel(second, 0.1)
    for each in people:
        await each.close()


async def test_who_asks_after_it_has_begun_leaves_it_its_gpus(
    hosts: list[LoopbackHost], tmp_path: Path
) -> None:
    """It holds all that there are: asked for again, or by another laptop, it is found, and not taken for what is in its own way."""
    for host in hosts:
        host.gpus(1)
    store = BlobStore(tmp_path / "blobs")
    limits = Limits(time_seconds=600, grace_seconds=5)
    waits = JobSpec(("python3", "-c", "import time; time.sleep(1000)"), limits=limits)
    asked = Order("holds-all", waits, 1, nodes=2)
    people = [gang(hosts) for _ in range(2)]
    first = await people[0].submit(asked, store)
    assert await people[1].submit(asked, store) == first
    assert await people[1]._begin(asked, store, first.attempt, 1) == first

    async def away(*_: object) -> None:
        raise Unreachable("machine 1 cannot be reached")

    people[1]._others[0].join = away  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Unreachable):
        await people[1].submit(asked, store)
    for each in (people[0], people[0]._others[0]):
        assert (await each.status(first)).ending is None, "somebody else has begun it"
    await people[0].cancel(first, 0.1)
    for each in people:
        await each.close()
    for host in hosts:
        host.gpus(0)


async def test_a_name_that_a_machine_has_seen_more_of_is_begun_beyond_that(
    hosts: list[LoopbackHost], tmp_path: Path
) -> None:
    store = BlobStore(tmp_path / "blobs")
    backend = gang(hosts)
    alone = MachineBackend("ssh", backend._others[0]._runner, "machine 1")
    fails = JobSpec(("python3", "-c", "raise SystemExit(3)"))
    handle = await alone.submit(Order("seen", fails), store)
    for _ in range(2):
        await ended_on(alone, handle)
        handle = await alone.resume("seen", {}, store)
    await ended_on(alone, handle)
    await alone.cleanup(handle)
    begun = await backend.submit(order("seen", "print('on')"), store)
    assert begun.attempt == 4
    assert (await ended(backend, begun)).ending.outcome is Outcome.SUCCEEDED
    await backend.close()


async def test_all_machines_begin_or_none(hosts: list[LoopbackHost], tmp_path: Path) -> None:
    """Who was cut off between the first machine and the second left half of it, which the next one completes."""
    store = BlobStore(tmp_path / "blobs")
    backend = gang(hosts)
    other = backend._others[0]
    join = other.join

    async def away(*_: object) -> None:
        raise CloudError("machine 1 will not")

    other.join = away  # pyright: ignore[reportAttributeAccessIssue]
    waits = "import time; print('on', flush=True); time.sleep(1000)"
    with pytest.raises(CloudError, match="machine 1 will not"):
        await backend.submit(order("none", waits), store)
    handle = await backend.find("none")
    assert handle is not None
    assert (await ended(backend, handle)).ending.outcome is Outcome.CANCELLED
    other.join = join
    second = await backend.resume("none", {}, store)
    assert (await other.status(second)).ending is None
    await backend.cancel(second, 0.1)
    await ended(backend, second)

    class CutOffError(BaseException):
        pass

    async def cut_off(*_: object) -> None:
        raise CutOffError

    other.join = cut_off  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(CutOffError):
        await backend.submit(order("half", waits), store)
    assert await other.find("half") is None
    other.join = join
    handle = await backend.submit(order("half", waits), store)
    assert handle.attempt == 1
    assert (await other.find("half")) is not None
    await backend.cancel(handle, 0.1)
    for each in (backend, other):
        status = await each.status(handle)
        while status.ending is None:
            status = await each.wait(handle, status, 20.0)
        assert status.ending.outcome is Outcome.CANCELLED
    await backend.close()


async def test_from_another_machine_it_goes_on_as_it_was_begun(
    hosts: list[LoopbackHost], tmp_path: Path
) -> None:
    """It meets where it did, and its machines keep their order."""
    store = BlobStore(tmp_path / "blobs")
    fails = (
        "import os, sys; print(os.environ['MASTER_ADDR']); sys.exit(os.environ['ATTEMPT'] == '1')"
    )
    laptop, other = gang(hosts), gang(hosts, meets_at="192.0.2.1")
    first = await laptop.submit(order("meets", fails, meets_at="10.0.0.1"), store)
    await ended(laptop, first)
    results = tmp_path / "results"
    await laptop.fetch(first, results)
    assert (results / "nodes/1.log").read_bytes() == b"10.0.0.1\n"
    swapped, alone = gang(hosts[::-1]), MachineBackend("ssh", laptop._runner, "machine 0")
    for wrong, why in ((swapped, "but number 2 of its machines"), (alone, "on 2 machines at once")):
        with pytest.raises(UsageError, match=why):
            await wrong.resume("meets", {}, store)
    second = await other.resume("meets", {}, store)
    assert (await ended(other, second)).ending.outcome is Outcome.SUCCEEDED
    for each in (other, other._others[0]):
        assert (await each.log(second, 0, 100)).data == b"10.0.0.1\n"
    (results / "nodes/1.log").write_bytes(b"changed here")
    for attempt in (2, 2):
        await other.fetch(second, results)
        assert (results / "nodes/1.log").read_bytes() == b"10.0.0.1\n", attempt
    assert (results / "earlier/changed/nodes/1.log").read_bytes() == b"changed here"
    for each in (laptop, other, swapped):
        await each.close()


async def test_what_others_have_on_a_machine_under_the_same_name_goes_on(
    hosts: list[LoopbackHost], tmp_path: Path
) -> None:
    store = BlobStore(tmp_path / "blobs")
    backend = gang(hosts)
    other = backend._others[0]
    theirs = JobSpec(("python3", "-c", "import time; print('on', flush=True); time.sleep(1000)"))
    handle = await MachineBackend.submit(other, Order("theirs", theirs), store)
    with pytest.raises(NameTaken, match="machine 1 has another job called theirs"):
        await backend.submit(order("theirs", "print()"), store)
    assert (await other.status(handle)).ending is None
    assert await backend.find("theirs") is None
    await other.cancel(handle, 0.1)
    await backend.close()


async def test_a_machine_that_is_away_keeps_nobody_from_the_results(
    hosts: list[LoopbackHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path / "blobs")
    backend = gang(hosts)
    handle = await backend.submit(
        order("away", "import os; os.mkdir('outputs'); open('outputs/x', 'w')"), store
    )
    await ended(backend, handle)

    async def away(*_: object) -> None:
        raise Unreachable("machine 1 cannot be reached")

    monkeypatch.setattr(backend._others[0], "log", away)
    fetched = await backend.fetch(handle, tmp_path / "results")
    assert fetched.files == ("outputs/x",)
    assert fetched.left_out == {"nodes/1.log": "machine 1 cannot be reached"}
    monkeypatch.setattr(backend._others[0], "cancel", away)
    await backend.cancel(handle, 0.1)
    await backend.close()


def test_attempts_meet_at_ports_of_their_own() -> None:
    ports = {port_of(f"job.{epoch}") for epoch in range(1, 100)}
    assert len(ports) == 99
    assert all(20_000 <= port < 32_000 for port in ports)


# --- Slurm -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm.cluster() as found:
        yield found


@pytest.fixture
def clerk(cluster: Cluster, person: Person, monkeypatch: pytest.MonkeyPatch) -> Person:
    """A person at a login node."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    (person.project / "near.env").write_text(NEAR)
    return person


def test_each_node_of_slurm_is_told_which_process_it_is(clerk: Person) -> None:
    (clerk.project / "job.py").write_text(TELLS)
    words = ("slurm", "--nodes", "2", "--env-file", "near.env", "--name", "told")
    typed = clerk.types(*words, "--script", "job.py", "a b")
    assert "process 0" in typed.out
    told = json.loads((clerk.project / "launches/told/outputs/0.json").read_text())
    assert (told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"], told["words"]) == ("2", "1", ["a b"])
    assert clerk.result("told")["state"] == "succeeded"


@pytest.mark.soak(
    suite="launch"
)  # as with two machines above: that Slurm began both is seen before and after this
def test_two_nodes_of_slurm_train_as_one_process_does(clerk: Person) -> None:
    steps = "training.max_steps=3"
    clerk.types("local", "--detach", "--name", "alone", "--", *ONE, steps)
    near = ("--env-file", "near.env")
    clerk.types("slurm", "--nodes", "2", *near, "--name", "both", "--", *BOTH, steps)
    found = clerk.result("both")
    assert found["state"] == "succeeded"
    clerk.types("logs", "-f", "alone")
    folders = [clerk.project / "launches" / each / "runs/toy" for each in ("alone", "both")]
    assert_close(*folders)


def test_slurm_stopped_it_saves(clerk: Person) -> None:
    near = ("--env-file", "near.env")
    words = ("slurm", "--nodes", "2", *near, "--name", "stopped", "--no-preflight")
    begun = clerk.begins(*words, "--", *LEARNERS, *ENDLESS)
    clerk.sees("step    3/2000")
    begun.send_signal(signal.SIGINT)
    assert begun.wait(240) == 130
    assert clerk.result("stopped")["state"] == "cancelled"
    assert_saved(clerk, "stopped")
    assert not pids_of("attempts/stopped.1/work")


# --- Ray -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_of_ray() -> Iterator[Ray]:
    with ray.cluster() as found:
        found.start_node()
        yield found


@pytest.fixture
def guest(two_of_ray: Ray, person: Person, monkeypatch: pytest.MonkeyPatch) -> Person:
    """A person at the head of a Ray."""
    monkeypatch.setenv("RAY_ADDRESS", two_of_ray.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", two_of_ray.token)
    (person.project / "near.env").write_text(f"{NEAR}CANARY=of-a-secret\n")
    return person


def test_on_ray_all_is_on_all_nodes_and_none_of_it_stays(guest: Person, two_of_ray: Ray) -> None:
    (guest.project / "job.py").write_text(TELLS)
    words = ("ray", "--gpus-per-node", "2", "--env-file", "near.env", "--name", "tells")
    typed = guest.types(*words, "--nodes", "2", "--script", "job.py", "two words")
    said = [line for line in typed.out.splitlines() if line.startswith("process ")]
    assert sorted(said) == [f"process {rank}" for rank in range(4)]
    folder = guest.project / "launches/tells/outputs"
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    assert [each["LOCAL_RANK"] for each in told] == ["0", "1", "0", "1"]
    assert {each["WORLD_SIZE"] for each in told} == {"4"}
    assert all(each["words"] == ["two words"] for each in told)
    assert {each["ray"] for each in told} == {f"{two_of_ray.host}:{two_of_ray.gcs}"}
    two_of_ray.idle()
    assert guest.holding("of-a-secret") == []


ON_RAY = ("ray", "--nodes", "2", "--env-file", "near.env")


def test_two_nodes_of_ray_train_as_one_process_does(guest: Person) -> None:
    steps = "training.max_steps=3"
    guest.types("local", "--detach", "--name", "one", "--", *ONE, steps)
    guest.types(*ON_RAY, "--name", "group", "--", *BOTH, steps)
    guest.types("logs", "-f", "one")
    assert_close(*(guest.project / "launches" / name / "runs/toy" for name in ("one", "group")))


@pytest.mark.soak(suite="launch")
def test_killed_and_resumed_on_ray_it_is_the_undisturbed_training_to_the_bit(
    guest: Person,
) -> None:
    steps = "training.max_steps=20"
    guest.types(*ON_RAY, "--name", "calm", "--", *BOTH, steps)
    with guest.held_at(5):
        begun = guest.begins(*ON_RAY, "--name", "shaken", "--", *BOTH, steps)
        guest.sees("step  4/20")
        os.kill(process_of(1, "shaken"), signal.SIGKILL)
    assert begun.wait(240) == 75
    assert "Learner 2 of 2" in guest.said()
    guest.types("resume", "shaken", "--env-file", "near.env")
    assert guest.result("shaken")["attempt"] == 2
    calm, shaken = (guest.project / "launches" / name / "runs/toy" for name in ("calm", "shaken"))
    assert what_must_be_equal(calm) == what_must_be_equal(shaken)


@pytest.mark.soak(suite="launch")
@pytest.mark.parametrize(
    ("who", "code", "state"), [("person", 130, "cancelled"), ("ray", 143, "failed")]
)
def test_ended_on_ray_it_saves_and_nothing_is_left(
    guest: Person, two_of_ray: Ray, who: str, code: int, state: str
) -> None:
    name = f"ended-by-{who}"
    begun = guest.begins(*ON_RAY, "--name", name, "--", *LEARNERS, *ENDLESS)
    guest.sees("step    3/2000")
    if who == "ray":
        two_of_ray.stop(name)
    else:
        begun.send_signal(signal.SIGINT)
    assert begun.wait(240) == code
    assert guest.result(name)["state"] == state
    assert_saved(guest, name)
    two_of_ray.idle()
    assert not pids_of(f"attempts/{name}.1/work")
