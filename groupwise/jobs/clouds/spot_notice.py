"""Runs on a spot machine: asks the metadata service whether AWS takes the machine back, and then makes its jobs save and end.

This file is part of the machine's user data and runs there as root, from every start on. It needs only Python 3.8, and uses no proxy of
the environment: the service answers each machine for itself. AWS gives two
minutes' notice, and a job gets most of them: the file `evict` in its folder contains the number of seconds
(`groupwise/jobs/hosts/runner/`)."""

import glob
import os
import sys
import time
import urllib.request

SERVICE = "http://169.254.169.254"
EVERY = 5.0
"""Seconds between requests, as AWS advises."""
TO_SAVE = 90
"""Seconds of the two minutes that a job gets; in the rest a watcher can fetch its checkpoints."""
TIMEOUT = 2.0


def has_notice(service: str) -> bool:
    """True if there is a notice; False also if the service does not answer."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(
            service + "/latest/api/token",
            method="PUT",
            headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"},
        )
        with direct.open(request, timeout=TIMEOUT) as response:
            token = response.read().decode()
        request = urllib.request.Request(
            service + "/latest/meta-data/spot/instance-action",
            headers={"X-aws-ec2-metadata-token": token},
        )
        with direct.open(request, timeout=TIMEOUT):
            return True
    except (OSError, ValueError):  # includes 404: no notice
        return False


def evict_all(root: str) -> None:
    """Request eviction of all attempts below this root; ended attempts ignore it."""
    for folder in glob.glob(os.path.join(glob.escape(root), "attempts", "*")):
        temporary = os.path.join(folder, "evict.new")
        try:
            with open(temporary, "w") as file:
                file.write(str(TO_SAVE))
            os.chmod(temporary, 0o644)
            os.replace(temporary, os.path.join(folder, "evict"))
        except OSError:
            continue  # it was removed meanwhile, or is not a folder


def main() -> None:
    """Run until the machine ends; attempts that start after the notice are evicted too."""
    root = sys.argv[1]
    service = sys.argv[2] if len(sys.argv) > 2 else SERVICE
    interval = float(sys.argv[3]) if len(sys.argv) > 3 else EVERY
    has_seen_notice = False
    while True:
        has_seen_notice = has_seen_notice or has_notice(service)
        if has_seen_notice:
            evict_all(root)
        time.sleep(interval)


if __name__ == "__main__":
    main()
