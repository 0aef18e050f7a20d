"""`groupwise launch aws` as a user types it, against moto, with a real sshd in place of instances. Whatever fails, no instance is left
running.

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
from typing import Any, TypeAlias

import boto3
import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPES, InstanceType

from groupwise.jobs.clouds import aws, spot_notice
from groupwise.jobs.clouds.aws import AwsBackend
from groupwise.jobs.clouds.aws_machines import ARM, MARGIN_MINUTES, AwsMachines, AwsTimeouts
from groupwise.jobs.clouds.backend import (
    CloudError,
    Handle,
    JobNotFound,
    NameTaken,
    Order,
    Outcome,
    Phase,
    Unreachable,
)
from groupwise.jobs.clouds.ec2 import AwsRefused, Ec2
from groupwise.jobs.clouds.machine import MachineBackend
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.host import HostUnreachable
from groupwise.jobs.hosts.spec import Limits
from groupwise.jobs.launch import places
from tests.fake_aws import KEY_NAME, PRICE, QUICK, REGION, FakeAws, cloud, ec2_client, user_data_of
from tests.integration.launch import stopping
from tests.integration.launch.person import Person
from tests.integration.launch.stopping import ctrl_c_ends_it
from tests.launch_backends import SAVES, LaunchClient, name, order
from tests.processes import wait_until
from tests.ssh_hosts import loopback_hosts

__all__ = ["name"]

FAILS = "import sys; sys.exit(1)"
MAKES = "import os; os.makedirs('outputs'); open('outputs/made', 'w').write('it'); print('done')"
SAVES_WHEN_TOLD = f"""{SAVES}
signal.signal(signal.SIGTERM, lambda *_: (save(7, b"seven"), sys.exit(3)))
print(f"attempt {{os.environ['ATTEMPT']}} began with {{begun!r}}", flush=True)
if begun: sys.exit(0)
while True: signal.pause()
"""


@pytest.fixture(scope="module")
def rented() -> Iterator[FakeAws]:
    with loopback_hosts() as [host], cloud(host) as found:
        yield found


@pytest.fixture
def account(rented: FakeAws) -> Iterator[FakeAws]:
    """With no machines; what stands in for them is empty."""
    for machine in rented.living():
        rented.ec2.terminate_instances([machine])
    rented.requests.clear()
    yield rented
    rented.shows_key, rented.console_key = True, None
    rented.host.restart()
    shutil.rmtree(rented.host.home / "groupwise-launch", ignore_errors=True)


@pytest.fixture
def python(account: FakeAws, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of `launch aws`, up to what is to be run, with packages that the machine has; its looks come sooner."""
    monkeypatch.setattr(aws, "AwsTimeouts", lambda: QUICK)
    places.ec2.cache_clear()
    named = {
        "--instance-type": "g5.2xlarge", "--key-name": KEY_NAME,
        "--key-path": str(account.host.key_path), "--security-group": account.group,
        "--user": account.host.user, "--port": str(account.host.port), "--python": sys.executable,
    }  # fmt: skip
    account.host.gpus(1)
    return ["aws", *(word for pair in named.items() for word in pair)]


def of_two_hours(name: str, script: str = MAKES, **fields: Any) -> Order:
    return order(name, script, limits=Limits(time_seconds=7200), **fields)


class Renter(LaunchClient[AwsBackend]):
    """Rents a machine for each job."""

    async def makes(self, **fields: Any) -> Handle:
        return await self.submit(MAKES, **fields)

    async def find(self) -> Any:
        return await self.backend.find(self.name)

    async def counted(self, handle: Handle) -> set[str]:
        """The machines that a job's cost is of."""
        found = await self.backend.cost(handle)
        assert found is not None
        return set(re.findall(r"(i-\w+) [\d.]+ h at", found.counts))

    async def gives_back(self) -> None:
        """What is rented for the job."""
        for each in await self.backend.rented():
            if each.job == self.name:
                await self.backend.give_back(each)


Reach: TypeAlias = Callable[..., Renter]


@pytest.fixture
async def reach(account: FakeAws, name: str, tmp_path: Path) -> AsyncIterator[Reach]:
    """Another client, whose records are in a folder of that name."""
    made: list[Renter] = []

    def found(kept: str = "kept", timeouts: AwsTimeouts = QUICK, ec2: Any = None) -> Renter:
        backend = account.backend(tmp_path / kept, timeouts, ec2)
        made.append(Renter(backend, tmp_path, name, of_two_hours))
        return made[-1]

    yield found
    for each in made:
        await each.backend.close()


