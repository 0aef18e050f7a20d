"""What is told of devices that JAX does not open."""

from __future__ import annotations

import pytest

from groupwise.errors import UsageError
from groupwise.tunix import environment


def test_devices_that_are_not_there_are_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.PLATFORMS, "cuda_of_nobody,cpu")
    with pytest.raises(UsageError, match=r"JAX cannot open .*cuda_of_nobody.* JAX_PLATFORMS=cpu"):
        environment.look()
