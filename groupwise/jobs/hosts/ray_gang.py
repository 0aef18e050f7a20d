"""Starts a job on several Ray nodes at once. It is the entrypoint of such a job, run by the Python that Ray uses on its nodes.

It waits until Ray has reserved a bundle on each requested node (a placement group), and keeps an actor on each. The first machine's
actor runs the attempt's `begin.sh`; its result is the result of the job. Its command writes what the other machines must run
(`groupwise.engine.learner.launch_node`) to a file in the attempt's folder, which all nodes share, readable by its user alone: secrets
never go through Ray. When the first machine ends, all end. If another machine ends, or its node is lost, all get time to notice, and are
then ended.

Ray releases its reservation when this program ends for any reason. Its actors end then too, and the kernel signals the processes that
they have started.

The driver (`ray.py`) passes this text to Python. The argument is one JSON object: the attempt's folder, the number of nodes, and the
bundle for each in Ray's terms: CPU, GPU, memory in bytes, other resources. The exit code is that of the first machine; 75 if it is not
known."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from typing import Any

TICK = 0.5
"""Seconds between two polls."""
NOTICE = 60.0
"""Seconds for the first machine to notice that another one has ended."""
SAVING = 60.0
"""Seconds for the other machines between TERM and KILL; torchrun kills after 50."""
UNREAD = 15.0
"""Seconds for a shared disk that cannot be read to recover."""
EVICTED = 25.0
"""Seconds that the job gets to end once it must."""
SHARED = "all nodes of Ray need the folder of jobs under one path, on a disk that they share, and the same environment"
LOST = 75
"""EX_TEMPFAIL: the same command, started again, continues the job."""
NO_RAY = 69
"""EX_UNAVAILABLE: Ray cannot be imported."""
PARENT_DEATH_SIGNAL = 1
ENDS_WITH_RAY = f"""\
import ctypes, os, sys
ctypes.CDLL(None).prctl({PARENT_DEATH_SIGNAL}, {int(signal.SIGTERM)}, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Program that runs a command which gets TERM when its parent process ends."""
NODES, HOST, ORDER = "RAY_GROUPWISE_NODES", "RAY_GROUPWISE_HOST", "RAY_GROUPWISE_ORDER"
"""Variables for the command on the first machine: the number of machines, the address at which they meet, and the file for the other
machines' order."""

ADDRESS = "RAY_ADDRESS"
"""Variable by which `ray.init()` finds the cluster. Ray sets it for jobs, but not for workers."""
WORKER_VARIABLES = frozenset({"RAY_JOB_ID", "RAY_RAYLET_PID"})
"""Variables that Ray itself removes from the environment of jobs (RAY_INTERNAL_FLAGS)."""


class Machine:
    """One machine, as an actor on a node. Its calls run one after another in one thread, which lives as long as the processes that it
    starts: PARENT_DEATH_SIGNAL depends on the thread."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._unread: float | None = None
        """Monotonic time since which the order has been unreadable."""

    def host(self) -> str:
        """The address at which the other machines reach this one."""
        return str(import_module("ray.util").get_node_ip_address())

    def lead(self, folder: str, variables: dict[str, str]) -> bool:
        """Start the attempt; repeated calls start it only once."""
        if self._child is not None:
            return True
        with open(os.path.join(folder, "engine.log"), "ab") as log:
            command = ["sh", os.path.join(folder, "begin.sh")]
            inherited = {
                name: value for name, value in os.environ.items() if name not in WORKER_VARIABLES
            }
            self._start_process(command, {**inherited, **variables}, log, "/")
        return True

    def follow(self, path: str, rank: int) -> bool | str:
        """Start the first machine's order, once. True if it has started, False if there is no order yet, a string with the reason if it
        cannot start. The output goes to a file next to the order."""
        if self._child is not None:
            return True
        try:
            with open(path, encoding="utf-8") as file:
                order = json.load(file)
        except FileNotFoundError:
            folder = os.path.dirname(path)
            return False if os.path.isdir(folder) else f"it has no {folder}: {SHARED}"
        except OSError as error:  # of a network disk, which may recover
            now = time.monotonic()
            self._unread = now if self._unread is None else self._unread
            if now - self._unread < UNREAD:
                return False
            return f"it cannot read {path} ({error.strerror}): {SHARED}"
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        environment = {
            **order["environment"],
            "NODE_RANK": str(rank),
            "CUDA_VISIBLE_DEVICES": gpus,
        }
        try:
            with open(f"{path}.{rank}.log", "ab") as log:
                self._start_process(order["arguments"], environment, log, order["folder"])
        except OSError as error:
            return f"it cannot begin {order['arguments'][0]} in {order['folder']} ({error.strerror}): {SHARED}"
        return True

    def note(self, folder: str, line: str) -> None:
        """Append a line to the engine's log of the attempt."""
        with open(os.path.join(folder, "engine.log"), "a", encoding="utf-8") as log:
            log.write(line)

    def evict(self, folder: str) -> None:
        """Make the attempt on this machine end: its supervisor checks for the file `evict`."""
        temporary = os.path.join(folder, "evict.new")
        with open(temporary, "w", encoding="ascii") as file:
            file.write(f"{EVICTED:g}")
        os.replace(temporary, os.path.join(folder, "evict"))

    def _start_process(
        self, command: list[str], environment: dict[str, str], log: Any, folder: str
    ) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", ENDS_WITH_RAY, *command],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def ended(self) -> int | None:
        """The exit code as shells report it; None: the process runs, or has not started."""
        code = None if self._child is None else self._child.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> None:
        """Send TERM to the started process, which passes it on to its own processes."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()

    def kill(self) -> None:
        """Kill the started process and all its descendants."""
        if self._child is not None and self._child.poll() is None:
            for pid in process_tree(self._child.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def process_tree(root_pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    pids = [root_pid]
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def remove(path: str) -> None:
    """Remove a file if it exists; ignore errors."""
    with contextlib.suppress(OSError):
        os.remove(path)


class Gang:
    """All machines of the job, and the loop that runs it."""

    def __init__(self, ray: Any, machines: list[Any], folder: str, stops: list[int]) -> None:
        """`stops`: filled by a signal handler once Ray wants the job ended."""
        self._ray, self._stops = ray, stops
        self._first, self._followers = machines[0], machines[1:]
        self._folder = folder
        self._order = os.path.join(folder, f"order.{os.urandom(8).hex()}.json")
        self._started: set[int] = set()
        self._failed: set[int] = set()
        self._first_end_at: float | None = None
        """Monotonic time at which one of the other machines was found to have ended."""

    def run(self) -> int:
        """Run the job to its end; returns the exit code."""
        if not (host := self._call_until_answer(self._first.host)):
            return LOST
        variables = {NODES: str(len(self._followers) + 1), HOST: host, ORDER: self._order}
        if ADDRESS in os.environ:
            variables[ADDRESS] = os.environ[ADDRESS]
        if not self._call_until_answer(self._first.lead, self._folder, variables):
            return LOST
        try:
            code = self._until_first_ends()
        finally:  # the other machines get TERM, and KILL after SAVING seconds
            deadline = time.monotonic() + SAVING
            for machine in self._followers:
                self._await_result(machine.end.remote())
            living = [rank - 1 for rank in self._started]
            while living and time.monotonic() < deadline:
                living = [
                    index
                    for index in living
                    if self._await_result(self._followers[index].ended.remote(), LOST) is None
                ]
                time.sleep(TICK)
            for machine in living:
                self._await_result(self._followers[machine].kill.remote())
            remove(self._order)
        return code

    def _until_first_ends(self) -> int:
        evicted = False
        while True:
            code = self._await_result(self._first.ended.remote(), LOST)
            if code is not None:
                return int(code)
            self._start_followers()
            exit_codes = [
                self._await_result(machine.ended.remote(), LOST) for machine in self._followers
            ]
            if self._first_end_at is None and any(code is not None for code in exit_codes):
                self._first_end_at = time.monotonic()
            late = self._first_end_at is not None and time.monotonic() - self._first_end_at > NOTICE
            if (self._stops or late) and not evicted:
                evicted = True
                self._await_result(self._first.evict.remote(self._folder))
            time.sleep(TICK)

    def _start_followers(self) -> None:
        if len(self._started | self._failed) == len(self._followers):
            return
        for rank, machine in enumerate(self._followers, 1):
            if rank in self._started | self._failed:
                continue
            outcome = self._await_result(machine.follow.remote(self._order, rank))
            if isinstance(outcome, str):
                # The job needs all machines: end it at once.
                self._failed.add(rank)
                line = f"Machine {rank + 1} of {len(self._followers) + 1} cannot begin its part: {outcome}\n"
                self._await_result(self._first.note.remote(self._folder, line))
                self._first_end_at = -math.inf
            elif outcome:
                self._started.add(rank)
        if len(self._started) == len(self._followers):
            remove(self._order)

    def _call_until_answer(self, method: Any, *arguments: Any) -> Any:
        """Call repeatedly until the machine answers; None: it is lost."""
        while (answer := self._await_result(method.remote(*arguments), False)) is None:
            time.sleep(TICK)
        return answer or None

    def _await_result(self, reference: Any, if_ended: Any = None) -> Any:
        """A machine's answer; None if it does not answer at the moment, `if_ended` if its actor has ended, perhaps with its node."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.ActorUnavailableError:
            return None
        except self._ray.exceptions.RayError:
            return if_ended


def main() -> int:
    """Run the job; returns the exit code."""
    arguments = json.loads(sys.argv[1])
    try:
        ray = import_module("ray")
    except ImportError as error:
        sys.stderr.write(
            f"{sys.executable}, the python3 on the PATH of Ray's jobs, has no Ray ({error}), which a job on several machines is begun by: "
            "start Ray's nodes in the environment that Ray is installed in.\n"
        )
        return NO_RAY
    ray.init(log_to_driver=False, logging_level="WARNING")
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: stops.append(signum))
    groups = import_module("ray.util.placement_group")
    group = groups.placement_group(
        [arguments["bundle"]] * arguments["nodes"], strategy="STRICT_SPREAD"
    )
    ready = group.ready()
    while not ray.wait([ready], timeout=TICK)[0]:
        if stops:
            return 128 + int(signal.SIGTERM)
    gang = Gang(ray, start_actors(ray, group, arguments), arguments["folder"], stops)
    return gang.run()


def start_actors(ray: Any, group: Any, arguments: dict[str, Any]) -> list[Any]:
    """Start one actor in each bundle, which uses all of the bundle's resources."""
    strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    bundle = dict(arguments["bundle"])
    cpus, gpus, memory = (bundle.pop(name, None) for name in ("CPU", "GPU", "memory"))
    return [
        ray.remote(Machine)
        .options(
            num_cpus=cpus,
            num_gpus=gpus,
            memory=memory,
            resources=bundle,
            max_restarts=0,
            scheduling_strategy=strategy(group, placement_group_bundle_index=index),
        )
        .remote()
        for index in range(arguments["nodes"])
    ]


if __name__ == "__main__":
    sys.exit(main())
