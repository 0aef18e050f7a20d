"""The start-up script of a rented machine: it first schedules the machine's own shutdown, then prints its host key.

The script is the machine's user data. It first schedules a shutdown, and until the key is printed any failure of the script ends the
machine at once. Every later boot schedules the same time again. Root may change that time (`ARM`), since another attempt on the machine has
its own deadline. A time that cannot be read counts as now. The script contains no secret: every AWS user who may see the machine, and every
program on it, can read it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from groupwise.jobs.clouds.machine import ROOT

HOST_KEY = re.compile(
    r"<groupwise-host-key (ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI[A-Za-z0-9+/]{43}=*) ([0-9a-f]{64})>"
)
"""The host key on the console, with its SHA-256: kernel and services write to the console at the same time, in the middle of lines too. All
ed25519 keys have the same length."""
KERNEL_LINE = re.compile(r"\[ *\d+\.\d{6}\] [^\r\n]*[\r\n]+")
"""A message of the kernel, from its time to its end of line."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f]")
"""Colours and cursor movements of the console, ends of lines, and other control characters."""
ARM = "/var/lib/groupwise/arm"
"""The program that schedules the shutdown: at its first argument (seconds since the epoch), or after its second argument in minutes if that
is sooner. Without arguments it schedules the last time again."""
SCRIPT = Path(__file__).with_name("boot.sh")
"""The script, with `@name@` in place of what differs between machines."""
NOTICE = Path(__file__).with_name("spot_notice.py")


def user_data(deadline: float, minutes: int, user: str, *, spot: bool) -> str:
    """The script of a machine that ends at `deadline` (seconds since the epoch), which is `minutes` from now."""
    watch = notice = ""
    if spot:
        watch = f"setsid python3 -I /var/lib/groupwise/spot_notice.py ~{user}/{ROOT} </dev/null >/dev/null 2>&1 &"
        program = NOTICE.read_text("utf-8")
        notice = f"cat > /var/lib/groupwise/spot_notice.py <<'END_OF_FILE'\n{program}END_OF_FILE"
    values = {
        "deadline": f"{deadline:.0f}",
        "minutes": str(minutes),
        "arm": ARM,
        "watch": watch,
        "notice": notice,
    }
    return re.sub(r"@(\w+)@", lambda name: values[name[1]], SCRIPT.read_text("utf-8"))


def host_key_in(console: str) -> str | None:
    """The host key that the machine has printed; None if it has not, or if AWS's copy of the console is late.

    The machine prints it several times. A copy counts if its checksum is right, so one that other text has got into is either mended or
    ignored. The last one counts, because a machine may have got another key since an earlier boot."""
    text = CONTROL.sub("", KERNEL_LINE.sub("", console))
    keys = [
        key
        for key, checksum in HOST_KEY.findall(text)
        if hashlib.sha256(key.encode()).hexdigest() == checksum
    ]
    return keys[-1] if keys else None
