"""The required calls to EC2 and related AWS services, and no others: our machines by their tags, starting one, its console, prices.

boto3's own retries are off: each call is tried here a few times while AWS is busy or does not answer. All calls may be repeated, because
a machine is started with the idempotency token of its attempt. Calls block: the backend makes them in threads.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from typing import Any, TypeVar

from groupwise.core.extras import not_installed, require_packages
from groupwise.core.loopback import METADATA_SERVICE, no_proxy_variables
from groupwise.core.retry import Backoff
from groupwise.jobs.clouds.backend import CloudError, Unreachable

IMAGE_PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
)
"""The Systems Manager parameter with the id of the newest deep-learning image: GPU drivers, and Ubuntu 24.04, whose Python is new
enough."""
TAG = "groupwise:"
"""The prefix of our tags."""
JOB = f"{TAG}job"
TRIES = 5
PAUSE, LONGEST_PAUSE = 1.0, 8.0
"""Seconds before the second try, doubled before each further one, and their maximum."""
AWS_TIMEOUTS = (5.0, 30.0)
"""Timeouts in seconds, for connecting and for an answer."""
RETRYABLE_CODES = frozenset(
    {
        *("RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"),
        *("InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable"),
        "RequestTimeout",
    }
)
PERMISSION_CODES = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})
CREDENTIAL_CODES = frozenset(
    {"AuthFailure", "InvalidClientTokenId", "ExpiredToken", "UnrecognizedClientException"}
)
PRICING_REGION = "us-east-1"
"""The region whose Price List Service has the prices of all regions."""

T = TypeVar("T")


class NoCredentials(CloudError):
    """There are no credentials here, or AWS rejects them."""

    code = "no_credentials"


class AwsRefused(CloudError):
    """AWS rejected a call. `aws` is its error code."""

    code = "refused"

    def __init__(self, message: str, aws: str) -> None:
        super().__init__(message)
        self.aws = aws

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.aws)


@dataclass(frozen=True, slots=True)
class Machine:
    """An EC2 instance that this package started."""

    id: str
    state: str
    """One of pending, running, shutting-down, terminated, stopping, stopped."""
    tags: Mapping[str, str]
    """Our tags, without their prefix."""
    type: str = ""
    address: str | None = None
    """The public address if it has one, else the private one."""
    spot: bool = False
    why: str = ""
    """AWS's reason for its state: `Server.SpotInstanceTermination: …`."""
    ended_at: float | None = None
    """Time of its end, in seconds since the epoch, if AWS reports it."""

    @property
    def is_alive(self) -> bool:
        return self.state in ("pending", "running")


