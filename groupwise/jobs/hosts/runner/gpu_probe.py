"""Lists the GPUs of the machine and the processes on them, by the vendors' tools that it has, and makes the variables that show a job its
GPUs. Requests that observe the machine or start a job call it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.amd_smi import read_amd_smi, read_rocm_smi
from groupwise.jobs.hosts.runner.nvidia_smi import read_nvidia_smi, read_tegrastats
from groupwise.jobs.hosts.runner.processes import marker_of
from groupwise.jobs.hosts.runner.protocol import arguments_of, seconds_of
from groupwise.jobs.hosts.runner.smi import GpuReport, Probe, find_tool

if TYPE_CHECKING:
    from typing import Any

    from groupwise.jobs.hosts.runner.root import Root

PROBE_TIMEOUT = 10.0
"""Default timeout in seconds of one round of the GPU probe."""
READERS = {
    "nvidia-smi": read_nvidia_smi,
    "tegrastats": read_tegrastats,
    "amd-smi": read_amd_smi,
    "rocm-smi": read_rocm_smi,
}
VENDORS = (("nvidia-smi", "tegrastats"), ("amd-smi", "rocm-smi"))
"""The tools of each vendor; the first one that the machine has is used."""


def probe_gpus(root: Root, body: dict[str, Any]) -> GpuReport:
    """Run one round of the probe: of the command that the request names, or of each vendor's tool."""
    timeout = seconds_of(body, "probe_timeout", PROBE_TIMEOUT)
    if body.get("probe"):
        command = arguments_of(body["probe"])
        known = [tool for tool in READERS if tool in map(os.path.basename, command)]
        report = READERS[(known or ["nvidia-smi"])[0]](Probe(root, command, timeout))
    else:
        found = [next(filter(find_tool, tools), None) for tools in VENDORS]
        reports = [READERS[tool](Probe(root, [tool], timeout)) for tool in found if tool]
        if reports and reports[-1].tool in VENDORS[1] and not reports[-1].gpus and not has_amd():
            reports.pop()  # the tool is installed without a GPU
        report = GpuReport("nvidia-smi", stderr="there is no nvidia-smi, amd-smi or rocm-smi")
        for other in reports:
            report = other if report.status == "absent" else merge_reports(report, other)
    for app in report.apps:
        app["attempt"] = marker_of(app["pid"], root)
    return report


def has_amd() -> bool:
    """True if AMD's driver has a GPU to compute on."""
    return os.path.exists("/dev/kfd")


def has_nvidia() -> bool:
    """True if NVIDIA's driver runs."""
    return os.path.exists("/proc/driver/nvidia/version")


def merge_reports(one: GpuReport, other: GpuReport) -> GpuReport:
    """The GPUs of two vendors. A tool that fails does not hide the GPUs of the other one."""
    if not other.gpus or not one.gpus:
        good, bad = (one, other) if one.gpus else (other, one)
        failure = f"{bad.tool} {bad.status}: {bad.stderr.strip()[:200]}"
        good.unreadable += [failure] if bad.status != "ok" else bad.unreadable
        return good
    one.tool += f" and {other.tool}"
    one.gpus += other.gpus
    one.apps += other.apps
    one.lost += other.lost
    one.unreadable += other.unreadable
    if one.apps_status == "ok":
        one.apps_status = other.apps_status
    return one


def device_variables(gpus: list[dict[str, Any]]) -> dict[str, str]:
    """The variables that show a job its GPUs and no others. HIP numbers the GPUs in ROCR_VISIBLE_DEVICES from 0."""
    nvidia, amd = (
        [gpu["visible"] for gpu in gpus if gpu["vendor"] == vendor] for vendor in ("nvidia", "amd")
    )
    if amd:
        counted = ",".join(str(n) for n in range(len(amd)))
        # Programs for ROCm read that one, too; beside NVIDIA's driver it would show another job's GPUs.
        for_cuda = nvidia if nvidia or has_nvidia() else [counted]
        return {
            "ROCR_VISIBLE_DEVICES": ",".join(amd),
            "HIP_VISIBLE_DEVICES": counted,
            "CUDA_VISIBLE_DEVICES": ",".join(for_cuda),
        }
    hidden = {"CUDA_VISIBLE_DEVICES": ",".join(nvidia)}
    if has_amd():  # for ROCm an empty value shows all GPUs
        hidden.update(ROCR_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")
    return hidden
