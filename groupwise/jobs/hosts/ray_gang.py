"""What begins a job on several machines of Ray at once: the entrypoint of such a job, run by the Python that Ray has on its nodes.

It waits until Ray has set aside so much on so many nodes (a placement group, one bundle on each), and keeps an actor on each. That of the
first one runs the attempt's `begin.sh`, which is the job as far as its record goes; begun, the command writes down what the others are to
run (`groupwise.engine.learner.launch_node`), in a file of the attempt's folder, which all nodes share, for its user alone: secrets never go
through Ray. The first one's end is the end of all. Where another one ends, or is gone with its node, all are given time to notice, then
ended.

Ray takes back what it has set aside when this program is gone, however that ended; then its actors are gone too, and what they have begun
hears it from the kernel.

Its text is given to Python by the driver (`ray.py`). One JSON object comes as the argument: the attempt's folder, nodes, and the bundle
that each is to have, as Ray calls it: CPU, GPU, memory in bytes, other resources. Exit code: that of the first one; 75 where that is not
known.
"""

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
"""Seconds between two looks."""
NOTICE = 60.0
"""Seconds that the first machine has to notice that another one has ended."""
SAVING = 60.0
"""Seconds that the others have after TERM; torchrun kills after 50."""
UNREAD = 15.0
"""Seconds in which a disk may come round that does not give what is on it."""
EVICTED = 25.0
"""Seconds that the job has, once it is to end."""
SHARED = "all nodes of Ray need the folder of jobs under one path, on a disk that they share, and the same environment"
LOST = 75
"""EX_TEMPFAIL: the same command begun again goes on."""
NO_RAY = 69
"""EX_UNAVAILABLE."""
PARENT_DEATH_SIGNAL = 1
ENDS_WITH_RAY = f"""\
import ctypes, os, sys
ctypes.CDLL(None).prctl({PARENT_DEATH_SIGNAL}, {int(signal.SIGTERM)}, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Becomes a command that hears TERM when the process that began it is gone."""
NODES, HOST, ORDER = "RAY_GROUPWISE_NODES", "RAY_GROUPWISE_HOST", "RAY_GROUPWISE_ORDER"
"""What the command on the first machine is told: how many there are, where they meet, and where it says what the others are to run."""

ADDRESS = "RAY_ADDRESS"
"""By which `ray.init()` finds the cluster; jobs of Ray have it, and workers have not."""
OF_WORKERS = frozenset({"RAY_JOB_ID", "RAY_RAYLET_PID"})
"""What Ray itself takes away from what jobs begin (RAY_INTERNAL_FLAGS)."""


