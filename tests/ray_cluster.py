"""A real Ray cluster on this machine: a head and optional nodes, with declared (not real) CPUs and GPUs.

It listens on more than the loopback, so it refuses everybody without its token. All that Ray starts stays below one process, which ends
it when its own input does: with the tests, however these end.
"""

import atexit
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from runpy import run_path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from tests.ports import free_port
from tests.processes import TIMEOUT_S, wait_until
from tests.required_programs import skip_or_fail
from tests.slurm import read, started_with

PYTHON = Path(
    run_path(str(Path(__file__).parents[1] / "scripts/real_environment.py"))["where"]("ray"),
    "bin/python",
)
"""The interpreter of Ray's environment, wherever a test has its home."""
REPORT_INTERVAL_S = 1
"""Seconds between Ray's reports of its use."""
SMALLEST_STORE = 80_000_000
"""Bytes of memory for Ray's objects; the tests make none."""
CHILD_SUBREAPER = 36
BEGINS = f"""\
import ctypes, json, os, signal, subprocess, sys
ctypes.CDLL(None).prctl({CHILD_SUBREAPER}, 1, 0, 0, 0)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def below():
    of = {{}}
    for each in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{{each}}/stat") as file:
                of.setdefault(int(file.read().rpartition(") ")[2].split()[1]), []).append(int(each))
        except OSError:
            pass
    found = [os.getpid()]
    for pid in found:
        found += of.get(pid, [])
    return found[1:]
for line in sys.stdin:
    subprocess.Popen(json.loads(line), preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_DFL), stdin=subprocess.DEVNULL)
while pids := below():
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
"""
"""A program that starts what it is told to, and ends with everything that this has started."""


def ray_python() -> Path:
    """The interpreter that has Ray."""
    if not PYTHON.exists():
        skip_or_fail("there is no Ray: scripts/real_environment.py makes an environment with it")
    return PYTHON


