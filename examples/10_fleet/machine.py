"""Plays a machine of a fleet: an SSH server on this one, for this user only.

    python examples/10_fleet/machine.py FOLDER PORT

It prints the command that adds it. Ctrl-C makes it unreachable, and the same command brings it back. What runs there goes on meanwhile.
"""

import contextlib
import getpass
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

folder, port = Path(sys.argv[1]).absolute(), int(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
if sshd is None:
    sys.exit("there is no sshd here: install the package openssh-server")


def listens() -> bool:
    """Whether a program listens at the port. To connect would make sshd complain of a login without a name."""
    local, any_other, listening = f"0100007F:{port:04X}", "00000000:0000", "0A"
    return f"{local} {any_other} {listening}" in Path("/proc/net/tcp").read_text()


if listens():
    sys.exit(f"another program uses the port {port}: choose another one")
for key in (folder / "login", folder / "host_key"):
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
settings = [
    f"Port={port}",
    "ListenAddress=127.0.0.1",
    f'HostKey="{folder}/host_key"',
    f'AuthorizedKeysFile="{folder}/login.pub"',
    "PasswordAuthentication=no",
    "KbdInteractiveAuthentication=no",
    "StrictModes=no",
    "PidFile=none",
    "LogLevel=FATAL",  # not that a client left because it does not trust the host key yet
]
# root's sshd needs this folder, and a container may lack it
if os.geteuid() == 0:
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
# in a process group of its own, so that Ctrl-C comes to this program alone
server = subprocess.Popen(
    [sshd, "-D", "-e", "-f", "/dev/null", *(f"-o{each}" for each in settings)],
    start_new_session=True,
)

shown = subprocess.run(
    ["ssh-keygen", "-lf", folder / "host_key.pub"], check=True, capture_output=True, text=True
)
options = {
    "--host": f"{getpass.getuser()}@127.0.0.1:{port}",
    "--key": f"{folder}/login",
    "--workdir": f"{folder}/work",
    "--trust": shown.stdout.split()[1],
}
# jobs of the training kinds need Groupwise there
if importlib.util.find_spec("groupwise"):
    options["--python"] = sys.executable
while server.poll() is None and not listens():
    time.sleep(0.05)
if server.poll() is None:
    words = [word for option in options.items() for word in option]
    print(f"groupwise fleet vm add {shlex.quote(folder.name)} {shlex.join(words)}", flush=True)

for sent in (signal.SIGINT, signal.SIGTERM):
    signal.signal(sent, signal.default_int_handler)
try:
    server.wait()
    sys.exit("sshd has ended by itself; it says above why")
except KeyboardInterrupt:
    connections = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    for process in (server.pid, *map(int, connections)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    server.wait()
