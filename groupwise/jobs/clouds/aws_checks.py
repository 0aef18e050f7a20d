"""Checks before an AWS machine is paid for: credentials, key, security group, instance type, quota; and its price.

All reasons for which AWS would refuse later are reported together. Checks that are not possible, without credentials or permission, are
listed as such: a plan needs no credentials.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from groupwise.core.errors import UsageError
from groupwise.jobs.clouds.backend import CloudError, Unreachable
from groupwise.jobs.clouds.ec2 import (
    PERMISSION_CODES,
    AwsRefused,
    Ec2,
    NoCredentials,
    SecurityGroup,
)
from groupwise.jobs.clouds.ec2_types import PRICES_OF, list_price, quota_code

OPTIONS = {
    "key_name": "--key-name: the key pair that machines are started with",
    "key_path": "--key-path: its private key, on this machine",
    "security_group": "--security-group: one that lets SSH in",
}
USER = "ubuntu"
"""The login user of the deep-learning image."""
DISK = "its disk costs about $0.03 an hour more"


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
        return f"${self.dollars:.2f} an hour ({self.source}); {DISK}"


@dataclass(slots=True)
class CheckResults:
    """The results of the checks."""

    price: Price
    lines: list[str] = field(default_factory=list[str])
    """Lines for users: what is right, and what could not be checked."""
    failed: list[str] = field(default_factory=list[str])


def check(
    ec2: Ec2, access: Access, place_options: Mapping[str, Any], kind: str, gpus: int
) -> CheckResults:
    """Run all checks. Raises UsageError if this machine lacks boto3 or, with credentials, the private key."""
    spot = bool(place_options.get("spot"))
    results = CheckResults(price_of(ec2, kind, spot=spot))
    checks = {
        "key pair": lambda: _check_key_pair(
            ec2, access, read_public_key(access.require("key_path"))
        ),
        "security group": lambda: _check_security_group(ec2, access),
        "instance type": lambda: _check_instance_type(ec2, kind, gpus),
        "quota": lambda: _check_quota(ec2, kind, spot=spot),
        "image": lambda: ec2.image(place_options.get("ami"))[0],
    }
    try:
        account = ec2.account()
    except (NoCredentials, Unreachable) as error:
        results.lines.append(f"not looked at: {', '.join(checks)}; {error.message}")
        return results
    results.lines.append(f"credentials: of account {account}")
    for name, run_check in checks.items():
        try:
            results.lines.append(f"{name}: {run_check()}")
        except (NoCredentials, Unreachable) as error:
            results.lines.append(f"{name}: not looked at, {error.message}")
        except CloudError as error:
            if isinstance(error, AwsRefused) and error.aws in PERMISSION_CODES:
                reason = f"not looked at, your user of AWS may not ask ({error.aws})"
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


def _check_instance_type(ec2: Ec2, kind: str, gpus: int) -> str:
    size = ec2.size(kind)
    if size is None:
        raise CloudError(f"{ec2.region} has no {kind}.")
    if gpus > size.gpus:
        raise CloudError(f"{kind} has {size.gpus} GPUs, and {gpus} are asked for.")
    if size.gpus and not gpus:
        return f"{kind}, whose {size.gpus} GPUs the job does NOT get: --gpus {size.gpus}"
    return f"{kind}, {size.gpus} GPUs, {size.vcpus} virtual cores"


def _check_quota(ec2: Ec2, kind: str, *, spot: bool) -> str:
    code, size = quota_code(kind, spot=spot), ec2.size(kind)
    if code is None or size is None:
        return f"not looked at: it is not known which one counts {kind}"
    try:
        quota = ec2.quota(code)
    except AwsRefused as error:
        return f"not looked at: {error.message}"
    if quota < size.vcpus:
        raise CloudError(
            f"your account may run {quota:g} virtual cores of this family at once ({code}), and {kind} has {size.vcpus}. Ask for more: "
            f"https://console.aws.amazon.com/servicequotas/home/services/ec2/quotas/{code}"
        )
    return f"{quota:g} virtual cores at once ({code}); what runs already is not counted"


def price_of(ec2: Ec2, kind: str, *, spot: bool) -> Price:
    """The price that AWS reports, else the list price at the time of this release."""
    try:
        price = ec2.price(kind, spot=spot)
    except CloudError as error:
        reason = error.code.replace("_", " ")
    else:
        if price is not None:
            return Price(price, "the highest spot price now" if spot else "AWS's list")
        reason = "AWS names none"
    if spot:
        return Price(None, f"spot prices are AWS's alone: {reason}")
    listed_price = list_price(kind, ec2.region)
    return Price(listed_price, f"on demand, {PRICES_OF}" if listed_price is not None else reason)