@dataclass(frozen=True, slots=True)
class InstanceRequest:
    """The parameters of a machine to start."""

    token: str
    """The token of its attempt: a repeated request with the same token finds the same machine."""
    type: str
    image: str
    root_device: str
    """The image's device name for its disk."""
    disk_gb: int
    key_name: str
    groups: tuple[str, ...]
    """Ids of security groups."""
    user_data: str
    tags: Mapping[str, str]
    subnet: str | None = None
    spot: bool = False
    spot_price: float | None = None
    """Highest spot price in dollars per hour; None: the on-demand price."""

    def parameters(self) -> dict[str, Any]:
        """The parameters of RunInstances."""
        tags = [{"Key": f"{TAG}{key}", "Value": value} for key, value in self.tags.items()]
        tags.append({"Key": "Name", "Value": f"groupwise {self.tags['job']}"})
        disk = {"VolumeSize": self.disk_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
        spot: dict[str, str] = {
            "SpotInstanceType": "one-time",
            "InstanceInterruptionBehavior": "terminate",
        }
        if self.spot_price is not None:
            spot["MaxPrice"] = f"{self.spot_price:.4f}"
        market = {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": spot}}
        return {
            "ClientToken": self.token,
            "MinCount": 1,
            "MaxCount": 1,
            "InstanceType": self.type,
            "ImageId": self.image,
            "KeyName": self.key_name,
            "SecurityGroupIds": [*self.groups],
            "UserData": self.user_data,
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required"},
            "BlockDeviceMappings": [{"DeviceName": self.root_device, "Ebs": disk}],
            "TagSpecifications": [
                {"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")
            ],
            **({"SubnetId": self.subnet} if self.subnet else {}),
            **(market if self.spot else {}),
        }


@dataclass(frozen=True, slots=True)
class SecurityGroup:
    """A security group."""

    id: str
    open_ports: tuple[tuple[int, int], ...]
    """Ranges of TCP ports that are open to any source."""

    def allows(self, port: int) -> bool:
        return any(first_port <= port <= last_port for first_port, last_port in self.open_ports)


@dataclass(frozen=True, slots=True)
class InstanceType:
    """An instance type, as AWS describes it."""

    name: str
    vcpus: int
    memory_mb: int
    architectures: tuple[str, ...]
    """Its processor architectures, such as x86_64 and arm64."""
    gpus: int = 0
    """Whole GPUs. A machine with a part of a GPU has none."""
    gpu: str = ""
    """Maker, model and memory of its GPUs; empty if it has none, nor a part of one."""

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        gpus = f"{self.gpus} x {self.gpu}" if self.gpus else self.gpu and f"a part of {self.gpu}"
        return f"{self.name}, {gpus or 'no GPU'}, {self.vcpus} virtual cores, {self.memory_mb / 1024:g} GiB"


@dataclass(frozen=True, slots=True)
class MachineImage:
    """A machine image (AMI)."""

    id: str
    root_device: str
    size_gb: int
    """The size of its disk in GB: a machine's disk is at least as large."""
    architecture: str
    families: tuple[str, ...] = ()
    """Families of instance types with GPUs that it supports by its own description; empty if that says nothing."""

    def supports(self, family: str) -> bool:
        """True if its drivers support GPUs of this family of instance types, or if it does not say which ones they support.

        Descriptions of older images say P4 for p4d, and P6 for p6-b200."""
        entries = [entry.lower() for entry in self.families]
        return not entries or any(
            re.fullmatch(rf"{entry}(d[a-z]*|-.*)?", family) for entry in entries
        )


@dataclass(frozen=True, slots=True)
class Quota:
    """A quota of EC2; those of machines count virtual cores."""

    code: str
    name: str
    value: float


@dataclass(slots=True)
class Ec2:
    """The required part of AWS's API in one region, through boto3. Every call raises CloudError: NoCredentials, AwsRefused, Unreachable."""

    region: str
    profile: str | None = None
    pause: float = PAUSE
    _clients: dict[tuple[str, str], Any] = field(default_factory=dict[tuple[str, str], Any])
    _session: Any = None

    def account(self) -> str:
        """The id of the account whose credentials are used."""
        return self._call_aws("sts", "get_caller_identity")["Account"]

    def start(self, request: InstanceRequest) -> Machine:
        """Start a machine, or find the one that was started with this token."""
        answer = self._call_aws("ec2", "run_instances", **request.parameters())
        return _parse_machine(answer["Instances"][0])

    def machines(self, job: str | None = None) -> list[Machine]:
        """The machines of this job, or all of ours, as long as AWS reports them: about an hour after their end."""
        filters = (
            {"Name": "tag-key", "Values": [JOB]}
            if job is None
            else {"Name": f"tag:{JOB}", "Values": [job]}
        )
        pages = self._pages("describe_instances", Filters=[filters])
        return [
            _parse_machine(instance)
            for page in pages
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        ]

    def console(self, machine: str) -> str:
        """The console output of a machine; AWS may be minutes late. Only newer types (Nitro) provide the latest output."""
        try:
            answer = self._call_aws("ec2", "get_console_output", InstanceId=machine, Latest=True)
        except AwsRefused as refused:
            if refused.aws != "UnsupportedOperation":
                raise
            answer = self._call_aws("ec2", "get_console_output", InstanceId=machine)
        return answer.get("Output") or ""

    def tag(self, machine: str, tags: Mapping[str, str]) -> None:
        """Set our tags on a machine."""
        aws_tags = [{"Key": f"{TAG}{key}", "Value": value} for key, value in tags.items()]
        self._call_aws("ec2", "create_tags", Resources=[machine], Tags=aws_tags)

    def terminate(self, machine: str) -> bool:
        """Terminate a machine; no effect if it has ended. False: AWS does not know it, any more or yet."""
        try:
            self._call_aws("ec2", "terminate_instances", InstanceIds=[machine])
        except AwsRefused as refused:
            if refused.aws != "InvalidInstanceID.NotFound":
                raise
            return False
        return True

    def image(self, requested: str | None) -> MachineImage:
        """This image, or the newest deep-learning image."""
        image_id = requested
        if image_id is None:
            try:
                answer = self._call_aws("ssm", "get_parameter", Name=IMAGE_PARAMETER)
            except AwsRefused as refused:
                raise AwsRefused(
                    f"the newest deep-learning image of {self.region} cannot be found out ({refused.message}): name one, --ami ami-…",
                    refused.aws,
                ) from None
            image_id = str(answer["Parameter"]["Value"])
        images = self._call_aws("ec2", "describe_images", ImageIds=[image_id])["Images"]
        if not images:
            raise CloudError(
                f"there is no image {image_id} in {self.region}. Give another with --ami."
            )
        [found] = images
        # `Supported EC2 instances: G4dn, G5, P5, P6-B200. Release notes: ...`
        listed = re.search(r"Supported EC2 instances: ([\w, -]+)", found.get("Description") or "")
        disks = {
            disk.get("DeviceName"): disk.get("Ebs", {})
            for disk in found.get("BlockDeviceMappings", [])
        }
        device = found["RootDeviceName"]
        return MachineImage(
            image_id,
            device,
            disks.get(device, {}).get("VolumeSize", 8),
            found["Architecture"],
            () if listed is None else tuple(re.findall(r"[\w-]+", listed[1])),
        )

    def public_key(self, name: str) -> str | None:
        """The public key of the key pair of this name, as `type base64`; None if there is none."""
        filters = [{"Name": "key-name", "Values": [name]}]
        answer = self._call_aws("ec2", "describe_key_pairs", Filters=filters, IncludePublicKey=True)
        keys = answer["KeyPairs"]
        return " ".join(keys[0].get("PublicKey", "").split()[:2]) if keys else None

    def group(self, requested: str, subnet: str | None) -> SecurityGroup | None:
        """The security group of this id or name. If several have the name, the one in the subnet's network."""
        filter_name = "group-id" if requested.startswith("sg-") else "group-name"
        filters = [{"Name": filter_name, "Values": [requested]}]
        if filter_name == "group-name" and subnet:
            subnets = self._call_aws("ec2", "describe_subnets", SubnetIds=[subnet])["Subnets"]
            filters.append({"Name": "vpc-id", "Values": [subnets[0]["VpcId"]]})
        groups = self._call_aws("ec2", "describe_security_groups", Filters=filters)[
            "SecurityGroups"
        ]
        if not groups:
            return None
        open_ports: list[tuple[int, int]] = []
        for permission in groups[0]["IpPermissions"]:
            sources = ("IpRanges", "Ipv6Ranges", "UserIdGroupPairs", "PrefixListIds")
            if not any(permission.get(source) for source in sources):
                continue
            if permission["IpProtocol"] == "-1":
                open_ports.append((0, 65535))
            elif permission["IpProtocol"] == "tcp":
                open_ports.append((permission["FromPort"], permission["ToPort"]))
        return SecurityGroup(groups[0]["GroupId"], tuple(open_ports))

    def instance_types(self, pattern: str) -> list[InstanceType]:
        """The instance types of this region whose names match; `*` matches any letters."""
        filters = [{"Name": "instance-type", "Values": [pattern]}]
        pages = self._pages("describe_instance_types", Filters=filters)
        return [_parse_type(answer) for page in pages for answer in page["InstanceTypes"]]

    def instance_type(self, name: str) -> InstanceType:
        """The instance type of this name. Raises CloudError, with the types that there are, if the region does not offer it."""
        found = self.instance_types(name)
        if found:
            return found[0]
        family = name.partition(".")[0]
        if same_family := self.instance_types(f"{family}.*"):
            offered = f"Of {family} it has {', '.join(sorted(each.name for each in same_family))}."
        else:
            families = sorted({each.family for each in self.instance_types("*") if each.gpus})
            offered = f"With GPUs it has the families {', '.join(families) or 'none'}."
        raise CloudError(f"{self.region} has no {name}. {offered}")

    def quotas(self) -> list[Quota]:
        """The quotas of EC2 in this account and region."""
        pages = self._pages("list_service_quotas", service="service-quotas", ServiceCode="ec2")
        return [
            Quota(answer["QuotaCode"], answer["QuotaName"], float(answer["Value"]))
            for page in pages
            for answer in page["Quotas"]
        ]

    def price(self, kind: str, *, spot: bool) -> float | None:
        """The price of an instance type in dollars per hour, for Linux."""
        if spot:
            answer = self._call_aws(
                "ec2",
                "describe_spot_price_history",
                InstanceTypes=[kind],
                ProductDescriptions=["Linux/UNIX"],
                StartTime=time.time(),
            )
            # The price in the most expensive zone, since the machine's zone is not known yet.
            prices = [float(entry["SpotPrice"]) for entry in answer["SpotPriceHistory"]]
            return max(prices, default=None)
        criteria = {
            "instanceType": kind,
            "regionCode": self.region,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }
        filters = [
            {"Type": "TERM_MATCH", "Field": name, "Value": value}
            for name, value in criteria.items()
        ]
        answer = self._call_aws(
            "pricing",
            "get_products",
            region=PRICING_REGION,
            ServiceCode="AmazonEC2",
            Filters=filters,
        )
        return max(filter(None, map(_hourly_price, answer["PriceList"])), default=None)

    # --- calls ------------------------------------------------------------------------------------

    def _call_aws(
        self, service: str, verb: str, *, region: str | None = None, **parameters: Any
    ) -> Any:
        client = self._client(service, region or self.region)
        return self._with_retries(lambda: getattr(client, verb)(**parameters))

    def _pages(self, verb: str, *, service: str = "ec2", **parameters: Any) -> list[Any]:
        client = self._client(service, self.region)
        return self._with_retries(lambda: [*client.get_paginator(verb).paginate(**parameters)])

    def _with_retries(self, call: Callable[[], T]) -> T:
        backoff = Backoff(self.pause, LONGEST_PAUSE)
        for _ in range(TRIES - 1):
            try:
                with cloud_errors(self.region):
                    return call()
            except Unreachable:
                time.sleep(backoff.next())
        with cloud_errors(self.region):
            return call()

    def _client(self, service: str, region: str) -> Any:
        if (service, region) not in self._clients:
            connect, read = AWS_TIMEOUTS
            config = _import_boto("botocore.config").Config(
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=connect,
                read_timeout=read,
            )
            with cloud_errors(self.region):
                if self._session is None:
                    os.environ.update(no_proxy_variables(METADATA_SERVICE))  # for boto3's keys
                    self._session = _import_boto("boto3").Session(profile_name=self.profile)
                client = self._session.client(service, region_name=region, config=config)
            self._clients[service, region] = client
        return self._clients[service, region]


def _import_boto(module: str) -> Any:
    """Import a module of boto3, only at the first call to AWS. Raises UsageError if it is not installed."""
    require_packages("AWS", "launch,aws", module.partition(".")[0])
    return import_module(module)


@contextmanager
def cloud_errors(region: str) -> Generator[None]:
    """Turn errors of boto3 into CloudError."""
    boto = _import_boto("botocore.exceptions")

    try:
        yield
    except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound) as error:
        raise NoCredentials(
            f"there are no credentials of AWS here ({error}): `aws configure`, AWS_PROFILE, --profile, or the variables AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY."
        ) from None
    except (boto.SSOTokenLoadError, boto.UnauthorizedSSOTokenError, boto.TokenRetrievalError) as e:
        raise NoCredentials(f"the login of AWS has run out ({e}): `aws sso login`.") from None
    except boto.LoginError as error:  # a profile that `aws login` made
        raise NoCredentials(f"the login to AWS has expired ({error}): `aws login`.") from None
    except boto.MissingDependencyException as error:
        raise NoCredentials(
            not_installed("a profile of `aws login`", "launch,aws", "awscrt")
        ) from error
    except boto.ClientError as error:
        answer: dict[str, str] = error.response["Error"]
        code, message = answer.get("Code", ""), answer.get("Message", "")
        if code in RETRYABLE_CODES:
            raise Unreachable(f"AWS is busy in {region} ({code}): {message}") from None
        if code in CREDENTIAL_CODES:
            raise NoCredentials(
                f"AWS does not accept the credentials found here ({code}): {message}"
            ) from None
        reason = f"AWS refuses ({code}): {message}"
        if code in PERMISSION_CODES:
            reason = f"your user of AWS may not do that ({code}): {message} docs/operate/launch.md lists what is needed."
        raise AwsRefused(reason, code) from None
    except boto.BotoCoreError as error:  # connection errors, timeouts, an unknown region
        raise Unreachable(f"AWS does not answer in {region}: {error}.") from None


def _parse_machine(answer: Mapping[str, Any]) -> Machine:
    tags = {tag["Key"]: tag["Value"] for tag in answer.get("Tags", [])}
    reason: Mapping[str, str] = answer.get("StateReason") or {}
    # Format: `User initiated (2026-05-01 10:00:00 GMT)`; the time may be missing.
    transition = answer.get("StateTransitionReason") or ""
    end_match = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", transition)
    return Machine(
        answer["InstanceId"],
        answer["State"]["Name"],
        {key.removeprefix(TAG): value for key, value in tags.items() if key.startswith(TAG)},
        answer.get("InstanceType", ""),
        answer.get("PublicIpAddress") or answer.get("PrivateIpAddress"),
        answer.get("InstanceLifecycle") == "spot",
        f"{reason['Code']}: {reason.get('Message', '')}" if reason.get("Code") else "",
        None if end_match is None else datetime.fromisoformat(f"{end_match[1]}+00:00").timestamp(),
    )


def _parse_type(answer: Mapping[str, Any]) -> InstanceType:
    gpus: Sequence[Mapping[str, Any]] = answer.get("GpuInfo", {}).get("Gpus", [])
    models = [
        f"{gpu['Manufacturer']} {gpu['Name']} with {gpu['MemoryInfo']['SizeInMiB'] / 1024:.3g} GiB"
        for gpu in gpus
    ]
    return InstanceType(
        answer["InstanceType"],
        answer["VCpuInfo"]["DefaultVCpus"],
        answer["MemoryInfo"]["SizeInMiB"],
        tuple(answer["ProcessorInfo"]["SupportedArchitectures"]),
        sum(gpu["Count"] for gpu in gpus),
        " and ".join(models),
    )


def _hourly_price(product: str) -> float | None:
    """The price per hour in dollars of a Price List Service product; None if it has no hourly price."""
    terms: Sequence[Any] = [*json.loads(product)["terms"].get("OnDemand", {}).values()]
    prices = [
        float(dimension["pricePerUnit"]["USD"])
        for term in terms
        for dimension in term["priceDimensions"].values()
        if dimension["unit"] == "Hrs"
    ]
    return max(prices, default=None)
