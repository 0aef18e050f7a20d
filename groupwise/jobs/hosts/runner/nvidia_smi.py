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


def normalize_cell(cell: str) -> str:
    """The cell in lower case without spaces and brackets."""
    return cell.strip().strip("[]").strip().lower()


def parse_number(cell: str) -> int | None:
    """The cell as a non-negative integer, with or without a unit; None if it is not one."""
    match = NUMBER.fullmatch(cell.strip().strip("[]").strip())
    return int(match.group(1)) if match else None


def parse_rows(text: str, fields: Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """Split into rows with one cell for each field, and unreadable lines. A last line without a newline was cut off and counts as
    unreadable."""
    rows: list[dict[str, str]] = []
    unreadable: list[str] = []
    lines = text.split("\n")
    for index, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip():
            continue
        if len(cells) == len(fields) and index < len(lines) - 1:
            rows.append({name: cells[n] for n, name in enumerate(fields)})
        else:
            unreadable.append(line.strip()[:200])
    return rows, unreadable


def parse_gpus(
    text: str, fields: Sequence[str] = GPU_FIELDS
) -> tuple[list[dict[str, Any]], list[str]]:
    """Parse the list of GPUs; returns them and the unreadable lines."""
    rows, unreadable = parse_rows(text, fields)
    gpus: dict[str, dict[str, Any]] = {}
    for row in rows:
        uuid, index = row["uuid"].strip("[] "), parse_number(row["index"])
        if (
            index is None
            or not uuid.startswith("GPU-")
            or not GPU_UUID.fullmatch(uuid)
            or uuid in gpus
        ):
            unreadable.append(", ".join(row.values())[:200])
            continue
        # Missing values are None, and listed in `problems` if they indicate a fault.
        total_mb, used_mb = parse_number(row["memory.total"]), parse_number(row["memory.used"])
        mig = normalize_cell(row.get("mig.mode.current", "")) == "enabled"
        problems = [
            f"{name}: {cell[:100]}"
            for name, cell in row.items()
            if name not in ("index", "uuid") and is_fault(name, cell, mig)
        ]
        if total_mb is not None and used_mb is not None and used_mb > total_mb:
            problems.append(f"memory.used: {used_mb} of {total_mb} MiB")
            used_mb = None
        gpus[uuid] = {
            "index": index,
            "uuid": uuid,
            "model": None if normalize_cell(row["name"]) in NOTHING else row["name"],
            "memory_mb": total_mb,
            "memory_used_mb": used_mb,
            "utilisation": parse_number(row["utilization.gpu"]),
            "temperature": parse_number(row["temperature.gpu"]),
            "mig": mig,
            "mig_devices": [],
            "problems": problems,
        }
    return list(gpus.values()), unreadable


def is_fault(name: str, cell: str, mig: bool) -> bool:
    """True if the cell contains an error, or the GPU does not report its memory. With MIG enabled a missing memory value is normal."""
    if name == "name":
        text = normalize_cell(cell)
        return text in ("err!", "gpu is lost") or "unknown error" in text
    if name == "mig.mode.current":
        return normalize_cell(cell) not in NOTHING | {"enabled", "disabled"}
    if normalize_cell(cell) in NOTHING:
        return name.startswith("memory.") and not mig
    return parse_number(cell) is None


def parse_apps(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Parse the list of processes on GPUs; returns them and the unreadable lines."""
    rows, unreadable = parse_rows(text, APP_FIELDS)
    apps: list[dict[str, Any]] = []
    for row in rows:
        uuid, pid = row["gpu_uuid"].strip("[] "), parse_number(row["pid"])
        if pid is None or not GPU_UUID.fullmatch(uuid):
            unreadable.append(", ".join(row.values())[:200])
            continue
        apps.append({"uuid": uuid, "pid": pid, "memory_mb": parse_number(row["used_memory"])})
    return apps, unreadable


def parse_mig(listing: str, xml: str) -> dict[str, list[dict[str, Any]]]:
    """MIG devices by the UUID of their GPU: parsed from `-L`, their memory from `-q -x`."""
    devices: dict[str, list[dict[str, Any]]] = {}
    gpu = ""
    for line in listing.splitlines():
        gpu_line, device_line = GPU_LINE.fullmatch(line), MIG_LINE.fullmatch(line)
        if gpu_line:
            gpu = gpu_line.group(1)
        elif device_line and gpu:
            profile, index, uuid = device_line.groups()
            memory = mig_memory(xml).get((gpu, int(index)))
            device = {"index": int(index), "uuid": uuid, "profile": profile, "memory_mb": memory}
            devices.setdefault(gpu, []).append(device)
    return devices


def mig_memory(xml: str) -> dict[tuple[str, int], int | None]:
    """Memory in MiB by GPU UUID and device index; empty if the XML cannot be parsed."""
    from xml.etree import ElementTree

    try:
        log = ElementTree.fromstring(xml)
    except (ElementTree.ParseError, ValueError):
        return {}
    memory: dict[tuple[str, int], int | None] = {}
    for gpu in log.iter("gpu"):
        for device in gpu.iter("mig_device"):
            index = parse_number(device.findtext("index") or "")
            if index is not None:
                total = parse_number(device.findtext("fb_memory_usage/total") or "")
                memory[(gpu.findtext("uuid") or "").strip(), index] = total
    return memory


class ProbeOutput:
    """The outcome of one nvidia-smi command."""

    def __init__(
        self, status: str, stdout: str = "", stderr: str = "", exit: int | None = None
    ) -> None:
        self.status, self.stdout, self.stderr, self.exit = status, stdout, stderr, exit
        """status ∈ ok, absent, failed, hung."""


class Probe:
    """Calls nvidia-smi. A process that hangs in the kernel cannot be killed, so at most PROBES rounds run at once on a machine."""

    def __init__(self, root: Root, body: dict[str, Any]) -> None:
        self.root = root
        self.command = arguments_of(body.get("probe") or ["nvidia-smi"])
        self.timeout = seconds_of(body, "probe_timeout", PROBE_TIMEOUT)
        self.deadline = 0.0

    def run(self, *questions: Sequence[str]) -> list[ProbeOutput]:
        """Run one command for each question, concurrently, within the timeout."""
        deadline = time.monotonic() + self.timeout
        while True:
            locks = (take_lock(self.root.lock(f"probe-{n}.lock")) for n in range(PROBES))
            lock = next((fd for fd in locks if fd is not None), None)
            if lock is not None:
                break
            if time.monotonic() > deadline:
                complaint = "earlier calls of it still hang"
                return [ProbeOutput("hung", stderr=complaint) for _ in questions]
            time.sleep(0.02)
        self.deadline = time.monotonic() + self.timeout
        try:
            return self._run_commands(questions, lock)
        finally:
            os.close(lock)

    def _seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _run_commands(self, questions: Sequence[Sequence[str]], lock: int) -> list[ProbeOutput]:
        import subprocess

        if not find_program(self.command[0], os.environ.get("PATH", os.defpath)):
            return [
                ProbeOutput("absent", stderr=f"there is no {self.command[0]}") for _ in questions
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
            return [ProbeOutput("failed", stderr=str(error)) for _ in questions]
        streams = [s for process in running for s in (process.stdout, process.stderr) if s]
        outputs = {s.fileno(): b"" for s in streams}
        poller = select.poll()
        waiting = set(outputs)
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        while waiting and self._seconds_left():
            for fd, _ in poller.poll(self._seconds_left() * 1000):
                data = os.read(fd, 65536)
                outputs[fd] += data
                if not data or len(outputs[fd]) > 1 << 22:
                    poller.unregister(fd)
                    waiting.discard(fd)
        return [self._process_output(process, outputs) for process in running]

    def _process_output(self, process: Any, outputs: dict[int, bytes]) -> ProbeOutput:
        """The outcome of one process. A process that exceeds the timeout is killed and not waited for: hanging in the kernel, it may never
        end."""
        stdout, stderr = (
            outputs[stream.fileno()].decode("utf-8", "replace")
            for stream in (process.stdout, process.stderr)
        )
        while process.poll() is None and self._seconds_left():
            time.sleep(0.005)
        code = process.poll()
        end_probe(process)
        if code is None:
            return ProbeOutput("hung", stdout, stderr)
        return ProbeOutput("failed" if code else "ok", stdout, stderr, code)


def end_probe(process: Any) -> None:
    """Kill the probe's process group and close its streams."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 0.2
        while process.poll() is None and time.monotonic() < deadline:
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
        self.unreadable: list[str] = []
        self.exit: int | None = None
        self.stderr = ""

    def gpu(self, uuid: str) -> dict[str, Any] | None:
        """The GPU with this UUID; None if it is missing or could not be read."""
        return next((g for g in self.gpus if g["uuid"] == uuid), None)

    def summary(self) -> dict[str, Any]:
        """The outcome of the probe in the form that answers use."""
        return {
            "status": self.status,
            "apps": self.apps_status,
            "lines_not_read": self.unreadable[:20],
            "exit": self.exit,
            "said": self.stderr,
        }


def probe_gpus(root: Root, body: dict[str, Any]) -> GpuReport:
    """Run one round of the probe."""
    probe, report = Probe(root, body), GpuReport()
    about_gpus, about_apps = probe.run(
        query_arguments("gpu", GPU_FIELDS), query_arguments("compute-apps", APP_FIELDS)
    )
    fields = GPU_FIELDS
    if (
        about_gpus.status == "failed"
        and "mig.mode.current" in about_gpus.stdout + about_gpus.stderr
    ):
        fields = OLD_GPU_FIELDS
        (about_gpus,) = probe.run(query_arguments("gpu", fields))
    report.gpus, unreadable = parse_gpus(about_gpus.stdout, fields)
    report.apps, unreadable_apps = parse_apps(about_apps.stdout)
    report.status = probe_status(about_gpus, unreadable, report.gpus)
    report.apps_status = probe_status(about_apps, unreadable_apps, report.apps)
    report.unreadable = unreadable + unreadable_apps
    report.exit = about_gpus.exit
    report.stderr = (about_gpus.stderr or about_apps.stderr).strip()[:500]
    for app in report.apps:
        app["attempt"] = marker_of(app["pid"], root)
    if any(gpu["mig"] for gpu in report.gpus):
        listing, xml = probe.run(("-L",), ("-q", "-x"))
        devices = parse_mig(listing.stdout, xml.stdout)
        for gpu in report.gpus:
            gpu["mig_devices"] = devices.get(gpu["uuid"], [])
    return report


def query_arguments(kind: str, fields: Sequence[str]) -> tuple[str, ...]:
    """The nvidia-smi arguments that query these fields, in this order."""
    return (f"--query-{kind}={','.join(fields)}", "--format=csv,noheader,nounits")


def probe_status(output: ProbeOutput, unreadable: list[str], entries: list[Any]) -> str:
    """The probe's status: `garbage` only if no line could be read. If some lines could, the status remains ok, and the caller gets the
    unreadable lines too."""
    return "garbage" if output.status == "ok" and unreadable and not entries else output.status
