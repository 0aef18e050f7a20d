"""Reads the GPUs of NVIDIA, and the processes on them, from nvidia-smi; on a Jetson without it from tegrastats.

`observe.py` calls `read_nvidia_smi`, whose cells are numbers, words for "no value", or errors. A GPU that cannot be reached does not hide
the others. MIG devices are GPUs of their own. GPUs of Jetson and DGX Spark have no memory of their own, but that of the machine.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import read_text
from groupwise.jobs.hosts.runner.processes import marker_of
from groupwise.jobs.hosts.runner.protocol import GPU_UUID
from groupwise.jobs.hosts.runner.smi import (
    GpuReport,
    gpu_record,
    in_mb,
    machine_memory_mb,
    normalize_cell,
    parse_number,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from groupwise.jobs.hosts.runner.smi import Probe, ProbeOutput

GPU_FIELDS = (
    "index",
    "uuid",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "mig.mode.current",
    "name",
)
"""The name is last, because it may contain commas."""
APP_FIELDS = ("gpu_uuid", "pid", "used_memory")
REJECTED_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field to query')
"""Drivers reject a whole query with one field that they do not know."""
NOTHING = frozenset(
    "|n/a|not supported|not available|not found|insufficient permissions|requested functionality has been deprecated".split(
        "|"
    )
)
"""Cells that mean "no value" and do not indicate a fault."""
NO_MEMORY = frozenset({"", "n/a", "not supported", "not available"})
"""Values of `memory.total` that mean that the GPU has no memory of its own."""
INTEGRATED = re.compile(r"\b(?:GB10|Thor|Orin|Xavier|Tegra)\b|\(nvgpu\)")
"""Models of such GPUs; drivers have several words for the memory that they do not have."""
LOST = re.compile(
    r"device handle|GPU is lost|fallen off the bus|requires reset", re.IGNORECASE | re.ASCII
)
NO_DEVICES = "No devices were found"
ANSWERED = (0, 14, 15)
"""Exit codes of a complete answer: 14 warns of a corrupt infoROM, 15 of a GPU that was lost."""
MAX_CARDS = 16
CARD_UUID = re.compile(r"(?:GPU|MIG)-.+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
"""UUID of a GPU; on a Jetson it has no prefix."""
MIG_LINE = re.compile(r"\s*MIG\s+(\S+)\s+Device\s+(\d+):\s+\(UUID:\s*(MIG-[A-Za-z0-9/-]+)\)\s*")
GPU_LINE = re.compile(r"GPU\s+\d+:.*\(UUID:\s*(GPU-[A-Za-z0-9-]+)\)\s*")
MIG_INSTANCE = ("gpu_instance_id", "compute_instance_id")
"""Which MIG device a process is on."""
GRAPHICS = "C+G"
"""The type of processes that compute and draw, such as those of a desktop."""


def read_nvidia_smi(probe: Probe) -> GpuReport:
    """Run one round of nvidia-smi."""
    report, fields = GpuReport("nvidia-smi"), [*map(str, GPU_FIELDS)]
    about_gpus, about_apps = probe.run(
        query_arguments("gpu", fields), query_arguments("compute-apps", APP_FIELDS)
    )
    while about_gpus.status == "failed":
        match = REJECTED_FIELD.search(f"{about_gpus.stdout}\n{about_gpus.stderr}")
        if match is None or match.group(1) not in fields[2:]:
            break
        fields.remove(match.group(1))
        (about_gpus,) = probe.run(query_arguments("gpu", fields))
    read_gpus(report, about_gpus, fields)
    read_apps(report, about_apps)
    # Older drivers stop at the first GPU that they cannot reach. Those after it answer if they are asked one by one.
    has_stopped = about_apps.status == "failed" and about_apps.exit not in ANSWERED
    if report.lost and about_gpus.status != "hung" and (has_stopped or not report.gpus):
        read_cards(report, probe, fields)
    strangers = (app for app in report.apps if marker_of(app["pid"], probe.root) is None)
    if any(gpu["mig"] for gpu in report.gpus) or any(strangers):
        listing, xml = probe.run(("-L",), ("-q", "-x"))
        read_details(report, listing.stdout, xml.stdout)
    if report.lost or any(gpu["problems"] or gpu["mig"] for gpu in report.gpus):
        # CUDA does not count the GPUs that it cannot use, so that the indices of the others are not nvidia-smi's.
        for gpu in report.gpus:
            gpu["visible"] = gpu["uuid"] if gpu["uuid"].startswith("GPU-") else gpu["visible"]
    return report


def query_arguments(kind: str, fields: Sequence[str]) -> tuple[str, ...]:
    """The nvidia-smi arguments that query these fields, in this order."""
    return (f"--query-{kind}={','.join(fields)}", "--format=csv,noheader,nounits")


def read_gpus(report: GpuReport, output: ProbeOutput, fields: Sequence[str]) -> None:
    """Add the GPUs of one answer to the report."""
    gpus, lines = parse_gpus(output.stdout, fields)
    known = {gpu["uuid"] for gpu in report.gpus}
    report.gpus += [gpu for gpu in gpus if gpu["uuid"] not in known]
    report.status = sort_lines(report, output, lines, gpus)
    if gpus and report.status == "failed":
        report.status = "ok"
    report.exit, report.stderr = output.exit, output.stderr


def read_apps(report: GpuReport, output: ProbeOutput) -> None:
    """Add the processes of one answer to the report."""
    apps, lines = parse_apps(output.stdout)
    # A warning hides no process, but a row that cannot be read is one.
    rows = [line for line in lines if "," in line or CARD_UUID.match(line)]
    report.apps += [app for app in apps if app not in report.apps]
    report.apps_status = sort_lines(report, output, lines, apps)
    if report.apps_status == "ok" and not all(map(LOST.search, rows)):
        report.apps_status = "garbage"
    report.stderr = report.stderr or output.stderr


def sort_lines(
    report: GpuReport, output: ProbeOutput, lines: list[str], found: Sequence[object]
) -> str:
    """Add the lines that are not rows to the report; returns the answer's status. A lost GPU does not make an answer incomplete."""
    lines += [line.strip() for line in output.stderr.split("\n") if LOST.search(line)]
    lost = [line for line in lines if LOST.search(line)]
    report.lost += [line for line in dict.fromkeys(lost) if line not in report.lost]
    unreadable = [line for line in lines if line not in lost and NO_DEVICES not in line]
    report.unreadable += unreadable
    is_answer = lost or output.exit in ANSWERED or NO_DEVICES in output.stdout
    if output.status == "hung" or not is_answer:
        return output.status
    return "garbage" if unreadable and not found else "ok"


