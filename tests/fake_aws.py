"""A fake AWS: moto in this process, patched where moto differs from AWS. Every instance is one real sshd on this machine.

moto boots nothing: each instance has the address of that sshd, and its console shows what its user data would print. moto ignores client
tokens too: here a used token gives the same instance again, or is refused with other parameters, as on AWS.
"""

import base64
import contextlib
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from groupwise.jobs.clouds.aws import AwsBackend
from groupwise.jobs.clouds.aws_checks import Access
from groupwise.jobs.clouds.aws_machines import AwsTimeouts
from groupwise.jobs.clouds.aws_state import JobRecords
from groupwise.jobs.clouds.ec2 import IMAGE_PARAMETER, Ec2
from tests.ssh_hosts import LoopbackHost

REGION = "us-east-1"
ACCOUNT = "123456789012"
KEY_NAME, GROUP_NAME = "mine", "lets-in"
PRICE = 1.212
SUPPORTED = (
    "Supported EC2 instances: G4dn, G5, G6, Gr6, G6e, G7, G7e, P4d, P4de, P5, P5e, P5en, P6-B200, P6-B300. Release notes: "
    "https://aws.amazon.com/releasenotes/aws-deep-learning-base-gpu-ami-ubuntu-24-04/"
)
"""The description of the deep-learning image with the open drivers, as AWS gives it."""
QUOTAS = [
    {"L-1216C47A": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances", "L-417A185B": "Running On-Demand P instances"},
    {"L-DB2E81BA": "Running On-Demand G and VT instances", "L-3819A6DF": "All G and VT Spot Instance Requests"},
    {"L-7212CCBC": "All P4, P3 and P2 Spot Instance Requests", "L-C4BD4855": "All P5 Spot Instance Requests", "L-0": "Rules"},
]  # fmt: skip
"""Pages of codes and names of EC2's quotas."""
QUICK = AwsTimeouts(look=0.01, ready=60.0, other=20.0)


@functools.cache
def ec2_client() -> Ec2:
    """Cached, because boto3 is slow to load its service models; `cloud` clears the cache."""
    return Ec2(REGION, pause=0.01)


@dataclass
class FakeAws:
    """An AWS account in one region."""

    url: str
    other_url: str
    """The URL of the services that moto does not have: the Price List Service, and EC2's quotas."""
    host: LoopbackHost
    """The sshd that stands in for every instance."""
    group: str = ""
    shows_key: bool = True
    """True: instances have booted far enough for their consoles to show their host keys."""
    console_key: str | None = None
    """The host key that consoles show; None: the machine's real one."""
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The parameters of all RunInstances requests, in order."""
    tokens: dict[str, tuple[str, Any]] = field(default_factory=dict[str, tuple[str, Any]])
    prices: dict[str, float] = field(default_factory=lambda: {"g5.2xlarge": PRICE})
    quota: float = 64.0
    """Quota in virtual cores, the same for each instance family."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables by which programs find this AWS."""
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ENDPOINT_URL_PRICING": self.other_url, "AWS_ENDPOINT_URL_SERVICE_QUOTAS": self.other_url,
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "example", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }  # fmt: skip

    def sudo(self) -> list[list[str]]:
        """The commands that were run as root on instances since the last call."""
        path = self.host.home / "sudo-said"
        said = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.split() for line in said]

    def ends_at(self, machine: str, moment: float) -> None:
        """Set the machine's deadline, as if it had been started earlier."""
        self.ec2.create_tags([machine], {"groupwise:deadline": f"{moment:.0f}"})

    def deadline(self, machine: str) -> float:
        """The deadline in the machine's tag."""
        tags = {tag["key"]: tag["value"] for tag in self.ec2.get_instance(machine).get_tags()}
        return float(tags["groupwise:deadline"])

    @property
    def ec2(self) -> Any:
        """The state of EC2 in moto."""
        from moto.ec2.models import ec2_backends

        return ec2_backends[ACCOUNT][REGION]

    def machines(self) -> list[Any]:
        """All instances that were ever started."""
        return [*self.ec2.all_instances()]

    def living(self) -> list[str]:
        """The ids of the instances that cost money now."""
        return [each.id for each in self.machines() if each.state in ("running", "pending")]

    def interrupt_spot_instance(self, machine: str) -> None:
        self.ec2.terminate_instances([machine])
        self.ec2.get_instance(machine).state_reason.code = "Server.SpotInstanceTermination"

    def stored(self) -> str:
        """Everything that AWS stores about instances, as text."""
        kept = [
            [each.id, each.get_tags(), user_data_of(each), each.image_id]
            for each in self.machines()
        ]
        return json.dumps([kept, self.requests], default=str)

    def access(self, **fields: Any) -> Access:
        known = {
            "key_name": KEY_NAME, "key_path": str(self.host.key_path), "security_group": self.group, "user": self.host.user,
            "port": self.host.port,
        }  # fmt: skip
        return Access(**{**known, **fields})

    def backend(
        self, kept: Path, timeouts: AwsTimeouts = QUICK, ec2: Any = None, **access: Any
    ) -> AwsBackend:
        """A new backend, as on a machine whose job records are in the folder `kept`."""
        told = (ec2 or ec2_client(), self.access(**access), JobRecords(kept))
        return AwsBackend("aws", *told, owner="me@here", timeouts=timeouts)


def console_line(key: str) -> str:
    """The line with the host key, as the user data prints it on the console."""
    return f"<groupwise-host-key {key} {hashlib.sha256(key.encode()).hexdigest()}>"


