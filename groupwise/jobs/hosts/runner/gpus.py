"""GPUs as nvidia-smi reports them, and the processes on them. The tool may be missing, hang, or print errors instead of numbers."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.locks import take_lock
from groupwise.jobs.hosts.runner.processes import find_program, marker_of
from groupwise.jobs.hosts.runner.protocol import GPU_UUID, arguments_of, seconds_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from groupwise.jobs.hosts.runner.root import Root

PROBE_TIMEOUT = 10.0
"""Default timeout in seconds of one round of the GPU probe."""
PROBES = 4
GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "mig.mode.current",
)
OLD_GPU_FIELDS = GPU_FIELDS[:-1]
"""Fields for drivers that do not know MIG: they reject a query with an unknown field."""
APP_FIELDS = ("gpu_uuid", "pid", "used_memory")
NOTHING = frozenset(
    "|n/a|not supported|not available|insufficient permissions|requested functionality has been deprecated".split(
        "|"
    )
)
"""Cells that mean "no value" and do not indicate a fault."""
NUMBER = re.compile(r"(\d{1,9})(?:\.\d*)?\s*(?:MiB|MB|%|C|W)?", re.IGNORECASE)
MIG_LINE = re.compile(r"\s*MIG\s+(\S+)\s+Device\s+(\d+):\s+\(UUID:\s*(MIG-[A-Za-z0-9/-]+)\)\s*")
GPU_LINE = re.compile(r"GPU\s+\d+:.*\(UUID:\s*(GPU-[A-Za-z0-9-]+)\)\s*")


def plain(cell: str) -> str:
    """The cell in lower case without spaces and brackets."""
    return cell.strip().strip("[]").strip().lower()


def number(cell: str) -> int | None:
    """The cell as a non-negative integer, with or without a unit; None if it is not one."""
    found = NUMBER.fullmatch(cell.strip().strip("[]").strip())
    return int(found.group(1)) if found else None


def rows(text: str, fields: Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """Split into rows with one cell for each field, and unreadable lines. A last line without a newline was cut off and counts as
    unreadable."""
    found: list[dict[str, str]] = []
    not_read: list[str] = []
    lines = text.split("\n")
    for at, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip():
            continue
        if len(cells) == len(fields) and at < len(lines) - 1:
            found.append({name: cells[n] for n, name in enumerate(fields)})
        else:
            not_read.append(line.strip()[:200])
    return found, not_read


def parse_gpus(
    text: str, fields: Sequence[str] = GPU_FIELDS
) -> tuple[list[dict[str, Any]], list[str]]:
    """Parse the list of GPUs; returns them and the unreadable lines."""
    found, not_read = rows(text, fields)
    gpus: dict[str, dict[str, Any]] = {}
    for row in found:
        uuid, index = row["uuid"].strip("[] "), number(row["index"])
        if (
            index is None
            or not uuid.startswith("GPU-")
            or not GPU_UUID.fullmatch(uuid)
            or uuid in gpus
        ):
            not_read.append(", ".join(row.values())[:200])
            continue
        # Missing values are None, and listed in `problems` if they indicate a fault.
        total, used = number(row["memory.total"]), number(row["memory.used"])
        mig = plain(row.get("mig.mode.current", "")) == "enabled"
        problems = [
            f"{name}: {cell[:100]}"
            for name, cell in row.items()
            if name not in ("index", "uuid") and is_fault(name, cell, mig)
        ]
        if total is not None and used is not None and used > total:
            problems.append(f"memory.used: {used} of {total} MiB")
            used = None
        gpus[uuid] = {
            "index": index,
            "uuid": uuid,
            "model": None if plain(row["name"]) in NOTHING else row["name"],
            "memory_mb": total,
            "memory_used_mb": used,
            "utilisation": number(row["utilization.gpu"]),
            "temperature": number(row["temperature.gpu"]),
            "mig": mig,
            "mig_devices": [],
            "problems": problems,
        }
    return list(gpus.values()), not_read


def is_fault(name: str, cell: str, mig: bool) -> bool:
    """True if the cell contains an error, or the GPU does not report its memory. With MIG enabled a missing memory value is normal."""
    if name == "name":
        text = plain(cell)
        return text in ("err!", "gpu is lost") or "unknown error" in text
    if name == "mig.mode.current":
        return plain(cell) not in NOTHING | {"enabled", "disabled"}
    if plain(cell) in NOTHING:
        return name.startswith("memory.") and not mig
    return number(cell) is None


def parse_apps(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Parse the list of processes on GPUs; returns them and the unreadable lines."""
    found, not_read = rows(text, APP_FIELDS)
    apps: list[dict[str, Any]] = []
    for row in found:
        uuid, pid = row["gpu_uuid"].strip("[] "), number(row["pid"])
        if pid is None or not GPU_UUID.fullmatch(uuid):
            not_read.append(", ".join(row.values())[:200])
            continue
        apps.append({"uuid": uuid, "pid": pid, "memory_mb": number(row["used_memory"])})
    return apps, not_read