def read_cards(report: GpuReport, probe: Probe, fields: Sequence[str]) -> None:
    """Query each GPU by itself, and the processes on it."""
    try:
        count = len(os.listdir("/proc/driver/nvidia/gpus")) or MAX_CARDS
    except OSError:
        count = MAX_CARDS
    cards = [("-i", str(n)) for n in range(min(count, MAX_CARDS))]
    queries = (query_arguments("gpu", fields), query_arguments("compute-apps", APP_FIELDS))
    outputs = probe.run(*((*card, *query) for query in queries for card in cards))
    answered: set[str] = set()
    for n, about_gpu in enumerate(outputs[: len(cards)]):
        read_gpus(report, about_gpu, fields)
        if about_gpu.exit in ANSWERED:
            read_apps(report, outputs[len(cards) + n])
            if report.apps_status == "ok":
                answered.update(gpu["uuid"] for gpu in parse_gpus(about_gpu.stdout, fields)[0])
        elif about_gpu.status == "hung":
            report.lost.append(f"GPU {n}: nvidia-smi hangs")
    for gpu in report.gpus:
        if gpu["uuid"] not in answered:
            gpu["problems"].append("nvidia-smi does not say who uses it")
    report.status = report.apps_status = "ok"


def parse_rows(text: str, fields: Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """Split into rows with one cell for each field, and unreadable lines. A last line without a newline was cut off and counts as
    unreadable."""
    rows: list[dict[str, str]] = []
    unreadable: list[str] = []
    lines = text.split("\n")
    for index, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split(",", len(fields) - 1)]
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
            or not CARD_UUID.fullmatch(uuid)
            or not GPU_UUID.fullmatch(uuid)
            or uuid in gpus
        ):
            unreadable.append(", ".join(row.values())[:200])
            continue
        cells = {name: row.get(name, "") for name in GPU_FIELDS}
        mig = normalize_cell(cells["mig.mode.current"]) == "enabled"
        total_mb, used_mb = (
            in_mb(parse_number(cells[name])) for name in ("memory.total", "memory.used")
        )
        integrated = not mig and (
            normalize_cell(cells["memory.total"]) in NO_MEMORY
            or (total_mb is None and INTEGRATED.search(cells["name"]) is not None)
        )
        gpus[uuid] = gpu_record(
            "nvidia",
            index,
            uuid,
            model=None if normalize_cell(cells["name"]) in NOTHING else cells["name"],
            memory_mb=machine_memory_mb() if integrated else total_mb,
            memory_used_mb=None if integrated else used_mb,
            utilisation=parse_number(cells["utilization.gpu"]),
            temperature=parse_number(cells["temperature.gpu"]),
            mig=mig,
            integrated=integrated,
            problems=[
                f"{name}: {cell[:100]}"
                for name, cell in cells.items()
                if is_fault(name, cell, mig)
                and not (integrated and name.startswith("memory.") and not LOST.search(cell))
            ],
        )
    return list(gpus.values()), unreadable