@pytest.fixture
def client(reach: Reach) -> Renter:
    return reach()


# --- what is asked of AWS -------------------------------------------------------------------------


@pytest.mark.parametrize("spot", [False, True])
async def test_the_machine_is_as_it_was_described(
    account: FakeAws, client: Renter, spot: bool
) -> None:
    before = time.time()
    spots = {"spot": True, "max_price": 0.61, "disk_gb": 300}
    await client.makes(place_options=spots if spot else {"model_gb": 40})
    [found] = account.requests
    [disk] = found.pop("BlockDeviceMappings")
    assert disk["Ebs"] == {
        "VolumeSize": 300 if spot else 15 + 60 + 40,
        "VolumeType": "gp3",
        "DeleteOnTermination": True,
    }
    assert disk["DeviceName"].startswith("/dev/")
    assert len(found["ClientToken"]) == 64
    one_time = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    market = {"MarketType": "spot", "SpotOptions": {**one_time, "MaxPrice": "0.6100"}}
    expected = {
        "InstanceType": "g5.2xlarge", "MinCount": 1, "MaxCount": 1, "KeyName": KEY_NAME,
        "SecurityGroupIds": [account.group], "InstanceInitiatedShutdownBehavior": "terminate",
        "InstanceMarketOptions": market if spot else None,
    }  # fmt: skip
    assert {key: found.get(key) for key in expected} == expected
    assert found["MetadataOptions"]["HttpTokens"] == "required"
    assert {each["ResourceType"] for each in found["TagSpecifications"]} == {"instance", "volume"}
    [machine] = [each for each in account.machines() if each.id in account.living()]
    tags = {each["key"].partition(":")[2]: each["value"] for each in machine.get_tags()}
    assert (tags["job"], tags["attempt"], tags["owner"]) == (client.name, "1", "me@here")
    assert tags["host-key"] == account.host.host_key
    assert -1 < float(tags["deadline"]) - before - 2.5 * 3600 < 60
    script = user_data_of(machine)
    assert script.splitlines()[3] == "shutdown --no-wall -P +150"
    assert ("spot_notice.py" in script) is spot


async def test_aws_says_which_gpus_a_type_has_and_the_image_which_of_them_it_drives(
    account: FakeAws, client: Renter, monkeypatch: pytest.MonkeyPatch
) -> None:
    v100 = {
        "Name": "V100",
        "Manufacturer": "NVIDIA",
        "Count": 1,
        "MemoryInfo": {"SizeInMiB": 16384},
    }
    p3 = {**INSTANCE_TYPES["g5.2xlarge"], "InstanceType": "p3.2xlarge", "GpuInfo": {"Gpus": [v100]}}
    monkeypatch.setitem(INSTANCE_TYPES, "p3.2xlarge", p3)  # moto has none
    types = [*account.ec2.instance_types, InstanceType("p3.2xlarge")]
    monkeypatch.setattr(account.ec2, "instance_types", types)
    account.quota = 1000.0

    async def plan(kind: str, **options: Any) -> str:
        asked = {"instance_type": kind, **options}
        return "\n".join((await client.backend.plan(client.order("x", place_options=asked))).steps)

    for kind, gpus in {
        "p5.48xlarge": "8 x NVIDIA H100 with 80 GiB", "p5.4xlarge": "1 x NVIDIA H100", "p5e.48xlarge": "8 x NVIDIA H200",
        "p6-b200.48xlarge": "8 x NVIDIA B200", "g6e.12xlarge": "4 x NVIDIA L40S", "c7i.large": "c7i.large, no GPU",
    }.items():  # fmt: skip
        assert gpus in await plan(kind)
    assert "All P5 Spot Instance Requests" in await plan("p5.48xlarge", spot=True)
    assert "none of the quotas of EC2 names p6-b200" in await plan("p6-b200.48xlarge", spot=True)
    for kind, why in {
        "p3.2xlarge": "has no driver for the GPUs of p3.2xlarge", "g6f.large": "no driver", "g5g.xlarge": "g5g.xlarge is arm64",
        "g5.3xlarge": "g5.2xlarge", "h9.large": r"families .*g5, .*p5, ",
    }.items():  # fmt: skip
        with pytest.raises(CloudError, match=why):
            await plan(kind)
    with pytest.raises(CloudError, match="--disk-gb 10"):
        await plan("g5.2xlarge", disk_gb=10)
    account.quota = 64.0
    assert account.requests == []
    monkeypatch.setattr(Ec2, "instance_type", _forbidden)
    assert "instance type: not checked" in await plan("g5.2xlarge")
    await client.makes()
    assert len(account.requests) == 1


