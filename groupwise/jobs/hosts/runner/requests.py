"""Answers one request. The bootstrap calls `answer_request`; an engine's `begin.sh` runs this file as a program."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.artefacts import (
    verb_gather,
    verb_keep,
    verb_log,
    verb_manifest,
    verb_read,
)
from groupwise.jobs.hosts.runner.attempt_folder import verb_forget, verb_void
from groupwise.jobs.hosts.runner.blobs import verb_join, verb_missing, verb_put
from groupwise.jobs.hosts.runner.ending import verb_kill, verb_sweep
from groupwise.jobs.hosts.runner.files import is_disk_full
from groupwise.jobs.hosts.runner.gpu_locks import verb_release
from groupwise.jobs.hosts.runner.launch import supervise, verb_launch
from groupwise.jobs.hosts.runner.observe import (
    verb_hello,
    verb_observe,
    verb_status,
    verb_touch,
    verb_wait,
)
from groupwise.jobs.hosts.runner.processes import find_program, path_of
from groupwise.jobs.hosts.runner.protocol import (
    PROTOCOL,
    SPOKEN,
    RequestProgress,
    RequestRejected,
    arguments_of,
    as_bytes,
    seconds_of,
    text_of,
    traceback_summary,
)
from groupwise.jobs.hosts.runner.root import root_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, BinaryIO, NoReturn

    from groupwise.jobs.hosts.runner.protocol import VerbAnswer
    from groupwise.jobs.hosts.runner.root import Root

RUN_TIMEOUT = 60.0
LARGEST_OUTPUT = 4 << 20
"""Most bytes that `run` returns of a program's standard output, and of its standard error."""
SIGN_EVERY = 10.0
"""Seconds between signs of life."""


def verb_run(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Run a program of the machine and wait for its end, RUN_TIMEOUT seconds at most."""
    import subprocess

    arguments = arguments_of(body.get("arguments"))
    program = find_program(arguments[0], path_of(None))
    if program is None:
        raise RequestRejected("unknown_program", f"there is no program {arguments[0]:.200} on PATH")
    timeout = min(seconds_of(body, "timeout", RUN_TIMEOUT), RUN_TIMEOUT)
    with subprocess.Popen(
        [program, *arguments[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=os.path.expanduser("~"),
        start_new_session=True,
    ) as running:
        code: int | None = None
        try:
            out, err = running.communicate(timeout=timeout)
            code = running.returncode
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            out, err = running.communicate()
    texts = [output[:LARGEST_OUTPUT].decode("utf-8", "replace") for output in (out, err)]
    return {"code": code, "out": texts[0], "err": texts[1]}, b""


VERBS: dict[str, Callable[[Root, dict[str, Any], BinaryIO], VerbAnswer]] = {
    "hello": verb_hello,
    "observe": verb_observe,
    "missing": verb_missing,
    "put": verb_put,
    "join": verb_join,
    "launch": verb_launch,
    "void": verb_void,
    "status": verb_status,
    "wait": verb_wait,
    "touch": verb_touch,
    "kill": verb_kill,
    "run": verb_run,
    "log": verb_log,
    "manifest": verb_manifest,
    "read": verb_read,
    "gather": verb_gather,
    "keep": verb_keep,
    "release": verb_release,
    "forget": verb_forget,
    "sweep": verb_sweep,
}
LONG = frozenset({"join", "keep", "manifest"})
"""Verbs that take long, because they read all data of a job."""


def answer_request(body: dict[str, Any], payload: BinaryIO) -> NoReturn:
    """Answer one request. The bootstrap calls this once it has verified length and hash of the body."""
    os.umask(0o077)
    try:
        if body.get("protocol") not in SPOKEN:
            raise RequestRejected(
                "protocol", "this runner speaks {}".format(", ".join(map(str, SPOKEN)))
            )
        verb = VERBS.get(text_of(body, "verb"))
        if verb is None:
            raise RequestRejected("unknown_verb", "there are: {}".format(", ".join(VERBS)))
        slow = body["verb"] in LONG or body.get("engine")
        with signs_of_life() if slow else contextlib.nullcontext():
            answer, data = verb(root_of(body), body, payload)
        answer = {"ok": True, **answer}
    except RequestRejected as refusal:
        answer, data = {"error": refusal.body}, b""
    except OSError as error:
        code = "disk_full" if is_disk_full(error) else "os_error"
        answer, data = {"error": {"code": code, "message": str(error)}}, b""
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        # The body comes from outside and may contain anything. Do not include the error's message: it may contain a secret value.
        location = f"{type(error).__name__} at {traceback_summary(error)}"
        message = f"a field is missing or of another kind than expected ({location})"
        answer, data = {"error": {"code": "bad_request", "message": message}}, b""
    send_answer(answer, data)


@contextlib.contextmanager
def signs_of_life() -> Generator[None, None, None]:
    """Send signs of life from a thread while the request makes progress."""
    import threading

    working = threading.Lock()

    def send_signs() -> None:
        work_done = RequestProgress.done
        with contextlib.suppress(OSError):  # the caller disconnected; it will ask again
            while not working.acquire(timeout=SIGN_EVERY):
                work_done = send_sign(work_done)

    thread = threading.Thread(target=send_signs)
    try:
        with working:
            with contextlib.suppress(RuntimeError):  # the user's limit of threads is reached
                thread.start()
            yield
    finally:
        if thread.ident is not None:
            thread.join()  # no sign of life may be written into the answer


def send_sign(done_before: int) -> int:
    """Send a sign of life if more work was done than `done_before`; returns the amount of work done now."""
    done = RequestProgress.done
    if done != done_before:
        os.write(1, b"\n")
    return done


def send_answer(answer: dict[str, Any], data: bytes) -> NoReturn:
    """Write the answer and exit at once, without Python's clean-up."""
    text = as_bytes(answer)
    sha = hashlib.sha256(text).hexdigest()
    head = f"GROUPWISE-ANSWER {PROTOCOL} {len(text)} {sha} {len(data)}\n"
    unsent = memoryview(head.encode("ascii") + text + data)
    try:
        while unsent:
            unsent = unsent[os.write(1, unsent) :]
    except OSError:
        pass  # the caller has disconnected
    os._exit(0)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1]))
