"""Reads the GPUs of AMD, and the processes on them, from the JSON of amd-smi, or of rocm-smi, which older releases of ROCm have.

`observe.py` calls it. Fields may be missing or `N/A`, and warnings may stand around the JSON.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import read_text
from groupwise.jobs.hosts.runner.protocol import NO_JSON, as_list, as_object, is_small
from groupwise.jobs.hosts.runner.smi import GpuReport, gpu_record, in_mb, machine_memory_mb

if TYPE_CHECKING:
    from typing import Any

    from groupwise.jobs.hosts.runner.smi import Probe, ProbeOutput

AMD_SMI = (
    ("list", "--json"),
    ("static", "--asic", "--json"),
    ("metric", "--mem-usage", "--usage", "--temperature", "--json"),
    ("process", "--json"),
)
ROCM_SMI = (
    ("--showuniqueid", "--showproductname", "--showbus", "--showmeminfo", "vram", "--showuse",
     "--showtemp", "--json"),
    ("--showpids", "--json"),
)  # fmt: skip
AMD_UUID = re.compile(
    r"([0-9a-f]{2})ff[0-9a-f]{4}-0000-1000-80([0-9a-f]{2})-([0-9a-f]{12})", re.IGNORECASE
)
"""amd-smi's UUID: the device's number, with the card's unique id around it, which is the UUID in HIP."""
ROCM_CARD = re.compile(r"card\d{1,4}")
MIN_VRAM_MB = 1024
"""The graphics of a processor set aside less than this, and use the machine's memory."""
UNITS = {"B": 1 / (1 << 20), "KB": 1 / (1 << 10), "MB": 1, "GB": 1 << 10}
"""MiB in each unit."""


def read_amd_smi(probe: Probe) -> GpuReport:
    """Run amd-smi once for each of its tables, and read the GPUs and their processes."""
    report = GpuReport("amd-smi")
    outputs = probe.run(*AMD_SMI)
    names, about, metrics, processes = (by_gpu(json_in(output.stdout)) for output in outputs)
    note_outcome(report, outputs[0], names)
    for index, listed in sorted(names.items()):
        asic, memory, load, heat = (
            as_object(of.get(index, {}).get(part)) or {}
            for of, part in (
                (about, "asic"), (metrics, "mem_usage"), (metrics, "usage"), (metrics, "temperature"),
            )
        )  # fmt: skip
        match = AMD_UUID.fullmatch(str(listed.get("uuid")))
        add_amd_gpu(
            report,
            index,
            "GPU-" + "".join(match.groups()) if match else "",
            str(listed.get("bdf")),
            model=asic.get("market_name"),
            memory_mb=in_mb(amount_in(memory.get("total_vram"))),
            memory_used_mb=in_mb(amount_in(memory.get("used_vram"))),
            utilisation=amount_in(load.get("gfx_activity")),
            heats=[heat.get(sensor) for sensor in ("edge", "hotspot", "junction")],
        )
    drop_processor_graphics(report)
    report.apps_status = outputs[3].status
    if outputs[3].status == "ok" and json_in(outputs[3].stdout) is None:
        report.apps_status = "garbage"
    for gpu in report.gpus:
        for process in as_list(processes.get(gpu["index"], {}).get("process_list")):
            info = as_object((as_object(process) or {}).get("process_info")) or {}
            usage = as_object(info.get("memory_usage")) or {}
            memory_mb = in_mb(amount_in(usage.get("vram_mem", info.get("mem_usage"))))
            # A process that has the driver open is listed with every GPU, but has memory only where it computes.
            if is_small(info.get("pid")) and memory_mb != 0:
                app = {"uuid": gpu["uuid"], "pid": info["pid"], "memory_mb": memory_mb}
                report.apps.append(app)
    return report


