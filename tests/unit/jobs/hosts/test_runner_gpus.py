"""How the runner interprets nvidia-smi, and how it assigns GPUs to attempts.

1. What could not be read is None or named as unread; nothing is ever taken for free, or for zero, because it was not understood.
2. A tool that hangs costs its time limit and no more.
3. A GPU is one attempt's, or that of shares whose sum fits; whoever holds it is told.
4. A process on a GPU that is not ours makes a launch refuse; ours that leaked keeps the GPU from being released.
5. CUDA sees indices as they are at the launch, in the order of buses; MIG devices by their names.
"""

import copy
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.jobs.hosts import answers
from groupwise.jobs.hosts.runner import observe
from groupwise.jobs.hosts.runner.amd_smi import json_in, read_amd_smi, read_rocm_smi
from groupwise.jobs.hosts.runner.nvidia_smi import (
    mig_devices,
    parse_apps,
    parse_gpus,
    read_nvidia_smi,
)
from groupwise.jobs.hosts.runner.root import Root
from groupwise.jobs.hosts.runner.smi import (
    Probe,
    ProbeOutput,
    gpu_record,
    machine_memory_mb,
    parse_number,
)
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
    fine = {"tool": "nvidia-smi", "status": "ok", "apps": "ok", "lines_not_read": [], "lost": []}
    assert seen["probe"] == fine | {"exit": 0, "said": ""}
    busy = {"memory_used_mb": 851, "utilisation": 97, "temperature": 71}
    plain = {"vendor": "nvidia", "visible": "1", "mig": False, "integrated": False, "problems": []}
    card = {"index": 1, "uuid": B, "model": "NVIDIA H100 80GB HBM3", "memory_mb": 85520}
    assert seen["gpus"][1] == card | busy | plain


BAD_HEALTH: dict[str, tuple[str, list[str], int]] = {
    "n/a": ("ok", [A, B], 0), "err": ("ok", [A, B], 0), "lost": ("ok", [A], 1),
    "lost_exit": ("ok", [A], 1), "garbage": ("garbage", [], 3), "truncated": ("ok", [A], 1),
    "non_utf8": ("ok", [B], 2), "exit9": ("failed", [], 1), "no_mig_field": ("ok", [A, B], 0),
    "empty": ("ok", [], 0),
}  # fmt: skip
"""What nvidia-smi does, to how that is called, the GPUs that are seen, and how many lines at least are told to be unread."""


def test_a_machine_in_bad_health(here: Machine) -> None:
    for mode, (status, uuids, unread) in BAD_HEALTH.items():
        show(here, mode)
        seen = here.ask("observe")
        lines = seen["probe"]["lines_not_read"] + seen["probe"]["lost"]
        found = (seen["probe"]["status"], [gpu["uuid"] for gpu in seen["gpus"]])
        assert found == (status, uuids), mode
        assert len([line for line in lines if "compute" not in line]) >= unread, mode
        assert unread or lines == [], mode
    show(here, "n/a")
    gpu = here.ask("observe")["gpus"][0]
    assert gpu["memory_mb"] == 85520
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
    first, second, *rest = here.ask("observe")["gpus"]
    assert (first["mig"], second["mig"], first["problems"]) == (True, False, [])
    assert [(d["index"], d["uuid"], d["memory_mb"]) for d in rest] == [
        (0, NEW_MIG, 42144),
        (0, OLD_MIG, 10200),
    ]
    assert rest[0]["model"] == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    show(here, "normal", {"uuid": A, "mig": devices}, xml="<nvidia_smi_log>")
    assert all(gpu["problems"] for gpu in here.ask("observe")["gpus"][1:]), "who is on them?"
    show(here, "normal", {"uuid": A, "mig": devices}, {"uuid": B, "mig": []})
    assert "MIG" in here.sh("true", gpus=[A])["refused"]["message"]
    here.sh("echo $CUDA_VISIBLE_DEVICES", gpus=[NEW_MIG], epoch=2)
    assert here.comes_to("exited", epoch=2)["exit"]["tail"] == f"{NEW_MIG}\n"


NOTHING = "[N/A]|N/A|[Not Supported]|[Unknown Error]|[Insufficient Permissions]|[GPU is lost]|ERR!||-1|1e3|12 34|99999999999999"
GOLDEN = dict.fromkeys(NOTHING.split("|")) | {
    "0": 0, " 81559 ": 81559, "81559 MiB": 81559, "97 %": 97, "412.50": 412
}  # fmt: skip


