"""Runs on a spot machine: asks its metadata service whether AWS wants it back, and then tells its jobs, so that they save and end.

This file travels in the machine's user data and is run there as root, from every start on. It needs only Python 3.8. AWS gives two minutes'
notice; a job has most of them: the file `evict` in its folder says how many seconds (`groupwise/jobs/hosts/runner/`)."""

import glob
import os
import sys
import time
import urllib.request

SERVICE = "http://169.254.169.254"
EVERY = 5.0
"""Seconds between requests, as AWS advises."""
TO_SAVE = 90
"""Seconds of the two minutes; in the rest a watcher can fetch what was saved."""
TIMEOUT = 2.0


def wanted_back(service: str) -> bool:
    """True if there is a notice. A service that does not answer gives none."""
    try:
        request = urllib.request.Request(
            service + "/latest/api/token",
            method="PUT",
            headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            token = answer.read().decode()
        request = urllib.request.Request(
            service + "/latest/meta-data/spot/instance-action",
            headers={"X-aws-ec2-metadata-token": token},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT):
            return True
    except (OSError, ValueError):  # 404 among them: no notice
        return False


def tell(root: str) -> None:
    """Tell all attempts below this root; those that have ended ignore it."""
    for folder in glob.glob(os.path.join(glob.escape(root), "attempts", "*")):
        new = os.path.join(folder, "evict.new")
        try:
            with open(new, "w") as file:
                file.write(str(TO_SAVE))
            os.chmod(new, 0o644)
            os.replace(new, os.path.join(folder, "evict"))
        except OSError:
            continue  # it was removed meanwhile, or is no folder


def main() -> None:
    """Run until the machine is gone; attempts that begin after the notice are warned too."""
    root = sys.argv[1]
    service = sys.argv[2] if len(sys.argv) > 2 else SERVICE
    every = float(sys.argv[3]) if len(sys.argv) > 3 else EVERY
    noticed = False
    while True:
        noticed = noticed or wanted_back(service)
        if noticed:
            tell(root)
        time.sleep(every)


if __name__ == "__main__":
    main()
