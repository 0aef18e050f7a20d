"""A waiting job with a secret, and Ctrl-C by its watcher: the same on every place."""

import hashlib
import signal
from pathlib import Path

from tests.integration.launch.person import Person

WAITS = """\
import hashlib, os, pathlib, signal, sys
def end(number, frame):
    pathlib.Path("outputs/ended").write_text("in order")
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
pathlib.Path("outputs").mkdir()
secret = os.environ.get("TOKEN", "")
pathlib.Path("outputs/told").write_text(hashlib.sha256(secret.encode()).hexdigest())
print("it waits", flush=True)
while True:
    signal.pause()
"""
CANARY = "canary-of-a-secret-5150"


def ctrl_c_ends_it(person: Person, *place: str, far: tuple[Path, ...] = ()) -> None:
    """It ends in order, its results are here, and its secret is nowhere, folders of the `far` side among that."""
    (person.project / "job.py").write_text(WAITS)
    (person.project / "secret.env").write_text(f"TOKEN={CANARY}\n")
    words = ("--name", "stopped", "--env-file", "secret.env", "--script", "job.py")
    watching = person.begins(*place, *words)
    person.sees("it waits")
    watching.send_signal(signal.SIGINT)
    assert watching.wait(240) == 130
    said = person.said()
    assert said.count("it waits") == 1
    assert CANARY not in said
    outputs = person.project / "launches/stopped/outputs"
    assert (outputs / "ended").read_text() == "in order"
    assert (outputs / "told").read_text() == hashlib.sha256(CANARY.encode()).hexdigest()
    assert person.result("stopped")["state"] == "cancelled"
    assert person.holding(CANARY, *far) == []
