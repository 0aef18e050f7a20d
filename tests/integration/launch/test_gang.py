"""Jobs on several machines at once: two real sshds, two nodes of a real Slurm and of a real Ray, started by commands as a user types them.

1. A learner that is killed on the second machine ends all with code 75; resumed, it is the undisturbed training to the bit.
2. A training on two machines, with samplers of its own, is that of one process up to rounding; what it makes comes from the first machine.
3. Each attempt meets at a port of its own; every process is told by torchrun which it is.
4. All machines begin, or none; submitted again by whomever, what was begun in part is completed.
5. Stopped, it saves on the first machine, and nothing is left on any.
"""

import json
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from groupwise.core.errors import UsageError
from groupwise.core.rendezvous import KEY
from groupwise.jobs.clouds.backend import CloudError, Handle, NameTaken, Order, Outcome, Unreachable
from groupwise.jobs.clouds.gang import GangBackend
from groupwise.jobs.clouds.machine import ROOT, MachineBackend
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.spec import Limits
from groupwise.jobs.hosts.ssh import Address, SshHost
from tests import ray_cluster, slurm
from tests.integration.launch.person import Person
from tests.integration.launch.test_local import TRAINS, pids_of
from tests.integration.toy_run import what_must_be_equal
from tests.launch_backends import WAITS, LaunchClient, ending, name, order
from tests.ssh_hosts import LoopbackHost, loopback_hosts

__all__ = ["name"]

pytestmark = [pytest.mark.launch, pytest.mark.timeout(540)]
ONE_LEARNER = (*TRAINS[:-1], "model.dtype=float32", "run.threads=1")
"""Whose results those of all others are compared with."""
LEARNERS = (*TRAINS[:-1], "model.dtype=float32", "run.threads=2", "distributed.learners=2")
BOTH = (*LEARNERS, "run.threads=4", "distributed.samplers=2")
"""Two learners, one on each machine, and two samplers on the first."""
REPORT_PROGRAM = """\
import json, os, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
told = {name: os.environ[name] for name in names}
key = os.environ.get("GROUPWISE_KEY_FILE")
told["key"] = key and open(key).read()
os.makedirs("outputs", exist_ok=True)
with open(f"outputs/{told['RANK']}.json", "w") as file:
    json.dump({**told, "words": sys.argv[1:], "ray": os.environ.get("RAY_ADDRESS")}, file)
sys.stdout.write(f"process {told['RANK']}\\n")
"""
NEAR = "GLOO_SOCKET_IFNAME=lo\n"
SOAK = pytest.mark.soak(suite="launch")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[LoopbackHost]]:
    with loopback_hosts(2) as found:
        yield found


@pytest.fixture
def way(person: Person, hosts: list[LoopbackHost]) -> list[str]:
    """To both of them, whom the person knows."""
    known = person.home / ".ssh" / "known_hosts"
    known.parent.mkdir(exist_ok=True)
    lines = (f"[{host.address}]:{host.port} {host.host_key}\n" for host in hosts)
    known.write_text("".join(lines))
    (person.project / "near.env").write_text(NEAR)
    named = [f"{host.user}@{host.address}:{host.port}" for host in hosts]
    words = [word for each in named for word in ("--host", each)]
    key = str(hosts[0].key_path)
    return [*words, "--key", key, "--python", sys.executable, "--env-file", "near.env"]


def adapter(folder: Path) -> dict[str, list[float]]:
    found = load_file(folder / "final" / "adapter_model.safetensors")
    return {name: tensor.ravel().tolist() for name, tensor in found.items()}


def assert_close(one: Path, other: Path) -> None:
    first, second = adapter(one), adapter(other)
    assert first.keys() == second.keys()
    for weight, values in first.items():
        assert second[weight] == pytest.approx(values, rel=1e-3, abs=1e-4), weight


def trained(person: Person, name: str) -> Path:
    return person.project / "launches" / name / "runs/toy"


