"""Verdicts that were paid for, on disk: one file for each question, whatever run or worker asked it.

A file appears whole or not at all, so any number of workers may share the folder and be killed. Two that ask the same question at
the same time both pay, and write the same file. What cannot be read is asked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, cast

from groupwise.core.atomic_files import write_json
from groupwise.core.cache import cache_folder
from groupwise.core.errors import StoreError

logger = logging.getLogger(__name__)

FORMAT = 1


class JudgeCache:
    """Answers of a judge by what it was asked."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` may begin with `~`; None is the cache of this machine."""
        self._folder = (folder or cache_folder("judge")).expanduser()
        self._writable = True

    def get(self, asked: dict[str, Any]) -> str | None:
        """The stored answer to this question; None if there is none."""
        try:
            stored: object = json.loads(self._file(asked).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(stored, dict):
            return None
        entry = cast("dict[str, object]", stored)
        said = entry.get("said")
        return said if entry.get("format") == FORMAT and isinstance(said, str) else None

    def put(self, asked: dict[str, Any], said: str) -> None:
        """Keep an answer. A full or closed disk is warned of once: the verdict is there all the same."""
        file = self._file(asked)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"format": FORMAT, "asked": asked, "said": said})
        except (OSError, StoreError) as error:
            if self._writable:
                logger.warning(
                    "Verdicts of the judge cannot be kept in %s: %s", self._folder, error
                )
            self._writable = False

    def _file(self, asked: dict[str, Any]) -> Path:
        text = json.dumps(asked, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        return self._folder / key[:2] / f"{key}.json"