def user_data_of(machine: Any) -> str:
    """The instance's user data, as moto stores it."""
    return base64.b64decode(str(machine.user_data)).decode()


class _OtherServices(BaseHTTPRequestHandler):
    """Answers requests for quotas and prices in JSON, as AWS does."""

    cloud: FakeAws

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        of_prices = self.headers["X-Amz-Target"].endswith("GetProducts")
        answer = self._prices(asked) if of_prices else self._quotas(asked)
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _quotas(self, asked: Any) -> Any:
        page = int(asked.get("NextToken", 0))
        quotas = [
            {"QuotaCode": code, "QuotaName": name, "Value": self.cloud.quota}
            for code, name in QUOTAS[page].items()
        ]
        return {"Quotas": quotas} | ({"NextToken": f"{page + 1}"} if page + 1 < len(QUOTAS) else {})

    def _prices(self, asked: Any) -> Any:
        [kind] = [e["Value"] for e in asked["Filters"] if e["Field"] == "instanceType"]
        price = self.cloud.prices.get(kind)
        dimension = {"unit": "Hrs", "pricePerUnit": {"USD": str(price)}}
        terms = {"OnDemand": {"x.y": {"priceDimensions": {"x.y.z": dimension}}}}
        return {"PriceList": [] if price is None else [json.dumps({"terms": terms})]}

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def _serve_others(found: FakeAws) -> Iterator[str]:
    handler = type("Handler", (_OtherServices,), {"cloud": found})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def cloud(host: LoopbackHost) -> Iterator[FakeAws]:
    """A fake AWS with a key pair and a security group. Inside the `with` block this process has its environment variables."""
    from moto.moto_api._internal.models import moto_api_backend
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    found = FakeAws(f"http://127.0.0.1:{port}", "", host)
    with (
        _serve_others(found) as found.other_url,
        mock.patch.dict(os.environ, found.environment),
        _corrected(found),
    ):
        for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN"):
            os.environ.pop(name, None)
        try:
            _create_resources(found)
            yield found
        finally:
            moto_api_backend.reset()
            server.stop()
            ec2_client.cache_clear()


SUDO = """\
#!/bin/sh
[ ! -e "$HOME/sudo-refuses" ] || { echo 'sudo: a password is required' >&2; exit 1; }
echo "$*" >> "$HOME/sudo-said"
"""
"""The instances' `sudo`: it only records the command, because there is nothing to shut down."""


def _create_resources(found: FakeAws) -> None:
    sudo = found.host.folder / "bin" / "sudo"
    sudo.write_text(SUDO)
    sudo.chmod(0o755)
    import boto3
    from moto.ssm.models import Parameter, ssm_backends

    client = boto3.client("ec2", region_name=REGION)
    public = found.host.key_path.with_suffix(".pub").read_bytes()
    client.import_key_pair(KeyName=KEY_NAME, PublicKeyMaterial=public)
    network = client.describe_vpcs()["Vpcs"][0]["VpcId"]
    made = client.create_security_group(GroupName=GROUP_NAME, Description="-", VpcId=network)
    found.group = made["GroupId"]
    ports = {"FromPort": found.host.port, "ToPort": found.host.port}
    rule = {"IpProtocol": "tcp", **ports, "IpRanges": [{"CidrIp": "192.0.2.0/24"}]}
    client.authorize_security_group_ingress(GroupId=found.group, IpPermissions=[rule])
    image = next(iter(found.ec2.amis))
    found.ec2.amis[image].description = SUPPORTED
    kept = ssm_backends[ACCOUNT][REGION]
    nothing = {"description": "", "allowed_pattern": None, "keyid": None, "last_modified_date": 0}
    kind: dict[str, Any] = {
        "parameter_type": "String",
        "data_type": "text",
        "version": 1,
        **nothing,
    }
    parameter = Parameter(account_id=ACCOUNT, name=IMAGE_PARAMETER, value=image, **kind)
    parameters: Any = kept._parameters
    parameters[IMAGE_PARAMETER].append(parameter)


@contextlib.contextmanager
def _corrected(found: FakeAws) -> Iterator[None]:
    """Patch moto where it differs from AWS."""
    from moto.core.responses import ActionResult
    from moto.ec2.exceptions import EC2ClientError
    from moto.ec2.models.instances import Instance
    from moto.ec2.responses.general import General
    from moto.ec2.responses.instances import InstanceResponse
    from moto.ec2.utils import Base64EncodedString

    one_by_one = threading.Lock()
    plainly: Callable[[Any], Any] = InstanceResponse.run_instances

    def run_instances(self: Any) -> Any:
        asked = json.loads(json.dumps(self.params, default=str))
        found.requests.append(asked)
        token = asked["ClientToken"]
        with one_by_one:
            if token not in found.tokens:
                answer = plainly(self)
                found.tokens[token] = (json.dumps(asked, sort_keys=True), answer)
                return answer
        before, answer = found.tokens[token]
        if before != json.dumps(asked, sort_keys=True):
            raise EC2ClientError("IdempotentParameterMismatch", "the token was used with others")
        return answer

    def console(self: Any) -> Any:
        key = found.console_key or found.host.host_key
        said = f"boot\n{console_line(key)}\n" if found.shows_key else "boot\n"
        output = Base64EncodedString.from_raw_string(said)
        return ActionResult({"InstanceId": self._get_param("InstanceId"), "Output": output})

    address = property(lambda _: found.host.address)
    with (
        mock.patch.object(InstanceResponse, "run_instances", run_instances),
        mock.patch.object(General, "get_console_output", console),
        mock.patch.object(Instance, "public_ip_address", address),
    ):
        yield