@dataclass
class Ray:
    """A Ray cluster that keeps its ports and its token when it is killed and started again."""

    folder: Path
    python: Path
    token: str = field(default_factory=lambda: f"{random.SystemRandom().getrandbits(160):040x}")
    gcs: int = field(default_factory=free_port)
    api: int = field(default_factory=free_port)
    _watch: "subprocess.Popen[bytes] | None" = None

    @property
    def address(self) -> str:
        """The URL of the dashboard."""
        return f"http://127.0.0.1:{self.api}"

    @property
    def host(self) -> str:
        """The head's address: a loopback address that Ray does not replace by another."""
        return "127.77.0.1"

    @property
    def node(self) -> str:
        """The other node's address."""
        return "127.77.0.2"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of Ray and of its jobs."""
        return {
            "PATH": f"{self.python.parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # it is not alone on this machine
            "RAY_health_check_period_ms": "500",  # what is dead refuses at once, what is slow has its time
            "RAY_enable_metrics_collection": "0",
            "AUTOSCALER_UPDATE_INTERVAL_S": str(REPORT_INTERVAL_S),
            "RAY_JOB_START_TIMEOUT_SECONDS": "900",
            "DASHBOARD_METRIC_PORT": str(free_port("0.0.0.0")),
            "AUTOSCALER_METRIC_PORT": str(free_port("0.0.0.0")),
        }

    def start(self, **resources: float) -> None:
        """Start the head, with four CPUs and two GPUs."""
        ports = (f"--port={self.gcs}", f"--dashboard-port={self.api}")
        more = (f"--ray-client-server-port={free_port()}", "--dashboard-host=127.0.0.1")
        self._begin(
            "--head",
            f"--node-ip-address={self.host}",
            "--num-gpus=2",
            *ports,
            *more,
            f"--resources={json.dumps(resources)}",
        )
        self.until(lambda: self.ask("GET", "/api/jobs/")[0] == 200)

    def start_node(self) -> None:
        """Start another node, the only one with the resource `apart`."""
        before = self._has("apart")
        where = (f"--address={self.host}:{self.gcs}", f"--node-ip-address={self.node}")
        self._begin(*where, "--num-gpus=2", '--resources={"apart": 2}')
        self.until(lambda: self._has("apart") > before)

    def kill_node(self) -> None:
        """Kill the node's raylet, without which its jobs end, and wait until the head has noticed."""
        self.kill(f"--node_ip_address={self.node}")
        self.until(lambda: self._has("apart") == 0)

    def _begin(self, *options: str) -> None:
        """Start the cluster. Ray gives a node 30 s to register, which is too little on a busy machine, so this is retried."""
        if self._watch is None:
            with (self.folder / "said").open("ab") as said:
                self._watch = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", BEGINS],
                    env=self.environment,
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
        small = (f"--object-store-memory={SMALLEST_STORE}", f"--temp-dir={self.folder}/ray")
        agent = f"--dashboard-agent-listen-port={free_port()}"
        workers = ("--min-worker-port=0", "--max-worker-port=0")  # any: another Ray may be here
        quiet = ("--disable-usage-stats", "--include-log-monitor=false", "--log-color=false")
        tries = ("sh", "-c", 'for try in 1 2 3 4 5; do "$@" && exit; done', "ray")
        start = (*tries, str(self.python), "-m", "ray.scripts.scripts", "start", "--num-cpus=4")
        assert self._watch.stdin is not None
        told = json.dumps([*start, *options, *small, agent, *workers, *quiet])
        self._watch.stdin.write(f"{told}\n".encode())
        self._watch.stdin.flush()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the condition holds; until then Ray's API may not answer."""

        def holds_now() -> bool:
            with suppress(URLError, ConnectionError):
                return holds()
            return False

        wait_until(holds_now, "Ray", TIMEOUT_S * 3, details=(self.folder / "said").read_text)

    def idle(self) -> None:
        """Wait until nothing is in use, by a report of Ray from after the end of the last job."""
        known = time.time() + REPORT_INTERVAL_S

        def told() -> bool:
            report = self._report()
            if not report or report["time"] < known:
                return False
            return not any(used for used, _ in report["loadMetricsReport"]["usage"].values())

        self.until(told)

    def _has(self, resource: str) -> float:
        """The amount of a resource that all nodes have together."""
        report = self._report()
        return report["loadMetricsReport"]["usage"].get(resource, (0.0, 0.0))[1] if report else 0.0

    def _report(self) -> dict[str, Any]:
        """The resources of the nodes and their use, by Ray's latest report; empty before the first one."""
        return json.loads(self.ask("GET", "/api/cluster_status")[1])["data"]["clusterStatus"] or {}

    def ask(self, method: str, path: str, token: str | None = None) -> tuple[int, str]:
        """Send a request to Ray's API; returns status and text."""
        headers = {"Authorization": f"Bearer {token or self.token}"}
        request = Request(f"{self.address}{path}", method=method, headers=headers)
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode()

    def jobs(self, name: str) -> list[dict[str, Any]]:
        """Ray's jobs for the attempts of a job."""
        found = json.loads(self.ask("GET", "/api/jobs/")[1])
        return [each for each in found if (each["submission_id"] or "").startswith(f"{name}.")]

    def stop(self, name: str) -> None:
        """Stop a job, as `ray job stop` does."""
        for each in self.jobs(name):
            assert self.ask("POST", f"/api/jobs/{each['submission_id']}/stop")[0] == 200

    def kill(self, *words: str) -> None:
        """`kill -9` those of its processes whose command contains one of the words, and wait until they are gone."""
        while found := [
            pid
            for pid in started_with(f"RAY_AUTH_TOKEN={self.token}")
            if any(word.encode() in read(Path(f"/proc/{pid}/cmdline")) for word in words)
        ]:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def end(self) -> None:
        """End the whole cluster."""
        if self._watch is not None:
            assert self._watch.stdin is not None
            self._watch.stdin.close()
            self._watch.wait(TIMEOUT_S)
            self._watch = None


@contextmanager
def cluster() -> Iterator[Ray]:
    """A head that accepts jobs."""
    with tempfile.TemporaryDirectory(prefix="gw-ray-", ignore_cleanup_errors=True) as path:
        found = Ray(Path(path), ray_python())
        try:
            found.start()
            yield found
        finally:
            found.end()


@functools.cache
def shared() -> Ray:
    """A cluster of two nodes, shared by the tests of this process that leave it unchanged; it ends with the process."""
    until_the_end = ExitStack()
    atexit.register(until_the_end.close)
    found = until_the_end.enter_context(cluster())
    found.start_node()
    return found
