"""Kernels of a GPU by Triton's interpreter, which must be chosen before Triton is imported: in a process of its own, which is forked, as it
has torch then.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch

from groupwise.engine.models.native import fused
from tests import device_checks
from tests.integration.toy_run import in_child

ROOT = Path(__file__).parents[5]
TRITON = run_path(str(ROOT / "scripts/real_environment.py"))["where"]("triton")


def interpret(packages: Path) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    # A torch for GPUs has imported Triton already. Its compiled part cannot be imported twice.
    for name in [*sys.modules]:
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    sys.path.insert(0, str(packages))
    warnings.simplefilter("default")
    interpreter: Any = import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Numbers of a kernel are arrays of one number there, which NumPy 2.4 takes for no number.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        device_checks.kernels_between_products_are_those_of_torch(cpu, dtype)
        device_checks.tokens_are_drawn_as_torch_does(cpu, dtype)
        device_checks.numbers_of_the_head_are_those_of_torch(cpu, dtype)
        for name in device_checks.FUSED_MODELS:
            device_checks.fused_modules_are_those_of_transformers(cpu, dtype, name)
    device_checks.kernels_with_products_are_those_of_torch(cpu, torch.float32)
    # Bfloat16 is whole numbers to its products.
    device_checks.kernels_with_products_are_those_of_torch(
        cpu, torch.float16, device_checks.HEADS[:1]
    )


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not TRITON.exists(), reason="scripts/real_environment.py makes its environment")
def test_the_interpreter_gives_what_torch_does():
    (packages,) = TRITON.glob("lib/python*/site-packages")
    assert in_child(lambda: interpret(packages)) == 0


def test_without_triton_torch_computes_and_the_log_says_so(caplog):
    assert fused._try_kernels.__wrapped__(torch.device("cpu")) is None
    assert "Triton's kernels cannot be used here" in caplog.text
