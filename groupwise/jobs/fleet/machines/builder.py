"""Makes a Python environment on a machine. This file is sent there as the command of one attempt (`prepare.py`), together with
`order.json`, the lock and the wheels. It needs Python 3.8 and nothing else.

An environment is `<folder>/<name>`, named by a hash of its intended contents. It is built in its final place, since environments cannot be
moved, and `environment.json` is written in it last: without that file it is incomplete, and the next build removes it and starts over. Each
name has one lock, held by the builder and by every pip that it has started; a second builder waits, and finds the environment made. An
environment that is complete and works is kept, so repeating the build takes a second.

An environment that a process still uses is never removed, neither to be rebuilt nor to free space. Pruning also spares environments that
were made or found within the last hour: the caller has yet to record in the database that a machine's jobs run with them.

`result.json` in the working folder holds the result: {"python", "version", "groupwise", "made", "at"} or {"problem"}. Secret values are
only in the environment of pip; they, and passwords in addresses, are removed from its output.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from functools import partial
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import Request, urlopen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MARKER = "environment.json"
NAME = re.compile(r"[0-9a-f]{20}")
TEMPORARY = ".tmp"
"""Suffix of the folder in which pip unpacks: /tmp is often too small for it."""
MAX_OUTPUT_LINES = 60
"""Lines of pip's output that are kept, to find the cause of a failure."""
PRUNE_AFTER_SECONDS = 3600.0
"""Seconds for which an environment that was just made or found is not pruned; the caller records it well before, or builds again."""
DISK_FULL_MB = 4
"""A disk with less free space than this many MiB counts as full."""
IMPORT_TIMEOUT = 300.0
"""Timeout in seconds of the trial import, which is slow on a slow disk."""
SURVEY_SECONDS = 5.0
"""Timeout in seconds of one request to the package index in a survey."""
PINNED_REQUIREMENT = re.compile(
    r"^Requires-Dist: ([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)\s*;?\s*(.*)$", re.MULTILINE
)
"""A line of a wheel's metadata that requires one release: name, release, marker."""
PASSWORD = re.compile(r"(://)[^/@\s]+@")
PROBE = "import sys; print('.'.join(map(str, sys.version_info[:3])), sys.prefix != sys.base_prefix)"
IMPORT_PROGRAM = (
    "import json, sys, importlib.metadata as m, groupwise;"
    "json.dump({'groupwise': groupwise.__version__, 'installed': m.version('groupwise')}, sys.stdout)"
)
FAILURE_ADVICE = (
    (
        r"No space left on device|Errno 28|Disk quota exceeded",
        "the disk there is full: {free} MB are free in {folder}. Make room (pip's own cache is ~/.cache/pip; "
        "`vm prepare --prune` removes environments that nothing uses), or give the machine another --workdir.",
    ),
    (
        r"DO NOT MATCH THE HASHES|hash(es)? (is|are) required|--require-hashes",
        "what the index has is not what the lock says, by its hashes: find out which of the two was changed before you make a new lock.",
    ),
    (
        r"Cannot connect to proxy|ProxyError",
        "the proxy does not answer; --env HTTPS_PROXY=… names another one.",
    ),
    (
        r"\b401\b|\b403\b|User for .*:|Credentials",
        "the index requires a name and a password: give the address with them as the variable PIP_INDEX_URL, so that they are in no "
        "argument list (`vm prepare --secret PIP_INDEX_URL=env:NAME`, or a line of the file of `launch --env-file`).",
    ),
    (
        r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|Connection (refused|timed out)|ReadTimeout",
        "the machine does not reach the package index. --index-url names one that it reaches, --env HTTPS_PROXY=… a proxy, and "
        "--wheelhouse sends everything from here.",
    ),
    (
        r"No matching distribution found|Could not find a version",
        "pip there finds no such release for its Python and processor: see its words above. --python chooses the interpreter, "
        "--index-url and --extra-index-url where pip looks, --lock other releases.",
    ),
    (
        r"ResolutionImpossible|conflicting dependencies",
        "the lock contradicts itself: see pip's words above.",
    ),
)
"""Patterns in pip's output, with the advice for each; the first match counts."""


class Problem(Exception):
    """The environment cannot be made; the message is for users."""


