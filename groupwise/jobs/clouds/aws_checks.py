"""Checks before an AWS machine is paid for: credentials, key, security group, instance type, quota; and its price.

All reasons for which AWS would refuse later are reported together. Checks that are not possible, without credentials or permission, are
listed as such: a plan needs no credentials.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import asyncssh

from groupwise.core.errors import UsageError
from groupwise.core.terminal.quantities import counted
from groupwise.jobs.clouds.backend import CloudError, Unreachable
from groupwise.jobs.clouds.ec2 import (
    PERMISSION_CODES,
    AwsRefused,
    Ec2,
    InstanceType,
    MachineImage,
    NoCredentials,
    SecurityGroup,
)

OPTIONS = {
    "key_name": "--key-name: the key pair that machines are started with",
    "key_path": "--key-path: its private key, on this machine",
    "security_group": "--security-group: one that lets SSH in",
}
USER = "ubuntu"
"""The login user of the deep-learning image."""
DISK_GB = "disk_gb"
"""The key of `Order.place_options` for the size of the machine's disk."""
DISK_PRICE = "its disk costs about $0.01 an hour more for each 100 GB"


@dataclass(frozen=True, slots=True)
class Access:
    """How machines are started, and how to log in to them."""

    key_name: str | None = None
    key_path: str | None = None
    security_group: str | None = None
    """Id or name."""
    subnet: str | None = None
    user: str = USER
    port: int = 22
    python: str = "python3"

    def require(self, what: str) -> str:
        """The option of this name. Raises UsageError if it was not set: a caller that only looks for a job need not set all."""
        value = getattr(self, what)
        if value is None:
            raise UsageError(f"this needs {OPTIONS[what]}.")
        return str(value)

    def group(self, ec2: Ec2) -> SecurityGroup:
        """The security group. Raises CloudError if it does not exist."""
        group_name = self.require("security_group")
        group = ec2.group(group_name, self.subnet)
        if group is None:
            raise CloudError(f"there is no security group {group_name} in {ec2.region}.")
        return group


@dataclass(frozen=True, slots=True)
class Price:
    """The price per hour in dollars, and its source; `str` of it is for messages."""

    dollars: float | None
    source: str

    def __str__(self) -> str:
        if self.dollars is None:
            return f"whose price is not known ({self.source})"
        return f"${self.dollars:.2f} an hour ({self.source}); {DISK_PRICE}"


@dataclass(slots=True)
class CheckResults:
    """The results of the checks."""

    price: Price
    lines: list[str] = field(default_factory=list[str])
    """Lines for users: what is right, and what could not be checked."""
    failed: list[str] = field(default_factory=list[str])
    image: MachineImage | None = None
    """The image; None if AWS was not asked for it."""


def check(
    ec2: Ec2, access: Access, place_options: Mapping[str, Any], kind: str, gpus: int
) -> CheckResults:
    """Run all checks. Raises UsageError if this machine lacks boto3 or, with credentials, the private key."""
    spot, instance_type = bool(place_options.get("spot")), cache(ec2.instance_type)
    results = CheckResults(price_of(ec2, kind, spot=spot))

    def check_requested_image() -> str:
        results.image = ec2.image(place_options.get("ami"))
        return check_image(results.image, instance_type(kind), place_options.get(DISK_GB))

    checks = {
        "key pair": lambda: _check_key_pair(
            ec2, access, read_public_key(access.require("key_path"))
        ),
        "security group": lambda: _check_security_group(ec2, access),
        "instance type": lambda: _check_instance_type(instance_type(kind), gpus),
        "image": check_requested_image,
        "quota": lambda: _check_quota(ec2, instance_type(kind), spot=spot),
    }
    try:
        account = ec2.account()
    except (NoCredentials, Unreachable) as error:
        results.lines.append(f"not checked: {', '.join(checks)}; {error.message}")
        return results
    results.lines.append(f"credentials: of account {account}")
    for name, run_check in checks.items():
        try:
            results.lines.append(f"{name}: {run_check()}")
        except (NoCredentials, Unreachable) as error:
            results.lines.append(f"{name}: not checked, {error.message}")
        except CloudError as error:
            if isinstance(error, AwsRefused) and error.aws in PERMISSION_CODES:
                reason = f"not checked, your user of AWS may not ask ({error.aws})"
                results.lines.append(f"{name}: {reason}")
            else:
                results.failed.append(f"{name}: {error.message}")
    return results


