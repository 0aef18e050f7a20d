"""What the runner makes of nvidia-smi, and how it gives GPUs to attempts.

1. What could not be read is None or named as unread; nothing is ever taken for free, or for zero, because it was not understood.
2. A tool that hangs costs its time limit and no more.
3. A GPU is one attempt's, or that of shares whose sum fits; whoever holds it is told.
4. A process on a GPU that is not ours makes a launch refuse; ours that leaked keeps the GPU from being released.
5. CUDA sees indices as they are at the launch, in the order of buses; MIG devices by their names.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.jobs.hosts import answers
from groupwise.jobs.hosts.runner.nvidia_smi import parse_apps, parse_gpus, parse_mig, parse_number
from tests.processes import is_gone, wait_until
from tests.runner_machine import Machine, machine

A, B, C = "GPU-aaaaaaaa-0000", "GPU-bbbbbbbb-1111", "GPU-cccccccc-2222"
NEW_MIG, OLD_MIG = "MIG-11111111-2222-3333-4444-555555555555", f"MIG-{A}/7/0"
FOR_EVER = "exec sleep 600"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        made.with_gpus(
            {"uuid": A}, {"uuid": B, "used_mb": 812, "utilisation": 97, "temperature": 71}
        )
        yield made


def show(here: Machine, mode: str = "normal", *gpus: dict[str, Any], **more: Any) -> None:
    here.with_gpus(*(gpus or ({"uuid": A}, {"uuid": B})), mode=mode, **more)


def mark(here: Machine, job: str = "job") -> str:
    """What its processes have in their environment, and those of no other test."""
    return f"GROUPWISE_RUNNER_FOLDER={here.folder(job)}"


# --- reading ------------------------------------------------------------------------------------


def test_a_machine_in_good_health(here: Machine) -> None:
    seen = here.ask("observe")
    fine = {"status": "ok", "apps": "ok", "lines_not_read": [], "exit": 0, "said": ""}
    assert seen["probe"] == fine
    busy = {"memory_used_mb": 812, "utilisation": 97, "temperature": 71}
    plain = {"mig": False, "mig_devices": [], "problems": []}
    card = {"index": 1, "uuid": B, "model": "NVIDIA H100 80GB HBM3", "memory_mb": 81559}
    assert seen["gpus"][1] == card | busy | plain


BAD_HEALTH: dict[str, tuple[str, list[str], int]] = {
    "n/a": ("ok", [A, B], 0), "err": ("ok", [A, B], 0), "lost": ("ok", [A], 1),
    "lost_exit": ("failed", [A], 1), "garbage": ("garbage", [], 3), "truncated": ("ok", [A], 1),
    "non_utf8": ("ok", [B], 2), "exit9": ("failed", [], 1), "no_mig_field": ("ok", [A, B], 0),
    "empty": ("ok", [], 0),
}  # fmt: skip
"""What nvidia-smi does, to how that is called, the GPUs that are seen, and how many lines at least are told to be unread."""


def test_a_machine_in_bad_health(here: Machine) -> None:
    for mode, (status, uuids, unread) in BAD_HEALTH.items():
        show(here, mode)
        seen = here.ask("observe")
        lines = seen["probe"]["lines_not_read"]
        found = (seen["probe"]["status"], [gpu["uuid"] for gpu in seen["gpus"]])
        assert found == (status, uuids), mode
        assert len([line for line in lines if "compute" not in line]) >= unread, mode
        assert unread or lines == [], mode
    show(here, "n/a")
    gpu = here.ask("observe")["gpus"][0]
    assert gpu["memory_mb"] == 81559
    assert [gpu[name] for name in ("memory_used_mb", "utilisation", "temperature")] == [None] * 3
    assert gpu["problems"] == ["memory.used: [N/A]"]
    show(here, "err")
    problems = here.ask("observe")["gpus"][0]["problems"]
    assert {"temperature.gpu: ERR!", "memory.used: ERR!"} <= {*problems}


def test_a_tool_that_hangs(here: Machine) -> None:
    show(here, "hang")
    begun = time.monotonic()
    seen = here.ask("observe", probe_timeout=0.3)
    assert time.monotonic() - begun < 10
    assert (seen["probe"]["status"], seen["gpus"]) == ("hung", [])
    marked = here.environment["FAKE_NVIDIA_SMI_STATE"].encode()
    wait_until(
        lambda: not any(marked in environ(p) for p in os.listdir("/proc")),
        "the end of the hung tool",
    )


def environ(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_mig_is_understood(here: Machine) -> None:
    devices = [
        {"uuid": NEW_MIG, "profile": "3g.40gb", "memory_mb": 40192},
        {"uuid": OLD_MIG, "profile": "1g.10gb", "memory_mb": 9728},
    ]
    show(here, "normal", {"uuid": A, "mig": devices}, {"uuid": B, "mig": []})
    first, second = here.ask("observe")["gpus"]
    assert (first["mig"], second["mig"]) == (True, False)
    assert [(d["uuid"], d["memory_mb"]) for d in first["mig_devices"]] == [
        (NEW_MIG, 40192),
        (OLD_MIG, 9728),
    ]
    assert first["problems"] == []
    assert "MIG" in here.sh("true", gpus=[A])["refused"]["message"]
    here.sh("echo $CUDA_VISIBLE_DEVICES", gpus=[NEW_MIG], epoch=2)
    assert here.comes_to("exited", epoch=2)["exit"]["tail"] == f"{NEW_MIG}\n"


NOTHING = "[N/A]|N/A|[Not Supported]|[Unknown Error]|[Insufficient Permissions]|[GPU is lost]|ERR!||-1|1e3|12 34|99999999999999"
GOLDEN = dict.fromkeys(NOTHING.split("|")) | {
    "0": 0, " 81559 ": 81559, "81559 MiB": 81559, "97 %": 97, "412.50": 412
}  # fmt: skip


def test_cells() -> None:
    assert {cell: parse_number(cell) for cell in GOLDEN} == GOLDEN


@given(st.text(max_size=400))
def test_any_text_at_all(text: str) -> None:
    gpus, unread = parse_gpus(text)
    apps, apps_unread = parse_apps(text)
    lines = [line for line in text.split("\n") if line.strip()]
    assert len(gpus) + len(unread) == len(lines)
    assert len(apps) + len(apps_unread) == len(lines)
    parse_mig(text, text)


CELLS = st.sampled_from([*GOLDEN, "GPU-1", "GPU-2", "Enabled", "Disabled", "0", "1", "a,b"])


@given(st.lists(st.lists(CELLS, min_size=7, max_size=9), max_size=5))
def test_any_table_of_such_cells(table: list[list[str]]) -> None:
    text = "".join(", ".join(row) + "\n" for row in table)
    gpus, unread = parse_gpus(text)
    assert len(gpus) + len(unread) == len([row for row in table if ", ".join(row).strip()])
    assert len({gpu["uuid"] for gpu in gpus}) == len(gpus)
    for gpu in gpus:
        assert gpu["uuid"].startswith("GPU-")
        assert gpu["memory_used_mb"] is not None or gpu["mig"] or gpu["problems"]


def test_a_table_that_was_cut_off_gives_no_wrong_number() -> None:
    text = f"0, {A}, H100, 81559, 12345, 50, 40, Disabled\n1, {B}, H100, 81559, 54321, 50, 40, Disabled\n"
    for kept in range(len(text)):
        for gpu in parse_gpus(text[:kept])[0]:
            assert gpu["memory_used_mb"] in (12345, 54321)
    text = f"{A}, 4711, 5000\n{B}, 4712, 6000\n"
    for kept in range(len(text)):
        apps, unread = parse_apps(text[:kept])
        assert [app["memory_mb"] for app in apps] == [5000, 6000][: len(apps)]
        assert len(apps) + len(unread) == len(text[:kept].splitlines())


# --- giving -------------------------------------------------------------------------------------


def test_indices_are_those_of_the_launch(here: Machine) -> None:
    here.sh("echo $CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES", gpus=[B, A])
    assert here.comes_to("exited")["exit"]["tail"] == "PCI_BUS_ID 1,0\n"
    show(here, "normal", {"uuid": C}, {"uuid": B}, {"uuid": A})
    here.sh("echo $CUDA_VISIBLE_DEVICES", gpus=[B, A], epoch=2)
    assert here.comes_to("exited", epoch=2)["exit"]["tail"] == "1,2\n"


def test_a_gpu_is_one_attempt_s(here: Machine) -> None:
    here.sh(FOR_EVER, gpus=[B])
    told = here.sh("true", job="other", gpus=[A, B])
    assert (told["refused"]["code"], told["refused"]["holder"]) == ("gpu_busy", "job.1")
    third = here.sh(FOR_EVER, job="third", gpus=[A])
    assert third["state"] == "running", "none is kept if one cannot be had"
    here.ask("kill", job="job", epoch=1, grace=0)
    here.comes_to("exited")
    wait_until(
        lambda: here.ask("release", job="job", epoch=1, gpus=[B], idle_memory_mb=900)["clean"]
    )
    here.sh("true", job="other", epoch=2, gpus=[B])
    assert here.comes_to("exited", job="other", epoch=2)["exit"]["code"] == 0


def test_a_gpu_that_is_not_well_is_not_used(here: Machine) -> None:
    cases = (("normal", C), ("lost", B), ("err", A), ("exit9", A), ("hang", A), ("garbage", A))
    for epoch, (mode, gpu) in enumerate(cases, 1):
        show(here, mode)
        told = here.sh("true", gpus=[gpu], probe_timeout=0.5, epoch=epoch)
        assert (told["state"], told["refused"]["code"]) == ("refused", "gpu_missing"), mode


def test_a_foreign_process_keeps_us_off(here: Machine) -> None:
    show(here, apps=[{"uuid": B, "pid": os.getpid()}])
    told = here.sh("true", gpus=[B])["refused"]
    assert told["code"] == "foreign_busy"
    assert str(os.getpid()) in told["holder"]
    assert here.sh("true", gpus=[A], epoch=2)["state"] in ("running", "exited")
    assert here.ask("observe")["apps"][0]["attempt"] is None
    share = here.sh("true", gpus=[B], share_mb=10, epoch=3)["refused"]
    assert share["code"] == "foreign_busy"


def test_shares_fit_beside_each_other(here: Machine) -> None:
    card = {"uuid": A, "memory_mb": 1000}
    show(here, "normal", card)
    here.sh(FOR_EVER, job="one", gpus=[A], share_mb=600)
    show(here, "normal", card, marker_apps={A: mark(here, "one")})
    here.sh(FOR_EVER, job="two", gpus=[A], share_mb=400)
    assert here.status("two")["state"] == "running"
    told = here.sh("true", job="three", gpus=[A], share_mb=1)["refused"]
    assert (told["code"], told["holder"]) == ("gpu_busy", "one.1, two.1")
    one = answers.parse_member_state(here.status("one"))
    assert (one.gpus, one.share_mb, one.slot) == ((A,), 600, None)
    assert here.sh("true", job="whole", gpus=[A])["refused"]["code"] == "gpu_busy"
    here.ask("kill", job="one", epoch=1, grace=0)
    here.comes_to("exited", "one")
    show(here, "normal", card)
    wait_until(lambda: here.ask("release", job="one", epoch=1, gpus=[A], share_mb=600)["clean"])
    assert here.sh(FOR_EVER, job="four", gpus=[A], share_mb=600)["state"] == "running"
    here.sh(FOR_EVER, job="slotted", slot=0)
    told = here.sh("true", job="whole", epoch=2, slot=0)["refused"]
    assert (told["code"], told["holder"]) == ("gpu_busy", "slotted.1"), "so is a slot"
    assert here.sh(FOR_EVER, job="beside", slot=1)["state"] == "running"
    seen = {each["job"]: each for each in here.ask("observe")["attempts"]}
    found = (seen["slotted"]["slot"], seen["slotted"]["gpus"], seen["beside"]["slot"])
    assert found == (0, [], 1)


# --- taking back --------------------------------------------------------------------------------


def holders(here: Machine, **fields: Any) -> list[str]:
    common: dict[str, Any] = {"job": "job", "epoch": 1, "gpus": [A], "idle_memory_mb": 10}
    released = here.ask("release", **{**common, **fields})
    assert released["clean"] == (not released["holders"])
    return sorted({h["what"] for h in released["holders"]})


def test_a_running_attempt_holds_its_gpu_until_it_is_another_s(here: Machine) -> None:
    here.sh(FOR_EVER, gpus=[A])
    assert "lock" in holders(here)
    assert {"process", "cgroup"} & set(holders(here))
    here.ask("kill", job="job", epoch=1, grace=0)
    here.comes_to("exited")
    wait_until(lambda: not holders(here))
    here.sh(FOR_EVER, job="other", gpus=[A])
    assert "lock" not in holders(here)


def test_a_leak_keeps_the_gpu(here: Machine) -> None:
    """The supervisor is gone, and the command; a grandchild is left, which closed all files and shows on the GPU."""
    program = here.home / "leak.py"
    program.write_text(
        "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\nos.closerange(0, 256)\n"
        "open('pid', 'w').write('%d\\n' % os.getpid())\nimport time; time.sleep(600)\n"
    )
    here.sh(f"{sys.executable} -IS {program}; {FOR_EVER}", gpus=[A])
    pid = int(here.written("pid"))
    here.kill_supervisor()
    show(here, marker_apps={A: mark(here)})
    assert set(holders(here)) >= {"memory"}
    app = here.ask("observe")["apps"][0]
    assert (app["pid"], app["attempt"]) == (pid, "job.1")
    assert here.sh("true", job="other", gpus=[A])["refused"]["code"] == "gpu_busy"
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid))
    assert wait_until(lambda: not holders(here))


def test_memory_has_to_be_seen_idle(here: Machine) -> None:
    here.sh("true", gpus=[A])
    here.comes_to("exited")
    wait_until(lambda: "lock" not in holders(here))
    seen: list[tuple[str, dict[str, Any], list[str]]] = [
        ("normal", {"uuid": A, "used_mb": 11}, ["memory"]),
        ("normal", {"uuid": A, "used_mb": 10}, []),
        ("normal", {"uuid": A, "cells": {"memory.used": "[N/A]"}}, ["memory"]),
        ("normal", {"uuid": B}, ["memory"]),
        *[(mode, {"uuid": A}, ["memory"]) for mode in ("exit9", "hang", "garbage")],
    ]
    for mode, gpu, expected in seen:
        here.with_gpus(gpu, mode=mode)
        assert holders(here, probe_timeout=0.5 if mode == "hang" else 20.0) == expected, mode