class Machine:
    """One of them, as an actor on a node. All its answers come at once, so that the thread that began a process lives as long as it."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._unread: float | None = None
        """Since when the order has been there and could not be read."""

    def host(self) -> str:
        """Where the others reach it."""
        return str(import_module("ray.util").get_node_ip_address())

    def lead(self, folder: str, told: dict[str, str]) -> bool:
        """Begin the attempt, once however often it is told to."""
        if self._child is not None:
            return True
        with open(os.path.join(folder, "engine.log"), "ab") as log:
            begins = ["sh", os.path.join(folder, "begin.sh")]
            own = {name: word for name, word in os.environ.items() if name not in OF_WORKERS}
            self._begin(begins, {**own, **told}, log, "/")
        return True

    def follow(self, path: str, rank: int) -> bool | str:
        """Begin what the first one has written down, once, and whether it has; a string: why it never will. What its processes say goes
        to a file beside that."""
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
        """In the attempt's log."""
        with open(os.path.join(folder, "engine.log"), "a", encoding="utf-8") as log:
            log.write(line)

    def evict(self, folder: str) -> None:
        """Have the attempt, which this one leads, end: its runner looks for this file, and tells the job alone."""
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
        """What it has begun is to save. That passes it on to its own."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()

    def kill(self) -> None:
        """All that it has begun."""
        if self._child is not None and self._child.poll() is None:
            for pid in below(self._child.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def below(first: int) -> list[int]:
    """It, and all processes that it has begun."""
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
    """If it is there."""
    with contextlib.suppress(OSError):
        os.remove(path)


class Gang:
    """All of them."""

    def __init__(self, ray: Any, machines: list[Any], folder: str, stops: list[int]) -> None:
        """`stops`: not empty once Ray wants all of it ended."""
        self._ray, self._stops = ray, stops
        self._first, self._others = machines[0], machines[1:]
        self._folder = folder
        self._order = os.path.join(folder, f"order.{os.urandom(8).hex()}.json")
        self._followed: set[int] = set()
        self._cannot: set[int] = set()
        self._missed: float | None = None
        """Since when one of the others has been known to be gone."""

    def run(self) -> int:
        """From its beginning to its end. The exit code."""
        if not (host := self._answered(self._first.host)):
            return LOST
        told = {NODES: str(len(self._others) + 1), HOST: host, ORDER: self._order}
        if ADDRESS in os.environ:
            told[ADDRESS] = os.environ[ADDRESS]
        if not self._answered(self._first.lead, self._folder, told):
            return LOST
        try:
            code = self._until_first_ends()
        finally:
            self._end_others()
            remove(self._order)
        return code

    def _until_first_ends(self) -> int:
        evicted = False
        while True:
            code = self._asked(self._first.ended.remote(), LOST)
            if code is not None:
                return int(code)
            self._have_others_follow()
            if self._is_one_gone() and self._missed is None:
                self._missed = time.monotonic()
            late = self._missed is not None and time.monotonic() - self._missed > NOTICE
            if (self._stops or late) and not evicted:
                evicted = True
                self._asked(self._first.evict.remote(self._folder))
            time.sleep(TICK)

    def _have_others_follow(self) -> None:
        if len(self._followed | self._cannot) == len(self._others):
            return
        for rank, other in enumerate(self._others, 1):
            if rank in self._followed | self._cannot:
                continue
            follows = self._asked(other.follow.remote(self._order, rank))
            if isinstance(follows, str):
                self._give_up(rank, follows)
            elif follows:
                self._followed.add(rank)
        if len(self._followed) == len(self._others):
            remove(self._order)

    def _give_up(self, rank: int, why: str) -> None:
        """Without this one there is nothing to wait for."""
        self._cannot.add(rank)
        line = f"Machine {rank + 1} of {len(self._others) + 1} cannot begin its part: {why}\n"
        self._asked(self._first.note.remote(self._folder, line))
        self._missed = -math.inf

    def _is_one_gone(self) -> bool:
        return any(self._asked(each.ended.remote(), LOST) is not None for each in self._others)

    def _end_others(self) -> None:
        until = time.monotonic() + SAVING
        for each in self._others:
            self._asked(each.end.remote())
        living = [rank - 1 for rank in self._followed]
        while living and time.monotonic() < until:
            living = [
                each
                for each in living
                if self._asked(self._others[each].ended.remote(), LOST) is None
            ]
            time.sleep(TICK)
        for each in living:
            self._asked(self._others[each].kill.remote())

    def _answered(self, method: Any, *asked: Any) -> Any:
        """Asked until it answers; None: it is gone."""
        while (answer := self._asked(method.remote(*asked), False)) is None:
            time.sleep(TICK)
        return answer or None

    def _asked(self, answer: Any, gone: Any = None) -> Any:
        """What a machine answers; None where it does not at this moment, `gone` where it is, with its node perhaps."""
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.ActorUnavailableError:
            return None
        except self._ray.exceptions.RayError:
            return gone


def main() -> int:
    """The exit code."""
    asked = json.loads(sys.argv[1])
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
    group = groups.placement_group([asked["bundle"]] * asked["nodes"], strategy="STRICT_SPREAD")
    ready = group.ready()
    while not ray.wait([ready], timeout=TICK)[0]:
        if stops:
            return 128 + int(signal.SIGTERM)
    gang = Gang(ray, begun(ray, group, asked), asked["folder"], stops)
    return gang.run()


def begun(ray: Any, group: Any, asked: dict[str, Any]) -> list[Any]:
    """An actor in each bundle, which has all of it."""
    places = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    bundle = dict(asked["bundle"])
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
        for index in range(asked["nodes"])
    ]


if __name__ == "__main__":
    sys.exit(main())
