"""Where the kernels can be used, and how they round; elsewhere the reason is logged and transformers' modules compute."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from groupwise.engine.models.native import compiled
from groupwise.engine.models.native.compiled import refusal
from groupwise.engine.models.native.facts import without_numba
from groupwise.engine.models.native.weights import native_model
from tests.unit.engine.models.native.families import family

TOO_NEW = "Numba needs NumPy 2.5 or less. Got NumPy 2.6."


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    without_numba.cache_clear()
    yield
    without_numba.cache_clear()


def test_formats():
    assert refusal(torch.float32) is None
    assert refusal(torch.bfloat16) is None
    assert "float16" in str(refusal(torch.float16))


def test_numba_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "pip install 'groupwise[train]'" in str(refusal(torch.float32))


@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_numba_cannot_be_imported(monkeypatch, tmp_path, caplog, kind):
    (tmp_path / "numba.py").write_text(f"raise {kind}({TOO_NEW!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numba")
    with caplog.at_level(logging.WARNING):
        assert native_model(family("llama")) is None
    assert TOO_NEW in caplog.text
    (tmp_path / "numba.py").write_text("raise ImportError('again')")
    assert TOO_NEW in str(refusal(torch.bfloat16)), "it is tried once"


def test_swiglu_of_extremes():
    gate = torch.tensor([-1e30, -100.0, -88.5, -0.0, 100.0, 1e30, torch.inf, torch.nan])
    found = compiled.swiglu(torch.cat([gate, torch.ones(8)])[None], torch.float32)[0]
    wanted = torch.nn.functional.silu(gate)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_bfloat16_is_rounded_to_the_nearest_half_to_even():
    numbers = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1e-30])
    numbers = torch.cat(
        [numbers, torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 100]
    )
    weight = torch.ones(1)
    # A norm of rows of one number without epsilon would be ±1; with a huge one it is the number divided by its root.
    found = compiled.normed(numbers[:, None], weight * 2.0**40, 2.0**80, torch.bfloat16)[:, 0]
    exact = numbers.double() / (numbers.double().square() / 2.0**80 + 1).sqrt()
    assert torch.equal(found, exact.float().bfloat16())
