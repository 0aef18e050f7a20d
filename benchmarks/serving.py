"""What the training server costs: `python -m benchmarks.serving`.

1. A step through HTTP beside the same step of `groupwise rl`, on the work W1: four prompts × eight completions of exactly 48 tokens by
   SmolLM2-135M-Instruct, LoRA of rank 16. Both sides have the model loaded and take turns, so that the moods of the machine reach both;
   a step goes from the first question to the committed step: by HTTP one request for four groups and one with their rewards, which
   waits for the step. The figure is the median of the pairs' differences, as a share of the step in one process.
2. How many posts of rewards a second are acknowledged, each of them flushed to the disk, commits batched: groups are served
   beforehand by a fake engine, and the clients are in another process.
3. A step of `groupwise rl` with `run.server` beside the same step without it, both in turns: what it costs that sampler and learner are
   in the engine of a server, the new adapter fetched after each step.
4. How long small requests of one client wait while another client sends megabytes (`small_requests.py`), to a server with `tiny`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import small_requests
from benchmarks.step import RESULTS, machine, slug, spread
from benchmarks.work import ALPHA, LEARNING_RATE, MODEL, RANK, W1, prompts
from groupwise.api.client import AsyncTrainingClient, TrainingClient, rewards_for
from groupwise.server.serve import build_service, serve
from groupwise.server.settings import read_settings

WARM_UP = 2
"""Pairs that are not counted: the first steps compile and fill caches."""
PROMPTS = "BENCHMARK_PROMPTS"
"""The variable with the file of all prompts, a list for each step."""
SECONDS_OF_OTHERS = 60.0
GROUPS, POSTERS, AT_ONCE = 6000, 64, 200
"""Groups that are rewarded, posts at once, groups served at once."""
MEMBERS = 8
FAKE = "tests.fake_engine:make"


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--store", action="store_true", help="keep the result")
    parser.add_argument("--only", choices=("overhead", "posts", "elsewhere", "others"))
    given = parser.parse_args()
    described = machine()
    found: dict[str, Any] = {"machine": described}
    if given.only in (None, "overhead"):
        found["overhead"] = overhead(given.pairs)
    if given.only in (None, "elsewhere"):
        found["elsewhere"] = elsewhere(given.pairs)
    if given.only in (None, "posts"):
        found["posts"] = posts()
    if given.only in (None, "others"):
        found["others"] = others()
    if given.store:
        file = RESULTS / f"serving-{slug(described)}.json"
        stored = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**stored, **found}, indent=2) + "\n")
        print(f"stored in {file}")


# --- a step, on both sides -------------------------------------------------------------------------


def overhead(pairs: int) -> dict[str, Any]:
    """Seconds of steps on both sides, and what HTTP adds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "prompts.json"
        file.write_text(json.dumps(_prompts(pairs + WARM_UP)))
        with _loop(folder, file, pairs + WARM_UP) as loop, running_server(folder) as url:
            through_http = _Http(url, json.loads(file.read_text()), pairs + WARM_UP)
            both = [(loop.step(), through_http.step(step)) for step in range(pairs + WARM_UP)]
            cpu = through_http.cpu_per_step()
    alone, served = zip(*both[WARM_UP:], strict=True)
    shares = [(http - one) / one for one, http in zip(alone, served, strict=True)]
    print(f"step in one process   {spread(alone)} s")
    print(f"step through HTTP     {spread(served)} s")
    print(f"more through HTTP     {100 * median(shares):.1f} %  (pairs {_percents(shares)})")
    print(f"processor time of the HTTP process: {1000 * cpu:.1f} ms a step")
    return {
        "work": W1.described,
        "in_process": alone,
        "through_http": served,
        "median_share": median(shares),
        "cpu_seconds_per_step": cpu,
    }


def elsewhere(pairs: int) -> dict[str, Any]:
    """Seconds of steps of two loops, and what it adds that the parts of one are on a server."""
    steps = pairs + WARM_UP
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "prompts.json"
        file.write_text(json.dumps(_prompts(steps)))
        with (
            running_server(folder) as url,
            _loop(folder, file, steps) as alone,
            _loop(folder, file, steps, url) as served,
        ):
            both = [(alone.step(), served.step()) for _ in range(steps)]
    here, there = zip(*both[WARM_UP:], strict=True)
    shares = [(two - one) / one for one, two in zip(here, there, strict=True)]
    print(f"step of a loop with its own parts     {spread(here)} s")
    print(f"step of a loop with parts elsewhere   {spread(there)} s")
    print(f"more for parts elsewhere  {100 * median(shares):.1f} %  (pairs {_percents(shares)})")
    return {
        "work": W1.described,
        "in_process": here,
        "parts_elsewhere": there,
        "median_share": median(shares),
    }


def _prompts(steps: int) -> list[tuple[str, ...]]:
    from groupwise.engine.models.config import ModelConfig
    from groupwise.engine.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(name=MODEL))
    return [prompts(W1, tokenizer, step) for step in range(steps)]


def _percents(shares: Sequence[float]) -> str:
    return ", ".join(f"{100 * share:.1f}" for share in sorted(shares))


def reward(text: str) -> float:
    """Something that differs between completions, so that every group teaches."""
    return sum(map(ord, text)) % 7 / 7


class _Loop:
    """`groupwise rl` in a process of its own, which takes a step whenever it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def step(self) -> float:
        """Seconds of the next step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