def parse_mig(listing: str, xml: str) -> dict[str, list[dict[str, Any]]]:
    """MIG devices by the UUID of their GPU: parsed from `-L`, their memory from `-q -x`."""
    found: dict[str, list[dict[str, Any]]] = {}
    gpu = ""
    for line in listing.splitlines():
        gpu_line, device_line = GPU_LINE.fullmatch(line), MIG_LINE.fullmatch(line)
        if gpu_line:
            gpu = gpu_line.group(1)
        elif device_line and gpu:
            profile, index, uuid = device_line.groups()
            memory = mig_memory(xml).get((gpu, int(index)))
            device = {"index": int(index), "uuid": uuid, "profile": profile, "memory_mb": memory}
            found.setdefault(gpu, []).append(device)
    return found


def mig_memory(xml: str) -> dict[tuple[str, int], int | None]:
    """Memory in MiB by GPU UUID and device index; empty if the XML cannot be parsed."""
    from xml.etree import ElementTree

    try:
        log = ElementTree.fromstring(xml)
    except (ElementTree.ParseError, ValueError):
        return {}
    found: dict[tuple[str, int], int | None] = {}
    for gpu in log.iter("gpu"):
        for device in gpu.iter("mig_device"):
            index = number(device.findtext("index") or "")
            if index is not None:
                total = number(device.findtext("fb_memory_usage/total") or "")
                found[(gpu.findtext("uuid") or "").strip(), index] = total
    return found


class ProbeOutput:
    """The outcome of one nvidia-smi command."""

    def __init__(
        self, status: str, text: str = "", complaint: str = "", exit: int | None = None
    ) -> None:
        self.status, self.text, self.complaint, self.exit = status, text, complaint, exit
        """status ∈ ok, absent, failed, hung."""


class Probe:
    """Calls nvidia-smi. A process that hangs in the kernel cannot be killed, so at most PROBES rounds run at once on a machine."""

    def __init__(self, root: Root, body: dict[str, Any]) -> None:
        self.root = root
        self.command = arguments_of(body.get("probe") or ["nvidia-smi"])
        self.timeout = seconds_of(body, "probe_timeout", PROBE_TIMEOUT)
        self.until = 0.0

    def ask(self, *questions: Sequence[str]) -> list[ProbeOutput]:
        """Run one command for each question, concurrently, within the timeout."""
        until = time.monotonic() + self.timeout
        while True:
            locks = (take_lock(self.root.lock(f"probe-{n}.lock")) for n in range(PROBES))
            lock = next((fd for fd in locks if fd is not None), None)
            if lock is not None:
                break
            if time.monotonic() > until:
                complaint = "earlier calls of it still hang"
                return [ProbeOutput("hung", complaint=complaint) for _ in questions]
            time.sleep(0.02)
        self.until = time.monotonic() + self.timeout
        try:
            return self._ask(questions, lock)
        finally:
            os.close(lock)

    def _left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def _ask(self, questions: Sequence[Sequence[str]], lock: int) -> list[ProbeOutput]:
        import subprocess

        if not find_program(self.command[0], os.environ.get("PATH", os.defpath)):
            return [
                ProbeOutput("absent", complaint=f"there is no {self.command[0]}") for _ in questions
            ]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for question in questions:
                running.append(  # noqa: PERF401  (one that cannot be started must not hide those before it)
                    subprocess.Popen(
                        [*self.command, *question],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        env={**os.environ, "LC_ALL": "C"},
                        start_new_session=True,
                        pass_fds=(lock,),  # locked as long as any of the processes lives
                    )
                )
        except OSError as error:
            for process in running:
                end_probe(process)
            return [ProbeOutput("failed", complaint=str(error)) for _ in questions]
        streams = [s for process in running for s in (process.stdout, process.stderr) if s]
        outputs = {s.fileno(): b"" for s in streams}
        poller = select.poll()
        waiting = set(outputs)
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        while waiting and self._left():
            for fd, _ in poller.poll(self._left() * 1000):
                data = os.read(fd, 65536)
                outputs[fd] += data
                if not data or len(outputs[fd]) > 1 << 22:
                    poller.unregister(fd)
                    waiting.discard(fd)
        return [self._outcome(process, outputs) for process in running]

    def _outcome(self, process: Any, outputs: dict[int, bytes]) -> ProbeOutput:
        """The outcome of one process. A process that exceeds the timeout is killed and not waited for: hanging in the kernel, it may never
        end."""
        text, complaint = (
            outputs[stream.fileno()].decode("utf-8", "replace")
            for stream in (process.stdout, process.stderr)
        )
        while process.poll() is None and self._left():
            time.sleep(0.005)
        code = process.poll()
        end_probe(process)
        if code is None:
            return ProbeOutput("hung", text, complaint)
        return ProbeOutput("failed" if code else "ok", text, complaint, code)