def _forbidden(*_: Any) -> Any:
    raise AwsRefused("your user of AWS may not do that.", "UnauthorizedOperation")


async def test_two_clients_at_once_start_only_one_machine(
    account: FakeAws, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = reach("kept-1"), reach("kept-2")
    decided, go = asyncio.Event(), asyncio.Event()
    request = second.backend._machines._request

    async def late(*arguments: Any) -> Any:
        decided.set()
        await go.wait()
        return await request(*arguments)

    monkeypatch.setattr(second.backend._machines, "_request", late)
    deciding = asyncio.create_task(second.makes())
    await decided.wait()
    one = await first.makes()
    go.set()
    assert repr(await deciding) == repr(one)
    assert len(account.living()) == 1


async def test_only_one_of_two_machines_for_an_attempt_stays(
    account: FakeAws, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is by which AWS was made to start both."""
    first, second = reach("kept-1"), reach("kept-2")
    one = await first.makes()
    newest, unseen = second.backend._machines.newest, [None]

    async def blind(name: str) -> Any:
        return unseen.pop() if unseen else await newest(name)

    monkeypatch.setattr(second.backend._machines, "newest", blind)
    assert repr(await second.makes()) == repr(one)
    assert (len(account.requests), len(account.living())) == (2, 1)


# --- none is left ---------------------------------------------------------------------------------


class Faulty(Ec2):
    """AWS, where something happens before each call that comes after the start of a machine: `fails` is told its number and verb."""

    def __init__(self, fails: Callable[[int, str], None]) -> None:
        super().__init__(REGION, pause=0.001, _clients=ec2_client()._clients)
        self.fails, self.calls, self.has_started = fails, 0, False

    def _call_aws(self, service: str, verb: str, **more: Any) -> Any:
        self._count(verb)
        said = super()._call_aws(service, verb, **more)
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
async def test_a_machine_is_terminated_if_anything_fails_before_its_job_starts(
    account: FakeAws, reach: Reach, how: str
) -> None:
    calls: list[str] = []
    client = reach(ec2=Faulty(lambda _, verb: calls.append(verb)))
    handle = await client.makes()
    seen = tuple(calls) if how == "AWS refuses" else tuple(calls[:5])
    assert {"describe_instances", "get_console_output", "create_tags"} <= set(calls)
    await client.backend.cleanup(handle)
    loop, running = asyncio.get_running_loop(), list[asyncio.Task[Any]]()
    for n, of in enumerate(seen, 1):

        def fails(call: int, verb: str, n: int = n) -> None:
            if call == n and how == "Ctrl-C":
                loop.call_soon_threadsafe(running[-1].cancel)
            elif call == n:
                raise CloudError(f"{verb} was refused")

        client = reach(ec2=Faulty(fails))
        running.append(asyncio.create_task(client.makes(name=f"{client.name}-{n}")))
        with pytest.raises(asyncio.CancelledError if how == "Ctrl-C" else CloudError):
            await running[-1]
        assert account.living() == [], of
        assert await client.backend.find(f"{client.name}-{n}") is None


@pytest.mark.parametrize(
    ("how", "error", "told"),
    [
        ("Ctrl-C", asyncio.CancelledError, None),
        ("its answer is lost", Unreachable, "no answer"),
        ("and AWS is silent", Unreachable, "sweep --name"),
    ],
)
async def test_a_machine_whose_start_was_not_acknowledged_is_found_and_terminated(
    account: FakeAws,
    client: Renter,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    error: type[BaseException],
    told: str | None,
) -> None:
    loop, starts, machines = asyncio.get_running_loop(), Ec2.start, Ec2.machines
    silences = iter([False, False, how == "and AWS is silent"])

    def start(self: Ec2, request: Any) -> Any:
        if how == "Ctrl-C":
            loop.call_soon_threadsafe(starting.cancel)
            return starts(self, request)
        starts(self, request)
        raise Unreachable("no answer came")

    def falls_silent(self: Ec2, job: str | None = None) -> Any:
        if next(silences, False):
            raise Unreachable("AWS is silent")
        return machines(self, job)

    monkeypatch.setattr(Ec2, "start", start)
    monkeypatch.setattr(Ec2, "machines", falls_silent)
    starting = asyncio.create_task(client.makes())
    with pytest.raises(error, match=told):
        await starting
    assert len(account.requests) == 1
    assert len(account.living()) == (how == "and AWS is silent")


@pytest.mark.parametrize("step", ["hello", "observe", "missing", "launch"])
async def test_a_machine_that_fails_during_preparation_is_terminated(
    account: FakeAws, reach: Reach, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def fails(self: Runner, *_: Any, **__: Any) -> Any:
        raise HostUnreachable(f"{step} was cut off")

    monkeypatch.setattr(Runner, step, fails)
    if step == "hello":  # nothing asks for it on the way
        monkeypatch.setattr(MachineBackend, "submit", fails)
    with pytest.raises((CloudError, HostUnreachable), match="cut off"):
        await reach(timeouts=replace(QUICK, ready=0.05)).makes()
    assert (len(account.requests), account.living()) == (1, [])


async def test_a_machine_without_the_expected_host_key_is_terminated(
    account: FakeAws, reach: Reach
) -> None:
    account.shows_key = False
    with pytest.raises(CloudError, match="host key"):
        await reach(timeouts=AwsTimeouts(look=0.01, ready=0.05)).makes(name="mute")
    assert account.living() == []
    account.shows_key = True
    account.console_key = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 43}"
    with pytest.raises(CloudError, match="pinned"):
        await reach().makes()
    assert account.living() == []


@pytest.mark.parametrize("knows", [True, False])
async def test_a_machine_that_aws_does_not_list_yet_is_terminated_once_it_does(
    account: FakeAws, reach: Reach, knows: bool
) -> None:
    """It is consistent only after some seconds."""
    unknown = [*range(3)] if knows else [*range(10_000)]

    def fails(_: int, verb: str) -> None:
        if verb == "create_tags" or (verb == "terminate_instances" and unknown):
            if verb == "terminate_instances":
                unknown.pop()
            raise AwsRefused("no such machine", "InvalidInstanceID.NotFound")
        if verb == "get_console_output":
            raise CloudError("the set-up fails")

    timeouts = AwsTimeouts(look=0.01, known=20.0 if knows else 0.2)
    with pytest.raises(CloudError) as told:
        await reach(timeouts=timeouts, ec2=Faulty(fails)).makes()
    left = "".join(account.living())
    assert bool(left) is not knows
    ends = f"aws ec2 terminate-instances --region {REGION} --instance-ids {left}"
    assert (ends in str(told.value)) is not knows


@pytest.mark.parametrize("somebody", ["takes it up", "ended it"])
async def test_a_machine_left_by_a_killed_client_is_reused_or_replaced(
    account: FakeAws, reach: Reach, monkeypatch: pytest.MonkeyPatch, somebody: str
) -> None:
    """It was killed between the machine's start and the job's beginning, so that it cleaned up nothing."""

    async def killed(self: AwsBackend, *_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(AwsBackend, "_set_up", killed)
        patched.setattr(AwsMachines, "undo", lambda *_: asyncio.sleep(0))
        with pytest.raises(KeyboardInterrupt):
            await reach("dead").makes()
    [machine] = account.living()
    account.ends_at(machine, time.time() + 600)
    client = reach()
    if somebody == "takes it up":
        assert (await client.backend.status(await client.find())).phase is Phase.WAITING
    else:
        await client.gives_back()
        assert (account.living(), await client.find()) == ([], None)
        with pytest.raises(JobNotFound):
            await client.resume()
    assert await client.outcome(await client.makes()) is Outcome.SUCCEEDED
    [lives] = account.living()
    assert (lives == machine, len(account.sudo())) == (
        (True, 1) if somebody == "takes it up" else (False, 0)
    )
    assert account.deadline(lives) > time.time() + 7200


# --- gone -----------------------------------------------------------------------------------------


async def test_a_job_whose_machine_is_gone_continues_from_what_was_fetched(
    account: FakeAws, reach: Reach, tmp_path: Path
) -> None:
    script = SAVES + (
        "print(os.environ['ATTEMPT'], begun, open('in').read(), flush=True)\n"
        "if not begun:\n    save(3, b'three'); save(4, b'four')\n    time.sleep(1000)\n"
    )
    (tmp_path / "in").write_text("the input")
    client = reach()
    files = client.store.put_files({"in": tmp_path / "in"})
    first = await client.submit(script, files=files, place_options={"spot": True})
    await client.saved(first, 4)
    await client.fetched(first)
    account.interrupt_spot_instance(account.living()[0])
    account.host.restart()
    shutil.rmtree(account.host.home / "groupwise-launch")

    lost = await client.ending(first)
    assert (lost.outcome, lost.failure) == (Outcome.LOST, FailureClass.PREEMPTION)
    assert "Server.SpotInstanceTermination" in lost.reason
    assert await client.find() == first

    other = reach("of-another-client")
    assert await other.find() == first
    assert (await other.backend.status(first)).ending == lost
    with pytest.raises(CloudError, match="that launched it"):
        await other.resume()

    client = replace(reach(), folder=tmp_path / "with an empty store")
    second = await client.resume()
    assert second.attempt == 2
    both = {each.id for each in account.machines()[-2:]}
    assert await client.counted(second) == both
    _forget(account, account.machines()[-2])
    assert await client.counted(second) == both
    assert await client.outcome(second) is Outcome.SUCCEEDED
    assert await client.said(second) == "2 four the input\n"
    assert await client.outcome(first) is Outcome.LOST


def _forget(account: FakeAws, machine: Any) -> None:
    """As AWS does an hour after its end."""
    account.ec2.delete_tags([machine.id], {tag["key"]: None for tag in machine.get_tags()})


async def _cut_off(*_: object) -> None:
    raise asyncio.CancelledError


async def test_another_attempt_there_has_its_time_before_the_machine_ends(
    account: FakeAws, client: Renter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its ends are moved, or none: also where the attempt does not begin."""
    await client.ending(await client.submit(FAILS))
    [machine] = account.living()
    soon = round(time.time()) + 600
    account.ends_at(machine, soon)
    refuses = account.host.home / "sudo-refuses"
    refuses.touch()
    with pytest.raises(CloudError, match=r"password .*sweep --name"):
        await client.resume()
    refuses.unlink()
    assert (account.deadline(machine), (await client.find()).attempt) == (soon, 1)
    for fails in ((MachineBackend, "_start_attempt"), (AwsMachines, "tag")):
        with monkeypatch.context() as patched:
            patched.setattr(*fails, _cut_off)
            with pytest.raises(asyncio.CancelledError):
                await client.resume()
        assert account.deadline(machine) == soon
        assert [words[2] for words in account.sudo()][1:] == [f"{soon}"]
    again = await client.resume()
    assert again.attempt == 2
    minutes = 7200 // 60 + MARGIN_MINUTES
    assert account.sudo() == [["-n", ARM, f"{account.deadline(machine):.0f}", f"{minutes}"]]
    assert account.deadline(machine) == pytest.approx(time.time() + minutes * 60, abs=30)
    await client.ending(again)


async def test_the_client_that_fetched_a_job_knows_it_after_aws_forgets_it(
    account: FakeAws, client: Renter
) -> None:
    handle = await client.makes()
    await client.ending(handle)
    await client.fetched(handle)
    await client.gives_back()
    _forget(account, account.machines()[-1])
    assert await client.find() == handle
    assert await client.outcome(handle) is Outcome.SUCCEEDED
    assert await client.said(handle) == "done\n"
    fetched = await client.backend.fetch(handle, client.folder / "results")
    assert (fetched.files, fetched.left_out) == (("outputs/made",), {})
    with pytest.raises(CloudError, match="has succeeded"):
        await client.resume()
    assert await client.makes() == handle
    with pytest.raises(NameTaken, match=client.name):
        await client.submit("print('another')")
    assert len(account.requests) == 1
    await client.backend.cleanup(handle)
    assert await client.find() is None


# --- typed ----------------------------------------------------------------------------------------


def job(person: Person, text: str = MAKES) -> list[str]:
    (person.project / "job.py").write_text(text)
    return ["--script", "job.py"]


def test_a_plan_needs_no_credentials_and_what_cannot_be_is_reported_before_anything_is_paid(
    person: Person, python: list[str], account: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, words = job(person), python[: python.index("--python")]
    with monkeypatch.context() as patched:
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patched.delenv(variable)
        trains = ["rl", "--task-module", "task.py", "model.name=tiny", "training.max_steps=3"]
        dry = ("--terminate-after", "--dry-run", "--no-preflight")
        typed = person.types(*words, *dry, "--", *trains)
        assert "an unknown price" in typed.out
        assert "how many GPUs g5.2xlarge has is not known" in typed.err
        assert f"groupwise {' '.join(trains)}" in typed.out
        assert "credentials" in person.types(*python, *script, code=1).err
        assert not (person.home / person.state).exists()
    places.ec2.cache_clear()
    typed = person.types(*python, "--terminate-after", "--dry-run", *script)
    assert "1 x NVIDIA A10G" in typed.out
    assert "195 GB of gp3" in typed.out
    assert "at most $29.69" in typed.out
    with monkeypatch.context() as patched:
        patched.setattr(Ec2, "instance_type", _forbidden)
        assert "--gpus N says it" in person.types(*python, *script, code=2).err
    typed = person.types(*python, "--max-price", "1.2", *script, code=2)
    assert f"costs ${PRICE:.2f} an hour, and --max-price is $1.20" in typed.err
    client = boto3.client("ec2", region_name=REGION)
    shut = client.create_security_group(GroupName="shut", Description="-")["GroupId"]
    other = [{account.group: shut, KEY_NAME: "theirs"}.get(each, each) for each in python]
    account.quota = 4.0
    typed = person.types(*other, *script, code=1)
    for told in ("no key pair theirs", f"{shut} lets no one in", "may run 4 virtual cores"):
        assert told in typed.err
    account.quota = 64.0
    assert account.requests == []
    client.delete_security_group(GroupId=shut)


def test_after_a_success_it_stays_until_it_is_removed(
    person: Person, python: list[str], account: FakeAws
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
    person: Person, python: list[str], account: FakeAws
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
    assert "not all of" in typed.err


def test_a_failure_ends_it_unless_it_was_to_be_kept_with_what_it_costs(
    person: Person, python: list[str], account: FakeAws
) -> None:
    script = job(person, "raise SystemExit(3)")
    person.types(*python, "--name", "fails", *script, code=3)
    assert account.living() == []
    typed = person.types(*python, "--name", "kept", "--keep-on-failure", *script, code=3)
    assert f"${PRICE:.2f} an hour" in typed.err
    assert len(account.living()) == 1
    person.types("sweep", "--name", "kept")
    assert account.living() == []


def test_ctrl_c_ends_it_in_order_and_its_machine_with_it(
    person: Person, python: list[str], account: FakeAws
) -> None:
    ctrl_c_ends_it(person, *python, far=(account.host.folder,))
    assert account.living() == []
    assert stopping.CANARY not in account.stored()


def test_a_signal_during_preparation_terminates_the_machine(
    person: Person, python: list[str], account: FakeAws
) -> None:
    account.shows_key = False
    words = (*python, *job(person))
    signals = (signal.SIGTERM, signal.SIGHUP)
    launching = [person.begins(*words, "--name", f"early-{number}") for number in signals]
    wait_until(lambda: len(account.living()) == len(signals), "machines", 240, person.said)
    for each, number in zip(launching, signals, strict=True):
        each.send_signal(number)
        assert each.wait(240) == 128 + number, person.said()
    assert account.living() == []


def test_a_spot_machine_that_is_wanted_back_is_followed_by_another(
    person: Person, python: list[str], account: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spot_notice, "TO_SAVE", 60)
    script = job(person, SAVES_WHEN_TOLD)
    watching = person.begins(*python, "--spot", "--name", "moves", *script)
    person.sees("attempt 1 began with ''")
    spot_notice.evict_all(str(account.host.home / "groupwise-launch"))
    assert watching.wait(240) == 0
    assert "attempt 2 began with 'seven'" in person.said()
    assert len(account.requests) == 2
    assert len(account.living()) == 1
    found = person.result("moves")
    assert (found["state"], found["attempt"]) == ("succeeded", 2)


def test_sweep_finds_only_overdue_machines(
    person: Person, python: list[str], account: FakeAws
) -> None:
    script = job(person)
    for each in ("early", "late"):
        person.types(*python, "--detach", "--name", each, *script)
    early, late = account.living()
    account.ends_at(late, time.time() - 60)
    typed = person.types("sweep", "--dry-run", "--at", f"aws:{REGION}")
    assert f"{late}, of " in typed.err
    assert "would be ended" in typed.err
    assert account.living() == [early, late]
    found = json.loads(person.types("sweep", "--json").out)["swept"]
    assert [each["id"] for each in found[0]["overdue"]] == [late]
    assert [each["id"] for each in found[0]["left"]] == [early]
    assert account.living() == [early]