@contextmanager
def _loop(folder: Path, file: Path, steps: int, server: str | None = None) -> Generator[_Loop]:
    environment = {**os.environ, PROMPTS: str(file)}
    runs = str(folder / ("elsewhere" if server else "alone"))
    words = ["-m", "benchmarks.serving_loop", runs, str(steps), *([server] if server else [])]
    command = [sys.executable, *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield _Loop(process)
        finally:
            process.kill()


class _Http:
    """A client that takes the same steps."""

    def __init__(self, url: str, texts: Sequence[Sequence[str]], steps: int) -> None:
        self._client = TrainingClient(url)
        self._texts = texts
        self._client.start(
            model_id=MODEL,
            max_completion_length=W1.new_tokens,
            num_completions_per_prompt=W1.members,
            groups_per_step=len(W1.prompts),
            learning_rate=LEARNING_RATE,
            max_steps=steps,
            staleness=0,
            max_prompt_length=W1.longest,
            save_steps=10_000,
            lora={"r": RANK, "alpha": ALPHA},
            sampler={"min_completion_length": W1.new_tokens},
        )
        self._cpu = self._used()
        self._steps = 0

    def step(self, step: int) -> float:
        """Seconds of a step."""
        started_at = time.perf_counter()
        answer = self._client.completions_batch(list(self._texts[step]))
        given = [
            rewards_for(each, [reward(text) for text in each.completions]) for each in answer.groups
        ]
        self._client.rewards_batch(given, wait=True)
        self._steps += 1
        return time.perf_counter() - started_at

    def cpu_per_step(self) -> float:
        """Processor seconds of the HTTP process for each step so far."""
        return (self._used() - self._cpu) / self._steps

    def _used(self) -> float:
        import httpx2

        text = httpx2.get(f"{self._client.connection.url}/metrics").text
        line = next(x for x in text.splitlines() if x.startswith("process_cpu_seconds_total"))
        return float(line.split()[-1])


@contextmanager
def running_server(folder: Path, *command: str) -> Generator[str]:
    """A server on a free port; its URL."""
    with _server_process(folder, *command) as (url, _):
        yield url


@contextmanager
def _server_process(folder: Path, *command: str) -> Generator[tuple[str, int]]:
    """A server on a free port; its URL and process id."""
    usual = (sys.executable, "-m", "groupwise", "serve", "--output-dir", str(folder / "served"))
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command or [*usual, "--port", "0"],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _address(log, process), process.pid
    finally:
        process.kill()
        process.wait()


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        words = log.read_text().split()
        found = [word.rstrip(";,.") for word in words if word.startswith("http://")]
        if found:
            return found[0]
        time.sleep(0.05)
    raise SystemExit(f"the server did not begin:\n{log.read_text()}")


# --- posts of rewards -------------------------------------------------------------------------------


def posts() -> dict[str, Any]:
    """Rewards that are acknowledged in a second, each one on the disk."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:  # on a disk: /tmp may be memory
        folder = Path(name)
        fake = (sys.executable, "-m", "benchmarks.serving", "fake-server", str(folder / "served"))
        with running_server(folder, *fake) as url:
            words = [sys.executable, "-m", "benchmarks.serving", "post", url]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    print(
        f"rewards of {GROUPS} groups, {POSTERS} posts at once: {found['per_second']:.0f} a second"
    )
    return found


# --- small requests beside large ones ------------------------------------------------------------------


def others() -> dict[str, Any]:
    """The longest wait of each kind of small request, in seconds, while another client sends large bodies."""
    with tempfile.TemporaryDirectory() as name, _server_process(Path(name)) as (url, pid):
        waits, sent = small_requests.measure(url, pid, SECONDS_OF_OTHERS, rounds=4)
    print(f"while another client sends {sent} large bodies, at most:")
    for request, wait in waits.items():
        print(
            f"{request:27} {wait.seconds:.3f} s, of which the server computed {wait.computing:.3f} s "
            f"(of {wait.requests} requests)"
        )
    load = os.getloadavg()[1]
    print(f"(load of the machine in the last five minutes: {load:.1f})")
    seconds = {request: asdict(wait) for request, wait in waits.items()}
    return {"large_bodies": sent, "load": load} | seconds


async def _post(url: str) -> dict[str, Any]:
    async with AsyncTrainingClient(url) as client:
        await client.start(
            steps="manual",
            num_completions_per_prompt=MEMBERS,
            max_completion_length=16,
            lease_seconds=3600.0,
            max_steps=10,
        )
        served: list[Any] = []
        for _ in range(0, GROUPS, AT_ONCE):
            served += (await client.completions_batch(["abc"] * AT_ONCE)).groups
        left = iter(served)
        started_at = time.perf_counter()
        await asyncio.gather(*(_poster(client, left) for _ in range(POSTERS)))
        seconds = time.perf_counter() - started_at
        counted = (await client.status()).counters.rewarded
    assert counted == GROUPS, counted
    return {"groups": GROUPS, "posters": POSTERS, "per_second": GROUPS / seconds}


async def _poster(client: AsyncTrainingClient, left: Any) -> None:
    for group in left:
        await client.rewards(group, [float(member) for member in range(MEMBERS)])


def _fake_server(folder: str) -> int:
    options = {"output_dir": folder, "port": 0}
    words = [f"max_open_groups={2 * GROUPS}"]
    return serve(
        read_settings(None, {}, options, words), None, build=partial(build_service, factory=FAKE)
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["fake-server"]:
        sys.exit(_fake_server(sys.argv[2]))
    if sys.argv[1:2] == ["post"]:
        print(json.dumps(asyncio.run(_post(sys.argv[2]))))
        sys.exit()
    main()
