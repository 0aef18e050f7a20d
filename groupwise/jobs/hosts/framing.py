"""Encoding of requests and answers on the control side; the other side is `bootstrap.py` and `runner/`.

A request is the line `GROUPWISE <protocol> <length> <sha256>`, a JSON body of that length, and raw bytes if the body's `payload` says
so. The machine does nothing until length and hash match, so a request that was cut off has no effect.

The machine prints `GROUPWISE-READY` before it reads the request. A caller that waits for this line before it sends the request knows that
nothing has happened if the line does not come. Once the request was sent, a missing line proves nothing: it may be lost with the answer.

An answer starts with `GROUPWISE-ANSWER <protocol> <length> <sha256> <payload length>`. Any output of a login shell before that line is
skipped. `AnswerReader` takes bytes as they arrive, from any transport, and finishes once the answer is complete: it does not wait for
the end of a stream that another process may keep open."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, cast

from groupwise.api.http.strict_json import check_number, finite, no_constant
from groupwise.jobs.hosts.bootstrap import READY
from groupwise.jobs.hosts.host import (
    HostError,
    HostUnreachable,
    OutcomeUnknown,
    Request,
    RunnerRefused,
    RunnerResponse,
)

PROTOCOL = 1
"""The protocol version of our requests."""
SPOKEN = frozenset(n for n in (PROTOCOL, PROTOCOL - 1) if n >= 1)
"""The protocol versions of answers that are accepted. The previous one is included, so control plane and machines can be upgraded one after
the other."""
MAX_NOISE = 1 << 20
"""Most bytes of other output before the answer; a machine that prints more will not answer."""

_HEADER = re.compile(rb"GROUPWISE-ANSWER (\d{1,6}) (\d{1,12}) ([0-9a-f]{64}) (\d{1,12})\r?\n")
_LONGEST_HEADER = 200
_MAX_COMPLAINTS = 4000
"""Most bytes of standard error that are kept for messages: the last ones."""
_LONGEST_COMPLAINT = 300
"""Most characters of standard error in a message."""


class BadAnswer(OutcomeUnknown):
    """The received bytes are not a valid answer: cut off, changed in transit, or of another protocol. The request may have been executed
    nevertheless."""


def request_bytes(request: Request) -> bytes:
    """Encode a request; `payload` and `secrets` become fields of its body if there are any."""
    body: dict[str, Any] = {"protocol": PROTOCOL, **request.body, "verb": request.verb}
    if request.payload:
        body["payload"] = len(request.payload)
    if request.secrets:
        body["secrets"] = dict(request.secrets)
    document = json.dumps(body, separators=(",", ":")).encode("ascii")
    digest = hashlib.sha256(document).hexdigest()
    header = f"GROUPWISE {PROTOCOL} {len(document)} {digest}\n".encode("ascii")
    return b"".join((header, document, request.payload))


def answer_bytes(body: Mapping[str, Any], payload: bytes = b"", protocol: int = PROTOCOL) -> bytes:
    """Encode an answer; used by fake machines in tests."""
    document = json.dumps(body, separators=(",", ":")).encode("ascii")
    digest = hashlib.sha256(document).hexdigest()
    header = f"GROUPWISE-ANSWER {protocol} {len(document)} {digest} {len(payload)}\n"
    return b"".join((header.encode("ascii"), document, payload))


class AnswerReader:
    """Collects a machine's output, piece by piece, until it contains an answer to the request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._buffer = bytearray()
        self._body_length: int | None = None
        self._payload_length = 0
        self._digest = b""
        self._noise = 0
        self.is_ready = False
        """True once the program on the machine runs, and reads the request."""
        self.answer: RunnerResponse | None = None

    def feed(self, data: bytes) -> bool:
        """Add output; returns True once the answer is complete. Raises BadAnswer if it is invalid."""
        self._buffer += data
        self.is_ready = self.is_ready or READY.strip() in self._buffer
        if self._body_length is None and not self._find_header():
            return False
        return self._parse_answer()

    def noise(self, max_bytes: int = 2000) -> str:
        """The end of the output received before an answer, for messages."""
        text = bytes(self._buffer[-max_bytes:]).replace(READY, b"")
        return text.decode("utf-8", "replace").strip()

    def _find_header(self) -> bool:
        match = _HEADER.search(self._buffer)
        if match is None:
            # Keep what may be the start of a header; count and discard the rest.
            surplus = len(self._buffer) - max(_LONGEST_HEADER, 2000)
            if surplus > 0:
                del self._buffer[:surplus]
                self._noise += surplus
            if self._noise > MAX_NOISE:
                raise BadAnswer(
                    f"more than {MAX_NOISE} bytes came from the machine before any answer: does a start-up file of its shell"
                    f" print without end? The last of it: {self.noise(200)!r}"
                )
            return False
        protocol, length, digest, payload = match.groups()
        self._body_length, self._payload_length, self._digest = int(length), int(payload), digest
        self._noise += match.start()
        del self._buffer[: match.end()]
        if int(protocol) not in SPOKEN:
            raise BadAnswer(
                f"the machine's runner answers in protocol {int(protocol)}; this control plane speaks"
                f" {' and '.join(map(str, sorted(SPOKEN)))}: bring both to the same release"
            )
        request = self._request
        if self._body_length > request.most_body or self._payload_length > request.most_payload:
            raise BadAnswer(
                f"the machine announces an answer to {request.verb} of {self._body_length} + {self._payload_length} bytes;"
                f" at most {request.most_body} + {request.most_payload} are read"
            )
        return True

    def _parse_answer(self) -> bool:
        assert self._body_length is not None
        if len(self._buffer) < self._body_length + self._payload_length:
            return False
        document = bytes(self._buffer[: self._body_length])
        if hashlib.sha256(document).hexdigest().encode("ascii") != self._digest:
            raise BadAnswer(
                "the answer's hash does not agree with its text: it was changed on the way"
            )
        end = self._body_length + self._payload_length
        try:
            check_number(
                document, lists=self._request.most_body // 64, texts=self._request.most_body // 16
            )
            # Decode here: for bytes, json would also accept UTF-16, and lone surrogates.
            text = document.decode("utf-8")
            body: object = json.loads(text, parse_constant=no_constant, parse_float=finite)
            body = _replace_unstorable(body) if b"\\u" in document else body
        except (ValueError, RecursionError) as error:
            raise BadAnswer(f"the answer is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadAnswer(f"the answer is a {type(body).__name__}; an object is expected")
        self.answer = RunnerResponse(
            cast("dict[str, Any]", body), bytes(self._buffer[self._body_length : end])
        )
        return True


def _replace_unstorable(value: Any) -> Any:
    """Replace characters that databases reject. A job may print any text, and the end of its log is part of answers."""
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
    if isinstance(value, list):
        return [_replace_unstorable(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {
            _replace_unstorable(k): _replace_unstorable(v)
            for k, v in cast("dict[Any, Any]", value).items()
        }
    return value


def checked_answer(answer: RunnerResponse) -> RunnerResponse:
    """Return the answer; raises RunnerRefused if it is an error."""
    error = answer.body.get("error")
    if error is None:
        return answer
    refusal = cast("dict[str, Any]", error) if isinstance(error, dict) else {"message": str(error)}
    raise RunnerRefused(
        str(refusal.get("code", "error")), str(refusal.get("message", "no reason given"))
    )


def timeout_message(request: Request, host: object, timeout: float) -> str:
    """The message for a call that timed out."""
    since = "" if request.longest is None else " of the last sign that it gets on"
    return f"no answer to {request.verb} from {host} within {timeout:g} s{since}"


NO_PYTHON = "no_python"
CANNOT_EXECUTE = frozenset({126, 127})
"""Exit statuses of a shell that does not find the program, or may not execute it; csh reports it only in words."""


def incomplete_answer_error(
    reader: AnswerReader, status: int | None, complaints: str, *, is_sent: bool
) -> HostError:
    """The error for a command that ended on the machine without a complete answer. `complaints` is its standard error.

    If the request was sent (`is_sent`), the only proof that it was not executed is the shell's status for a program that it cannot run."""
    text = _last_line(complaints) or _last_line(reader.noise())
    cannot_execute = status in CANNOT_EXECUTE and not reader.is_ready
    if status is None or reader.is_ready or (is_sent and not cannot_execute):
        cause = (
            "the connection ended" if status is None else f"the runner ended with status {status}"
        )
        return OutcomeUnknown(
            f"{cause} before its answer was whole" + (f": {text}" if text else "")
        )
    if cannot_execute or "ommand not found" in complaints:
        return RunnerRefused(
            NO_PYTHON,
            f"its login shell cannot run python3: {text or 'not found'}; install Python 3.8 or later, and have it on the PATH there",
        )
    silent = "perhaps a start-up file of it (.bashrc, .cshrc, config.fish) exits"
    return HostUnreachable(
        f"the login shell there ended with status {status} and ran nothing: {text.rstrip('.') or silent}"
    )


def _last_line(text: str) -> str:
    """The last line, which in a traceback names the error. It is short, since it is shown in lists of machines."""
    return text.strip().rpartition("\n")[2].strip()[-_LONGEST_COMPLAINT:]


class Exchange:
    """One request in progress. Its transport reports the machine's output; the caller awaits `answer`."""

    def __init__(self, request: Request) -> None:
        self.answer: asyncio.Future[RunnerResponse] = asyncio.get_running_loop().create_future()
        self.status: int | None = None
        """Exit status of the command on the machine, once it has ended."""
        self.is_sent = False
        """True once a part of the request was passed to the connection."""
        self.began = asyncio.Event()
        """Set once the program on the machine reads the request, or the call has ended."""
        self._reader = AnswerReader(request)
        self._complaints = b""
        self._limit: asyncio.Timeout | None = None
        self._idle_timeout = self._deadline = 0.0

    def limit(self, idle_timeout: float, longest: float | None) -> asyncio.Timeout:
        """The timeout of the call: `idle_timeout` seconds from now. With `longest`, `idle_timeout` counts from the last output, and
        `longest` limits the whole call."""
        now = asyncio.get_running_loop().time()
        limit = asyncio.timeout_at(now + idle_timeout)
        if longest is not None:
            self._limit, self._idle_timeout, self._deadline = limit, idle_timeout, now + longest
        return limit

    @property
    def is_ready(self) -> bool:
        """True once the program on the machine reads the request."""
        return self._reader.is_ready

    @property
    def is_answered(self) -> bool:
        """True once the complete answer was received."""
        return self._reader.answer is not None

    def take_stdout(self, data: bytes) -> None:
        """Handle a piece of standard output, which extends the timeout if there is a `longest`."""
        if self.answer.done():
            return
        if self._limit is not None and not self._limit.expired():
            now = asyncio.get_running_loop().time()
            self._limit.reschedule(min(now + self._idle_timeout, self._deadline))
        try:
            is_complete = self._reader.feed(data)
        except BadAnswer as error:
            self.fail(error)
            return
        if is_complete:
            assert self._reader.answer is not None
            self.answer.set_result(self._reader.answer)
        if is_complete or self._reader.is_ready:
            self.began.set()

    def take_stderr(self, data: bytes) -> None:
        """Handle a piece of standard error."""
        self._complaints = (self._complaints + data)[-_MAX_COMPLAINTS:]

    def fail(self, error: HostError) -> None:
        """End the call with an error, unless it has ended already."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.began.set()

    def end_of_output(self) -> None:
        """End the call because there will be no more output."""
        self.fail(
            incomplete_answer_error(
                self._reader,
                self.status,
                self._complaints.decode("utf-8", "replace"),
                is_sent=self.is_sent,
            )
        )

    def drop(self) -> None:
        """Drop the call: the caller no longer waits for it."""
        if not self.answer.done():
            self.answer.cancel()
        elif not self.answer.cancelled():
            self.answer.exception()  # retrieve it, or asyncio logs it as never retrieved
