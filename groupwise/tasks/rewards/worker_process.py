"""A worker process: it builds its server object once, then answers one request after the other.

The first message names the factory to import. A separate thread reads the socket, so a closed socket is noticed while user code
runs: then the parent has ended, or wants this process to end, and the whole process group ends. Answers are JSON, because the
parent must not unpickle data that user code could have written; requests are pickled, because this process trusts its parent.

The server object scores rewards (`score` and `compute_metrics`), or has `answer(request, started)`, sync or async, whose result
consists of plain values; it calls `started` with the name of the user code that is about to run, and whether it is `repeated`.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

from groupwise.core.errors import GroupwiseError
from groupwise.core.plugins import explain, load, printable
from groupwise.core.processes.frames import FrameBuffer, send_frame
from groupwise.core.processes.process_tree import MARK, tie_to_parent
from groupwise.core.reward_call.plain import plain
from groupwise.core.reward_call.request import ScoreRequest, unscored_group
from groupwise.core.types import to_json


def main(descriptor: int, parent: int) -> None:
    """Serve requests on the socket `descriptor` until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tie_to_parent(parent, os.environ[MARK])
    connection = socket.socket(fileno=descriptor)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_frames, args=(connection, inbox), daemon=True).start()
    pid = os.getpid()

    def send(message: dict[str, Any]) -> None:
        if os.getpid() != pid:  # user code forked, and its copy returned to here
            os._exit(0)
        send_frame(connection, json.dumps(message).encode())

    gc.disable()  # imports make no garbage; looking for it would take a tenth of the start
    try:
        setup = json.loads(inbox.get())
        folders = [*setup["sys_path"], os.getcwd()]  # last, so no file there can hide a module
        sys.path.extend(folder for folder in dict.fromkeys(folders) if folder not in sys.path)
        factory = load(setup["factory"], kind="factory").object
        server = factory(**setup["arguments"])
    except BaseException as error:  # noqa: BLE001 — any error is reported to the parent
        send({"start_failed": _error_text(error)})
        return
    gc.freeze()
    gc.enable()
    send({"ready": True})
    with asyncio.Runner() as runner:
        while True:
            frame = inbox.get()
            number = int.from_bytes(frame[:8], "big")
            try:
                answer = _handle_request(server, pickle.loads(frame[8:]), send, runner)
            except BaseException as problem:  # noqa: BLE001 — any error is reported to the parent
                answer = {"error": _error_text(problem)}
            send({"number": number, **answer})


def _read_frames(connection: socket.socket, inbox: queue.SimpleQueue[bytes]) -> None:
    buffer = FrameBuffer()
    try:
        while piece := connection.recv(1 << 16):
            buffer.add(piece)
            while (frame := buffer.take()) is not None:
                inbox.put(frame)
    finally:
        os.killpg(0, signal.SIGKILL)


def _handle_request(
    server: Any,
    request: Any,
    send: Callable[[dict[str, Any]], None],
    runner: asyncio.Runner,
) -> dict[str, Any]:
    def started(name: str, *, repeated: bool = False) -> None:
        send({"running": name, "repeated": repeated})

    if isinstance(request, ScoreRequest):
        return {"score": _score_group(server, request, started, runner)}
    if hasattr(server, "answer"):
        return {"answer": plain(_await_result(server.answer(request, started), runner))}
    prompts, completions, rows = request
    metrics = _await_result(server.compute_metrics(prompts, completions, rows), runner)
    return {"metrics": plain(metrics)}


def _score_group(
    scorer: Any,
    request: ScoreRequest,
    started: Callable[[str], None],
    runner: asyncio.Runner,
) -> dict[str, Any]:
    """The group's score as JSON values, converted here because values from user code may be impossible to convert."""
    try:
        return json.loads(to_json(_await_result(scorer.score(request, started), runner)))
    except BaseException as error:  # noqa: BLE001 — any error of user code fails only its group
        reason = f"scoring raised {_error_text(error)}"
        return json.loads(to_json(unscored_group(len(request.completions), "failed", reason)))


def _await_result(result: Any, runner: asyncio.Runner) -> Any:
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await cast("Any", result)

    return runner.run(wait())


def _error_text(error: BaseException) -> str:
    return printable(str(error)) if isinstance(error, GroupwiseError) else explain(error).strip()
