"""The table of the client's methods: it is that of the installed client, and the page and the refusals are made from it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.server.verbs.compatibility import CLIENT_VERSION, METHODS, page, refused_route

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "how-to" / "tinker.md"

LIST = """
import inspect, json, os, sys, warnings
warnings.simplefilter("ignore")
import tinker
kinds = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient)
found = {
    kind.__name__: sorted({
        name.removesuffix("_async") for name, value in inspect.getmembers(kind)
        if callable(value) and not name.startswith("_")
    })
    for kind in kinds
}
print(json.dumps([tinker.__version__, found]))
"""


def test_the_table_has_every_public_method_of_the_installed_client_and_no_other() -> None:
    run = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, check=True)
    version, found = json.loads(run.stdout)
    assert version == CLIENT_VERSION
    table = {
        owner: sorted(each.name for each in METHODS if each.owner == owner)
        for owner in dict.fromkeys(each.owner for each in METHODS)
    }
    assert table == found


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(), (
        f"run: python -m groupwise.server.verbs.compatibility > {PAGE.relative_to(PAGE.parents[2])}"
    )


@pytest.mark.parametrize(
    "file", ["README.md", "docs/how-to/tinker.md", "docs/how-to/deploy-server.md"]
)
def test_a_server_is_installed_with_all_that_the_verbs_need(file: str) -> None:
    lines = [line for line in (ROOT / file).read_text().splitlines() if "server" in line]
    installs = [line for line in lines if "pip install" in line]
    assert installs
    wanted = {"train", "server", "tinker"}
    assert all(wanted <= set(re.findall(r"\w+", line)) for line in installs), installs


def test_whatever_is_refused_says_why_and_is_reached_by_a_route() -> None:
    for each in METHODS:
        if not each.works:
            assert each.note, each
            assert each.routes, each


@pytest.mark.parametrize(
    ("method", "path", "named"),
    [
        ("POST", "/save_weights_external", "TrainingClient.save_weights_external"),
        ("POST", "/copy_weights", "ServiceClient.copy_weights and RestClient.copy_weights"),
        ("GET", "/training_runs", "RestClient.list_training_runs"),
        ("GET", "/training_runs/s:train:0", "RestClient.get_training_run "),
        ("GET", "/training_runs/s:train:0/checkpoints", "RestClient.list_checkpoints"),
        ("DELETE", "/training_runs/s/checkpoints/weights/a", "RestClient.delete_checkpoint"),
        ("PUT", "/training_runs/s/checkpoints/weights/a/ttl", "set_checkpoint_ttl"),
        ("POST", "/training_runs/s/checkpoints/weights/a/publish", ".publish_checkpoint"),
        ("GET", "/auth/apikey/me", "RestClient.whoami"),
        ("POST", "/retrieve_futures", "POST /retrieve_futures"),
    ],
)
def test_routes_are_refused_by_the_name_of_the_method(method: str, path: str, named: str) -> None:
    assert named in str(refused_route(method, path))


def test_a_route_that_the_protocol_has_not() -> None:
    assert refused_route("GET", "/nonsense") is None
    assert refused_route("DELETE", "/training_runs") is None
