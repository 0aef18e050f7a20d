"""One kernel for all tests that do not need their own, and its state before each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jupyter_kernel import Kernel

ANEW = """
%reset -f
import os, sys
os.chdir({folder!r})
for name in ("HF_TOKEN", "WANDB_API_KEY"):
    os.environ.pop(name, None)
"""


@pytest.fixture(scope="session")
def one_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("kernel")) as found:
        yield found


@pytest.fixture
def kernel(one_kernel: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    """In the test's folder, with no names; it leaves the folder before that is removed."""
    said = one_kernel.run(ANEW.format(folder=str(tmp_path)))
    assert not [each for each in said if each["kind"] == "error"], said
    yield one_kernel
    one_kernel.run(f"import os\nos.chdir({str(Path.home())!r})")
