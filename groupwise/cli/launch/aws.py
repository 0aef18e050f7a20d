"""`groupwise launch aws`."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.launch.options import (
    CommonOptions,
    Environment,
    common,
    environment,
    place_command,
    rental,
)
from groupwise.cli.launch.placing import launch
from groupwise.core.errors import UsageError

InstanceType = Annotated[str, typer.Option(metavar="T", help="Of machine; it is the job's alone.")]
KeyName = Annotated[str, typer.Option(metavar="K", help="Key pair that the machine lets in.")]
KeyPath = Annotated[
    Path | None,
    typer.Option(
        metavar="P",
        help="Its private key, on this machine, without a passphrase; without it: K.pem or K in ~/.ssh.",
    ),
]
SecurityGroup = Annotated[
    str, typer.Option(metavar="SG", help="That lets SSH in from here: its id or name.")
]
Region = Annotated[str, typer.Option(metavar="R")]
Subnet = Annotated[
    str | None,
    typer.Option(
        metavar="S", help="Without it: one of the default network, with a public address."
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(metavar="P", help="Of the credentials; without it: AWS_PROFILE, as usual."),
]
Ami = Annotated[
    str | None,
    typer.Option(
        metavar="AMI", help="Image; without it: the newest deep-learning one, Ubuntu 24.04."
    ),
]
Spot = Annotated[
    bool,
    typer.Option(
        "--spot",
        help="Cheaper, and AWS may take it back after two minutes' notice. --max-price is the most that is paid.",
    ),
]
User = Annotated[str, typer.Option(metavar="U", help="Who logs in; of another image another.")]
Port = Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Of SSH, likewise.")]


@place_command(packages=environment, rented=rental, job=common)
def aws(
    key_name: KeyName,
    security_group: SecurityGroup,
    key_path: KeyPath = None,
    instance_type: InstanceType = "g5.2xlarge",
    region: Region = "us-east-1",
    subnet: Subnet = None,
    profile: Profile = None,
    ami: Ami = None,
    spot: Spot = False,
    user: User = "ubuntu",
    port: Port = 22,
    *,
    packages: Environment,
    rented: dict[str, bool],
    job: CommonOptions,
) -> None:
    """On a machine of AWS that is started for it.

    It ends with the job after a failure, after a success with --terminate-after, else at its deadline. `groupwise launch sweep` looks
    after what is left.

    groupwise launch aws --key-name K --security-group SG -- rl --config C.yaml --task-module task.py
    """
    from groupwise.jobs.clouds.ec2_types import gpus_of
    from groupwise.jobs.launch.places import AWS, JobBackend

    for module in ("asyncssh", "boto3"):
        if find_spec(module) is None:
            raise UsageError(f"{module} is not there: pip install 'groupwise[launch,aws]'.")
    plan = packages.plan()
    if key_path is None:  # AWS names the keys that it makes K.pem
        made, own = (Path("~/.ssh").expanduser() / name for name in (f"{key_name}.pem", key_name))
        key_path = own if own.is_file() and not made.is_file() else made
    detail = {
        "region": region,
        "profile": profile,
        "key_name": key_name,
        "key_path": str(key_path.expanduser().absolute()),
        "security_group": security_group,
        "subnet": subnet,
        "user": user,
        "port": port,
        "python": packages.python,
    }
    given = {"ami": ami, "spot": spot, "max_price": job.max_price if spot else None, **rented}
    asks = {"instance_type": instance_type} | {name: each for name, each in given.items() if each}
    gpus = job.gpus or gpus_of(instance_type)
    launch(JobBackend(AWS, detail), replace(job, environment=plan, gpus=gpus, asks=asks))