def end_probe(process: Any) -> None:
    """Kill the probe's process group and close its streams."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        until = time.monotonic() + 0.2
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
    process.stdout.close()
    process.stderr.close()
    if process.returncode is None:
        process.returncode = -9  # suppresses Popen's warning about a child that was not waited for


class GpuReport:
    """GPUs and the processes on them, as far as the probe reported them."""

    def __init__(self) -> None:
        self.gpus: list[dict[str, Any]] = []
        self.apps: list[dict[str, Any]] = []
        self.status = self.apps_status = "absent"
        self.not_read: list[str] = []
        self.exit: int | None = None
        self.complaint = ""

    def gpu(self, uuid: str) -> dict[str, Any] | None:
        """The GPU with this UUID; None if it is missing or could not be read."""
        return next((g for g in self.gpus if g["uuid"] == uuid), None)

    def summary(self) -> dict[str, Any]:
        """The outcome of the probe in the form that answers use."""
        return {
            "status": self.status,
            "apps": self.apps_status,
            "lines_not_read": self.not_read[:20],
            "exit": self.exit,
            "said": self.complaint,
        }


def look_at_gpus(root: Root, body: dict[str, Any]) -> GpuReport:
    """Run one round of the probe."""
    probe, seen = Probe(root, body), GpuReport()
    about_gpus, about_apps = probe.ask(
        question("gpu", GPU_FIELDS), question("compute-apps", APP_FIELDS)
    )
    fields = GPU_FIELDS
    if (
        about_gpus.status == "failed"
        and "mig.mode.current" in about_gpus.text + about_gpus.complaint
    ):
        fields = OLD_GPU_FIELDS
        (about_gpus,) = probe.ask(question("gpu", fields))
    seen.gpus, not_read = parse_gpus(about_gpus.text, fields)
    seen.apps, apps_not_read = parse_apps(about_apps.text)
    seen.status = probe_status(about_gpus, not_read, seen.gpus)
    seen.apps_status = probe_status(about_apps, apps_not_read, seen.apps)
    seen.not_read = not_read + apps_not_read
    seen.exit = about_gpus.exit
    seen.complaint = (about_gpus.complaint or about_apps.complaint).strip()[:500]
    for app in seen.apps:
        app["attempt"] = marker_of(app["pid"], root)
    if any(gpu["mig"] for gpu in seen.gpus):
        listing, xml = probe.ask(("-L",), ("-q", "-x"))
        devices = parse_mig(listing.text, xml.text)
        for gpu in seen.gpus:
            gpu["mig_devices"] = devices.get(gpu["uuid"], [])
    return seen


def question(what: str, fields: Sequence[str]) -> tuple[str, ...]:
    """The nvidia-smi arguments that query these fields, in this order."""
    return (f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")


def probe_status(output: ProbeOutput, not_read: list[str], found: list[Any]) -> str:
    """The probe's status: `garbage` only if no line could be read. If some lines could, the status remains ok, and the caller gets the
    unreadable lines too."""
    return "garbage" if output.status == "ok" and not_read and not found else output.status