class Order:
    """The fields of `order.json`."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.prune: bool = document.get("prune", False)
        self.folder: str = document["folder"]
        """The folder of all environments of the machine."""
        self.keep: list[str] = document.get("keep", [])
        """Names of environments that must not be removed."""
        self.asked_at: float = document.get("asked_at", time.time())
        """Time by the machine's clock, taken before the names to keep were read."""
        self.name: str = document.get("name", "")
        self.pythons: list[str] = document.get("pythons", [])
        """Programs and paths, in the order in which they are tried."""
        self.least: list[int] = document.get("least", [])
        """The oldest sufficient version of Python, as [major, minor]."""
        self.groupwise: str = document.get("groupwise", "")
        """File name of the groupwise wheel; like `wheels` it is in the folder `wheels`."""
        self.wheel_sha256: str = document.get("wheel_sha256", "")
        self.wheels: list[str] = document.get("wheels", [])
        self.pins: int = document.get("pins", 0)
        """Number of lines in the lock, `lock.txt`."""
        self.hashed: bool = document.get("hashed", False)
        self.offline: bool = document.get("offline", False)
        """Install from the folder `wheelhouse` only."""
        self.index_url: str | None = document.get("index_url")
        self.extra_index_urls: list[str] = document.get("extra_index_urls", [])
        self.releases: dict[str, str] = document.get("releases", {})
        """Release of each distribution in the lock that names one, for `survey`."""
        self.secrets: list[str] = document.get("secrets", [])
        """Names of variables whose values are hidden in the output."""


def main() -> int:
    """Build or prune, as `order.json` requests."""
    with open("order.json", encoding="utf-8") as file:
        order = Order(json.load(file))
    os.umask(0o022)
    try:
        if order.prune:
            prune(order)
        else:
            finish({**build(order), "at": time.time()})
        return 0
    except Problem as problem:
        return fail(str(problem))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return fail(advice("No space left on device", order) or "")
        return fail(str(error))


def finish(result: dict[str, Any]) -> None:
    """Write the result for the caller."""
    with open("result.json", "w", encoding="utf-8") as file:
        json.dump(result, file)


def fail(problem: str) -> int:
    """Write the problem for the caller. Returns exit code 1, which reaches the caller even if the disk has no room for the file."""
    log(problem)
    with contextlib.suppress(OSError):
        finish({"problem": problem})
    return 1


def log(text: str) -> None:
    """Write a line of the log, which is followed while it is written."""
    sys.stdout.buffer.write((text + "\n").encode("utf-8", "replace"))  # independent of the locale
    sys.stdout.buffer.flush()


# --- building -----------------------------------------------------------------------------------


def build(order: Order) -> dict[str, Any]:
    """Make the environment, unless it exists."""
    folder, name = order.folder, order.name
    path = os.path.join(folder, name)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    lock = take_lock(folder, name, wait=True)
    assert lock is not None, "a waiting call returns the lock"
    try:
        marker = complete_environment(path)
        if marker:
            log(f"it is there already: {path}")
            os.utime(os.path.join(path, MARKER))
            return {**marker, "made": False}
        clear(path)
        try:
            return make(order, path, lock)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)  # a full disk may be the cause
            raise
        finally:
            shutil.rmtree(path + TEMPORARY, ignore_errors=True)
    finally:
        os.close(lock)


def take_lock(folder: str, name: str, wait: bool) -> int | None:
    """Lock a name, until this process and every child that inherits the descriptor have ended. None if it is taken and `wait` is False."""
    fd = os.open(os.path.join(folder, name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BlockingIOError:
        pass
    if not wait:
        os.close(fd)
        return None
    log("the same environment is being made by another `vm prepare`: waiting for its end")
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def complete_environment(path: str) -> dict[str, Any] | None:
    """The marker's content, if the marker exists and the groupwise release that it names can be imported there."""
    try:
        with open(os.path.join(path, MARKER), encoding="utf-8") as file:
            marker = dict(json.load(file))
    except (OSError, ValueError):
        return None
    version, problem = import_groupwise(path)
    if version == marker.get("groupwise"):
        return marker
    log(f"{path} was complete and does not work any more, so it is made again: {problem}")
    return None


def clear(path: str) -> None:
    """Remove the environment, marker first: a half-removed one then never looks complete."""
    if not os.path.lexists(path):
        return
    users = users_of(path)
    if users:
        raise Problem(
            f"{path} has to be made again, and processes use it: {', '.join(users[:5])}. "
            "Let them end (`groupwise fleet vm drain`), then prepare the machine again."
        )
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, MARKER))
    shutil.rmtree(path)


