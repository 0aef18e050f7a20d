"""Requests and answers as bytes, on the control side; `bootstrap.py` and `runner/` are the other side.

A request is one line, `GROUPWISE <protocol> <length> <sha256>`, a JSON body of that length, and raw bytes if the body says so. The machine
does nothing until length and hash agree, so a request that was cut on its way has not happened.

An answer begins with `GROUPWISE-ANSWER <protocol> <length> <sha256> <payload length>`. Whatever a login shell prints before that line is
skipped. `AnswerReader` takes the bytes as they come, from any transport, and is done when the answer is whole: it does not wait for the end
of a stream that some other process may hold open."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, cast

from groupwise.api.http.strict_json import check_number, finite, no_constant
from groupwise.jobs.hosts.port import (
    HostError,
    OutcomeUnknown,
    Request,
    RunnerRefused,
    RunnerResponse,
)

PROTOCOL = 1
"""The protocol of our requests."""
SPOKEN = frozenset(n for n in (PROTOCOL, PROTOCOL - 1) if n >= 1)
"""The protocols of answers that are read: the one before too, so that control plane and machines need not be upgraded at the same
moment."""
MOST_NOISE = 1 << 20
"""Most bytes before the answer; a machine that prints more is not going to answer."""

_HEADER = re.compile(rb"GROUPWISE-ANSWER (\d{1,6}) (\d{1,12}) ([0-9a-f]{64}) (\d{1,12})\r?\n")
_LONGEST_HEADER = 200
_MOST_COMPLAINTS = 4000
"""Most bytes of standard error that are kept for a message, the last ones."""
_LONGEST_COMPLAINT = 300
"""Most characters of it in a message."""


class BadAnswer(OutcomeUnknown):
    """The bytes that came back are no answer: torn, changed on the way, or of another protocol. The request may have been carried out all
    the same."""


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
    """Encode an answer, for stand-ins for a machine."""
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
        self.answer: RunnerResponse | None = None

    @property
    def silent(self) -> bool:
        """True if nothing came at all, not even noise."""
        return not self._buffer and not self._noise

    def feed(self, data: bytes) -> bool:
        """Add output; True once the answer is whole. Raises BadAnswer if it cannot become one."""
        self._buffer += data
        if self._body_length is None and not self._find_header():
            return False
        return self._take_answer()

    def noise(self, most: int = 2000) -> str:
        """The end of the output so far, which is no answer, for a message."""
        return bytes(self._buffer[-most:]).decode("utf-8", "replace").strip()

    def _find_header(self) -> bool:
        found = _HEADER.search(self._buffer)
        if found is None:
            # What may be the beginning of a header stays; the rest is counted.
            spare = len(self._buffer) - max(_LONGEST_HEADER, 2000)
            if spare > 0:
                del self._buffer[:spare]
                self._noise += spare
            if self._noise > MOST_NOISE:
                raise BadAnswer(
                    f"more than {MOST_NOISE} bytes came from the machine before any answer: does a start-up file of its shell"
                    f" print without end? The last of it: {self.noise(200)!r}"
                )
            return False
        protocol, length, digest, payload = found.groups()
        self._body_length, self._payload_length, self._digest = int(length), int(payload), digest
        self._noise += found.start()
        del self._buffer[: found.end()]
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

    def _take_answer(self) -> bool:
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
            # Of bytes json would guess UTF-16, and let half characters pass.
            text = document.decode("utf-8")
            body: object = json.loads(text, parse_constant=no_constant, parse_float=finite)
            body = _storable(body) if b"\\u" in document else body
        except (ValueError, RecursionError) as error:
            raise BadAnswer(f"the answer is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadAnswer(f"the answer is a {type(body).__name__}; an object is expected")
        self.answer = RunnerResponse(
            cast("dict[str, Any]", body), bytes(self._buffer[self._body_length : end])
        )
        return True


def _storable(value: Any) -> Any:
    """Replace characters that no database takes: a job may print anything, and the end of its log is reported as text."""
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
    if isinstance(value, list):
        return [_storable(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {_storable(k): _storable(v) for k, v in cast("dict[Any, Any]", value).items()}
    return value


def checked_answer(answer: RunnerResponse) -> RunnerResponse:
    """The answer itself; raises RunnerRefused if it is a refusal."""
    error = answer.body.get("error")
    if error is None:
        return answer
    refusal = cast("dict[str, Any]", error) if isinstance(error, dict) else {"message": str(error)}
    raise RunnerRefused(
        str(refusal.get("code", "error")), str(refusal.get("message", "no reason given"))
    )


def no_answer(request: Request, place: object, timeout: float) -> str:
    """The message for a call whose time limit is over."""
    since = "" if request.longest is None else " of the last sign that it gets on"
    return f"no answer to {request.verb} from {place} within {timeout:g} s{since}"


CANNOT_EXECUTE = frozenset({126, 127})
"""Exit statuses of a shell that finds no such program, or may not run it."""


def without_answer(reader: AnswerReader, status: int | None, complaints: str) -> HostError:
    """The error for a command that ended on the machine without an answer. `complaints` is its standard error."""
    text = _last_line(complaints) or _last_line(reader.noise())
    if status in CANNOT_EXECUTE and reader.answer is None:
        return RunnerRefused(
            "no_python",
            f"python3 cannot be run there: {text or 'not found'}; install Python 3.8 or later",
        )
    ended = "the connection ended" if status is None else f"the runner ended with status {status}"
    return OutcomeUnknown(f"{ended} before its answer was whole" + (f": {text}" if text else ""))


def _last_line(text: str) -> str:
    """The last line: of a traceback, that is the error. People read it among the states of many machines."""
    return text.strip().rpartition("\n")[2].strip()[-_LONGEST_COMPLAINT:]


class Exchange:
    """One request under way. Its transport reports what comes from the machine; the caller awaits `answer`."""

    def __init__(self, request: Request) -> None:
        self.answer: asyncio.Future[RunnerResponse] = asyncio.get_running_loop().create_future()
        self.status: int | None = None
        """Exit status of the command on the machine, once it has ended."""
        self._reader = AnswerReader(request)
        self._complaints = b""
        self._limit: asyncio.Timeout | None = None
        self._patience = self._end = 0.0

    def limit(self, patience: float, longest: float | None) -> asyncio.Timeout:
        """The call's time limit, `patience` seconds from now; with `longest`, from the last sign of life, and at most `longest` in all."""
        now = asyncio.get_running_loop().time()
        limit = asyncio.timeout_at(now + patience)
        if longest is not None:
            self._limit, self._patience, self._end = limit, patience, now + longest
        return limit

    @property
    def answered(self) -> bool:
        """True once the whole answer came."""
        return self._reader.answer is not None

    def heard(self, data: bytes) -> None:
        """Take a piece of standard output."""
        if self.answer.done():
            return
        if self._limit is not None and not self._limit.expired():
            now = asyncio.get_running_loop().time()
            self._limit.reschedule(min(now + self._patience, self._end))
        try:
            whole = self._reader.feed(data)
        except BadAnswer as error:
            self.fail(error)
            return
        if whole:
            assert self._reader.answer is not None
            self.answer.set_result(self._reader.answer)

    def complained(self, data: bytes) -> None:
        """Take a piece of standard error."""
        self._complaints = (self._complaints + data)[-_MOST_COMPLAINTS:]

    def fail(self, error: HostError) -> None:
        """End the call with an error; ignored if it has ended."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def over(self) -> None:
        """End the call because no more output comes."""
        self.fail(
            without_answer(self._reader, self.status, self._complaints.decode("utf-8", "replace"))
        )

    def drop(self) -> None:
        """Abandon the call: the caller no longer waits for it."""
        if not self.answer.done():
            self.answer.cancel()
        elif not self.answer.cancelled():
            self.answer.exception()  # else asyncio reports it as one that no caller looked at