def test_cells() -> None:
    assert {cell: parse_number(cell) for cell in GOLDEN} == GOLDEN


def test_words_for_no_memory() -> None:
    """By cell: whether a GPU with the machine's memory is well, and one that should have its own."""
    words = {
        "[N/A]": (True, True),
        "[Not Supported]": (True, True),
        "[GPU is lost]": (False, False),
    }
    words |= dict.fromkeys(("[Insufficient Permissions]", "[Unknown Error]", "ERR!"), (True, False))
    for cell, expected in words.items():
        row = f"0, {A}, {cell}, {cell}, 0, 36, [N/A]"
        gpus = [parse_gpus(f"{row}, NVIDIA {model}\n")[0][0] for model in ("GB10", "H100 80GB")]
        assert tuple(not gpu["problems"] for gpu in gpus) == expected, cell
        assert [gpu["memory_mb"] for gpu in gpus if not gpu["problems"]] == [MACHINE] * sum(
            expected
        )


@given(st.text(max_size=400))
def test_any_text_at_all(text: str) -> None:
    gpus, unread = parse_gpus(text)
    apps, apps_unread = parse_apps(text)
    lines = [line for line in text.split("\n") if line.strip()]
    assert len(gpus) + len(unread) == len(lines)
    assert len(apps) + len(apps_unread) == len(lines)
    mig_devices(text)


CELLS = st.sampled_from([*GOLDEN, "GPU-1", "GPU-2", "Enabled", "Disabled", "0", "1", "a,b"])


@given(st.lists(st.lists(CELLS, min_size=7, max_size=9), max_size=5))
def test_any_table_of_such_cells(table: list[list[str]]) -> None:
    text = "".join(", ".join(row) + "\n" for row in table)
    gpus, unread = parse_gpus(text)
    assert len(gpus) + len(unread) == len([row for row in table if ", ".join(row).strip()])
    assert len({gpu["uuid"] for gpu in gpus}) == len(gpus)
    for gpu in gpus:
        assert gpu["uuid"].startswith("GPU-")
        normal = gpu["mig"] or gpu["integrated"]
        assert gpu["memory_used_mb"] is not None or normal or gpu["problems"]


def test_a_table_that_was_cut_off_gives_no_wrong_number() -> None:
    text = f"0, {A}, 81559, 12345, 50, 40, Disabled, H100\n1, {B}, 81559, 54321, 50, 40, Disabled, H100\n"
    for kept in range(len(text)):
        for gpu in parse_gpus(text[:kept])[0]:
            assert gpu["memory_used_mb"] in (12944, 56959)
    text = f"{A}, 4711, 5000\n{B}, 4712, 6000\n"
    for kept in range(len(text)):
        apps, unread = parse_apps(text[:kept])
        assert [app["memory_mb"] for app in apps] == [5242, 6291][: len(apps)]
        assert len(apps) + len(unread) == len(text[:kept].splitlines())


# --- as recorded from machines --------------------------------------------------------------------

