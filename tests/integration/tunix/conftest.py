"""In the usual run Llama is held against torch with most losses, and Gemma with one; other families and losses in the soak.

Parts are started once for all tests, which leave them as they began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from groupwise.engine.backends.tunix import environment
from groupwise.training.assembly.parts import Parts
from tests.integration.tunix.running import config_of, parts_of, start_of

DIVIDED = Path(__file__).parent / "inside" / "divided.py"
USUAL = (
    ("gemma3", "grpo"), ("llama", "grpo, clipped"), ("llama", "dr_grpo, entropy"),
    ("llama", "gspo"), ("llama", "cispo, k2"), ("llama", "k1, corrected"),
)  # fmt: skip
"""Losses of families in the usual run; one code computes all of them."""
Pairs = Callable[[str], tuple[Parts, Parts]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or item.path.parent != Path(__file__).parent:
            continue
        family, loss = call.params.get("both"), call.params.get("name")
        if loss is not None and (family, loss) not in USUAL:
            item.add_marker(pytest.mark.soak(suite="tunix"))


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    """Parts of Tunix, and those of torch with the same adapter, which is not zero, by family."""
    found: dict[str, tuple[Parts, Parts]] = {}
    with ExitStack() as stack:

        def pair(family: str) -> tuple[Parts, Parts]:
            if family not in found:
                folder = tmp_path_factory.mktemp(family)
                start = start_of(family, folder / "start")
                tunix, by_torch = (
                    stack.enter_context(
                        closing(parts_of(config_of(family, backend, start), folder / backend))
                    )
                    for backend in ("tunix", "transformers")
                )
                for each in (tunix, by_torch):
                    asyncio.run(each.sampler.load(asyncio.run(each.learner.publish(1))))
                found[family] = tunix, by_torch
            return found[family]

        yield pair


@pytest.fixture
def divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU Tunix's layers leave out how they are divided: workers are started so that they do not."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{environment.python()}" -P -s "{DIVIDED}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv(environment.VARIABLE, str(python))
