"""Where the kernels can be used; where they cannot, the reason is told and transformers' modules compute."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from groupwise.models.native import compiled
from groupwise.models.native.compiled import refusal
from groupwise.models.native.weights import native_model
from tests.unit.models.native.families import family

TOO_NEW = "Numba needs NumPy 2.5 or less. Got NumPy 2.6."


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    compiled._without_numba.cache_clear()
    yield
    compiled._without_numba.cache_clear()


def give_numba(monkeypatch, folder, code: str) -> None:
    """Let this be what an import of numba runs."""
    (folder / "numba.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "numba")


def test_formats():
    assert refusal(torch.float32) is None
    assert refusal(torch.bfloat16) is None
    assert "float16" in str(refusal(torch.float16))


def test_numba_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "pip install numba" in str(refusal(torch.float32))


@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_numba_cannot_be_imported(monkeypatch, tmp_path, caplog, kind):
    give_numba(monkeypatch, tmp_path, f"raise {kind}({TOO_NEW!r})")
    with caplog.at_level(logging.WARNING):
        assert native_model(family("llama")) is None
    assert TOO_NEW in caplog.text
    (tmp_path / "numba.py").write_text("raise ImportError('again')")
    assert TOO_NEW in str(refusal(torch.bfloat16)), "it is tried once"
