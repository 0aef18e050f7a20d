"""`groupwise launch aws`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from groupwise.cli.environment import RemoteEnvironmentOptions
from groupwise.cli.launch.options import LaunchOptions, RentalOptions
from groupwise.cli.launch.placing import launch
from groupwise.cli.options import flag, option
from groupwise.cli.output import say
from groupwise.core.errors import UsageError
from groupwise.core.extras import require_packages


def aws(
    *,
    key_name: Annotated[str, option("K", "Key pair that the machine accepts.")],
    security_group: Annotated[
        str, option("SG", "Id or name of a security group that accepts SSH from here.")
    ],
    key_path: Annotated[
        Path | None,
        option(
            "P",
            "The private key, on this machine, without a passphrase; default: K.pem or K in ~/.ssh.",
        ),
    ] = None,
    instance_type: Annotated[
        str, option("T", "Type of the machine, for this job alone.")
    ] = "g5.2xlarge",
    region: Annotated[str, option("R", "Region of AWS.")] = "us-east-1",
    subnet: Annotated[
        str | None,
        option("S", "Subnet; default: one of the default network, with a public address."),
    ] = None,
    profile: Annotated[
        str | None, option("P", "Profile of the credentials; default: AWS_PROFILE.")
    ] = None,
    ami: Annotated[
        str | None, option("AMI", "Image; default: the newest deep-learning one, Ubuntu 24.04.")
    ] = None,
    disk_gb: Annotated[
        int | None,
        option(
            "N",
            "Size of the disk in GB; default: enough for image, environment, model and checkpoints.",
            min=8,
            max=16_384,
        ),
    ] = None,
    spot: Annotated[
        bool,
        flag(
            "A cheaper machine that AWS may take back after two minutes' notice. --max-price is the highest price paid.",
            "--spot",
        ),
    ] = False,
    user: Annotated[str, option("U", "User to log in as; depends on the image.")] = "ubuntu",
    port: Annotated[int, option("N", "Port of SSH; depends on the image.", min=1, max=65535)] = 22,
    packages: RemoteEnvironmentOptions,
    rental: RentalOptions,
    job: LaunchOptions,
) -> None:
    """Run a job on a new machine of AWS.

    If the job succeeds, the machine keeps running, and costs money, until --time-limit, or with --terminate-after until the results are
    here. If the job fails, the machine is ended. `groupwise launch sweep` ends machines that are left over.

    \b
        groupwise launch aws --key-name K --security-group SG --gpus 1 \\
            -- rl -c C.yaml -t task.py
    """
    from groupwise.jobs.clouds.aws_checks import DISK_GB
    from groupwise.jobs.clouds.backend import Unreachable
    from groupwise.jobs.clouds.ec2 import AwsRefused, NoCredentials
    from groupwise.jobs.launch.places import AWS, JobBackend, ec2

    require_packages("AWS", "launch,aws", "asyncssh", "boto3")
    plan = packages.plan_unless_there()
    if key_path is None:  # AWS names the keys that it creates K.pem
        created_key, own_key = (
            Path("~/.ssh").expanduser() / name for name in (f"{key_name}.pem", key_name)
        )
        key_path = own_key if own_key.is_file() and not created_key.is_file() else created_key
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
    options = {
        "ami": ami,
        DISK_GB: disk_gb,
        "spot": spot,
        "max_price": job.max_price if spot else None,
        **rental.place_options(),
    }
    place_options = {"instance_type": instance_type} | {
        name: value for name, value in options.items() if value
    }
    gpus = job.gpu_count
    if not gpus:
        try:
            gpus = ec2(region, profile).instance_type(instance_type).gpus
        except (NoCredentials, Unreachable) as error:
            if not job.dry_run:
                raise
            say(f"how many GPUs {instance_type} has is not known: {error.message}")
        except AwsRefused as refused:
            raise UsageError(
                f"how many GPUs {instance_type} has is not known: {refused.message} --gpus N says it."
            ) from None
    launch(JobBackend(AWS, detail), job, environment=plan, gpus=gpus, place_options=place_options)
