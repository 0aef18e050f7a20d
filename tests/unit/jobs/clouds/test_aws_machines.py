"""What a rented machine does when it starts: its own end is scheduled before anything can fail, and again at every start."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from groupwise.jobs.clouds.aws_machines import ARM, host_key_in, user_data
from tests.fake_aws import console_line
from tests.processes import wait_until

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKQAN3IRuil4D+PIQj7TMMs4z2sex5PNlpcvc8rj/TKP"
HOURS = 3600.0
MAX_USER_DATA = 16384
"""Most bytes that EC2 accepts."""


def ran(script: str, tmp_path: Path, *, broken: str = "") -> list[str]:
    """The script, on a machine whose files are in a folder and whose programs say what they were told; `broken` fails."""
    programs, root, said = (tmp_path / each for each in ("bin", "root", "said"))
    for folder in (programs, root / "etc/ssh", root / "dev"):
        folder.mkdir(parents=True, exist_ok=True)
    for name in ("shutdown", "python3", "apt-get", "setsid", "ssh-keygen", "chmod", "sleep"):
        fails = "exit 1" if name == broken else ""
        real = '/bin/chmod "$@"' if name == "chmod" else ""
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {said}\n{fails}\n{real}\n')
        (programs / name).chmod(0o755)
    (root / "etc/ssh/ssh_host_ed25519_key.pub").write_text(f"{KEY} root@machine\n")
    for place in ("/var/lib", "/etc/ssh", "/dev/console"):
        script = script.replace(place, f"{root}{place}")
    (tmp_path / "script").write_text(script)
    return called(tmp_path, Path("sh"), str(tmp_path / "script"))


def called(tmp_path: Path, program: Path, *words: str) -> list[str]:
    """A program of that machine; what it has the others do."""
    said = tmp_path / "said"
    said.write_text("")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    subprocess.run([program, *words], env={"PATH": path}, check=False)
    return said.read_text().splitlines()


def script(hours: float = 2.0, *, spot: bool = False) -> str:
    return user_data(time.time() + hours * HOURS, round(hours * 60), "ubuntu", spot=spot)


def test_the_end_is_armed_first_and_the_key_said_last(tmp_path: Path) -> None:
    said = ran(script(), tmp_path)
    assert said[0] == "shutdown --no-wall -P +120"
    console = (tmp_path / "root/dev/console").read_text()
    assert (host_key_in(console), console.count(KEY)) == (KEY, 4)
    assert "shutdown --no-wall -P now" not in said


@pytest.mark.parametrize("broken", ["shutdown", "chmod"])
def test_a_failing_start_script_shuts_the_machine_down(tmp_path: Path, broken: str) -> None:
    said = ran(script(), tmp_path, broken=broken)
    assert said[-1] == "shutdown --no-wall -P now"
    assert not (tmp_path / "root/dev/console").exists()


@pytest.mark.parametrize(
    ("deadline_in", "minutes", "expected"),
    [(89.5 * 60, 120, "90"), (-5, 120, "0"), (10 * 24 * HOURS, 120, "120")],
    ids=["later", "over", "a clock that is wrong"],
)
def test_each_later_start_arms_what_is_left(
    tmp_path: Path, deadline_in: float, minutes: int, expected: str
) -> None:
    ran(user_data(time.time() + deadline_in, minutes, "ubuntu", spot=False), tmp_path)
    assert started_again(tmp_path) == [f"shutdown --no-wall -P +{expected}"]


def started_again(tmp_path: Path) -> list[str]:
    again = tmp_path / "root/var/lib/cloud/scripts/per-boot/groupwise"
    assert os.access(again, os.X_OK)
    return called(tmp_path, again)


def test_its_end_may_be_moved_and_stays_so_at_later_starts(tmp_path: Path) -> None:
    ran(script(hours=1.0), tmp_path)
    arm = tmp_path / f"root{ARM}"
    later = f"{time.time() + 119.5 * 60:.0f}"
    assert called(tmp_path, arm, later, "180") == ["shutdown --no-wall -P +120"]
    assert started_again(tmp_path) == ["shutdown --no-wall -P +120"]
    assert called(tmp_path, arm, later, "90") == ["shutdown --no-wall -P +90"]


def test_only_a_spot_machine_asks_whether_it_is_wanted_back(tmp_path: Path) -> None:
    assert not any(line.startswith("setsid") for line in ran(script(), tmp_path))
    ran(script(spot=True), tmp_path)
    said = tmp_path / "said"  # written by a background process
    wait_until(lambda: "setsid python3 -I " in said.read_text(), details=said.read_text)
    assert "spot_notice.py" in (tmp_path / "said").read_text()
    written = (tmp_path / "root/var/lib/groupwise/spot_notice.py").read_text()
    compile(written, "spot_notice.py", "exec")
    assert "instance-action" in written
    assert len(script(spot=True).encode()) < MAX_USER_DATA


OTHER_KEY = KEY.replace("TKP", "TKQ")
LINE = console_line(KEY)
KERNEL = "[   21.345678] audit: type=1400 apparmor=<STATUS>\r\n"


@pytest.mark.parametrize("console", [
    f"boot\r\n{LINE}\r\n",
    f"{LINE[:50]}{KERNEL}{LINE[50:]}",
    f"{LINE[:80]}\r\n{LINE[80:]}",
    f"\x1b[0;32m{LINE[:30]}\x1b[0m{LINE[30:]}",
    f"{LINE[:60]}cloud-init[812]: Generating{LINE[60:]}\n{LINE}\n{LINE[:99]}",
    f"{console_line(OTHER_KEY)}\n-----BEGIN SSH HOST KEY KEYS-----\n{OTHER_KEY} root@ip\n{LINE}\n{LINE}",
], ids=["CR", "kernel", "wrapped", "colours", "spoilt, whole, cut", "several keys"])  # fmt: skip
def test_the_key_is_read_whatever_else_is_on_the_console(console: str) -> None:
    assert host_key_in(console) == KEY


@pytest.mark.parametrize("console", [
    "", LINE[:-1], f"{KEY} somebody@else", LINE.replace("KQAN", "abcd"),
    f"{LINE[:60]}systemd{LINE[60:]}", f"{LINE[:60]}systemd{LINE[67:]}",
])  # fmt: skip
def test_an_incomplete_host_key_is_ignored(console: str) -> None:
    assert host_key_in(console) is None