@pytest.mark.parametrize(
    "trains",
    [pytest.param(LEARNERS, id="learners"), pytest.param(BOTH, id="samplers too", marks=SOAK)],
)
def test_killed_on_the_second_machine_they_continue_to_the_same_bits(
    person: Person, way: list[str], trains: tuple[str, ...]
) -> None:
    """Those of two learners on one machine; with samplers of its own the training is also that of one process."""
    steps = "training.max_steps=4"
    words = ("ssh", *way, "--machines", "2", "--no-preflight", "--name")
    on_one = ("local", "--detach", "--no-preflight", "--name")
    person.types(*(words if trains == BOTH else on_one), "whole", "--", *trains, steps)
    with person.held_at(3):
        begun = person.begins(*words, "killed", "--", *trains, steps)
        person.sees("step 2/4")
        os.kill(process_of(rank=1), signal.SIGKILL)
    assert begun.wait(240) == 75
    found = person.result("killed")
    assert (found["state"], found["exit_code"]) == ("failed", 75)
    assert "Learner 2 of 2" in person.said()
    person.types("resume", "killed", "--env-file", "near.env")
    assert person.result("killed")["attempt"] == 2
    assert (person.project / "launches/killed/nodes/1.log").is_file()
    person.types("logs", "-f", "whole")
    whole, killed = (trained(person, name) for name in ("whole", "killed"))
    assert what_must_be_equal(whole) == what_must_be_equal(killed)
    if trains == BOTH:
        person.types("local", "--name", "alone", "--no-preflight", "--", *ONE_LEARNER, steps)
        assert_close(trained(person, "alone"), whole)


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
    (person.project / "job.py").write_text(REPORT_PROGRAM)
    odd = ["--flag", "", "a b", "it's", "$(touch x)", "two\nlines", "--", "-v", "--processes"]
    words = ("ssh", *way, "--nproc-per-node", "2", "--name", "odd", "--script", "job.py", *odd)
    assert "process 0" in person.types(*words).out
    folders = [host.home / ROOT / "attempts/odd.1/work" for host in hosts]
    told = [
        json.loads((folder / f"outputs/{2 * node + local}.json").read_text())
        for node, folder in enumerate(folders)
        for local in range(2)
    ]
    ranks = [(each["RANK"], each["LOCAL_RANK"]) for each in told]
    assert ranks == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert all((each["words"], each["WORLD_SIZE"]) == (odd, "4") for each in told)
    [key] = {each["key"] for each in told}
    assert len(key) == 64
    assert {stat.S_IMODE((folder / KEY).stat().st_mode) for folder in folders} == {0o600}
    assert "process 3" in (person.project / "launches/odd/nodes/1.log").read_text()
    person.types("remove", "odd")
    assert not any(folder.parent.exists() for folder in folders)


# --- the backend -----------------------------------------------------------------------------------


def gang(hosts: list[LoopbackHost], meets_at: str = "127.0.0.1") -> GangBackend:
    ways = [SshHost(Address(h.address, h.user, h.port, str(h.key_path), h.host_key)) for h in hosts]
    machines = [(Runner(way, root=ROOT), f"machine {n}") for n, way in enumerate(ways)]
    return GangBackend("ssh", machines, meets_at)


def on_two(name: str, script: str, *words: str, **fields: Any) -> Order:
    limits = Limits(time_seconds=600, grace_seconds=5)
    return order(name, script, *words, nodes=2, limits=limits, **fields)


@pytest.fixture
async def people(
    hosts: list[LoopbackHost], name: str, tmp_path: Path
) -> AsyncIterator[list[LaunchClient[GangBackend]]]:
    """Each with a way of their own to the two machines."""
    found = [LaunchClient(gang(hosts), tmp_path, name, on_two) for _ in range(2)]
    yield found
    for each in found:
        await each.backend.close()


@pytest.fixture
def one(people: list[LaunchClient[GangBackend]]) -> LaunchClient[GangBackend]:
    return people[0]


async def away(*_: object) -> None:
    raise Unreachable("machine 1 cannot be reached")


async def assert_lives(one: LaunchClient[GangBackend], handle: Handle) -> None:
    """On both machines; it is ended then."""
    for each in (one.backend, one.backend._others[0]):
        assert (await each.status(handle)).ending is None
    await one.backend.cancel(handle, 0.1)


