"""What it costs that sampler and learner are behind a protocol: `python -m benchmarks.protocols`.

The same run three ways: `here`, in the process of the loop; `parts`, on a training server by its own protocol (`run.server`); `tinker`, on
such a server by Tinker's (`model.backend: tinker`). All three have the model loaded and take turns, so that the moods of the machine
reach all. A step goes from the first draw to the committed step. A proxy between loop and server counts bytes. Tinker's protocol has no
least length of completions, so all may end early, and tokens are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import groupwise
from benchmarks.serving import reward, running_server
from benchmarks.step import RESULTS, machine, slug, spread

WARM_UP = 2
"""Turns that are not counted."""
WORKS: dict[str, dict[str, Any]] = {
    "tiny": {"model": "tiny", "prompts": 4, "members": 8, "tokens": 16, "prompt": 30},
    "tiny, large batch": {"model": "tiny", "prompts": 16, "members": 16, "tokens": 32, "prompt": 60},
    "bundled": {"model": "smollm2-135m-instruct", "prompts": 4, "members": 8, "tokens": 48, "prompt": 250},
}  # fmt: skip
"""Prompts in a step, completions of each, their longest in tokens, and the length of prompts in characters."""
WAYS = ("here", "parts", "tinker")


class Turns(groupwise.Callback):
    """Begins a step when it is told to, and says how long it took and how many tokens were drawn."""

    def on_step_begin(self, run: Any) -> None:
        if run.step == 0:
            os.write(1, b"ready\n")
        sys.stdin.readline()
        self._begun = time.perf_counter()

    def on_step_end(self, run: Any, metrics: Any) -> None:
        seconds = time.perf_counter() - self._begun
        length = metrics["completions/mean_length"]
        os.write(1, f"{json.dumps([seconds, length])}\n".encode())


class Task:
    """Prompts of one length; rewards differ within every group."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._work = work

    def get_rl_dataset(self, config: Any) -> list[dict[str, str]]:
        text = "Go on with this story about a fox and the hunters: once upon a time, "
        return [{"prompt": (f"{n} " + text * 9)[: self._work["prompt"]]} for n in range(400)]

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        def rewarded(completions: list[str], **_: Any) -> list[float]:
            return [reward(text) for text in completions]

        return [rewarded]

    def get_rl_callbacks(self, config: Any, tokenizer: Any, output_dir: str) -> list[Any]:
        return [Turns()]


def loop(work: dict[str, Any], way: str, url: str, folder: str, steps: int) -> None:
    """`groupwise rl` one of the ways, a step for each line on standard input."""
    service = {"backend": "tinker", "base_url": url} if way == "tinker" else {}
    groupwise.rl(
        {
            "model": {"name": work["model"], **service},
            "lora": {"r": 16},
            "sampler": {"max_completion_length": work["tokens"]},
            "training": {
                "max_steps": steps,
                "prompts_per_step": work["prompts"],
                "num_generations": work["members"],
                "learning_rate": 1e-6,  # the policy stays the same, and with it the length of completions
            },
            "rewards": {"in_process": True},
            "eval": {"before_and_after": False},
            "run": {
                "name": "r",
                "dir": folder,
                "save_steps": 10_000,
                "server": url if way == "parts" else None,
            },
        },
        Task(work),
    )


class CountingProxy:
    """Passes connections on to a server, and counts the bytes in both directions."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.bytes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            there = socket.create_connection(("127.0.0.1", self._port))
            for one in (client, there):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pair in ((client, there), (there, client)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self.bytes += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextmanager
def started(
    name: str, way: str, url: str, folder: Path, steps: int
) -> Generator[subprocess.Popen[str]]:
    """A loop in a process of its own, once its model is loaded."""
    words = [json.dumps(WORKS[name]), way, url, str(folder / way), str(steps)]
    command = [sys.executable, "-m", "benchmarks.protocols", "loop", *words]
    environment = {**os.environ, "TINKER_API_KEY": "tml-none", "TINKER_TELEMETRY": "0"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            while (line := process.stdout.readline()) != "ready\n":
                assert line, f"the loop {way} ended"
            yield process
        finally:
            process.kill()


def measured(name: str, turns: int) -> dict[str, dict[str, list[float]]]:
    """Seconds, tokens and bytes of each step of each way. A server has one of both protocols at a time, so each has its own."""
    steps = turns + WARM_UP
    measurements = {way: {"seconds": [], "tokens": [], "bytes": []} for way in WAYS}
    with tempfile.TemporaryDirectory() as place, ExitStack() as open_now:
        loops: dict[str, subprocess.Popen[str]] = {}
        proxies: dict[str, CountingProxy] = {}
        for way in WAYS:
            folder = Path(place, way)
            folder.mkdir()
            url = ""
            if way != "here":
                proxies[way] = CountingProxy(open_now.enter_context(running_server(folder)))
                url = proxies[way].url
            loops[way] = open_now.enter_context(started(name, way, url, folder, steps))
        for turn in range(steps):
            for way, process in loops.items():
                assert process.stdin is not None
                assert process.stdout is not None
                before = proxies[way].bytes if way in proxies else 0
                print(file=process.stdin, flush=True)
                seconds, length = json.loads(process.stdout.readline())
                sent = (proxies[way].bytes if way in proxies else 0) - before
                if turn >= WARM_UP:
                    numbers = (("seconds", seconds), ("tokens", length), ("bytes", float(sent)))
                    for key, value in numbers:
                        measurements[way][key].append(value)
    return measurements


def main(arguments: Sequence[str]) -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--work", choices=WORKS, action="append")
    parser.add_argument("--store", action="store_true", help="keep the result")
    options = parser.parse_args(arguments)
    machine_name = machine()
    file = RESULTS / f"protocols-{slug(machine_name)}.json"
    for name in options.work or WORKS:
        work = WORKS[name]
        measurements = measured(name, options.turns)
        rows = work["prompts"] * work["members"]
        for way, numbers in measurements.items():
            pairs = zip(numbers["seconds"], measurements["here"]["seconds"], strict=True)
            share = median((mine - here) / here for mine, here in pairs)
            print(
                f"{name:18} {way:7} {spread(numbers['seconds'])} s, {rows / median(numbers['seconds']):.1f} rows/s, "
                f"{median(numbers['tokens']):.1f} tokens, {median(numbers['bytes']) / 1e3:.0f} kB, {100 * share:+.1f} %",
                flush=True,
            )
        if options.store:
            stored: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
            results = {**stored, "machine": machine_name, name: measurements}
            file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["loop"]:
        work, way, url, folder, steps = sys.argv[2:]
        loop(json.loads(work), way, url, folder, int(steps))
    else:
        main(sys.argv[1:])
