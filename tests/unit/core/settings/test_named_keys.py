"""Every key of a config that a message, a hint, advice or a page names is one that there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from groupwise.core.settings.schema import keys_of, sections_in
from groupwise.training.config import RunConfig
from groupwise.training.sft_config import SftConfig

TOP = Path(__file__).parents[4]
NO_KEYS = {"model", "sampler", "learner"}
"""Modules and objects of these names are mentioned in the packages below."""
PACKAGES = (
    "groupwise/engine/distributed/", "groupwise/engine/backends/tunix/", "groupwise/engine/models/", "groupwise/jobs/launch/",
    "groupwise/training/suites/", "docs/decisions/",
)  # fmt: skip
FOREIGN = ("docs/how-to/coming-from.md", "docs/how-to/gpus.md")
"""Pages that name keys of other frameworks; ours stand there as code, which test_docs.py checks."""
FILES = re.compile(r"\.(py|ya?ml|json|jsonl|txt|html|db|md|safetensors(\..*)?|log|sh|csv)$")


def _keys(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[str]:
    for name, info in keys_of(model).items():
        yield ".".join((*above, name))
        for section in sections_in(info.annotation).values():
            yield from _keys(section, (*above, name))


KEYS = {*_keys(RunConfig), *_keys(SftConfig)}
SECTIONS = {key.partition(".")[0] for key in KEYS} - {"task"}
"""The section of a task has keys of the task's own."""
NAMED = re.compile(rf"(?<![\w./`'$-])(?:{'|'.join(sorted(SECTIONS))})(?:\.[a-z_0-9]+)+(?![\w(/*])")


def wrong_keys(text: str, place: str) -> set[str]:
    named = {name for name in NAMED.findall(text) if not FILES.search(name)}
    found = named - KEYS - {"run.step"}  # of the run that callbacks are given
    if place.startswith(PACKAGES):
        found = {name for name in found if name.partition(".")[0] not in NO_KEYS}
    return found


def test_texts_of_the_package_and_its_pages():
    assert wrong_keys("Set data.selection, or sampler.temperature.", "x") == {"data.selection"}
    wrong: dict[str, set[str]] = {}
    for file in (
        TOP / "README.md",
        *(TOP / "docs").rglob("*.md"),
        *(TOP / "groupwise").rglob("*.py"),
    ):
        place = str(file.relative_to(TOP))
        if place in FOREIGN:
            continue
        nodes = ast.walk(ast.parse(file.read_text())) if file.suffix == ".py" else ()
        texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        if found := wrong_keys("\n".join(texts) if texts else file.read_text(), place):
            wrong[place] = found
    assert wrong == {}
