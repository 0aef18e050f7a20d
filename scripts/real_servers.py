#!/usr/bin/env python3
"""Make the servers present that tests talk to: PostgreSQL, NATS, sshd, Slurm, login shells, and what makes hosts of namespaces; or a
browser, or what builds containers.

Nothing is started here, and nothing of the machine is configured: the tests start each server as a child of their own, in a folder
of their own. On Debian and Ubuntu, as root, what is missing is installed; elsewhere this says what to install. A package that wants to
start its server at once is told not to, as Debian's policy-rc.d provides for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")
POSTGRES = Path("/usr/lib/postgresql")
POLICY = Path("/usr/sbin/policy-rc.d")
NEEDED = {
    "nats-server": "nats-server",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "unshare": "util-linux",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "squeue": "slurm-client",
    "bsd-csh": "csh",
    "tcsh": "tcsh",
    "fish": "fish",
}
"""Program → Debian package."""
OTHERS = {
    "chromium": {"chromium": "chromium"},
    "containers": {
        "buildah": "buildah",
        "debootstrap": "debootstrap",
        "fuse-overlayfs": "fuse-overlayfs",
        "nginx": "nginx-light",
        "openssl": "openssl",
        "systemd-analyze": "systemd",
    },
}
"""Likewise, if this is all that is wanted: `real_servers.py chromium`."""


def main() -> int:
    """Install what is missing, or say so."""
    missing = missing_packages()
    if not missing:
        return 0
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(
            f"These tests need {', '.join(missing)}. On Debian or Ubuntu: sudo apt-get install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 1
    print(f"Installing {', '.join(missing)}")
    with nothing_started(), tempfile.TemporaryFile() as said:
        for command in (
            ["update", "-q"],
            ["install", "-q", "-y", "--no-install-recommends", *missing],
        ):
            done = subprocess.run(
                ["apt-get", *command],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                check=False,
            )
            if done.returncode and command[0] == "install":
                said.seek(0)
                print(said.read().decode(errors="replace")[-4000:], file=sys.stderr)
                return 1
    return report_rest()


def missing_packages() -> list[str]:
    """Debian packages of the programs that are not there."""
    if len(sys.argv) == 2:
        wanted = OTHERS[sys.argv[1]]
        return [package for program, package in wanted.items() if program_at(program) is None]
    missing = {package for program, package in NEEDED.items() if program_at(program) is None}
    if not any(POSTGRES.glob("*/bin/postgres")) and program_at("postgres") is None:
        missing.add("postgresql")
    return sorted(missing)


def program_at(name: str) -> str | None:
    """Where a program is; daemons lie where the PATH of a person does not lead."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))


def report_rest() -> int:
    """What is still missing after the installation."""
    if rest := missing_packages():
        print(f"Installed, but still not found: {', '.join(rest)}", file=sys.stderr)
    return 1 if rest else 0


@contextmanager
def nothing_started() -> Generator[None]:
    """For so long packages start no servers; a policy that the machine has already is left alone."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
