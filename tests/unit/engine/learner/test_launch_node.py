"""The processes of one machine of several: where they meet, and with which code they end."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.rendezvous import KEY, KEY_FILE, port_of, rendezvous_variables
from groupwise.engine.learner import launch_node
from groupwise.engine.learner.launch_node import (
    STARTED_BY_SRUN,
    Rendezvous,
    read_rendezvous,
    run_on_all_nodes,
)

FAILS = "import os, sys; sys.exit(int(os.environ['RANK']) * 3)"
KILLED = "import os, signal; os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)"
WAITING_PROGRAM = """\
import os, signal, sys, time
def say(line):
    os.write(1, f"{line}\\n".encode())  # at once: another process says its own there
signal.signal(signal.SIGTERM, lambda *_: (say(f"saved {os.environ['RANK']}"), sys.exit(0)))
say("on")
time.sleep(1000)
"""


def test_machines_are_told_where_they_meet() -> None:
    """By us or by srun, whose nodes meet at the first one."""
    by_srun = {
        "GROUPWISE_BEGUN_BY_SRUN": "1", "GROUPWISE_ATTEMPT": "sums.2", "SLURM_NODEID": "1",
        "SLURM_NNODES": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    assert read_rendezvous(by_srun) == Rendezvous(1, 2, "10.0.0.1", port_of("sums.2"), "sums.2")
    by_hand = {name: word for name, word in by_srun.items() if name != "GROUPWISE_ATTEMPT"}
    assert read_rendezvous(by_hand) == Rendezvous(1, 2, "10.0.0.1", port_of("slurm.7"), "slurm.7")
    ports = [port_of(f"sums.{epoch}") for epoch in range(1, 100)]
    assert len(set(ports)) == 99
    assert all(20_000 <= port < 32_000 for port in ports)
    told = rendezvous_variables(1, 3, "10.0.0.1", "sums.2")
    assert read_rendezvous(told) == Rendezvous(1, 3, "10.0.0.1", port_of("sums.2"), "sums.2")
    for word in ("NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT"):
        assert read_rendezvous({**told, word: ""}) is None


def test_nodes_of_slurm_have_a_secret_in_the_folder_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(KEY_FILE, raising=False)
    srun = fake_srun(tmp_path, "printf '%s\\n' \"$@\" >>words")
    monkeypatch.setenv("PATH", f"{srun}:{os.environ['PATH']}")
    found = []
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setenv(STARTED_BY_SRUN, "")
            patched.setenv(KEY_FILE, "")
            assert run_on_all_nodes(2, ["--", "true"]) == 0
            path = Path(os.environ[KEY_FILE])
        found.append(path.read_text())
        assert path == tmp_path / KEY
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len({*found}) == 2
    words = (tmp_path / "words").read_text()
    assert "--nodes=2\n" in words
    assert not any(secret in words for secret in found)


def fake_srun(folder: Path, script: str) -> Path:
    """The folder in which it is."""
    (folder / "bin").mkdir()
    (folder / "bin/srun").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "bin/srun").chmod(0o755)
    return folder / "bin"


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak(suite="engine"))],
)
def test_a_signal_is_withheld_from_srun_and_passed_to_its_tasks(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As the runner tells it, all of the command's session; or typed in an allocation."""
    tasks = (
        'trap "exit 9" TERM\n'
        "while [[ $1 == --* ]]; do shift; done\n"
        'SLURM_NODEID=0 SLURM_NNODES=1 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 setsid "$@" &\n'
        "wait $!"
    )
    path = f"{fake_srun(tmp_path, tasks)}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": f"{os.getpid()}", "PATH": path}
    process = begun(
        sys.executable,
        "-c",
        WAITING_PROGRAM,
        told=False,
        at=tmp_path,
        **slurm,
        GLOO_SOCKET_IFNAME="lo",
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["on\n", "on\n"]
    os.killpg(process.pid, number)
    said, _ = process.communicate(timeout=100)
    assert sorted(said.splitlines()) == ["saved 0", "saved 1"]
    assert process.returncode == 128 + signal.SIGTERM


def test_the_first_machine_of_ray_says_what_others_run_and_what_they_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path, seen = tmp_path / "order.json", list[Any]()

    def runs(meeting: Rendezvous, processes: str, command: Sequence[str]) -> int:
        seen.extend((meeting, processes, command, json.loads(path.read_text())))
        seen.append(path.stat().st_mode & 0o777)
        (tmp_path / "order.json.1.log").write_bytes(b"of the second\n")
        return 5

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(KEY_FILE, "")
    monkeypatch.setattr(launch_node, "run", runs)
    told = {
        "RAY_GROUPWISE_NODES": "2", "RAY_GROUPWISE_HOST": "10.0.0.1", "RAY_GROUPWISE_ORDER": str(path), "GROUPWISE_ATTEMPT": "sums.2",
        "CANARY": "secret",
    }  # fmt: skip
    words = ["--processes", "2", "--", "job", "a b"]
    assert launch_node.run_on_ray(told, words, "2", ["job", "a b"]) == 5
    meeting, processes, command, order, mode = seen
    assert meeting == Rendezvous(0, 2, "10.0.0.1", port_of("sums.2"), "sums.2")
    assert (processes, command, mode) == ("2", ["job", "a b"], 0o600)
    assert order["arguments"] == [
        sys.executable,
        "-m",
        "groupwise.engine.learner.launch_node",
        *words,
    ]
    assert order["environment"]["CANARY"] == "secret"
    assert order["environment"][KEY_FILE] == os.environ[KEY_FILE] == str(tmp_path / KEY)
    assert read_rendezvous({**order["environment"], "NODE_RANK": "1"}) == replace(meeting, rank=1)
    assert order["folder"] == os.getcwd()
    assert not path.exists()
    assert capfdbinary.readouterr().out == b"of the second\n"


def begun(
    *command: str, told: bool = True, at: Path | None = None, **environment: str
) -> "subprocess.Popen[str]":
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    where = rendezvous_variables(0, 1, "127.0.0.1", f"test-{os.getpid()}.1") if told else {}
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "groupwise.engine.learner.launch_node",
            "--processes",
            "2",
            "--",
            *command,
        ],
        env={**kept, **where, **environment, "OMP_NUM_THREADS": "1"},
        cwd=at,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("script", "code", "why"),
    [pytest.param(FAILS, 3, "", marks=pytest.mark.soak(suite="engine")), (KILLED, 75, "signal 9")],
)
def test_the_first_that_failed_gives_the_exit_code(script: str, code: int, why: str) -> None:
    """Also in an allocation of Slurm: what was told where it meets needs no srun."""
    process = begun(sys.executable, "-c", script, SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="7")
    _, said = process.communicate(timeout=100)
    assert process.returncode == code, said
    assert why in said
