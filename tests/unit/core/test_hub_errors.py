"""Whether the hub answers, and which of its failures pass by themselves."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from groupwise.core import hub_errors


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*hub_errors.PROXIES, "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    asked = hub_errors.is_reachable
    asked.cache_clear()
    yield
    asked.cache_clear()


def test_whether_the_hub_answers_is_asked_once_and_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert hub_errors.is_reachable()
    assert hub_errors.is_reachable(), "it is not asked again"
    hub_errors.is_reachable.cache_clear()
    assert not hub_errors.is_reachable(), "nobody listens there any more"
    hub_errors.is_reachable.cache_clear()
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert hub_errors.is_reachable(), "only the proxy can tell"
    hub_errors.is_reachable.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub_errors.is_reachable()


def of_status(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "https://hub.example/model")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status))


def wrapped(cause: BaseException) -> OSError:
    error = OSError("It looks like there is no such file.")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("error", "passes"), [
    (of_status(503), True), (of_status(429), True), (of_status(404), False), (of_status(401), False), (wrapped(of_status(502)), True),
    (wrapped(of_status(404)), False), (wrapped(ConnectionResetError()), True), (httpx.ReadTimeout("slow"), True),
    (ValueError("no config of that name"), False),
])  # fmt: skip
def test_temporary_errors_of_the_hub_are_recognised(
    monkeypatch: pytest.MonkeyPatch, error: Exception, *, passes: bool
) -> None:
    monkeypatch.setattr(hub_errors, "is_reachable", lambda: True)
    assert hub_errors.is_temporary(error) is passes


def test_no_error_is_temporary_in_offline_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub_errors.is_temporary(ConnectionResetError())