def make(order: Order, path: str, lock: int) -> dict[str, Any]:
    """Build the environment; the marker is written after everything else is on disk."""
    started_at = time.monotonic()
    program, version = interpreter(order)
    log(f"1/4 an environment with Python {version} ({program}) in {path}")
    pip = Pip(order, path, lock)
    pip.run([program, "-m", "venv", "--without-pip", path], "no environment can be made")
    # A separate step, because venv hides the output of ensurepip.
    pip.run([pip.python, "-m", "ensurepip", "--upgrade", "--default-pip"], "it gets no pip")
    log("2/4 groupwise, as it is installed where `vm prepare` was called")
    pip.install("--no-index", "--no-deps", os.path.join("wheels", order.groupwise))
    log(f"3/4 {order.pins} releases as locked")
    if order.pins:
        pip.install("-r", "lock.txt", *(("--require-hashes",) if order.hashed else ()))
    if order.wheels:
        wheel_paths = [os.path.join("wheels", wheel) for wheel in order.wheels]
        pip.install("--no-index", "--no-deps", *wheel_paths)
    log("4/4 looking whether it works")
    pip.check()
    groupwise_version, problem = import_groupwise(path)
    if groupwise_version is None:
        raise Problem(f"it was made, and groupwise cannot be imported there: {problem}")
    environment = {
        "python": os.path.join(path, "bin", "python"),
        "version": version,
        "groupwise": groupwise_version,
        "wheel": order.wheel_sha256,
        "made_at": time.time(),
    }
    os.sync()
    marker = os.path.join(path, MARKER)
    with open(marker + ".new", "w", encoding="utf-8") as file:
        json.dump(environment, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(marker + ".new", marker)
    os.sync()
    log(f"made in {time.monotonic() - started_at:.0f} s")
    return {**environment, "made": True}


def import_groupwise(path: str) -> tuple[str | None, str]:
    """Import groupwise there: its release and "", or None and the reason."""
    command = [os.path.join(path, "bin", "python"), "-I", "-c", IMPORT_PROGRAM]
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=IMPORT_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    try:
        return str(json.loads(process.stdout)["groupwise"]), ""
    except (ValueError, KeyError, TypeError):
        lines = process.stderr.decode("utf-8", "replace").strip().splitlines()
        return None, lines[-1] if lines else f"exit code {process.returncode}"


# --- the interpreter ----------------------------------------------------------------------------


def interpreter(order: Order) -> tuple[str, str]:
    """The first interpreter of `order.pythons` that is new enough, and its version."""
    minimum = ".".join(map(str, order.least))
    too_old: list[str] = []
    for name in order.pythons:
        program = os.path.expanduser(name) if "/" in name else shutil.which(name)
        version = version_of(program) if program else None
        if program is None or version is None:
            continue
        if tuple(map(int, version.split(".")[:2])) >= tuple(order.least):
            return program, version
        too_old.append(f"{program} is Python {version}")
    names = ", ".join(order.pythons)
    explanation = "; ".join(dict.fromkeys(too_old)) or "none of these is there"
    raise Problem(
        f"groupwise needs Python {minimum} or newer, and the machine has none among {names}: {explanation}. Install one there (Debian and "
        f"Ubuntu: `apt install python{minimum} python{minimum}-venv`; without root: `uv python install {minimum}`), or name it: "
        f"--python /path/to/python{minimum}"
    )


def version_of(program: str) -> str | None:
    """The version of an interpreter; None if it is not a working Python."""
    try:
        output = subprocess.run(
            [program, "-I", "-c", PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        ).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return output[0].decode("ascii", "replace") if len(output) == 2 else None


# --- what a build would do ----------------------------------------------------------------------


def survey(order: Order) -> dict[str, Any]:
    """Report what `build` would find here and download; change nothing. `files`: size in bytes of each file that pip would download, by
    its name; empty if the index does not say."""
    existing = folder = os.path.expanduser(order.folder)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    found: dict[str, Any] = {
        "made": os.path.isfile(os.path.join(folder, order.name, MARKER)),
        "free": shutil.disk_usage(existing).free,
        "folder": folder,
        "files": {},
    }
    try:
        program, version = interpreter(order)
    except Problem as problem:
        return {**found, "problem": str(problem)}
    found.update(python=program, version=version)
    trial = [program, "-I", "-c", "import ensurepip, venv"]
    if subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
        found["problem"] = advice("No module named ensurepip", order)
    if "PIP_INDEX_URL" in order.secrets:
        found["unknown"] = "the address of its package index is a secret"
    elif not found["made"] and not order.offline:
        index = order.index_url or os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
        found["index"] = PASSWORD.sub(r"\1****@", index)
        try:
            found["files"] = download_sizes(index, order.releases, version)
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            found["unknown"] = str(getattr(error, "reason", error))
    return found


def download_sizes(index: str, releases: dict[str, str], python: str) -> dict[str, int]:
    """Sizes in bytes, by name, of the files that pip would download for these releases, and for those that the index's build of torch
    requires."""
    from concurrent.futures import ThreadPoolExecutor

    choose = partial(choose_file, index, python)
    with ThreadPoolExecutor(16) as pool:
        files = [file for file in pool.map(choose, releases, releases.values()) if file]
        torch = next((file for file in files if file["filename"].startswith("torch-")), None)
        if torch and (torch.get("core-metadata") or torch.get("dist-info-metadata")):
            address = urljoin(f"{index.rstrip('/')}/torch/", torch["url"]) + ".metadata"
            with open_url(address) as response:
                metadata = response.read(1 << 20).decode("utf-8", "replace")
            machine = os.uname().machine
            required = {
                name: release
                for name, release, marker in PINNED_REQUIREMENT.findall(metadata)
                if name not in releases
                and "extra" not in marker
                and ("machine" not in marker or machine in marker)
                and ("Linux" in marker or "linux" in marker or not marker)
            }
            files += [file for file in pool.map(choose, required, required.values()) if file]
    return {file["filename"]: file["size"] for file in files if file.get("size")}


def open_url(url: str) -> Any:
    """Open an address of the index. A login in it goes into a header, as pip has it: urllib takes it for a part of the host, and repeats
    it in its error."""
    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    request = Request(urlunsplit(parts._replace(netloc=host)))
    request.add_header("Accept", "application/vnd.pypi.simple.v1+json, */*;q=0.1")
    if login:
        encoded = base64.b64encode(unquote(login).encode()).decode("ascii")
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    return urlopen(request, timeout=SURVEY_SECONDS)


def choose_file(index: str, python: str, name: str, release: str) -> dict[str, Any] | None:
    """The index's entry for the file of a release that fits this machine best: a wheel, else the source; None if there is none."""
    try:
        with open_url(f"{index.rstrip('/')}/{name}/") as response:
            files: list[dict[str, Any]] = json.load(response)["files"]
    except HTTPError as error:
        if error.code == 404:
            return None
        raise
    major, minor = python.split(".")[:2]
    ranked: list[tuple[int, str, dict[str, Any]]] = []
    for file in files:
        stem, is_wheel, _ = file["filename"].partition(".whl")
        parts = stem.split("-")
        if not is_wheel:
            if stem.endswith(f"-{release}.tar.gz"):
                ranked.append((0, stem, file))
            continue
        tag, abi, platform = parts[-3:]
        fits = platform == "any" or ("manylinux" in platform and os.uname().machine in platform)
        stable = abi == "abi3" and tag.startswith("cp3") and int(tag[3:]) <= int(minor)
        rank = 3 if tag == f"cp{major}{minor}" else 2 if stable else 1 if "py3" in tag else 0
        if len(parts) >= 5 and parts[1].partition("+")[0] == release and fits and rank:
            ranked.append((rank, stem, file))
    return max(ranked, key=lambda each: each[:2])[2] if ranked else None


# --- pip ----------------------------------------------------------------------------------------


class Pip:
    """Runs the environment's pip, and copies its output to the log."""

    def __init__(self, order: Order, place: str, lock: int) -> None:
        self.order, self.place, self.lock = order, place, lock
        self.python = os.path.join(place, "bin", "python")
        self.hidden = sorted(
            (os.environ[name] for name in order.secrets if os.environ.get(name)), key=len
        )[::-1]
        temporary = place + TEMPORARY
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)
        self.environment = {**os.environ, "TMPDIR": temporary, "PIP_NO_INPUT": "1"}
        self.environment.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_PROGRESS_BAR="off")
        if order.index_url:
            self.environment["PIP_INDEX_URL"] = order.index_url
        if order.extra_index_urls:
            self.environment["PIP_EXTRA_INDEX_URL"] = " ".join(order.extra_index_urls)

    def install(self, *arguments: str) -> None:
        """Install from the wheelhouse only, if there is one; the settings of the machine's pip are then ignored."""
        index_options: list[str] = []
        if self.order.offline:
            self.environment["PIP_CONFIG_FILE"] = os.devnull
            index_options = ["--no-index", "--find-links", "wheelhouse"]
        self.run(
            [self.python, "-m", "pip", "install", *index_options, *arguments],
            "pip could not install everything",
        )

    def check(self) -> None:
        """Check that the releases fit together. Only missing requirements of groupwise itself are an error: then the lock is wrong."""
        code, lines = self.output_of([self.python, "-m", "pip", "check"])
        missing = [line for line in lines if line.startswith("groupwise ")]
        if missing:
            raise Problem(
                f"the lock has not all that groupwise itself needs: {'; '.join(missing)}. Without --lock it is made from what is "
                "installed where `vm prepare` is called."
            )
        if code:
            log("  not all of it fits together, pip says. It is used all the same.")

    def run(self, command: Sequence[str], failure: str) -> None:
        """Run a command of the build. If it fails, raises Problem with advice."""
        code, lines = self.output_of(command)
        if code:
            last_line = lines[-1] if lines else f"exit code {code}"
            explanation = advice("\n".join(lines), self.order) or last_line
            raise Problem(f"{failure}: {explanation}")

    def output_of(self, command: Sequence[str]) -> tuple[int, list[str]]:
        """The command's exit code, and the last lines of its output. It inherits the lock: no other build starts while it lives."""
        last_lines: deque[str] = deque(maxlen=MAX_OUTPUT_LINES)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment,
            pass_fds=(self.lock,),
        )
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                text = self.redact(line.decode("utf-8", "replace").rstrip())
                if text:
                    log("  " + text)
                    last_lines.append(text)
        return process.wait(), list(last_lines)

    def redact(self, line: str) -> str:
        """The line with passwords and secret values hidden."""
        for value in self.hidden:
            line = line.replace(value, "****")
        return PASSWORD.sub(r"\1****@", line)