def is_fault(name: str, cell: str, mig: bool) -> bool:
    """True if the cell contains an error, or the GPU does not report its memory. With MIG enabled a missing memory value is normal. An
    error in `utilization.gpu` is not a fault: some vGPUs, and GPUs of WSL, always have one."""
    text = normalize_cell(cell)
    if name in ("index", "uuid", "utilization.gpu"):
        return False
    if name == "name":
        return text in ("err!", "gpu is lost") or "unknown error" in text
    if name == "mig.mode.current":
        return text not in NOTHING | {"enabled", "disabled"}
    if text in NOTHING:
        return name.startswith("memory.") and not mig
    return parse_number(cell) is None


def parse_apps(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Parse the list of processes on GPUs; returns them and the unreadable lines."""
    rows, unreadable = parse_rows(text, APP_FIELDS)
    apps: list[dict[str, Any]] = []
    for row in rows:
        if all(normalize_cell(cell) in NOTHING for cell in row.values()):
            continue  # as vGPUs print it
        uuid, pid = row["gpu_uuid"].strip("[] "), parse_number(row["pid"])
        if pid is None and normalize_cell(row["pid"]) in NOTHING:
            pid = 0  # a process whose number the driver hides
        if pid is None or not CARD_UUID.fullmatch(uuid) or not GPU_UUID.fullmatch(uuid):
            unreadable.append(", ".join(row.values())[:200])
            continue
        apps.append(
            {"uuid": uuid, "pid": pid, "memory_mb": in_mb(parse_number(row["used_memory"]))}
        )
    return apps, unreadable


def read_details(report: GpuReport, listing: str, xml: str) -> None:
    """Add each MIG device as a GPU of its own; assign processes to MIG devices, and mark those that also draw.

    `-L` lists the devices, and `-q -x` has their memory and processes."""
    from xml.etree import ElementTree

    try:
        log = ElementTree.fromstring(xml)
    except (ElementTree.ParseError, ValueError):
        log = ElementTree.Element("nvidia_smi_log")
    cards = {(gpu.findtext("uuid") or "").strip(): gpu for gpu in log.iter("gpu")}
    for parent, profile, number, uuid in mig_devices(listing):
        card = report.gpu(parent)
        if card is None or not card["mig"]:
            continue
        devices = cards[parent].iter("mig_device") if parent in cards else iter(())
        found = next((d for d in devices if text_at(d, "index") == number), log)
        gpu = gpu_record("nvidia", card["index"], uuid, visible=uuid)
        gpu["problems"] = [*card["problems"]]
        gpu["model"] = f"{card['model'] or 'NVIDIA'} MIG {profile}"
        gpu["memory_mb"] = in_mb(parse_number(text_at(found, "fb_memory_usage/total")))
        gpu["memory_used_mb"] = in_mb(parse_number(text_at(found, "fb_memory_usage/used")))
        gpu["temperature"] = card["temperature"]
        if found is log:
            gpu["problems"].append("nvidia-smi -q -x does not report it")
        report.gpus.append(gpu)
        on_device = {
            text_at(process, "pid")
            for process in (cards[parent].iter("process_info") if found is not log else ())
            if all(text_at(process, name) == text_at(found, name) for name in MIG_INSTANCE)
        }
        for app in report.apps:
            if app["uuid"] == parent and str(app["pid"]) in on_device:
                app["uuid"] = uuid
    drawing = {
        (uuid, text_at(process, "pid"))
        for uuid, card in cards.items()
        for process in card.iter("process_info")
        if text_at(process, "type") == GRAPHICS
    }
    for app in report.apps:
        app["graphics"] = (app["uuid"], str(app["pid"])) in drawing


def text_at(element: Any, path: str) -> str:
    """The text of an element below this one; empty if there is none."""
    return str(element.findtext(path) or "").strip()


def mig_devices(listing: str) -> list[tuple[str, str, str, str]]:
    """The MIG devices of `nvidia-smi -L`: UUID of their GPU, profile, number on it, UUID."""
    devices: list[tuple[str, str, str, str]] = []
    gpu = ""
    for line in listing.splitlines():
        gpu_line, device_line = GPU_LINE.fullmatch(line), MIG_LINE.fullmatch(line)
        if gpu_line:
            gpu = gpu_line.group(1)
        elif device_line and gpu:
            profile, number, uuid = device_line.groups()
            devices.append((gpu, profile, number, uuid))
    return devices


def read_tegrastats(probe: Probe) -> GpuReport:
    """The GPU of a Jetson without nvidia-smi. tegrastats prints a line at each interval and never ends; the first is enough."""
    import shlex

    report = GpuReport("tegrastats")
    command = " ".join(map(shlex.quote, probe.command))
    probe.command = ["sh"]
    (output,) = probe.run(("-c", f"{command} --interval 100 | head -n 1"))
    load = re.search(r"GR3D_FREQ (\d+)%", output.stdout)
    heat = re.search(r"\bgpu@(\d+)", output.stdout, re.IGNORECASE)
    report.status = report.apps_status = output.status
    report.stderr, report.exit = output.stderr, output.exit
    if not re.search(r"\bRAM \d+/\d+MB\b", output.stdout):
        report.unreadable = [output.stdout.strip()[:200]] if output.stdout.strip() else []
        report.status = "garbage" if output.status == "ok" else output.status
        return report
    serial = read_text("/proc/device-tree/serial-number") or read_text("/etc/machine-id")
    model = read_text("/proc/device-tree/model").strip("\0\n ")
    report.gpus = [
        gpu_record(
            "nvidia",
            0,
            f"GPU-tegra-{re.sub('[^A-Za-z0-9]', '', serial) or os.uname().nodename}",
            model=model or "NVIDIA Jetson",
            memory_mb=machine_memory_mb(),
            integrated=True,
            utilisation=int(load.group(1)) if load else None,
            temperature=int(heat.group(1)) if heat else None,
        )
    ]
    return report