def read_public_key(path: str) -> str:
    """The public key of a private key file, as `type base64`. Raises UsageError for a key that ssh would not use either."""
    file = Path(path).expanduser()
    try:
        mode = file.stat().st_mode
        key = asyncssh.read_private_key(file)
    except OSError as error:
        raise UsageError(f"--key-path {path}: it cannot be read: {error.strerror}.") from None
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        raise UsageError(
            f"--key-path {path}: {error}. A private key without a passphrase is wanted, in a format of OpenSSH or as AWS gives it (.pem)."
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"--key-path {path}: it can be read by others; chmod 600 {file}")
    return " ".join(key.export_public_key("openssh").decode().split()[:2])


def _check_key_pair(ec2: Ec2, access: Access, local_key: str) -> str:
    name = access.require("key_name")
    public = ec2.public_key(name)
    if public is None:
        raise CloudError(
            f"there is no key pair {name} in {ec2.region}: `aws ec2 import-key-pair --region {ec2.region} --key-name {name} "
            "--public-key-material fileb://KEY.pub` makes one of yours."
        )
    if public and public != local_key:
        raise CloudError(
            f"{name} is another key than {access.key_path}, which a machine started with it would not let in."
        )
    return f"{name}, of {access.key_path}"


def _check_security_group(ec2: Ec2, access: Access) -> str:
    group = access.group(ec2)
    if not group.allows(access.port):
        raise CloudError(
            f"{group.id} lets no one in at port {access.port}: `aws ec2 authorize-security-group-ingress --region {ec2.region} "
            f"--group-id {group.id} --protocol tcp --port {access.port} --cidr YOUR.ADDRESS/32`."
        )
    return f"{group.id}, which lets SSH in from somewhere"


def _check_instance_type(kind: InstanceType, gpus: int) -> str:
    if gpus > kind.gpus:
        raise CloudError(
            f"{kind.name} has {counted(kind.gpus, 'GPU')}, and --gpus asks for {gpus}."
        )
    if kind.gpus and not gpus:
        return f"{kind}, and the job gets NONE of its GPUs: --gpus {kind.gpus}"
    return str(kind)


def check_image(image: MachineImage, kind: InstanceType, disk_gb: int | None) -> str:
    """Describe the image, if it fits the instance type. Raises CloudError if they do not fit: the machine would not start, or would have
    no driver for its GPUs."""
    if image.architecture not in kind.architectures:
        raise CloudError(
            f"{image.id} is for {image.architecture}, and {kind.name} is {' or '.join(kind.architectures)}: another --instance-type, or "
            "--ami with an image for it."
        )
    if kind.gpu and not image.supports(kind.family):
        raise CloudError(
            f"{image.id} has no driver for the GPUs of {kind.name} ({kind.gpu}): by its description it supports "
            f"{', '.join(image.families)}. Take one of these, or --ami with an image for {kind.family}."
        )
    if disk_gb is not None and disk_gb < image.size_gb:
        raise CloudError(
            f"--disk-gb {disk_gb}: the disk of {image.id} is {image.size_gb} GB itself."
        )
    drivers = (
        f"for GPUs of {', '.join(image.families)}"
        if image.families
        else "whose GPU drivers it does not name"
    )
    return f"{image.id}, {image.size_gb} GB, {drivers}"


def _check_quota(ec2: Ec2, kind: InstanceType, *, spot: bool) -> str:
    """Quotas are found by their names, which list letters or families: `Running On-Demand G and VT instances`, `All P4, P3 and P2 Spot
    Instance Requests`."""
    pattern = r"All (.+) Spot Instance Requests" if spot else r"Running On-Demand (.+) instances"
    generation = re.match(r"[a-z]+\d*", kind.family)
    names = [generation[0], generation[0].rstrip("0123456789")] if generation else []
    quotas = {
        word: quota
        for quota in ec2.quotas()
        if (match := re.fullmatch(pattern, quota.name))
        for word in re.findall(r"\w+", match[1].lower())
    }
    found = next((quotas[name] for name in names if name in quotas), None)
    if found is None:
        return f"not checked: none of the quotas of EC2 names {kind.family}"
    if found.value < kind.vcpus:
        raise CloudError(
            f"your account may run {found.value:g} virtual cores of this family at once ({found.name}), and {kind.name} has {kind.vcpus}. "
            f"Ask for more: https://console.aws.amazon.com/servicequotas/home/services/ec2/quotas/{found.code}"
        )
    return f"{found.value:g} virtual cores at once ({found.name}); what runs already is not counted"


def price_of(ec2: Ec2, kind: str, *, spot: bool) -> Price:
    """The price that AWS reports."""
    try:
        price = ec2.price(kind, spot=spot)
    except CloudError as error:
        return Price(None, f"only AWS knows it: {error.code.replace('_', ' ')}")
    if price is None:
        return Price(None, "AWS does not say it")
    return Price(price, "the highest spot price now" if spot else "AWS's list")