def advice(text: str, order: Order) -> str | None:
    """Advice on a failure with this output; None if the cause is not known."""
    if "ensurepip is not available" in text or "No module named ensurepip" in text:
        return (
            "this Python cannot make environments: its module ensurepip is missing. On Debian and Ubuntu, "
            "`apt install python3-venv` there (python3.12-venv for python3.12, and so on); or name another one by --python."
        )
    disk = os.statvfs(order.folder)
    free_mib = disk.f_bavail * disk.f_frsize >> 20  # MiB
    if free_mib < DISK_FULL_MB:
        text = "No space left on device"  # not every program reports that
    for pattern, message in FAILURE_ADVICE:
        if re.search(pattern, text):
            return message.format(free=free_mib, folder=order.folder)
    return None


# --- removing -----------------------------------------------------------------------------------


def prune(order: Order) -> None:
    """Remove environments, except those to keep, those being built, recent ones, and those that a process uses. The temporary folder of a
    killed build is removed with its environment."""
    folder = order.folder
    removed: list[str] = []
    used: list[str] = []
    recent: list[str] = []
    matches = [
        re.fullmatch(f"({NAME.pattern})({re.escape(TEMPORARY)})?", name)
        for name in os.listdir(folder)
    ]
    for name in sorted({match[1] for match in matches if match}):
        path = os.path.join(folder, name)
        if name in order.keep:
            continue
        lock = take_lock(folder, name, wait=False)
        if lock is None:
            continue
        try:
            if is_recent(path, order.asked_at):
                recent.append(name)
                continue
            if users_of(path):
                used.append(name)
                continue
            clear(path)
            shutil.rmtree(path + TEMPORARY, ignore_errors=True)
            removed.append(name)
        finally:
            os.close(lock)
    finish({"removed": removed, "used": used, "recent": recent})


def is_recent(path: str, asked_at: float) -> bool:
    """True if it is complete, and so new that its user may not have recorded it yet when the names to keep were read."""
    try:
        return os.stat(os.path.join(path, MARKER)).st_mtime + PRUNE_AFTER_SECONDS > asked_at
    except FileNotFoundError:
        return False


def users_of(path: str) -> list[str]:
    """Processes that were started from it or have a file of it mapped, as far as this user may read /proc."""
    prefix = os.fsencode(path + "/")
    users: list[str] = []
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        # Its command line, its environment (a job's PATH starts with the environment's folder), and its mapped files.
        if any(
            prefix in of_process(pid, proc_file) for proc_file in ("cmdline", "environ", "maps")
        ):
            program = of_process(pid, "comm").decode("utf-8", "replace").strip()
            users.append(f"{program or 'a process'} (pid {pid})")
    return users


def of_process(pid: str, name: str) -> bytes:
    """A file of /proc; empty if this user may not read it, or the process has ended."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


if __name__ == "__main__":
    sys.exit(main())
