"""The builder on the machine, with a program in place of Python and pip: half an environment is never used as a whole one."""

import ast
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from groupwise.jobs.fleet.machines import builder
from groupwise.jobs.fleet.machines.builder import MARKER, PRUNE_AFTER_SECONDS, Order, Pip, users_of
from tests.processes import wait_until
from tests.unit.jobs.fleet.machines.build_folder import NAME, BuildFolder


@pytest.fixture
def builds(tmp_path: Path) -> Iterator[BuildFolder]:
    made = BuildFolder(tmp_path)
    yield made
    made.close()


def test_pip_gets_groupwise_first_and_never_by_name(builds: BuildFolder) -> None:
    said = builds.build(
        wheels=["own-1-py3-none-any.whl"], hashed=True, index_url="https://i/simple"
    )
    assert f"installing with https://i/simple in {builds.place}.tmp" in said["log"]
    installs = [call for call in builds.calls() if "pip install" in call]
    assert installs == [
        "-m pip install --no-index --no-deps wheels/groupwise-1.0-py3-none-any.whl",
        "-m pip install -r lock.txt --require-hashes",
        "-m pip install --no-index --no-deps wheels/own-1-py3-none-any.whl",
    ]


def test_a_killed_build_leaves_nothing_that_is_taken_for_whole(builds: BuildFolder) -> None:
    mark = builds.folder / "installing"
    builds.behaves(f'case "$*" in *"-r lock.txt"*) touch {mark}; sleep 300;; esac')
    process = builds.begin()
    wait_until(mark.exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (builds.place / "left").touch()
    assert not (builds.place / MARKER).exists()
    builds.behaves("")
    assert builds.build()["made"] is True
    assert not (builds.place / "left").exists()


def test_the_second_of_two_waits_and_finds_it_made(builds: BuildFolder) -> None:
    mark, go_on = builds.folder / "installing", builds.folder / "go-on"
    wait = f"touch {mark}; while [ ! -e {go_on} ]; do sleep 0.01; done"
    builds.behaves(f'case "$*" in *"-r lock.txt"*) {wait};; esac')
    first = builds.begin()
    wait_until(mark.exists)
    second = builds.begin()
    assert second.stdout is not None
    assert "made by another" in second.stdout.readline()
    wait_until(lambda: waits_for_a_lock(second.pid))
    go_on.touch()
    log, _ = second.communicate(timeout=60)
    first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "it is there already" in log
    assert sum("-m venv" in call for call in builds.calls()) == 1


def waits_for_a_lock(pid: int) -> bool:
    """As the kernel tells: `2: -> FLOCK ADVISORY WRITE pid …`."""
    waiting = [
        line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line
    ]
    return str(pid) in [line[5] for line in waiting]


def test_a_pip_that_outlives_its_builder_keeps_the_lock(builds: BuildFolder) -> None:
    """The builder is killed, a pip that it has started is not."""
    mark = builds.folder / "installing"
    builds.behaves(f'case "$*" in *"-r lock.txt"*) touch {mark}; exec sleep 300;; esac')
    process = builds.begin()
    wait_until(mark.exists)
    process.kill()
    process.wait()
    lock = os.open(builds.environments / f"{NAME}.lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.killpg(process.pid, signal.SIGKILL)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.close(lock)
    process.communicate()


def test_a_broken_environment_is_built_again(builds: BuildFolder) -> None:
    builds.build()
    (builds.place / "bin" / "python").unlink()
    (builds.place / "left").touch()
    assert builds.build()["made"] is True
    assert not (builds.place / "left").exists()


def test_but_not_under_a_process_that_uses_it(builds: BuildFolder) -> None:
    builds.build()
    (builds.place / "bin" / "python").unlink()
    with _user_of(builds.place) as pid:
        said = builds.build()
    assert f"(pid {pid})" in said["problem"]
    assert (builds.place / MARKER).exists()


def test_secrets_are_taken_out_of_what_pip_says(builds: BuildFolder) -> None:
    builds.behaves(
        'case "$*" in *"-r lock.txt"*) echo "hush-hush and https://me:pass@x/simple";; esac'
    )
    said = builds.build(secrets=["SECRET_URL"])
    assert "hush" not in said["log"]
    assert "pass" not in said["log"]
    assert "**** and https://****@x/simple" in said["log"]


class _user_of:
    """A process that was begun as jobs are: the folder of its interpreter stands first on its PATH."""

    def __init__(self, place: Path) -> None:
        environment = {"PATH": f"{place}/bin:/usr/bin:/bin"}
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE, env=environment
        )

    def __enter__(self) -> int:
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def test_only_unused_environments_that_are_not_kept_are_removed(builds: BuildFolder) -> None:
    names = ["1" * 20, "2" * 20, "3" * 20, "4" * 20]
    for name in names:
        _old_environment(builds, name)
    (builds.environments / "builds").mkdir()
    lock = os.open(builds.environments / f"{names[3]}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with _user_of(builds.environments / names[1]):
        said = builds.build(prune=True, keep=[names[0]])
    os.close(lock)
    assert (said["removed"], said["used"]) == ([names[2]], [names[1]])
    there = {path.name for path in builds.environments.iterdir() if path.is_dir()}
    assert there == {names[0], names[1], names[3], "builds"}


def _old_environment(builds: BuildFolder, name: str) -> None:
    (builds.environments / name).mkdir(parents=True)
    (builds.environments / name / MARKER).touch()
    os.utime(builds.environments / name / MARKER, (0, 0))


def test_a_new_or_found_environment_is_not_removed_before_a_row_names_it(
    builds: BuildFolder,
) -> None:
    """Who has prepared a machine with it has yet to write that down."""
    builds.build()
    assert builds.build(prune=True)["removed"] == []
    os.utime(builds.place / MARKER, (0, 0))
    builds.build()  # it is found
    said = builds.build(prune=True)
    assert (said["removed"], said["used"], said["recent"]) == ([], [], [NAME])
    later = time.time() + 2 * PRUNE_AFTER_SECONDS
    assert builds.build(prune=True, asked_at=later)["removed"] == [NAME]


def test_processes_that_have_mapped_files_of_a_folder_count_as_its_users(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "cat"
    program.write_bytes(Path("/bin/cat").read_bytes())
    program.chmod(0o755)
    process = subprocess.Popen(["cat"], executable=program, stdin=subprocess.PIPE)
    try:
        assert any(f"(pid {process.pid})" in user for user in users_of(str(tmp_path)))
    finally:
        process.communicate()
    assert users_of(str(tmp_path)) == []


def test_it_imports_nothing_but_what_python_has() -> None:
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(ast.parse(Path(builder.__file__).read_text()))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert imported <= set(sys.stdlib_module_names)


def test_longer_secrets_are_hidden_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer secret that holds a shorter one is hidden whole."""
    monkeypatch.setenv("A", "abc")
    monkeypatch.setenv("B", "abcdef")
    pip = Pip(Order({"folder": str(tmp_path), "secrets": ["A", "B"]}), str(tmp_path / "x"), 0)
    assert pip.redact("abcdef abc") == "**** ****"


# A survey


def test_a_survey_says_what_pip_would_fetch_and_changes_nothing(builds: BuildFolder) -> None:
    machine, asked, logins = os.uname().machine, list[str](), set[str | None]()
    needs = (
        f'nvidia-x-cu13==13.1; platform_system == "Linux" and platform_machine == "{machine}"',
        'triton==9.9; platform_system == "Linux" and platform_machine == "none"', "six==1.0",
    )  # fmt: skip
    pages = {
        "torch": {f"torch-2.1.0-cp312-cp312-manylinux_2_28_{machine}.whl": 900, "torch-2.1.0-cp312-cp312-win_amd64.whl": 1},
        "numpy": {
            f"numpy-2.0-cp311-cp311-manylinux_{machine}.whl": 1, f"numpy-2.0-cp39-abi3-manylinux_{machine}.whl": 50,
            "numpy-2.0.tar.gz": 2, "numpy-1.9-py3-none-any.whl": 3,
        },
        "six": {"six-1.17.0.tar.gz": 7},
        "nvidia-x-cu13": {f"nvidia_x_cu13-13.1-py3-none-manylinux_{machine}.whl": 2000},
    }  # fmt: skip

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.split("/")[2]
            asked.append(name)
            logins.add(self.headers["Authorization"])
            files = [
                {
                    "filename": file,
                    "url": f"../../files/{file}",
                    "size": size,
                    "core-metadata": True,
                }
                for file, size in pages.get(name, {}).items()
            ]
            body = json.dumps({"files": files})
            if self.path.endswith(".metadata"):
                body = "".join(f"Requires-Dist: {need}\n" for need in needs)
            self.send_response(200 if files or self.path.endswith(".metadata") else 404)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    releases = {"torch": "2.1.0", "numpy": "2.0", "six": "1.17.0", "not-there": "1"}
    before = sorted(builds.folder.rglob("*"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://me:word@127.0.0.1:{server.server_port}/simple"
        order = Order(builds.order(releases=releases, index_url=url))
        found = builder.survey(order)
        server.shutdown()
    assert found["files"] == {
        f"torch-2.1.0-cp312-cp312-manylinux_2_28_{machine}.whl": 900,
        f"numpy-2.0-cp39-abi3-manylinux_{machine}.whl": 50,
        "six-1.17.0.tar.gz": 7,
        f"nvidia_x_cu13-13.1-py3-none-manylinux_{machine}.whl": 2000,
    }
    assert (found["made"], found["python"], found["version"]) == (
        False,
        str(builds.python),
        "3.12.1",
    )
    assert "triton" not in asked
    assert logins == {"Basic bWU6d29yZA=="}  # me:word
    no_port = "http://me:word@127.0.0.1/simple"
    unreachable = builder.survey(Order(builds.order(releases=releases, index_url=no_port)))
    assert (unreachable["files"], "word" in json.dumps(unreachable)) == ({}, False)
    assert unreachable["unknown"]
    hidden = builder.survey(Order(builds.order(releases=releases, secrets=["PIP_INDEX_URL"])))
    assert (hidden["files"], "secret" in hidden["unknown"]) == ({}, True)
    assert set(builds.folder.rglob("*")) - {builds.folder / "calls"} == {*before}
    builds.behaves('case "$*" in *ensurepip*) exit 1 ;; esac')
    assert "python3-venv" in builder.survey(Order(builds.order(offline=True)))["problem"]
    assert (
        "none of these is there" in builder.survey(Order(builds.order(pythons=["gone"])))["problem"]
    )
