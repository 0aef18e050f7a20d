"""What asks the HTTP API of Ray's head, on the machine from which that can be reached. Its text is run there by the driver (`ray.py`).

It needs Python 3.8 and nothing else, so that Ray itself need not be installed where jobs are given to it. One JSON object comes as the
argument: the address, seconds for a call, and calls [[method, path, body or null], …]; one JSON list goes out: of each call status and
text. Code 3, with the reason on stderr: no answer to one of them, and what it asked may have been done.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

NO_ANSWER = 3
LARGEST = 1 << 18
"""Bytes of one answer: Ray says 20,000 letters of a job that failed. Many of these are one answer of the runner."""
TOKEN = os.path.join("~", ".ray", "auth_token")
"""Where Ray keeps it, if the environment does not say otherwise (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH)."""


class Stays(HTTPRedirectHandler):
    """The token goes to nobody else."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """No."""


def main() -> int:
    """The exit code."""
    asked = json.loads(sys.argv[1])
    # The head is inside the cluster, and a proxy leads out of it.
    opener = build_opener(ProxyHandler({}), Stays())
    answers: list[tuple[int, str]] = []
    for method, path, body in asked["calls"]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(asked["address"] + path, data=data, method=method, headers=headers())
        try:
            answers.append(answer(opener, request, asked["seconds"]))
        except (URLError, OSError, ValueError) as error:
            sys.stderr.write(str(getattr(error, "reason", error)))
            return NO_ANSWER
    json.dump(answers, sys.stdout)
    return 0


def answer(opener: OpenerDirector, request: Request, seconds: float) -> tuple[int, str]:
    """Status and text, whatever the status is."""
    try:
        with opener.open(request, timeout=seconds) as found:
            return found.status, found.read(LARGEST).decode("utf-8", "replace")
    except HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read(LARGEST).decode("utf-8", "replace")


def headers() -> dict[str, str]:
    """With the token, if there is one: a head that wants none does not look at it."""
    found = {"Content-Type": "application/json"}
    token = os.environ.get("RAY_AUTH_TOKEN") or kept()
    if token:
        found["Authorization"] = f"Bearer {token}"
    return found


def kept() -> str:
    """The token of the file; empty: there is none that could be read."""
    path = os.path.expanduser(os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
