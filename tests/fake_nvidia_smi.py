#!/usr/bin/env python3
"""Stands in for nvidia-smi: answers from a JSON file that a test writes and rewrites while the machine runs.

The file is the one that FAKE_NVIDIA_SMI_STATE names, or `nvidia-smi.json` beside this script (or the link through which it is called):

    {"mode": "normal",
     "gpus": [{"uuid": "GPU-…", "model": "…", "memory_mb": 81559, "used_mb": 4, "utilisation": 0, "temperature": 31,
               "mig": [{"uuid": "MIG-…", "profile": "3g.40gb", "memory_mb": 40192}] or null,
               "cells": {"memory.used": "[N/A]"}}],
     "apps": [{"uuid": "GPU-…", "pid": 4711, "used_mb": 900}],
     "marker_apps": {"GPU-…": "GROUPWISE_ATTEMPT=job.3"}}

A GPU's index is its place in the list. `cells` overrides what a field says. `marker_apps` lists every process with that variable in its
environment as an app on that GPU, so that a leak shows as it would. As recorded from machines (`gpu_reports/`): `lost` has the line for
each index that cannot be reached, at which drivers that are old stop (`stops`); `after` are lines after all others, `app_rows` other rows
of processes, `listing` and `xml` the answers to -L and -q -x, `exit` the exit status. Modes, each seen on real machines:

    normal; n/a (cells without values); err (ERR! in them); lost (the last GPU is gone, with the line that says so, exit 0);
    lost_exit (the same, exit 15); hang (never ends, ignores TERM); garbage; truncated (ends in mid-line);
    non_utf8; exit9 (no driver); no_mig_field (a driver before MIG); empty; apps_fail (who computes cannot be told)
"""

import json
import os
import signal
import sys
import time

PLACEHOLDERS = {"n/a": "[N/A]", "err": "ERR!"}
ALWAYS_PRESENT = ("index", "uuid", "name", "memory.total")
"""Cells that a GPU without values still has."""


def state():
    path = os.environ.get("FAKE_NVIDIA_SMI_STATE")
    if not path:
        path = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "nvidia-smi.json")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def cell(gpu, index, field, mode):
    if field in gpu.get("cells", {}):
        return gpu["cells"][field]
    if mode in PLACEHOLDERS and field not in ALWAYS_PRESENT:
        return PLACEHOLDERS[mode]
    migs = gpu.get("mig")
    values = {
        "index": index,
        "uuid": gpu["uuid"],
        "name": gpu.get("model", "NVIDIA H100 80GB HBM3"),
        "memory.total": gpu.get("memory_mb", 81559),
        "memory.used": "[N/A]" if migs else gpu.get("used_mb", 4),
        "utilization.gpu": "[N/A]" if migs else gpu.get("utilisation", 0),
        "temperature.gpu": gpu.get("temperature", 31),
        "mig.mode.current": "Enabled" if migs else "Disabled" if migs == [] else "[N/A]",
    }
    return str(values.get(field, "[N/A]"))


def query_gpu(known, fields, only):
    mode = known.get("mode", "normal")
    if mode == "no_mig_field" and "mig.mode.current" in fields:
        print('Field "mig.mode.current" is not a valid field to query.')
        return 2
    gpus = list(enumerate(known.get("gpus", [])))
    lost = [gpus.pop()[0]] if mode in ("lost", "lost_exit") else []
    if only is not None:
        gpus = [(n, gpu) for n, gpu in gpus if n == only]
        if not gpus:
            print("No devices were found")
            return 6
    for n, gpu in list(gpus):
        if str(n) in known.get("lost", {}):
            print(known["lost"][str(n)])
            gpus.remove((n, gpu))
            if known.get("stops"):
                return known["exit"]
    lines = [", ".join(cell(gpu, n, field, mode) for field in fields) for n, gpu in gpus]
    lines += [
        f"Unable to determine the device handle for GPU0000:0{index}:00.0: GPU is lost. "
        " Reboot the system to recover this GPU"
        for index in lost
    ]
    text = "".join(line + "\n" for line in [*lines, *known.get("after", ())])
    if mode == "truncated":
        text = text[: -len(text.splitlines()[-1]) // 2]
    if mode == "non_utf8":
        sys.stdout.flush()
        sys.stdout.buffer.write(b"\xff\xfe" + text.encode() + b"\x80\xae, \xc3\n")
    else:
        sys.stdout.write(text)
    return 15 if mode == "lost_exit" else known.get("exit", 0) if only is None else 0


def marked(variable):
    wanted = b"\0" + variable.encode() + b"\0"
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{int(name)}/environ", "rb") as file:
                if wanted in b"\0" + file.read():
                    yield int(name)
        except (OSError, ValueError):
            continue


def query_apps(known, fields, only):
    if known.get("mode") == "apps_fail":
        print("Insufficient Permissions", file=sys.stderr)
        return 4
    if known.get("stops") and only is None:
        print(next(iter(known["lost"].values())))
        return known["exit"]
    apps = list(known.get("apps", []))
    for uuid, variable in known.get("marker_apps", {}).items():
        apps += [{"uuid": uuid, "pid": pid} for pid in marked(variable)]
    for app in apps:
        values = {
            "gpu_uuid": app["uuid"],
            "pid": str(app["pid"]),
            "used_memory": str(app.get("used_mb", 500)),
        }
        print(", ".join(values[field] for field in fields))
    for row in known.get("app_rows", ()):
        print(row)
    return known.get("exit", 0) if only is None else 0


def listing(known):
    if "listing" in known:
        print(known["listing"], end="")
        return 0
    for n, gpu in enumerate(known.get("gpus", [])):
        print(f"GPU {n}: {gpu.get('model', 'NVIDIA H100 80GB HBM3')} (UUID: {gpu['uuid']})")
        for k, device in enumerate(gpu.get("mig") or []):
            print(f"  MIG {device['profile']:<12}Device {k:>2}: (UUID: {device['uuid']})")
    return 0


def full_xml(known):
    if "xml" in known:
        print(known["xml"], end="")
        return 0
    print(
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>'
    )
    for gpu in known.get("gpus", []):
        print(f"<gpu><uuid>{gpu['uuid']}</uuid><mig_devices>")
        for k, device in enumerate(gpu.get("mig") or []):
            memory = f"<fb_memory_usage><total>{device['memory_mb']} MiB</total></fb_memory_usage>"
            print(f"<mig_device><index>{k}</index>{memory}</mig_device>")
        print("</mig_devices></gpu>")
    print("</nvidia_smi_log>")
    return 0


def misbehave(mode):
    if mode == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(3600)
    if mode == "garbage":
        print("%&/()=\0 <<<\n, , ,\n\n;;;")
        return 0
    if mode == "empty":
        return 0
    if mode == "exit9":
        print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
        return 9
    return None


def main(arguments):
    known = state()
    code = misbehave(known.get("mode", "normal"))
    if code is not None:
        return code
    only = int(arguments[1]) if arguments[:1] == ["-i"] else None
    for argument in arguments:
        name, _, fields = argument.partition("=")
        if name == "--query-gpu":
            return query_gpu(known, fields.split(","), only)
        if name == "--query-compute-apps":
            return query_apps(known, fields.split(","), only)
    if arguments == ["-L"]:
        return listing(known)
    if arguments == ["-q", "-x"]:
        return full_xml(known)
    print("Invalid combination of input arguments.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
