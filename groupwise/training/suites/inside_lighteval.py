"""A file that lighteval loads beside its own tasks, in its own environment: only the standard library is sure to be there.

It adds no task. It notes which releases are at work, which lighteval does not tell, and takes from the tasks their own limit of tokens:
lighteval would send it beside the one that was asked for (`max_tokens` and `max_completion_tokens`), of which some services take the
wrong one and others neither.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata

VARIABLE = "GROUPWISE_SUITE_RELEASES"
"""The environment variable that names the file to write."""
PACKAGES = ("lighteval", "litellm")
LIMITED = ("math_500", "gpqa", "lcb.main")
"""Modules whose tasks have a limit of their own."""

TASKS_TABLE: list[object] = []


def _prepare(file: str) -> None:
    for module in LIMITED:
        loaded = sys.modules.get(f"lighteval.tasks.tasks.{module}")
        for task in getattr(loaded, "TASKS_TABLE", ()):
            task.generation_size = None
    with open(file, "w", encoding="utf-8") as written:
        json.dump({name: metadata.version(name) for name in PACKAGES}, written)


if VARIABLE in os.environ:
    _prepare(os.environ[VARIABLE])
