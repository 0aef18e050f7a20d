"""Begins a job on several machines of Ray at once: the entrypoint of such a job, run by the Python that Ray has on its nodes.

It waits until Ray has reserved a bundle on each wanted node (a placement group), and keeps an actor on each. The first machine's actor
runs the attempt's `begin.sh`, which is the job as far as its record goes. Its command writes down what the other machines have to run
(`groupwise.engine.learner.launch_node`), in a file of the attempt's folder, which all nodes share, readable by its user alone: secrets
never go through Ray. When the first machine ends, all end. If another one ends, or is gone with its node, all get time to notice, then are
ended.

Ray takes its reservation back when this program is gone, however that ended; its actors are gone then too, and the kernel tells the
processes they have begun.

The driver (`ray.py`) passes this text to Python. The argument is one JSON object: the attempt's folder, nodes, and the bundle for each in
Ray's terms: CPU, GPU, memory in bytes, other resources. The exit code is that of the first machine; 75 if it is not known."""

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
"""Time in seconds between two looks."""
NOTICE = 60.0
"""Time in seconds for the first machine to notice that another one has ended."""
SAVING = 60.0
"""Time in seconds for the others after TERM; torchrun kills after 50."""
UNREAD = 15.0
"""Time in seconds for a disk that cannot be read to recover."""
EVICTED = 25.0
"""Time in seconds for the job to end, once it has to."""
SHARED = "all nodes of Ray need the folder of jobs under one path, on a disk that they share, and the same environment"
LOST = 75
"""EX_TEMPFAIL: the same command goes on if it is begun again."""
NO_RAY = 69
"""EX_UNAVAILABLE."""
PARENT_DEATH_SIGNAL = 1
ENDS_WITH_RAY = f"""\
import ctypes, os, sys
ctypes.CDLL(None).prctl({PARENT_DEATH_SIGNAL}, {int(signal.SIGTERM)}, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that gets TERM when the process that began it is gone."""
NODES, HOST, ORDER = "RAY_GROUPWISE_NODES", "RAY_GROUPWISE_HOST", "RAY_GROUPWISE_ORDER"
"""Variables for the command on the first machine: how many there are, where they meet, and where to write what the others have to run."""

ADDRESS = "RAY_ADDRESS"
"""Variable by which `ray.init()` finds the cluster; Ray's jobs have it, its workers do not."""
OF_WORKERS = frozenset({"RAY_JOB_ID", "RAY_RAYLET_PID"})
"""Variables that Ray itself removes from what jobs begin (RAY_INTERNAL_FLAGS)."""


