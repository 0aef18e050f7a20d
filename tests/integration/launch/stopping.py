"""A job that waits, with a secret, and Ctrl-C of whoever watches: it is the same on every place."""

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


def asked(person: Person, name: str) -> tuple[str, ...]:
    """The words after the place."""
    (person.project / "job.py").write_text(WAITS)
    (person.project / "secret.env").write_text(f"TOKEN={CANARY}\n")
    return ("--name", name, "--env-file", "secret.env", "--script", "job.py")


def assert_stopped(person: Person, name: str, said: str, *places: Path) -> None:
    """It ended in order, its results are here, and its secret is nowhere, `places` of the far side among that."""
    assert f"stopping {name}" in said, said
    assert said.count("it waits") == 1
    assert CANARY not in said
    outputs = person.project / "launches" / name / "outputs"
    assert (outputs / "ended").read_text() == "in order"
    assert (outputs / "told").read_text() == hashlib.sha256(CANARY.encode()).hexdigest()
    assert person.result(name)["state"] == "cancelled"
    assert person.holding(CANARY, *places) == []


def ctrl_c_ends_it(person: Person, *place: str, far: tuple[Path, ...] = ()) -> None:
    """Typed in a terminal of its own."""
    name = "stopped"
    watching = person.begins(*place, *asked(person, name))
    person.sees("it waits")
    watching.send_signal(signal.SIGINT)
    assert watching.wait(240) == 130
    assert_stopped(person, name, person.said(), *far)
