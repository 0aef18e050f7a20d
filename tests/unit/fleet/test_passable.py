"""What cannot be passed on is found wherever it stands, and told by its place."""

from typing import Any

import pytest

from groupwise.fleet.passable import sayable, text_problems


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"arguments": ["a", "b\0"]}, "arguments.1: a NUL character at position 1"),
        ({"environment": {"A": "\0"}}, "environment.A: a NUL character at position 0"),
        ({"labels": {"a\0": "b"}}, r"labels.a\x00: a NUL character at position 1"),
        ({"files": {"\udcff": ["0", 1, 2]}}, r"files.\udcff: bytes that are no UTF-8"),
        ({"hyperparams": {"a": [{"b": "\ud800"}]}}, "hyperparams.a.0.b: bytes that are no UTF-8"),
    ],
)
def test_the_place_is_named(document: dict[str, Any], place: str) -> None:
    assert place in "\n".join(text_problems(document, ""))


def test_what_json_cannot_say_is_told_as_near_as_it_can() -> None:
    document = {"a\ud800": [float("nan"), float("-inf"), 1.5, (True, None)], "b": "漢\udcff"}
    assert sayable(document) == {"a?": [None, None, 1.5, [True, None]], "b": "漢?"}
