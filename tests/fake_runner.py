"""Stands in for the runner in tests of the transport: answers with what it was asked, late, at length, or not at all."""

import hashlib
import json
import os
import sys
import time
from typing import Any, BinaryIO


def answer_request(body: "dict[str, Any]", payload: BinaryIO) -> None:
    came = payload.read(body.get("payload", 0))
    if len(came) < body.get("payload", 0):  # cut on its way: like the runner, it does nothing
        say({"error": {"code": "truncated", "message": "the payload ended before its end"}})
        return
    mark = body.get("mark")
    if mark:
        with open(mark, "a") as file:
            file.write(body["verb"] + "\n")
    verb = body["verb"]
    if verb == "sleep":
        time.sleep(body["seconds"])
    for _ in range(body.get("signs", 0)):
        time.sleep(body["every"])
        os.write(1, b"\n")
    if verb == "die":
        sys.stderr.write("it is dying\n")
        os._exit(body.get("status", 3))
    if verb == "refuse":
        say({"error": {"code": "disk_full", "message": "no room"}})
    elif verb == "linger":
        linger(body["seconds"])
    else:
        told = {name: body[name] for name in body if name not in ("source", "secrets")}
        secrets = {
            name: hashlib.sha256(value.encode()).hexdigest()
            for name, value in body.get("secrets", {}).items()
        }
        digest = hashlib.sha256(came).hexdigest()
        say(
            {"ok": True, "told": told, "secrets": secrets, "came": digest},
            b"\xff\n" * body.get("back", 0),
        )


def say(document: "dict[str, Any]", payload: bytes = b"") -> None:
    text = json.dumps(document).encode()
    digest = hashlib.sha256(text).hexdigest()
    head = f"GROUPWISE-ANSWER 1 {len(text)} {digest} {len(payload)}\n"
    out = sys.stdout.buffer
    out.write(head.encode() + text + payload)
    out.flush()


def linger(seconds: float) -> None:
    """Leave a process behind that holds the output open."""
    if os.fork() == 0:
        time.sleep(seconds)
        os._exit(0)
    say({"ok": True})
