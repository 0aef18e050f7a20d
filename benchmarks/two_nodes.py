"""A run on two machines with a slow network between them: `python -m benchmarks.two_nodes --store`, as root on Linux.

The machines are network namespaces, joined by nothing but a program that hands packets on: 1 Gbit/s in each direction, and a round trip
of 20 ms (`--gigabits`, `--round-trip`). It stands in for `tc netem`, which not every kernel has. On each machine torchrun starts one
learner of the quickstart's model. Printed are the bytes that went each way, until the first step and for each step after it, beside what
`many_gpus.py` computes for the sum of the gradients; and the seconds of a step, which say little on a machine that does other work.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

from benchmarks.step import RESULTS, machine, slug
from groupwise.runs.store import Store

ROOT = Path(__file__).parents[1]
SUBNET, PORT, CARD = "10.78.0", 29_400, "node0"
NEW_NETWORK, SET_INTERFACE, TUN = 0x40000000, 0x400454CA, 0x1001
MTU = 9000
WORDS = (
    *("rl", "-c", "configs/quickstart.yaml", "-t", "examples/01_first_task/task.py"),
    *("distributed.learners=2", "training.prompts_per_step=2", "training.num_generations=4"),
    *("eval.before_and_after=false", "run.threads=2", "run.name=two-nodes"),
    "algorithm.beta=0.01",  # so that a step has a gradient, though all rewards may be equal
)


@dataclass(slots=True)
class Node:
    """A network namespace with one card, whose packets this process reads and writes."""

    number: int
    namespace: int
    """File descriptor of it; `card` likewise."""
    card: int
    sent: int = 0
    """Bytes that have left it."""
    free_at: float = 0.0
    """When what it has sent will have left its wire."""

    @classmethod
    def make(cls, number: int) -> Node:
        """This thread stays in the new namespace."""
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK) != 0:
            raise PermissionError("network namespaces are for root")
        card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(card, SET_INTERFACE, struct.pack("16sH", CARD.encode(), TUN))
        for words in (
            "link set lo up",
            f"addr add {SUBNET}.{number}/24 dev {CARD}",
            f"link set {CARD} mtu {MTU} txqueuelen 2000 up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        return cls(number, os.open("/proc/thread-self/ns/net", os.O_RDONLY), card)

    def start(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """One process of torchrun."""
        at = f"{SUBNET}.{self.number}"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *(f"--node-rank={self.number - 1}", f"--master-addr={SUBNET}.1"),
            *(f"--master-port={PORT}", f"--local-addr={at}", "-m", "groupwise", *words),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CARD}
        nsenter = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self.namespace}"]
        with log.open("wb") as output:
            return subprocess.Popen(
                [*nsenter, *command], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )  # fmt: skip


@dataclass(slots=True)
class Link:
    """Hands packets on, late, until `ended` is set."""

    nodes: tuple[Node, Node]
    bytes_per_second: float
    delay: float
    """Seconds in one direction."""
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """For a thread."""
        waiting: list[tuple[float, int, int, bytes]] = []
        order, cards = count(), {node.card: node for node in self.nodes}
        while not self.ended.is_set():
            pause = waiting[0][0] - time.monotonic() if waiting else 0.1
            for card in select.select([*cards], [], [], max(0.0, pause))[0]:
                packet, node = os.read(card, 65_536), cards[card]
                now = time.monotonic()
                node.free_at = max(now, node.free_at) + len(packet) / self.bytes_per_second
                node.sent += len(packet)
                other = self.nodes[node is self.nodes[0]].card
                heapq.heappush(waiting, (node.free_at + self.delay, next(order), other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, card, packet = heapq.heappop(waiting)
                os.write(card, packet)


def main() -> None:
    """Run, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabits", type=float, default=1.0, help="a second, in each direction")
    parser.add_argument("--round-trip", type=float, default=20.0, help="milliseconds")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    described = machine()
    nodes = (Node.make(1), Node.make(2))
    link = Link(nodes, given.gigabits * 1e9 / 8, given.round_trip / 2e3)
    threading.Thread(target=link.run, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="gw-nodes-") as folder:
        words = (*WORDS, f"training.max_steps={given.steps}", f"run.dir={folder}")
        logs = [Path(folder) / f"node-{node.number}.log" for node in nodes]
        processes = [node.start(words, log) for node, log in zip(nodes, logs, strict=True)]
        sent = sent_after_steps(nodes, Path(folder) / "two-nodes/run.db", processes, given.steps)
        codes = [process.wait() for process in processes]
        link.ended.set()
        if any(codes):
            sys.exit("\n".join(log.read_text(errors="replace") for log in logs))
        with Store.open(Path(folder) / "two-nodes/run.db", readonly=True) as store:
            seconds = [value for _, value in store.metrics(["time/step"])["time/step"]]
    found = {
        "gigabits": given.gigabits,
        "round_trip_ms": given.round_trip,
        "before_the_first_step_ended": sent[0],
        "bytes_of_a_step": [
            [after - before for before, after in zip(first, last, strict=True)]
            for first, last in pairwise(sent)
        ],
        "seconds_of_a_step": seconds,
    }
    print(json.dumps(found, indent=1))
    if given.store:
        file = RESULTS / f"two-nodes-{slug(described)}.json"
        result = {"machine": described, "load": os.getloadavg(), **found}
        file.write_text(json.dumps(result, indent=1) + "\n")


def sent_after_steps(
    nodes: Sequence[Node], record: Path, processes: Sequence[subprocess.Popen[bytes]], steps: int
) -> list[list[int]]:
    """Bytes that each node had sent when each step was recorded."""
    found: list[list[int]] = []
    while len(found) < steps and all(process.poll() is None for process in processes):
        time.sleep(0.01)
        if record.exists():
            with Store.open(record, readonly=True) as store:
                last = store.last_step()
            done = 0 if last is None else last + 1
            found += [[node.sent for node in nodes]] * (done - len(found))
    return found


if __name__ == "__main__":
    main()