async def test_a_late_resume_does_not_end_an_attempt_that_another_client_started(
    people: list[LaunchClient[GangBackend]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was placed, or gone on with, between this one's question and its deed."""
    one, other = people
    waits = f"import os; os.environ['ATTEMPT'] == '1' and exit(3)\n{WAITS}"
    await one.ending(await one.submit(waits))
    second = await one.resume()
    attempts, early = other.backend._attempts, [True]

    async def before(name: str | None = None) -> list[Any]:
        first = early.pop() if early else False
        return [each for each in await attempts(name) if not first or each.epoch == 1]

    monkeypatch.setattr(other.backend, "_attempts", before)
    assert await other.resume() == second
    await assert_lives(one, second)


async def test_a_repeated_submit_finds_the_running_gang(
    people: list[LaunchClient[GangBackend]],
    hosts: list[LoopbackHost],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds all that there are: asked for again, or by another client, it is found, and not taken for what is in its own way."""
    one, other = people
    for host in hosts:
        host.gpus(1)
    asked = one.order(WAITS, gpus=1)
    first = await one.submit(asked)
    assert await other.submit(asked) == first
    assert await other.backend._start_attempt(asked, other.store, first.attempt, 1) == first
    monkeypatch.setattr(other.backend._others[0], "join", away)
    with pytest.raises(Unreachable):
        await other.submit(asked)
    await assert_lives(one, first)
    for host in hosts:
        host.gpus(0)


async def test_another_job_of_the_same_name_keeps_running(
    one: LaunchClient[GangBackend],
) -> None:
    """And once it is removed, this one is begun beyond all that the machine has seen."""
    alone = MachineBackend("ssh", one.backend._others[0]._runner, "machine 1")
    handle = await alone.submit(order(one.name, WAITS), one.store)
    with pytest.raises(NameTaken, match=f"machine 1 has another job called {one.name}"):
        await one.submit("print()")
    assert (await alone.status(handle)).ending is None
    assert await one.backend.find(one.name) is None
    await alone.cancel(handle, 0.1)
    await ending(alone, handle)
    handle = await alone.resume(one.name, {}, one.store)
    await alone.cancel(handle, 0.1)
    await ending(alone, handle)
    await alone.cleanup(handle)
    begun = await one.submit("print('on')")
    assert begun.attempt == 3
    assert await one.outcome(begun) is Outcome.SUCCEEDED


class CutOffError(BaseException):
    pass


async def test_a_job_starts_on_all_machines_or_on_none(
    one: LaunchClient[GangBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was cut off between the first machine and the second left half of it, which the next one completes."""
    [other] = one.backend._others

    async def will_not(*_: object) -> None:
        raise CloudError("machine 1 will not")

    async def cut_off(*_: object) -> None:
        raise CutOffError

    with monkeypatch.context() as patched:
        patched.setattr(other, "join", will_not)
        with pytest.raises(CloudError, match="machine 1 will not"):
            await one.submit(WAITS)
    handle = await one.backend.find(one.name)
    assert handle is not None
    assert await one.outcome(handle) is Outcome.CANCELLED
    second = await one.resume()
    await assert_lives(one, second)
    await one.ending(second)
    half = f"{one.name}-half"
    with monkeypatch.context() as patched:
        patched.setattr(other, "join", cut_off)
        with pytest.raises(CutOffError):
            await one.submit(WAITS, name=half)
    assert await other.find(half) is None
    handle = await one.submit(WAITS, name=half)
    assert handle.attempt == 1
    await assert_lives(one, handle)
    for each in (one.backend, other):
        assert (await ending(each, handle)).outcome is Outcome.CANCELLED


async def test_from_another_machine_it_continues_as_it_was_begun(
    one: LaunchClient[GangBackend], hosts: list[LoopbackHost]
) -> None:
    """It meets where it did, and its machines keep their order."""
    fails = (
        "import os, sys; print(os.environ['MASTER_ADDR']); sys.exit(os.environ['ATTEMPT'] == '1')"
    )
    first = await one.submit(fails, meets_at="10.0.0.1")
    await one.ending(first)
    swapped, alone = gang(hosts[::-1]), MachineBackend("ssh", one.backend._runner, "machine 0")
    for wrong, why in ((swapped, "but number 2 of its machines"), (alone, "on 2 machines at once")):
        with pytest.raises(UsageError, match=why):
            await wrong.resume(one.name, {}, one.store)
    other = replace(one, backend=gang(hosts, meets_at="192.0.2.1"))
    second = await other.resume()
    assert await other.outcome(second) is Outcome.SUCCEEDED
    for each in (other.backend, other.backend._others[0]):
        assert (await each.log(second, 0, 100)).data == b"10.0.0.1\n"
    await other.fetched(second)
    assert (one.folder / "results/nodes/1.log").read_bytes() == b"10.0.0.1\n"
    for each in (other.backend, swapped):
        await each.close()


# --- Slurm and Ray ---------------------------------------------------------------------------------


@pytest.fixture(params=["slurm", "ray"])
def engine(
    request: pytest.FixtureRequest, person: Person, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Which one; the person is at its head."""
    (person.project / "near.env").write_text(f"{NEAR}CANARY=of-a-secret\n")
    if request.param == "slurm":
        monkeypatch.setenv("SLURM_CONF", str(slurm.shared().configuration))
    else:
        monkeypatch.setenv("RAY_ADDRESS", ray_cluster.shared().address)
        monkeypatch.setenv("RAY_AUTH_TOKEN", ray_cluster.shared().token)
    yield request.param
    if request.param == "ray":
        ray_cluster.shared().idle()


def on_both(engine: str, name: str) -> tuple[str, ...]:
    return (engine, "--machines", "2", "--env-file", "near.env", "--no-preflight", "--name", name)


def test_all_is_on_all_nodes_and_each_is_told_which_process_it_is(
    person: Person, engine: str
) -> None:
    (person.project / "job.py").write_text(REPORT_PROGRAM)
    gpus = ("--gpus", "2") if engine == "ray" else ()
    typed = person.types(*on_both(engine, "told"), *gpus, "--script", "job.py", "two words")
    folder = person.project / "launches/told/outputs"
    told = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    local = "2" if gpus else "1"
    assert {(each["LOCAL_WORLD_SIZE"], *each["words"]) for each in told} == {(local, "two words")}
    assert {each["WORLD_SIZE"] for each in told} == {f"{2 * int(local)}"}
    assert person.result("told")["state"] == "succeeded"
    assert "process 0" in typed.out
    if engine == "ray":
        said = [line for line in typed.out.splitlines() if line.startswith("process ")]
        assert sorted(said) == [f"process {rank}" for rank in range(4)]
        assert [each["LOCAL_RANK"] for each in told] == ["0", "1", "0", "1"]
        head = ray_cluster.shared()
        assert {each["ray"] for each in told} == {f"{head.host}:{head.gcs}"}
    assert person.holding("of-a-secret") == []


@SOAK
def test_two_nodes_train_as_one_process_does_also_where_one_was_killed(
    person: Person, engine: str
) -> None:
    """On Ray: what was killed there goes on to the bits of the undisturbed training."""
    steps = "training.max_steps=6"
    person.types("local", "--detach", "--name", "alone", "--", *ONE_LEARNER, steps)
    person.types(*on_both(engine, "calm"), "--", *BOTH, steps)
    person.types("logs", "-f", "alone")
    calm = trained(person, "calm")
    assert_close(trained(person, "alone"), calm)
    if engine == "slurm":
        return
    with person.held_at(5):
        begun = person.begins(*on_both(engine, "shaken"), "--", *BOTH, steps)
        person.sees("step 4/6")
        os.kill(process_of(1, "shaken"), signal.SIGKILL)
    assert begun.wait(240) == 75
    assert "Learner 2 of 2" in person.said()
    person.types("resume", "shaken", "--env-file", "near.env")
    assert person.result("shaken")["attempt"] == 2
    assert what_must_be_equal(calm) == what_must_be_equal(trained(person, "shaken"))


@SOAK
@pytest.mark.parametrize(
    ("engine", "who", "code", "state"),
    [
        ("slurm", "person", 130, "cancelled"),
        ("ray", "person", 130, "cancelled"),
        ("ray", "ray", 143, "failed"),
    ],
    indirect=["engine"],
)
def test_ended_there_it_saves_and_nothing_is_left(
    person: Person, engine: str, who: str, code: int, state: str
) -> None:
    name = f"ended-by-{who}"
    begun = person.begins(*on_both(engine, name), "--", *LEARNERS, *ENDLESS)
    person.sees("step    3/2000")
    if who == "ray":
        ray_cluster.shared().stop(name)
    else:
        begun.send_signal(signal.SIGINT)
    assert begun.wait(240) == code
    assert person.result(name)["state"] == state
    assert_saved(person, name)
    if engine == "ray":
        ray_cluster.shared().idle()
    assert not pids_of(f"attempts/{name}.1/work")
