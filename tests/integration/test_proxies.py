"""A proxy of the environment is for the internet: no client uses it to speak with this machine, and each uses it for others."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import botocore.credentials
import botocore.utils
import pytest

from groupwise.api.client import AsyncTrainingClient, TrainingClient
from groupwise.api.openai_client.client import Client, Endpoint
from groupwise.core.loopback import is_never_proxied, no_proxy_variables
from groupwise.core.retry import Timing
from groupwise.engine.backends.tinker.capabilities import read_schema
from groupwise.engine.sampler.servers.server_pool import Server
from groupwise.jobs.clouds.ec2 import Ec2, NoCredentials
from groupwise.jobs.fleet.client import FleetClient
from groupwise.jobs.fleet.files.log_shipping import Address
from tests.ports import free_port


def openai_client(url: str) -> Any:
    async def ask() -> None:
        async with Client(Endpoint(url, "model", retries=0)) as client:
            await client.models()

    return asyncio.run(ask())


def async_training_client(url: str) -> Any:
    async def ask() -> None:
        async with AsyncTrainingClient(url, retry_timeout=0) as client:
            await client.status()

    return asyncio.run(ask())


CLIENTS: dict[str, Callable[[str], Any]] = {
    "fleet": lambda url: FleetClient(url, retry_timeout=0).machines(),
    "training": lambda url: TrainingClient(url, retry_timeout=0).status(),
    "asynchronous": async_training_client,
    "openai": openai_client,
    "logs": lambda url: asyncio.run(Address(url).take(b"{}\n")),
    "tinker": read_schema,
    "vllm": lambda url: Server(Endpoint(url, "model"), 1, Timing()).notify(f"{url}/pause", {}),
}


@pytest.fixture
def served() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and what it was asked for: with a host, if it was taken for a proxy."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            paths.append(self.path)
            self.send_response(400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = answer

        def log_message(self, format: str, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()


@pytest.mark.parametrize("name", CLIENTS)
def test_a_proxy_is_used_for_other_machines_and_never_for_this_one(
    name: str, served: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, paths = served
    for variable in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1")
    with contextlib.suppress(Exception):  # what the server answers is nothing to them
        CLIENTS[name](url)
    assert [path[0] for path in paths] == ["/"]
    monkeypatch.delenv("all_proxy")
    monkeypatch.delenv("ALL_PROXY")
    monkeypatch.setenv("http_proxy", url)
    with contextlib.suppress(Exception):
        CLIENTS[name]("http://elsewhere.invalid")
    assert [path[:16] for path in paths[1:]] == ["http://elsewhere"]


def test_programs_of_others_are_given_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "intern.example")
    expected = "intern.example,127.0.0.1"
    assert no_proxy_variables("http://127.0.0.1:8000/v1") == {
        "no_proxy": expected,
        "NO_PROXY": expected,
    }
    assert no_proxy_variables("https://api.example/v1") == {}


@pytest.mark.parametrize(
    ("url", "is_direct"),
    [
        ("http://169.254.169.254/latest", True), ("http://[fe80::1]:80", True), ("http://LOCALHOST.:1", True),
        ("http://10.0.0.1", False), ("http://169.254.example", False), ("http://[", False),
    ],
)  # fmt: skip
def test_neither_this_machine_nor_what_answers_each_machine_for_itself_has_a_proxy(
    url: str, is_direct: bool
) -> None:
    assert is_never_proxied(url) is is_direct


def test_keys_of_an_aws_machine_are_asked_for_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxies: list[Any] = []

    class Fetcher(botocore.utils.InstanceMetadataFetcher):
        def retrieve_iam_role_credentials(self) -> dict[str, str]:
            proxies.append(botocore.utils.get_environ_proxies(self.get_base_url()))
            return {}

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "intern.example")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr(botocore.credentials, "InstanceMetadataFetcher", Fetcher)
    with pytest.raises(NoCredentials):
        Ec2("eu-west-1").account()
    assert proxies == [{}]
