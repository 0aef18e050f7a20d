"""Connections to training servers: the same functions as without one, each call with the connection's own key."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise import notebook
from groupwise.api.client.errors import ClientError
from groupwise.api.schemas.keys import VARIABLE
from groupwise.core.errors import UsageError
from groupwise.notebook import Connection, connect, connection

HERE = {"accelerator", "connect", "load_rubrics"}
"""Functions that have nothing to do with who computes."""
FUNCTIONS = {
    name for name in notebook.__all__ if inspect.isfunction(getattr(notebook, name))
} - HERE
WITHOUT_A_SESSION = ("prepare_session", "run_full_pipeline", "search")
"""Those that are told the server."""
WITH_A_SESSION = ("train_grpo", "quick_test", "evaluate")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back afterwards
    monkeypatch.delenv(VARIABLE)


@pytest.fixture(autouse=True)
def requested_urls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The URLs that are asked for their status, each with the key that was there then."""
    found: list[tuple[str, str | None]] = []

    class Client:
        def __init__(self, url: str, *, retry_timeout: float) -> None:
            self.connection = SimpleNamespace(url=url.rstrip("/"))

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def status(self) -> None:
            found.append((self.connection.url, os.environ.get(VARIABLE)))
            if os.environ.get(VARIABLE) == "wrong":
                raise ClientError("refused")

    monkeypatch.setattr(connection, "TrainingClient", Client)
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str | None]]:
    """What the functions are called with: name, server, and the key that they would find."""
    found: list[tuple[str, str | None, str | None]] = []

    def recorded(name: str) -> Any:
        def call(*_: object, server: str | None = None, **__: object) -> None:
            found.append((name, server, os.environ.get(VARIABLE)))

        return call

    for name in (*WITHOUT_A_SESSION, *WITH_A_SESSION):
        monkeypatch.setattr(connection, name, recorded(name))
    return found


def parameters_of(function: Any) -> list[inspect.Parameter]:
    return [
        each
        for each in inspect.signature(function).parameters.values()
        if each.name not in ("self", "server")
    ]


def test_it_has_every_function_with_the_same_parameters() -> None:
    for name in FUNCTIONS:
        assert parameters_of(getattr(Connection, name)) == parameters_of(getattr(notebook, name)), (
            name
        )


def test_each_call_takes_its_own_key(
    requested_urls: list[tuple[str, str | None]], calls: list[tuple[str, str | None, str | None]]
) -> None:
    one, other = connect("http://a/", "key-a"), connect("http://b", "key-b")
    assert requested_urls == [("http://a", "key-a"), ("http://b", "key-b")]
    open_ = connect("http://open")
    assert requested_urls[-1] == ("http://open", None)
    for remote in (one, other, open_, one):
        remote.prepare_session(None)  # pyright: ignore[reportArgumentType]
        remote.run_full_pipeline(None)  # pyright: ignore[reportArgumentType]
        remote.search(None, {})  # pyright: ignore[reportArgumentType]
        session: Any = SimpleNamespace(server=remote.url)
        for name in WITH_A_SESSION:
            getattr(remote, name)(None, session)
        expected = (remote.url, remote.key)
        assert [each[1:] for each in calls[:3]] == [expected] * 3
        assert [each[0] for each in calls] == [*WITHOUT_A_SESSION, *WITH_A_SESSION]
        assert {each[2] for each in calls} == {remote.key}
        calls.clear()


@pytest.mark.parametrize("server", [None, "http://b"])
@pytest.mark.parametrize("name", WITH_A_SESSION)
def test_a_session_that_it_did_not_prepare_is_refused(
    name: str, server: str | None, calls: list[tuple[str, str | None, str | None]]
) -> None:
    remote = connect("http://a", "key-a")
    connect("http://b", "key-b")
    where = server or "this machine"
    with pytest.raises(UsageError, match=f"on {where}, not on http://a"):
        getattr(remote, name)(None, SimpleNamespace(server=server))
    assert not calls
    assert os.environ[VARIABLE] == "key-b"


@pytest.mark.parametrize("before", [None, "key-before"])
def test_a_failed_connection_leaves_the_environment_as_it_was(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
        assert connect("http://a").key == before
    with pytest.raises(ClientError):
        connect("http://a", "wrong")
    assert os.environ.get(VARIABLE) == before
    assert "key-a" not in repr(connect("http://a", "key-a"))
