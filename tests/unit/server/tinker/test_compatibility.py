"""The table of the methods of the client: the page and the refusals are made from it; whether it is complete is seen in test_tinker.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.server.tinker import compatibility
from groupwise.server.tinker.compatibility import METHODS, page, refused_route

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "operate" / "tinker.md"


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(), (
        f"run: python -m groupwise.server.tinker.compatibility > {PAGE.relative_to(PAGE.parents[2])}"
    )


def test_each_refused_method_has_a_reason_and_a_route() -> None:
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


def test_a_recipe_that_fails_is_not_said_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tmp_path / "cookbook.json"
    rows = [
        {"recipe": name, "passes": passes, "seen": "it learns", "seconds": 3}
        for name, passes in (("sl_loop", True), ("rl_loop", False))
    ]
    stored.write_text(json.dumps({"release": "1.2.3", "recipes": rows}))
    monkeypatch.setattr(compatibility, "COOKBOOK", stored)
    _, _, table = page().partition("<!-- recipes: begin -->")
    table, _, _ = table.partition("<!-- recipes: end -->")
    assert "| `sl_loop` | yes | it learns | 3 |" in table
    assert "| `rl_loop` | no | it learns | 3 |" in table
    assert "1.2.3" in page()
