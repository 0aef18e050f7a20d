"""Calls the HTTP API of Ray's head from a machine that can reach it. The driver (`ray.py`) runs this text there.

It needs only Python 3.8, so Ray need not be installed on the machine. The argument is one JSON object: the address, seconds for a call,
and calls [[method, path, body or null], …]. It prints one JSON list: status and text of each call. Exit code 3, with the reason on
stderr: a call got no answer, and may have been executed."""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

NO_ANSWER = 3
LARGEST = 1 << 18
"""Most bytes of one HTTP answer; Ray sends 20,000 characters about a failed job. Many HTTP answers form one answer of the runner."""
TOKEN = os.path.join("~", ".ray", "auth_token")
"""Ray's token file, if the environment names none (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH)."""


class NoRedirects(HTTPRedirectHandler):
    """Follows no redirect: the token must not reach another server."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """Refuse the redirect."""


def main() -> int:
    """Make the calls; returns the exit code."""
    arguments = json.loads(sys.argv[1])
    # Use no proxy: the head is inside the cluster.
    opener = build_opener(ProxyHandler({}), NoRedirects())
    answers: list[tuple[int, str]] = []
    for method, path, body in arguments["calls"]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(arguments["address"] + path, data=data, method=method, headers=headers())
        try:
            answers.append(send(opener, request, arguments["seconds"]))
        except (URLError, OSError, ValueError) as error:
            sys.stderr.write(str(getattr(error, "reason", error)))
            return NO_ANSWER
    json.dump(answers, sys.stdout)
    return 0


def send(opener: OpenerDirector, request: Request, seconds: float) -> tuple[int, str]:
    """Send the request; returns status and text for any status."""
    try:
        with opener.open(request, timeout=seconds) as response:
            return response.status, response.read(LARGEST).decode("utf-8", "replace")
    except HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read(LARGEST).decode("utf-8", "replace")


def headers() -> dict[str, str]:
    """Request headers, including the token if there is one; a head without authentication ignores it."""
    fields = {"Content-Type": "application/json"}
    token = os.environ.get("RAY_AUTH_TOKEN")
    if not token:
        path = os.path.expanduser(os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN)
        try:
            with open(path, encoding="utf-8") as file:
                token = file.read().strip()
        except (OSError, UnicodeDecodeError):
            token = ""
    if token:
        fields["Authorization"] = f"Bearer {token}"
    return fields


if __name__ == "__main__":
    sys.exit(main())
