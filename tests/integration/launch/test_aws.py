"""`groupwise launch aws`, typed, against moto, where a real sshd stands in for machines; and that none of these is left, whatever fails.

1. The machine is exactly the one that was described; nothing secret is in what AWS keeps of it.
2. Whatever fails between its start and the job's beginning ends it, Ctrl-C too; an answer that was lost does not hide it.
3. It ends with a job that did not succeed, once the results are here; after a success when that was asked for; `sweep` ends what is late.
4. A job whose machine is gone is told by its name, and goes on from what was fetched; one whose machine is wanted back goes on by itself.
"""

import asyncio
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest

from groupwise.clouds import aws, spot_notice
from groupwise.clouds.aws import MARGIN_MINUTES, AwsBackend, Patience
from groupwise.clouds.boot import ARM
from groupwise.clouds.ec2 import BotoEc2, Refused
from groupwise.clouds.machine import MachineBackend
from groupwise.clouds.port import (
    CloudError,
    Handle,
    NameTaken,
    NotHere,
    Order,
    Outcome,
    Phase,
    Unreachable,
)
from groupwise.hosts.driver import Runner
from groupwise.hosts.failures import FailureClass
from groupwise.hosts.files import BlobStore
from groupwise.hosts.port import HostUnreachable
from groupwise.hosts.spec import JobSpec, Limits
from groupwise.launch import places
from tests.aws import KEY_NAME, PRICE, QUICK, REGION, Cloud, asked, cloud, user_data_of
from tests.contract.test_cloud_contract import SAVES, WAITS
from tests.integration.launch.person import Person
from tests.places import ending, until
from tests.ssh_hosts import loopback_hosts

CANARY = "canary-of-a-secret-9083"
MAKES = "import os; os.makedirs('outputs'); open('outputs/made', 'w').write('it'); print('done')"
SAVES_WHEN_TOLD = (
    SAVES
    + """
import signal, sys, time
attempt, begun = os.environ["ATTEMPT"], os.environ.get("RESUME_FROM")
data = pathlib.Path(begun, "w").read_bytes().decode() if begun else ""
print(f"attempt {attempt} began with {data!r}", flush=True)
if begun: sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: (save(7, b"seven"), sys.exit(3)))
while True: signal.pause()
"""
)


@pytest.fixture(scope="module")
def rented() -> Iterator[Cloud]:
    with loopback_hosts() as [host], cloud(host) as found:
        yield found


@pytest.fixture
def account(rented: Cloud) -> Iterator[Cloud]:
    """With no machines; what stands in for them is empty."""
    for machine in rented.living():
        rented.ec2.terminate_instances([machine])
    rented.requests.clear()
    yield rented
    rented.says_key, rented.key_said = True, None
    rented.host.restart()
    shutil.rmtree(rented.host.home / "groupwise-launch", ignore_errors=True)