class Machine:
    """One machine, as an actor on a node. Its calls run one after another, in one thread: the one that begins a process lives as long as
    it."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._unread: float | None = None
        """Time since when the order was there but could not be read."""

    def host(self) -> str:
        """The address at which the others reach it."""
        return str(import_module("ray.util").get_node_ip_address())

    def lead(self, folder: str, variables: dict[str, str]) -> bool:
        """Begin the attempt, once however often it is called."""
        if self._child is not None:
            return True
        with open(os.path.join(folder, "engine.log"), "ab") as log:
            begins = ["sh", os.path.join(folder, "begin.sh")]
            own = {name: word for name, word in os.environ.items() if name not in OF_WORKERS}
            self._begin(begins, {**own, **variables}, log, "/")
        return True

    def follow(self, path: str, rank: int) -> bool | str:
        """Begin, once, what the first machine has written down. True if it has begun, False if not yet, a string if it never will, with the
        reason. Output goes to a file beside the order."""
        if self._child is not None:
            return True
        try:
            with open(path, encoding="utf-8") as file:
                order = json.load(file)
        except FileNotFoundError:
            folder = os.path.dirname(path)
            return False if os.path.isdir(folder) else f"it has no {folder}: {SHARED}"
        except OSError as error:  # of a network's disk; it may answer the next time
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
                self._begin(order["arguments"], environment, log, order["folder"])
        except OSError as error:
            return f"it cannot begin {order['arguments'][0]} in {order['folder']} ({error.strerror}): {SHARED}"
        return True

    def note(self, folder: str, line: str) -> None:
        """Write a line to the attempt's log."""
        with open(os.path.join(folder, "engine.log"), "a", encoding="utf-8") as log:
            log.write(line)

    def evict(self, folder: str) -> None:
        """Have the attempt that this machine leads end: its runner looks for this file, and tells only the job."""
        new = os.path.join(folder, "evict.new")
        with open(new, "w", encoding="ascii") as file:
            file.write(f"{EVICTED:g}")
        os.replace(new, os.path.join(folder, "evict"))

    def _begin(self, words: list[str], environment: dict[str, str], log: Any, folder: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", ENDS_WITH_RAY, *words],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def ended(self) -> int | None:
        """The exit code, as shells have it; None: it runs, or has not begun."""
        code = None if self._child is None else self._child.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> None:
        """Send TERM to what it has begun, which passes it on to its own processes."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()

    def kill(self) -> None:
        """Kill everything that it has begun."""
        if self._child is not None and self._child.poll() is None:
            for pid in below(self._child.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def below(first: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    found = [first]
    for pid in found:
        found += children.get(pid, [])
    return found


def remove(path: str) -> None:
    """Remove a file if it is there."""
    with contextlib.suppress(OSError):
        os.remove(path)


class Gang:
    """All machines of the job."""

    def __init__(self, ray: Any, machines: list[Any], folder: str, stops: list[int]) -> None:
        """`stops`: not empty once Ray wants the job ended."""
        self._ray, self._stops = ray, stops
        self._first, self._others = machines[0], machines[1:]
        self._folder = folder
        self._order = os.path.join(folder, f"order.{os.urandom(8).hex()}.json")
        self._followed: set[int] = set()
        self._cannot: set[int] = set()
        self._missed: float | None = None
        """Time since when one of the others has been known to be gone."""

    def run(self) -> int:
        """Run the job to its end; returns the exit code."""
        if not (host := self._call_until_answer(self._first.host)):
            return LOST
        variables = {NODES: str(len(self._others) + 1), HOST: host, ORDER: self._order}
        if ADDRESS in os.environ:
            variables[ADDRESS] = os.environ[ADDRESS]
        if not self._call_until_answer(self._first.lead, self._folder, variables):
            return LOST
        try:
            code = self._until_first_ends()
        finally:  # the others get TERM, and KILL once they have had time to save
            until = time.monotonic() + SAVING
            for each in self._others:
                self._result(each.end.remote())
            living = [rank - 1 for rank in self._followed]
            while living and time.monotonic() < until:
                living = [
                    each
                    for each in living
                    if self._result(self._others[each].ended.remote(), LOST) is None
                ]
                time.sleep(TICK)
            for each in living:
                self._result(self._others[each].kill.remote())
            remove(self._order)
        return code

    def _until_first_ends(self) -> int:
        evicted = False
        while True:
            code = self._result(self._first.ended.remote(), LOST)
            if code is not None:
                return int(code)
            self._have_others_follow()
            ended = [self._result(each.ended.remote(), LOST) for each in self._others]
            if self._missed is None and any(code is not None for code in ended):
                self._missed = time.monotonic()
            late = self._missed is not None and time.monotonic() - self._missed > NOTICE
            if (self._stops or late) and not evicted:
                evicted = True
                self._result(self._first.evict.remote(self._folder))
            time.sleep(TICK)

    def _have_others_follow(self) -> None:
        if len(self._followed | self._cannot) == len(self._others):
            return
        for rank, other in enumerate(self._others, 1):
            if rank in self._followed | self._cannot:
                continue
            follows = self._result(other.follow.remote(self._order, rank))
            if isinstance(follows, str):
                # The job needs all machines: it is ended at once.
                self._cannot.add(rank)
                line = f"Machine {rank + 1} of {len(self._others) + 1} cannot begin its part: {follows}\n"
                self._result(self._first.note.remote(self._folder, line))
                self._missed = -math.inf
            elif follows:
                self._followed.add(rank)
        if len(self._followed) == len(self._others):
            remove(self._order)

    def _call_until_answer(self, method: Any, *arguments: Any) -> Any:
        """Call until the machine answers; None: it is gone."""
        while (answer := self._result(method.remote(*arguments), False)) is None:
            time.sleep(TICK)
        return answer or None

    def _result(self, answer: Any, if_gone: Any = None) -> Any:
        """A machine's answer; None if it does not answer at the moment, `gone` if the machine is gone, perhaps with its node."""
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.ActorUnavailableError:
            return None
        except self._ray.exceptions.RayError:
            return if_gone


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
    """Start an actor in each bundle, which takes all of it."""
    places = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    bundle = dict(arguments["bundle"])
    cpus, gpus, memory = (bundle.pop(word, None) for word in ("CPU", "GPU", "memory"))
    return [
        ray.remote(Machine)
        .options(
            num_cpus=cpus,
            num_gpus=gpus,
            memory=memory,
            resources=bundle,
            max_restarts=0,
            scheduling_strategy=places(group, placement_group_bundle_index=index),
        )
        .remote()
        for index in range(arguments["nodes"])
    ]


if __name__ == "__main__":
    sys.exit(main())
