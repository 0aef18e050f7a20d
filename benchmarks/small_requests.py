"""What small requests of one client wait for while another client sends megabytes: `python -m benchmarks.serving --only others`.

One process sends bodies that are as large as the server reads, as fast as it is answered: prompts of 4 MiB, 20 MB of rewards, and others
that are all keys, lists, brackets or escapes, plain and compressed. Meanwhile each small request is timed, and the computing time of the
server's process within that time is noted: it is what a request waited for, however busy the machine is.
"""

from __future__ import annotations

import gzip
import itertools
import multiprocessing
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx2

MIB = 1 << 20
JSON = {"Content-Type": "application/json"}
START: dict[str, Any] = {
    "model_id": "tiny", "max_completion_length": 1, "num_completions_per_prompt": 2,
    "groups_per_step": 32, "staleness": 1, "max_prompt_length": 16, "max_steps": 100_000, "save_steps": 100_000,
}  # fmt: skip
"""The run that small requests belong to."""


@dataclass(slots=True)
class Waits:
    """The longest waits of one kind of small request."""

    requests: int = 0
    seconds: float = 0.0
    computing: float = 0.0
    """Seconds that the server's process computed meanwhile."""


def large_bodies() -> dict[str, tuple[str, bytes]]:
    """Address and body of each large request, by what it is."""
    group = b'{"group_id": "g-1", "rewards": [0.5, 1, 0.25, 1]},'
    words = b"word " * (4 * MIB // 5)
    keys = b",".join(b'"k%d":1' % number for number in range(9_999))
    message = b'{"model": "latest", "messages": [{"role": "user", "content": "'
    large = 31 * MIB
    return {
        "prompt of 4 MiB": ("/completions", b'{"prompt": "' + words + b'"}'),
        "message of 4 MiB": ("/v1/chat/completions", message + words + b'"}]}'),
        "tool of 4 MiB": (
            "/v1/chat/completions",
            message
            + b'a"}], "tools": [{"type": "function", "function": {"name": "f", "description": "'
            + words
            + b'"}}]}',
        ),
        "20 MB of rewards": ("/rewards", b'{"rewards": [' + b"0.5," * 5_000_000 + b"1]}"),
        "rewards of 250,000 groups": (
            "/rewards",
            b'{"groups": [' + group * 250_000 + b"{}]}",
        ),
        "4 million tokens": (
            "/rewards",
            b'{"completion_tokens": [[' + b"12345," * 3_900_000 + b"1]]}",
        ),
        "10,000 unknown keys": ("/completions", b"{" + keys + b"}"),
        "many lists": ("/v1/completions", b'{"stop": [' + b"[]," * 290_000 + b"1]}"),
        "brackets in a text": ("/v1/responses", b'{"input": "' + b"[{" * (large // 2) + b'"}'),
        "escapes": ("/completions", b'{"prompt": "' + b"\\ud83d\\ude00" * (large // 12) + b'"}'),
        "nested deeply": ("/rewards", b"[" * large),
        "tokens of a sample": ("/api/v1/asample", b'{"prompt": [' + b"1," * 3_900_000 + b"1]}"),
        "no message": ("/api/v1/forward_backward", b"\x0a\x03abc" * (large // 5)),
        "settings of 31 MiB": ("/start", b'{"model_id": "' + b"a" * large + b'"}'),
    }


def send_large_bodies(url: str, sent: Any, stop: Event) -> None:
    """Send them one after the other until `stop`; counts them in `sent`."""
    bodies = large_bodies()
    packed = {f"{name}, gzip": (path, gzip.compress(body, 1)) for name, (path, body) in bodies.items()}  # fmt: skip
    with httpx2.Client(base_url=url, timeout=120, headers=JSON) as client:
        for name, (path, body) in itertools.cycle((bodies | packed).items()):
            headers = {"Content-Encoding": "gzip"} if name in packed else {}
            with suppress(httpx2.TransportError):  # a refusal that came before the body was read
                answer = client.post(path, content=body, headers=headers)
                assert 400 <= answer.status_code < 500, (name, answer.status_code)
            sent.value += 1
            if stop.is_set():
                return


def measure(url: str, pid: int, seconds: float, rounds: int) -> tuple[dict[str, Waits], int]:
    """The waits of small requests by name, and how many large bodies were sent meanwhile.

    Takes `seconds`, or as long as it takes to send every large body: plain in the first round, compressed in the second, and so on.
    """
    context = multiprocessing.get_context("spawn")
    stop, sent = context.Event(), context.Value("i", 0)
    sender = context.Process(target=send_large_bodies, args=(url, sent, stop), daemon=True)
    waits: dict[str, Waits] = {}
    with httpx2.Client(base_url=url, timeout=120) as client:
        client.post("/start", json=START).raise_for_status()
        session = _post(client, "/api/v1/create_session", {"tags": [], "sdk_version": "0.38.0"})
        requests = _small_requests(client, session["session_id"])
        for request in requests.values():  # the first of each is not counted
            request()
        sender.start()
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end or sent.value < rounds * len(large_bodies()):
                assert sender.is_alive(), "the sender of large bodies has failed"
                for name, request in requests.items():
                    _time(request, waits.setdefault(name, Waits()), pid)
        finally:
            stop.set()
            sender.join(60)
    return waits, sent.value


def _small_requests(client: httpx2.Client, session: str) -> Mapping[str, Callable[[], Any]]:
    groups: list[str] = []

    def complete() -> None:
        groups.append(_post(client, "/completions", {"prompt": "abc"})["group_id"])

    def reward() -> None:
        _post(client, "/rewards", {"group_id": groups.pop(), "rewards": [0.0, 1.0]})

    def retrieve() -> None:
        answer = client.post("/api/v1/retrieve_future", json={"request_id": "none"})
        assert answer.status_code == 404, answer.text

    return {
        "GET /healthz": lambda: client.get("/healthz").raise_for_status(),
        "a completion of one token": complete,
        "rewards of one group": reward,
        "a heartbeat": lambda: _post(client, "/api/v1/session_heartbeat", {"session_id": session}),
        "retrieve_future": retrieve,
    }


def _post(client: httpx2.Client, path: str, body: Mapping[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


def _time(request: Callable[[], Any], waits: Waits, pid: int) -> None:
    computed, begun = computing_seconds(pid), time.monotonic()
    request()
    waits.requests += 1
    waits.seconds = max(waits.seconds, time.monotonic() - begun)
    waits.computing = max(waits.computing, computing_seconds(pid) - computed)


def computing_seconds(pid: int) -> float:
    """Seconds that all threads of a process have computed so far, to the microsecond."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9