@pytest.fixture
def words(account: Cloud, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of `launch aws`, up to what is to be run; its looks come sooner."""
    monkeypatch.setattr(aws, "Patience", lambda: QUICK)
    places._ec2.cache_clear()
    named = {
        "--instance-type": "g5.2xlarge",
        "--key-name": KEY_NAME,
        "--key-path": str(account.host.key_path),
        "--security-group": account.group,
        "--user": account.host.user,
        "--port": str(account.host.port),
    }
    account.host.gpus(1)
    return ["aws", *(word for pair in named.items() for word in pair)]


@pytest.fixture
def python(words: list[str]) -> list[str]:
    """The same, with packages that the machine has."""
    return [*words, "--python", sys.executable]


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


Reach = Callable[..., AwsBackend]


@pytest.fixture
async def reach(account: Cloud, tmp_path: Path) -> AsyncIterator[Reach]:
    """A new way to it, as from a laptop whose records are in a folder of that name."""
    made: list[AwsBackend] = []

    def found(kept: str = "kept", patience: Patience = QUICK, ec2: Any = None) -> AwsBackend:
        made.append(account.backend(tmp_path / kept, patience, ec2))
        return made[-1]

    yield found
    for each in made:
        await each.close()


def order(name: str, script: str = MAKES, **asks: Any) -> Order:
    spec = JobSpec(("python3", "-c", script), limits=Limits(time_seconds=7200))
    return Order(name, spec, asks=asks)


# --- what is asked of AWS -------------------------------------------------------------------------


@pytest.mark.parametrize("spot", [False, True])
async def test_the_machine_is_as_it_was_described(
    account: Cloud, store: BlobStore, reach: Reach, spot: bool
) -> None:
    before, name = time.time(), f"described-{spot}"
    asks: dict[str, Any] = {"spot": True, "max_price": 0.61} if spot else {}
    await reach().submit(order(name, **asks), store)
    [found] = account.requests
    named = ("InstanceType", "MinCount", "MaxCount", "KeyName", "SecurityGroupIds")
    assert [found[each] for each in named] == ["g5.2xlarge", 1, 1, KEY_NAME, [account.group]]
    assert found["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert found["MetadataOptions"]["HttpTokens"] == "required"
    [disk] = found["BlockDeviceMappings"]
    assert disk["Ebs"] == {"VolumeSize": 250, "VolumeType": "gp3", "DeleteOnTermination": True}
    assert disk["DeviceName"].startswith("/dev/")
    assert len(found["ClientToken"]) == 64
    expected = {
        "MarketType": "spot",
        "SpotOptions": {
            "SpotInstanceType": "one-time",
            "InstanceInterruptionBehavior": "terminate",
            "MaxPrice": "0.6100",
        },
    }
    assert found.get("InstanceMarketOptions") == (expected if spot else None)
    assert {each["ResourceType"] for each in found["TagSpecifications"]} == {"instance", "volume"}
    [machine] = [each for each in account.machines() if each.id in account.living()]
    tags = {each["key"].partition(":")[2]: each["value"] for each in machine.get_tags()}
    assert (tags["job"], tags["attempt"], tags["owner"]) == (name, "1", "me@here")
    assert tags["host-key"] == account.host.host_key
    assert -1 < float(tags["deadline"]) - before - 2.5 * 3600 < 60
    script = user_data_of(machine)
    assert script.splitlines()[3] == "shutdown --no-wall -P +150"
    assert ("spot_notice.py" in script) is spot


async def test_who_decided_before_another_has_started_a_machine_starts_none(
    account: Cloud, store: BlobStore, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = reach("kept-1"), reach("kept-2")
    decided, go = asyncio.Event(), asyncio.Event()
    request = second._request

    async def late(*arguments: Any) -> Any:
        decided.set()
        await go.wait()
        return await request(*arguments)

    monkeypatch.setattr(second, "_request", late)
    deciding = asyncio.create_task(second.submit(order("tarries"), store))
    await decided.wait()
    one = await first.submit(order("tarries"), store)
    go.set()
    assert repr(await deciding) == repr(one)
    assert len(account.living()) == 1


async def test_of_two_machines_for_one_attempt_one_stays(
    account: Cloud, store: BlobStore, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is by which AWS was made to start both."""
    first, second = reach("kept-1"), reach("kept-2")
    one = await first.submit(order("doubled"), store)
    newest, unseen = second._newest, [None]

    async def blind(name: str) -> Any:
        return unseen.pop() if unseen else await newest(name)

    monkeypatch.setattr(second, "_newest", blind)
    assert repr(await second.submit(order("doubled"), store)) == repr(one)
    assert len(account.requests) == 2, "it was started"
    assert len(account.living()) == 1


# --- none is left ---------------------------------------------------------------------------------


class Faulty(BotoEc2):
    """AWS, where something happens before each call that comes after the start of a machine: `fails` is told its number and verb."""

    def __init__(self, fails: Callable[[int, str], None]) -> None:
        super().__init__(REGION, pause=0.001, _clients=asked()._clients)
        self.fails, self.calls, self.has_started = fails, 0, False

    def _ask(self, service: str, verb: str, **more: Any) -> Any:
        self._count(verb)
        said = super()._ask(service, verb, **more)
        self.has_started = self.has_started or verb == "run_instances"
        return said

    def _pages(self, verb: str, **words: Any) -> list[Any]:
        self._count(verb)
        return super()._pages(verb, **words)

    def _count(self, verb: str) -> None:
        if self.has_started:
            self.calls += 1
            self.fails(self.calls, verb)


@pytest.mark.parametrize("how", ["AWS refuses", "Ctrl-C"])
async def test_whatever_happens_between_its_start_and_the_job_it_is_ended(
    account: Cloud, store: BlobStore, reach: Reach, how: str
) -> None:
    calls: list[str] = []
    backend = reach(ec2=Faulty(lambda _, verb: calls.append(verb)))
    handle = await backend.submit(order("clean"), store)
    seen = tuple(calls) if how == "AWS refuses" else tuple(calls[:5])
    assert {"describe_instances", "get_console_output", "create_tags"} <= set(calls)
    await backend.cleanup(handle)
    loop, running = asyncio.get_running_loop(), list[asyncio.Task[Any]]()
    for n, of in enumerate(seen, 1):

        def fails(call: int, verb: str, n: int = n) -> None:
            if call == n and how == "Ctrl-C":
                loop.call_soon_threadsafe(running[-1].cancel)
            elif call == n:
                raise CloudError(f"{verb} was refused")

        backend = reach(ec2=Faulty(fails))
        running.append(asyncio.create_task(backend.submit(order(f"fails-{n}"), store)))
        with pytest.raises(asyncio.CancelledError if how == "Ctrl-C" else CloudError):
            await running[-1]
        assert account.living() == [], of
        assert await backend.find(f"fails-{n}") is None


async def test_ctrl_c_while_it_is_started_ends_it(
    account: Cloud, store: BlobStore, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, starts = asyncio.get_running_loop(), BotoEc2.start
    running: list[asyncio.Task[Any]] = []

    def start(self: BotoEc2, request: Any) -> Any:
        loop.call_soon_threadsafe(running[0].cancel)
        return starts(self, request)

    monkeypatch.setattr(BotoEc2, "start", start)
    backend = reach()
    running.append(asyncio.create_task(backend.submit(order("starting"), store)))
    with pytest.raises(asyncio.CancelledError):
        await running[0]
    assert len(account.requests) == 1
    assert account.living() == []


async def test_a_start_whose_answer_is_lost_is_found_and_ended(
    account: Cloud, store: BlobStore, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = BotoEc2.start

    def start(self: BotoEc2, request: Any) -> Any:
        starts(self, request)
        raise Unreachable("no answer came")

    monkeypatch.setattr(BotoEc2, "start", start)
    backend = reach()
    with pytest.raises(Unreachable, match="no answer"):
        await backend.submit(order("lost"), store)
    assert len(account.requests) == 1
    assert account.living() == []

    silences = iter([False, False, True])
    machines = BotoEc2.machines

    def falls_silent(self: BotoEc2, job: str | None = None) -> Any:
        if next(silences):
            raise Unreachable("AWS is silent")
        return machines(self, job)

    monkeypatch.setattr(BotoEc2, "machines", falls_silent)
    with pytest.raises(Unreachable, match="sweep --name unknown"):
        await backend.submit(order("unknown"), store)


@pytest.mark.parametrize("step", ["hello", "observe", "missing", "launch"])
async def test_whatever_the_machine_fails_at_it_is_ended(
    account: Cloud, store: BlobStore, reach: Reach, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def fails(self: Runner, *_: Any, **__: Any) -> Any:
        raise HostUnreachable(f"{step} was cut off")

    monkeypatch.setattr(Runner, step, fails)
    backend = reach(patience=replace(QUICK, ready=0.05))
    if step == "hello":  # nothing asks for it on the way
        monkeypatch.setattr(MachineBackend, "submit", fails)
    with pytest.raises((CloudError, HostUnreachable), match="cut off"):
        await backend.submit(order(f"at-{step}"), store)
    assert len(account.requests) == 1
    assert account.living() == []


async def test_one_that_never_says_its_key_or_shows_another_is_ended(
    account: Cloud, store: BlobStore, reach: Reach
) -> None:
    account.says_key = False
    backend = reach(patience=Patience(look=0.01, ready=0.05))
    with pytest.raises(CloudError, match="has not said its host key"):
        await backend.submit(order("mute"), store)
    assert account.living() == []
    account.says_key = True
    account.key_said = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 43}"
    with pytest.raises(CloudError, match="pinned"):
        await backend.submit(order("another"), store)
    assert account.living() == []


@pytest.mark.parametrize("knows", [True, False])
async def test_one_that_aws_does_not_know_yet_is_ended_once_it_does(
    account: Cloud, store: BlobStore, reach: Reach, knows: bool
) -> None:
    """It is consistent only after some seconds."""
    unknown = [*range(3)] if knows else [*range(10_000)]

    def fails(_: int, verb: str) -> None:
        if verb == "create_tags":
            raise Refused("no such machine", "InvalidInstanceID.NotFound")
        if verb == "terminate_instances" and unknown:
            unknown.pop()
            raise Refused("no such machine", "InvalidInstanceID.NotFound")
        if verb == "get_console_output":
            raise CloudError("the set-up fails")

    patience = Patience(look=0.01, known=0.2)
    backend = reach(patience=patience, ec2=Faulty(fails))
    with pytest.raises(CloudError) as told:
        await backend.submit(order(f"unknown-{knows}"), store)
    left = "".join(account.living())
    assert bool(left) is not knows
    ends = f"aws ec2 terminate-instances --region {REGION} --instance-ids {left}"
    assert (ends in str(told.value)) is not knows


async def dies_while_it_starts_one(
    store: BlobStore, reach: Reach, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A laptop that was killed between the machine's start and the job's beginning, so that it cleaned up nothing."""

    async def killed(self: AwsBackend, *_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(AwsBackend, "_set_up", killed)
        patched.setattr(AwsBackend, "_undo", lambda *_: asyncio.sleep(0))
        with pytest.raises(KeyboardInterrupt):
            await reach("dead").submit(order(name), store)


async def test_what_a_dead_laptop_left_is_taken_up(
    account: Cloud, store: BlobStore, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    await dies_while_it_starts_one(store, reach, monkeypatch, "orphan")
    [machine] = account.living()
    account.ends_at(machine, time.time() + 600)
    backend = reach()
    handle = await backend.find("orphan")
    assert handle is not None
    assert (await backend.status(handle)).phase is Phase.WAITING
    handle = await backend.submit(order("orphan"), store)
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    assert account.living() == [machine]
    assert len(account.sudo()) == 1
    assert account.deadline(machine) > time.time() + 7200


async def test_what_a_dead_laptop_left_and_somebody_ended_is_begun_anew(
    account: Cloud, store: BlobStore, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    await dies_while_it_starts_one(store, reach, monkeypatch, "ended")
    [machine] = account.living()
    backend = reach()
    for each in await backend.rented():
        if each.job == "ended":
            await backend.give_back(each)
    assert account.living() == []
    assert await backend.find("ended") is None
    with pytest.raises(NotHere):
        await backend.resume("ended", {}, store)
    handle = await backend.submit(order("ended"), store)
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    assert account.living() != [machine]


# --- gone -----------------------------------------------------------------------------------------


async def test_a_job_whose_machine_is_gone_goes_on_from_what_was_fetched(
    account: Cloud, store: BlobStore, reach: Reach, tmp_path: Path
) -> None:
    script = SAVES + (
        "begun = os.environ.get('RESUME_FROM')\n"
        "print(os.environ['ATTEMPT'], pathlib.Path(begun, 'w').read_bytes() if begun else '', open('in').read(), flush=True)\n"
        "if not begun:\n    save(3, b'three'); save(4, b'four')\n    import time; time.sleep(1000)\n"
    )
    (tmp_path / "in").write_text("the input")
    wanted = order("goes-on", script, spot=True)
    files = store.put_files({"in": tmp_path / "in"})
    wanted = replace(wanted, spec=replace(wanted.spec, files=files))
    laptop = reach()
    first = await laptop.submit(wanted, store)
    await until(laptop, first, lambda status: status.step == 4)
    await laptop.fetch(first, tmp_path / "results")
    account.takes_back(account.living()[0])
    account.host.restart()
    shutil.rmtree(account.host.home / "groupwise-launch")

    lost = await ending(laptop, first)
    assert (lost.outcome, lost.failure) == (Outcome.LOST, FailureClass.PREEMPTION)
    assert "Server.SpotInstanceTermination" in lost.reason
    assert (await laptop.find("goes-on")) == first

    other = reach("of-another-laptop")
    assert (await other.find("goes-on")) == first
    assert (await other.status(first)).ending == lost
    with pytest.raises(CloudError, match="on the machine that launched it"):
        await other.resume("goes-on", {}, store)

    laptop = reach()
    second = await laptop.resume("goes-on", {}, BlobStore(tmp_path / "an-empty-store"))
    assert second.attempt == 2
    both = {each.id for each in account.machines()[-2:]}
    assert await counted(laptop, second) == both
    _forget(account, account.machines()[-2])
    assert await counted(laptop, second) == both
    assert (await ending(laptop, second)).outcome is Outcome.SUCCEEDED
    said = (await laptop.log(second, 0, 1 << 16)).data.decode()
    assert said == "2 b'four' the input\n"
    assert (await laptop.status(first)).ending.outcome is Outcome.LOST


async def counted(backend: AwsBackend, handle: Handle) -> set[str]:
    """The machines that a job's cost is of."""
    found = await backend.cost(handle)
    assert found is not None
    return set(re.findall(r"(i-\w+) [\d.]+ h at", found.counts))


async def test_machines_that_it_did_not_begin_on_are_its_cost_and_those_of_a_removed_job_are_not(
    account: Cloud, store: BlobStore, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = reach()
    with monkeypatch.context() as patched:
        patched.setattr(MachineBackend, "_begin", _cut_off)
        with pytest.raises(asyncio.CancelledError):
            await backend.submit(order("counted"), store)
    handle = await backend.submit(order("counted"), store)
    assert await counted(backend, handle) == {each.id for each in account.machines()[-2:]}
    await ending(backend, handle)
    await backend.cleanup(handle)
    again = await backend.submit(order("counted", "print('another')"), store)
    assert await counted(backend, again) == set(account.living())


async def test_another_attempt_there_has_its_time_before_the_machine_ends(
    account: Cloud, store: BlobStore, reach: Reach
) -> None:
    """All of its ends are moved, or none."""
    backend = reach()
    await ending(backend, await backend.submit(order("later", "import sys; sys.exit(1)"), store))
    [machine] = account.living()
    assert account.sudo() == []
    soon = round(time.time()) + 600
    account.ends_at(machine, soon)
    refuses = account.host.home / "sudo-refuses"
    refuses.touch()
    with pytest.raises(CloudError, match=r"a password is required.*sweep --name later"):
        await backend.resume("later", {}, store)
    refuses.unlink()
    assert account.deadline(machine) == soon
    assert (await backend.find("later")).attempt == 1
    again = await backend.resume("later", {}, store)
    assert again.attempt == 2
    minutes = 7200 // 60 + MARGIN_MINUTES
    [moved] = account.sudo()
    assert moved == ["-n", ARM, f"{account.deadline(machine):.0f}", f"{minutes}"]
    assert account.deadline(machine) == pytest.approx(time.time() + minutes * 60, abs=30)
    await ending(backend, again)


@pytest.mark.parametrize("fails", [(MachineBackend, "_begin"), (AwsBackend, "_tag")])
async def test_an_attempt_that_does_not_begin_leaves_the_machine_its_end(
    account: Cloud,
    store: BlobStore,
    reach: Reach,
    monkeypatch: pytest.MonkeyPatch,
    fails: tuple[type, str],
) -> None:
    backend, name = reach(), f"stays{fails[1]}"
    failed = await backend.submit(order(name, "import sys; sys.exit(1)"), store)
    await ending(backend, failed)
    [machine] = account.living()
    soon = round(time.time()) + 600
    account.ends_at(machine, soon)
    with monkeypatch.context() as patched:
        patched.setattr(*fails, _cut_off)
        with pytest.raises(asyncio.CancelledError):
            await backend.resume(name, {}, store)
    assert account.deadline(machine) == soon
    assert [words[2] for words in account.sudo()][1:] == [f"{soon}"]


async def _cut_off(*_: object) -> None:
    raise asyncio.CancelledError


async def test_an_attempt_that_was_begun_all_the_same_keeps_its_time(
    account: Cloud, store: BlobStore, reach: Reach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between its beginning and the answer."""
    backend, go = reach(), tmp_path / "go"
    script = (
        f"import os, sys, time\nif not os.path.exists({str(go)!r}): sys.exit(1)\ntime.sleep(600)"
    )
    await ending(backend, await backend.submit(order("all-the-same", script), store))
    [machine] = account.living()
    soon = round(time.time()) + 600
    account.ends_at(machine, soon)
    go.touch()
    begin = MachineBackend._begin

    async def begun_and_cut_off(*words: Any, **more: Any) -> None:
        await begin(*words, **more)
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(MachineBackend, "_begin", begun_and_cut_off)
        with pytest.raises(asyncio.CancelledError):
            await backend.resume("all-the-same", {}, store)
    handle: Any = await backend.find("all-the-same")
    assert (handle.attempt, (await backend.status(handle)).ending) == (2, None)
    assert account.deadline(machine) > soon + 3600
    await backend.cancel(handle, 0.0)


async def test_what_aws_has_forgotten_is_known_where_it_was_fetched(
    account: Cloud, store: BlobStore, reach: Reach, tmp_path: Path
) -> None:
    backend = reach()
    handle = await backend.submit(order("forgotten"), store)
    await ending(backend, handle)
    await backend.fetch(handle, tmp_path / "results")
    for each in await backend.rented():
        await backend.give_back(each)
    _forget(account, account.machines()[-1])
    assert await backend.find("forgotten") == handle
    status = await backend.status(handle)
    assert status.ending.outcome is Outcome.SUCCEEDED
    assert (await backend.log(handle, 0, 100)).data == b"done\n"
    fetched = await backend.fetch(handle, tmp_path / "results")
    assert (fetched.files, fetched.left_out) == (("outputs/made",), {})
    with pytest.raises(CloudError, match="has succeeded"):
        await backend.resume("forgotten", {}, store)
    assert await backend.submit(order("forgotten"), store) == handle
    with pytest.raises(NameTaken, match="forgotten"):
        await backend.submit(order("forgotten", "print('another')"), store)
    assert len(account.requests) == 1
    await backend.cleanup(handle)
    assert await backend.find("forgotten") is None


def _forget(account: Cloud, machine: Any) -> None:
    """As AWS does an hour after its end."""
    account.ec2.delete_tags([machine.id], {tag["key"]: None for tag in machine.get_tags()})


# --- typed ----------------------------------------------------------------------------------------


def job(person: Person, text: str = MAKES) -> list[str]:
    (person.project / "job.py").write_text(text)
    return ["--script", "job.py"]


def test_a_plan_needs_no_credentials_and_what_cannot_be_is_told_before_anything_is_paid(
    person: Person,
    words: list[str],
    python: list[str],
    account: Cloud,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = job(person)
    with monkeypatch.context() as patched:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patched.delenv(name)
        trains = ["rl", "--task-module", "task.py", "model.name=tiny", "training.max_steps=3"]
        dry = ("--terminate-after", "--dry-run", "--no-preflight")
        typed = person.types(*words, *dry, "--", *trains)
        assert "at most $29.69" in typed.out
        assert (
            "groupwise rl --task-module task.py model.name=tiny training.max_steps=3" in typed.out
        )
        assert "credentials" in person.types(*python, *script, code=1).err
        assert not (person.home / person.state).exists()
    places._ec2.cache_clear()
    typed = person.types(*python, "--max-price", "1.2", *script, code=2)
    assert f"costs ${PRICE:.2f} an hour, and --max-price is $1.20" in typed.err
    client = boto3.client("ec2", region_name=REGION)
    shut = client.create_security_group(GroupName="shut", Description="-")["GroupId"]
    other = [{account.group: shut, KEY_NAME: "theirs"}.get(each, each) for each in python]
    account.quota = 4.0
    typed = person.types(*other, *script, code=1)
    for told in ("no key pair theirs", f"{shut} lets nobody in", "may run 4 virtual cores"):
        assert told in typed.err
    python[python.index("g5.2xlarge")] = "p5.48xlarge"
    account.quota = 1000.0
    typed = person.types(*python, "--max-price", "99", *script, code=2)
    account.quota = 64.0
    assert "nobody could say what AWS, us-east-1 costs" in typed.err
    assert account.requests == []
    client.delete_security_group(GroupId=shut)


def test_after_a_success_it_stays_until_it_is_removed(
    person: Person, python: list[str], account: Cloud
) -> None:
    typed = person.types(*python, "--name", "stays", *job(person))
    [machine] = account.living()
    assert f"{machine} ({account.host.user}@{account.host.address}) stays until" in typed.err
    assert f"${PRICE:.2f} an hour; `groupwise launch remove stays` ends it" in typed.err
    assert (person.project / "launches/stays/outputs/made").read_text() == "it"
    found = person.result("stays")
    assert found["cost"] >= 0
    assert f"{machine} 0.0" in found["cost_counts"]
    other = replace(person, state="another")
    key = ("--at", f"aws:{REGION}", "--key", str(account.host.key_path))
    assert other.types("logs", "-f", "stays", *key, "--to", "there").out == "done\n"
    assert (person.project / "there/outputs/made").read_text() == "it"
    person.types("remove", "stays")
    assert account.living() == []
    assert not list((person.home / person.state).rglob("stays*"))


def test_terminated_after_its_results_are_here_and_not_before(
    person: Person, python: list[str], account: Cloud
) -> None:
    script = job(person)
    person.types(*python, "--terminate-after", "--detach", "--name", "ends", *script)
    assert len(account.living()) == 1
    assert "is ended" in person.types("logs", "-f", "ends").err
    assert account.living() == []
    assert (person.project / "launches/ends/outputs/made").read_text() == "it"
    [listed] = json.loads(person.types("list", "--json").out)["jobs"]
    assert (listed["name"], listed["state"]) == ("ends", "succeeded")
    assert person.types("logs", "ends").out == "done\n"
    script = job(person, MAKES + "\nopen(b'outputs/\\xff', 'w').write('odd')")
    typed = person.types(*python, "--terminate-after", "--name", "keeps", *script)
    assert len(account.living()) == 1, "what is left out is on the machine still"
    assert "not all of what keeps has made is in" in typed.err


def test_a_failure_ends_it_unless_it_was_to_be_kept_with_what_it_costs(
    person: Person, python: list[str], account: Cloud
) -> None:
    script = job(person, "raise SystemExit(3)")
    person.types(*python, "--name", "fails", *script, code=3)
    assert account.living() == []
    typed = person.types(*python, "--name", "kept", "--keep-on-failure", *script, code=3)
    [machine] = account.living()
    assert f"${PRICE:.2f} an hour" in typed.err
    account.ec2.terminate_instances([machine])
    shutil.rmtree(account.host.home / "groupwise-launch")
    (account.host.home / "groupwise-launch").write_text("in the way")
    typed = person.types(*python, "--name", "looked-at", "--keep-on-failure", *script, code=1)
    [machine] = account.living()
    assert f"{machine} (" in typed.err
    assert "sweep --name looked-at` ends it" in typed.err
    (account.host.home / "groupwise-launch").unlink()
    person.types("sweep", "--name", "looked-at")
    assert account.living() == []


def test_ctrl_c_ends_job_and_machine(person: Person, python: list[str], account: Cloud) -> None:
    watching = person.begins(*python, "--name", "waits", *job(person, WAITS))
    person.sees("on\n")
    watching.send_signal(signal.SIGINT)
    assert watching.wait(60) == 130
    assert person.result("waits")["state"] == "cancelled"
    assert account.living() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_launches_is_told_to_end_while_the_machine_is_made_ready(
    person: Person, python: list[str], account: Cloud, number: signal.Signals
) -> None:
    account.says_key = False
    launching = person.begins(*python, "--name", f"early-{number}", *job(person))
    deadline = time.monotonic() + 60
    while not account.living():
        assert time.monotonic() < deadline, person.said()
        time.sleep(0.05)
    launching.send_signal(number)
    assert launching.wait(60) == 128 + number, person.said()
    assert account.living() == []


def test_secrets_are_in_nothing_that_is_kept(
    person: Person, python: list[str], account: Cloud
) -> None:
    (person.project / ".env").write_text(f"TOKEN={CANARY}\n")
    script = job(person, "import os; print(len(os.environ['TOKEN']))")
    typed = person.types(*python, "--name", "quiet", "--env-file", ".env", "--spot", *script)
    assert typed.out == f"{len(CANARY)}\n"
    assert CANARY not in account.stored()
    assert person.holding(CANARY) == []
    kept = [each for each in account.host.folder.rglob("*") if each.is_file()]
    assert kept
    assert not [each for each in kept if CANARY.encode() in each.read_bytes()]


def test_a_spot_machine_that_is_wanted_back_is_followed_by_another(
    person: Person, python: list[str], account: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spot_notice, "TO_SAVE", 12)
    script = job(person, SAVES_WHEN_TOLD)
    watching = person.begins(*python, "--spot", "--name", "moves", *script)
    person.sees("attempt 1 began with ''")
    spot_notice.tell(str(account.host.home / "groupwise-launch"))
    assert watching.wait(100) == 0
    assert "attempt 2 began with 'seven'" in person.said()
    assert len(account.requests) == 2
    assert len(account.living()) == 1
    found = person.result("moves")
    assert (found["state"], found["attempt"]) == ("succeeded", 2)


def test_what_is_late_is_swept(person: Person, python: list[str], account: Cloud) -> None:
    script = job(person)
    for name in ("early", "late"):
        person.types(*python, "--detach", "--name", name, *script)
    early, late = account.living()
    client = boto3.client("ec2", region_name=REGION)
    over = {"Key": "groupwise:deadline", "Value": f"{time.time() - 60:.0f}"}
    client.create_tags(Resources=[late], Tags=[over])
    typed = person.types("sweep", "--dry-run", "--at", f"aws:{REGION}")
    assert f"{late}, of " in typed.err
    assert "would be ended" in typed.err
    assert account.living() == [early, late]
    found = json.loads(person.types("sweep", "--json").out)["swept"]
    assert [each["id"] for each in found[0]["overdue"]] == [late]
    assert [each["id"] for each in found[0]["left"]] == [early]
    assert account.living() == [early]