REPORTS = Path(__file__).parents[3] / "gpu_reports"
CARD_0, LOST, CARD_2, CARD_3 = (
    f"GPU-{u}" for u in ("67a571b1", "3e34e62f", "2d540dd6", "80be5c9a")
)
MACHINE = machine_memory_mb()
RECORDED: dict[str, tuple[list[tuple[str, str, int | None, int | None, str]], dict[str, str]]] = {
    "gb10": ([("GPU-2dee1e25", "NVIDIA GB10", MACHINE, None, "")], {}),
    "jetson_orin": ([("a9485f58", "Orin (nvgpu)", MACHINE, None, "")], {"CUDA_VISIBLE_DEVICES": "0"}),
    "lost_card": ([(u, "NVIDIA GeForce RTX 2080 Ti", 11811, 1, "") for u in (CARD_0, CARD_2, CARD_3)], {}),
    "lost_card_old_driver": ([(u, "NVIDIA GeForce RTX 2080 Ti", 11811, 1, "") for u in (CARD_0, CARD_2, CARD_3)], {}),
    "lost_cells": ([(CARD_0, "NVIDIA GeForce RTX 2080 Ti", 11811, 1, ""),
                    (LOST, "NVIDIA GeForce RTX 2080 Ti", None, None, "GPU is lost")], {}),
    "mig": ([("GPU-7fdaf0a5", "NVIDIA A100-SXM4-80GB", None, None, "split"),
             *((f"MIG-{u}", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10200, used, "")
               for u, used in (("feb88891", 13), ("a25704ba", 2524), ("50f1c4c9", 13)))], {}),
    "vgpu": ([("GPU-6a1e4d9c", "NVIDIA H100L-2-24C", 25769, 0, "")], {"CUDA_VISIBLE_DEVICES": "0"}),
    "desktop": ([("GPU-09cb2925", "Quadro P4000", 8498, 735, "")], {"CUDA_VISIBLE_DEVICES": "0"}),
    "wsl": ([("GPU-b5e386b4", "NVIDIA GeForce GTX 1650 Ti with Max-Q Design", 4294, 125, "")], {"CUDA_VISIBLE_DEVICES": "0"}),
    "amd-smi/amd_smi": ([("GPU-75e3fd74aab3f72c", "AMD Instinct MI355X", 309220, 296, ""),
                         ("GPU-6889743843afe909", "AMD Instinct MI355X", 309220, 71303, "")],
                        {"ROCR_VISIBLE_DEVICES": "GPU-75e3fd74aab3f72c", "HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}),
    "rocm-smi/rocm_smi": ([("GPU-719d230578348e8c", "Radeon RX 7900 XT", 21458, 27, "")], {}),
    "rocm-smi/rocm_smi_two": ([("GPU-9246bd4f8b2bb12f", "Navi 21 [Radeon RX 6800/6800 XT / 6900 XT]", 17163, 692, "")], {}),
    "tegrastats/tegrastats": ([("GPU-tegra-", "", MACHINE, None, "")], {"CUDA_VISIBLE_DEVICES": "0"}),
}  # fmt: skip
"""By recording: what is seen, as (UUID, model, memory, memory in use, trouble), and the variables of a job on the first GPU."""


def replay(here: Machine, name: str) -> None:
    """The machine has the tool that was recorded, and no other."""
    tool, _, folder = name.rpartition("/")
    for other in (here.home / "bin").iterdir():
        other.unlink()
    if not tool:
        state = json.loads((REPORTS / "nvidia" / f"{name}.json").read_text())
        here.with_gpus(*state.pop("gpus"), **state)
        return
    program = here.home / "bin" / tool
    program.write_text(f'#!/bin/sh\nexec cat "{REPORTS / folder}/$1"\n')
    program.chmod(0o755)


@pytest.mark.parametrize("name", RECORDED)
def test_gpus_as_they_are(here: Machine, name: str) -> None:
    expected, variables = RECORDED[name]
    replay(here, name)
    here.environment |= {"CUDA_VISIBLE_DEVICES": "7", "ROCR_VISIBLE_DEVICES": "7"}
    seen = here.ask("observe")
    assert (seen["probe"]["status"], seen["probe"]["apps"]) == ("ok", "ok")
    for gpu, (uuid, model, memory_mb, used_mb, trouble) in zip(seen["gpus"], expected, strict=True):
        assert gpu["uuid"].startswith(uuid)
        assert model in gpu["model"]
        assert (gpu["memory_mb"], gpu["memory_used_mb"]) == (memory_mb, used_mb)
        assert trouble in "; ".join(["split"] * gpu["mig"] + gpu["problems"])
        assert bool(trouble) == bool(gpu["mig"] or gpu["problems"])
    assert [*seen["probe"]["lost"]] == [
        line for line in seen["probe"]["lost"] if "Unable to determine the device handle" in line
    ]
    assert bool(seen["probe"]["lost"]) == name.startswith("lost_card")
    if variables:
        uuid = seen["gpus"][0]["uuid"]
        here.sh("env | grep VISIBLE_DEVICES | sort", gpus=[uuid])
        told = here.comes_to("exited")["exit"]["tail"].splitlines()
        assert dict(line.split("=") for line in told) == variables
        wait_until(lambda: not holders(here, gpus=[uuid], idle_memory_mb=900))


def test_where_a_gpu_is_lost_the_others_are_named_as_cuda_counts_them(here: Machine) -> None:
    for epoch, name in enumerate(("lost_card", "lost_card_old_driver", "lost_cells"), 1):
        replay(here, name)
        uuids = {gpu["uuid"][:12]: gpu["uuid"] for gpu in here.ask("observe")["gpus"]}
        last = uuids.get(CARD_3, uuids[CARD_0])
        here.sh("echo $CUDA_VISIBLE_DEVICES", gpus=[last], epoch=epoch)
        assert here.comes_to("exited", epoch=epoch)["exit"]["tail"].strip() == last
        lost = "GPU-3e34e62f-d88e-f448-415e-be2cbf2c6178"
        refused = here.sh("true", job="other", gpus=[lost], epoch=epoch)["refused"]
        assert refused["code"] == "gpu_missing"
        assert "Unknown Error" in refused["message"] or "GPU is lost" in refused["message"]


def test_a_gpu_whose_users_are_unknown_is_not_used(tmp_path: Path) -> None:
    lost = "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error\n"
    rows = {n: f"{n}, {uuid}, 81559, 4, 0, 31, Disabled, H100\n" for n, uuid in enumerate((A, B))}

    class Stopping(Probe):
        """Lists all GPUs at once, but stops at the lost one before the processes; one card's cannot be read at all."""

        def run(self, *questions: Sequence[str]) -> list[ProbeOutput]:
            return [self.answer(*question) for question in questions]

        def answer(self, *words: str) -> ProbeOutput:
            if words == ("-L",):
                device = f"  MIG 1g.10gb Device  0: (UUID: {NEW_MIG})\n"
                return ProbeOutput("ok", f"GPU 0: H100 (UUID: {A})\n{device}", "", 0)
            if words == ("-q", "-x"):
                device = "<mig_device><index>0</index></mig_device>"
                return ProbeOutput("ok", f"<log><gpu><uuid>{A}</uuid>{device}</gpu></log>", "", 0)
            card = int(words[1]) if words[0] == "-i" else None
            about_apps = any("compute-apps" in word for word in words)
            if card is None:
                text = lost if about_apps else "".join([*rows.values(), lost])
                return ProbeOutput("failed" if about_apps else "ok", text, "", 255 * about_apps)
            if card not in rows:
                return ProbeOutput("failed", "No devices were found\n", "", 6)
            if card == 0 and about_apps:
                return ProbeOutput("hung")
            return ProbeOutput("ok", f"{B}, 1, 900\n" if about_apps else rows[card], "", 0)

    report = read_nvidia_smi(Stopping(Root(str(tmp_path)), ["nvidia-smi"], 1.0))
    assert {gpu["uuid"]: bool(gpu["problems"]) for gpu in report.gpus} == {A: True, B: False}
    assert [(app["uuid"], app["pid"]) for app in report.apps] == [(B, 1)]
    assert (report.status, report.apps_status) == ("ok", "ok")
    rows[0] = rows[0].replace("Disabled", "Enabled")
    report = read_nvidia_smi(Stopping(Root(str(tmp_path)), ["nvidia-smi"], 1.0))
    device = report.gpu(NEW_MIG)
    assert device is not None
    assert device["problems"] == ["nvidia-smi does not say who uses it"]


def test_processes_on_recorded_gpus_are_listed(here: Machine) -> None:
    users: dict[str, list[tuple[str, int, bool]]] = {}
    for name in ("mig", "desktop", "vgpu", "amd-smi/amd_smi", "rocm-smi/rocm_smi", "gb10"):
        replay(here, name)
        apps = here.ask("observe")["apps"]
        users[name] = [(a["uuid"][:12], a["pid"], a.get("graphics", False)) for a in apps]
    assert users == {
        "mig": [("MIG-a25704ba", 4711, False)],
        "desktop": [("GPU-09cb2925", 2355, True)],
        "vgpu": [],
        "amd-smi/amd_smi": [("GPU-68897438", 28389, False)],
        "rocm-smi/rocm_smi": [("GPU-719d2305", 28389, False)],
        "gb10": [("GPU-2dee1e25", 114687, False)],
    }
    told = here.sh("true", gpus=[here.ask("observe")["gpus"][0]["uuid"]])
    assert told["refused"]["code"] == "foreign_busy"
    show(
        here, app_rows=[f"{A}, [N/A], [Insufficient Permissions]"]
    )  # of a user in another container
    told = here.sh("true", gpus=[A], epoch=2)
    assert told["refused"]["code"] == "foreign_busy"
    assert here.sh("true", gpus=[B], epoch=3)["state"] != "refused"


class Replayed:
    """In place of a tool: answers in the order of the questions."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def run(self, *questions: Any) -> list[ProbeOutput]:
        return [ProbeOutput("ok", json.dumps(answer)) for answer in self.answers]


def leaves(document: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in [*(document.items() if isinstance(document, dict) else enumerate(document))]:
        yield document, key
        if isinstance(value, dict | list):
            yield from leaves(value)


@pytest.mark.parametrize("read", [read_amd_smi, read_rocm_smi])
def test_any_value_in_json(read: Any) -> None:
    """Each in turn is something else: what is read of the others is an answer that the control plane takes."""
    folder, names = (
        REPORTS / read.__name__.removeprefix("read_"),
        ("list", "static", "metric", "process"),
    )
    if read is read_rocm_smi:
        names = ("--showuniqueid", "--showpids")
    recorded = [json_in((folder / name).read_text()) for name in names]
    for odd in (None, [], {}, "", "²", "x" * 9999, 10**40, -1, True, math.inf, {"value": "1e999"}):
        for number in range(len([*leaves(recorded)])):
            answers_given = copy.deepcopy(recorded)
            within, key = [*leaves(answers_given)][number]
            within[key] = odd
            report = read(Replayed(answers_given))
            said = {"boot_id": "b", "probe": report.summary(), "gpus": report.gpus}
            assert len(answers.parse_observation(said | {"apps": report.apps}).gpus) <= 2


def test_the_graphics_of_a_processor_count_where_there_is_no_card() -> None:
    cards = json_in((REPORTS / "rocm_smi_two" / "--showuniqueid").read_text())
    [gpu] = read_rocm_smi(cast("Any", Replayed([{"card1": cards["card1"]}, {}]))).gpus
    assert (gpu["memory_mb"], gpu["integrated"], gpu["visible"]) == (MACHINE, True, "1")
    assert gpu["uuid"].endswith("-0000:0F:00.0")


def test_a_job_on_amd_sees_no_gpu_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    card = gpu_record("amd", 1, "GPU-75e3fd74aab3f72c", visible="GPU-75e3fd74aab3f72c")
    for beside, cuda in ((False, "0"), (True, "")):
        monkeypatch.setattr(observe, "has_nvidia", lambda beside=beside: beside)
        variables = observe.device_variables([card])
        assert (variables["HIP_VISIBLE_DEVICES"], variables["CUDA_VISIBLE_DEVICES"]) == ("0", cuda)


def test_the_command_that_lists_gpus_may_be_named(here: Machine) -> None:
    show(here, "normal", {"uuid": A, "model": "NVIDIA H100, [80GB], HBM3"})
    (here.home / "bin" / "nvidia-smi").rename(here.home / "wrapper")
    assert here.ask("observe")["probe"]["status"] == "absent"
    seen = here.ask("observe", probe=[str(here.home / "wrapper")])
    assert [gpu["model"] for gpu in seen["gpus"]] == ["NVIDIA H100, [80GB], HBM3"]
    replay(here, "amd-smi/amd_smi")
    seen = here.ask("observe", probe=["env", str(here.home / "bin" / "amd-smi")])
    assert (seen["probe"]["tool"], len(seen["gpus"])) == ("amd-smi", 2)
    show(here)  # cards of two vendors, and nvidia-smi without its driver
    assert [gpu["vendor"] for gpu in here.ask("observe")["gpus"]] == ["nvidia"] * 2 + ["amd"] * 2
    show(here, "exit9")
    seen = here.ask("observe")
    assert (seen["probe"]["status"], len(seen["gpus"])) == ("ok", 2)
    assert "nvidia-smi failed" in seen["probe"]["lines_not_read"][0]


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
    for row in (f"{B}, 12", f"{B}, x, 900"):  # somebody is there, whoever that is
        show(here, apps=[{"uuid": A, "pid": os.getpid()}], app_rows=[row])
        refused = here.sh("true", job="other", gpus=[B])["refused"]
        assert (refused["code"], "garbage" in refused["message"]) == ("gpu_missing", True)


def test_shares_fit_beside_each_other(here: Machine) -> None:
    card = {"uuid": A, "memory_mb": 954}  # of 2**20 bytes; as many as 1000 of 10**6
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
