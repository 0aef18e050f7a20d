"""The table of the methods of the client: the page and the refusals are made from it; whether it is complete is seen in test_verbs.py."""

from __future__ import annotations

from pathlib import Path

from groupwise.server.tinker.compatibility import METHODS, page, refused_route

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "how-to" / "tinker.md"


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(), (
        f"run: python -m groupwise.server.tinker.compatibility > {PAGE.relative_to(PAGE.parents[2])}"
    )


def test_whatever_is_refused_says_why_and_is_reached_by_a_route() -> None:
    for each in METHODS:
        assert each.works or (each.note and each.routes), each
    for method, path, named in (
        ("POST", "/copy_weights", "ServiceClient.copy_weights and RestClient.copy_weights"),
        ("POST", "/training_runs/s/checkpoints/weights/a/publish", "RestClient.publish_checkpoint"),
        ("GET", "/auth/apikey/me", "RestClient.whoami"),
    ):
        assert named in str(refused_route(method, path))
    assert refused_route("GET", "/nonsense") is None
    assert refused_route("GET", "/training_runs") is None
