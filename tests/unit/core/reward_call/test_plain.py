"""Anything that user code returns becomes something that JSON can hold."""

import json
import math
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from groupwise.core.reward_call.plain import plain


@pytest.mark.parametrize(("value", "expected"), [
    ({1: (2, 3.5)}, {"1": [2, 3.5]}), (math.nan, None), (np.float32(0.5), 0.5),
    (np.array([[1, 2]]), [[1, 2]]), (np.array(math.inf), None), ({"b", "a"}, ["a", "b"]),
    (Path("a/b"), "a/b"), (date(2026, 1, 2), "2026-01-02"), (True, True),
])  # fmt: skip
def test_plain(value, expected):
    assert plain(value) == expected
    json.dumps(plain(value), allow_nan=False)