def read_rocm_smi(probe: Probe) -> GpuReport:
    """Run one round of rocm-smi. It does not say which process is on which GPU, so if there are several, only the memory in use shows
    that a GPU is busy."""
    report = GpuReport("rocm-smi")
    about_gpus, about_apps = probe.run(*ROCM_SMI)
    cards = as_object(json_in(about_gpus.stdout)) or {}
    found = {int(n[4:]): as_object(cards[n]) or {} for n in cards if ROCM_CARD.fullmatch(n)}
    note_outcome(report, about_gpus, found)
    for index, card in sorted(found.items()):
        values = {name.lower(): str(value).strip() for name, value in card.items()}
        total, used = (values.get(f"vram total {name}memory (b)", "") for name in ("", "used "))
        add_amd_gpu(
            report,
            index,
            "GPU-" + values.get("unique id", "").lower().replace("0x", "").rjust(16, "0"),
            values.get("pci bus", ""),
            model=values.get("device name") or values.get("card series"),
            memory_mb=bytes_in(total),
            memory_used_mb=bytes_in(used),
            utilisation=amount_in(values.get("gpu use (%)")),
            heats=[text for name, text in values.items() if name.startswith("temperature (")],
        )
    drop_processor_graphics(report)
    report.apps_status = about_apps.status
    processes = as_object((as_object(json_in(about_apps.stdout)) or {}).get("system")) or {}
    for name, text in processes.items() if len(report.gpus) == 1 else ():
        cells = [cell.strip() for cell in str(text).split(",")]
        if re.fullmatch(r"PID\d{1,9}", name) and len(cells) > 2 and cells[2] != "0":
            app = {"uuid": report.gpus[0]["uuid"], "pid": int(name[3:])}
            report.apps.append({**app, "memory_mb": bytes_in(cells[2])})
    return report


def note_outcome(report: GpuReport, output: ProbeOutput, found: dict[int, Any]) -> None:
    """Copy the outcome of the first command."""
    report.status, report.exit, report.stderr = output.status, output.exit, output.stderr
    if output.status == "ok" and not found:
        report.status = "garbage"
        report.unreadable = [line[:200] for line in output.stdout.split("\n") if line.strip()]


def add_amd_gpu(
    report: GpuReport, index: int, uuid: str, bus: str, *, heats: list[Any], **values: Any
) -> None:
    """Add a GPU. HIP finds it by its UUID. A GPU in a processor has none: it gets one of its machine and bus, and HIP finds it by its
    index."""
    visible = uuid
    if not re.fullmatch(r"GPU-(?!0+$)[0-9a-f]{16}", uuid):
        place = re.sub("[^0-9A-Za-z:.]", "", bus)[:32]
        uuid = f"GPU-amd-{read_text('/etc/machine-id').strip()}-{place}"
        visible = str(index)
    gpu = gpu_record("amd", index, uuid, visible=visible, **values)
    if gpu["memory_mb"] is not None and gpu["memory_mb"] < MIN_VRAM_MB:
        gpu.update(integrated=True, memory_mb=machine_memory_mb(), memory_used_mb=None)
    elif gpu["memory_used_mb"] is None and not gpu["problems"]:
        gpu["problems"] = [f"{report.tool} does not report its memory"]
    known = isinstance(gpu["model"], str) and gpu["model"] not in ("", "N/A")
    gpu["model"] = gpu["model"] if known else None
    degrees = [amount_in(heat) for heat in heats]
    gpu["temperature"] = next((number for number in degrees if number is not None), None)
    report.gpus.append(gpu)


def drop_processor_graphics(report: GpuReport) -> None:
    """Leave out the graphics of a processor beside cards: they are not meant to compute on."""
    if not all(gpu["integrated"] for gpu in report.gpus):
        report.gpus = [gpu for gpu in report.gpus if not gpu["integrated"]]


def json_in(text: str) -> Any:
    """The first JSON document in the text, which may stand between warnings; None if there is none."""
    for match in re.finditer(r"^[\[{]", text, re.MULTILINE):
        try:
            return json.JSONDecoder().raw_decode(text, match.start())[0]
        except NO_JSON:
            continue
    return None


def by_gpu(document: Any) -> dict[int, dict[str, Any]]:
    """The entries of a document of amd-smi, by the number of the GPU."""
    entries = as_list((as_object(document) or {}).get("gpu_data", document))
    found = [entry for entry in map(as_object, entries) if entry]
    return {entry["gpu"]: entry for entry in found if is_small(entry.get("gpu"))}


def bytes_in(text: str) -> int | None:
    """Bytes as MB; None for `UNKNOWN` and the like."""
    return int(text) // 10**6 if re.fullmatch("[0-9]{1,15}", text) else None


def amount_in(value: Any) -> int | None:
    """A number, alone or with its unit; memory in MiB. None for `N/A` and the like."""
    unit = "MB"
    document = as_object(value)
    if document is not None:
        value, unit = document.get("value"), str(document.get("unit"))
    try:
        number = float(value) * UNITS.get(unit, 1)
    except (TypeError, ValueError, OverflowError):
        return None
    # A process with any memory at all has at least 1 MiB.
    return None if not 0 <= number < 1 << 31 else max(int(number), int(number > 0))
