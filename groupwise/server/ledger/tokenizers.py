"""Builds the answer to GET /tokenizer from the engine's tokenizer files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.api.schemas.training import TokenizerAnswer
from groupwise.server.engine.engine_protocol import Opened

ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A run's tokenizer, stored so that it can be described without an engine."""

    hash: str
    """Name of the folder with its files."""
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, opened: Opened) -> Tokenizer:
        """The tokenizer of a run that an engine has opened."""
        return cls(opened.tokenizer_hash, opened.stop_token_ids)


def tokenizer_answer(folder: Path, tokenizer: Tokenizer) -> TokenizerAnswer:
    """Describe the tokenizer files in this folder."""
    tokenizer_file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    facts: dict[str, Any] = json.loads(config_file.read_text()) if config_file.is_file() else {}
    tokens = {role: facts[role] for role in ROLES if facts.get(role)}  # text, or `content` of it
    texts = {role: t if isinstance(t, str) else str(t["content"]) for role, t in tokens.items()}
    template = folder / TEMPLATE
    return TokenizerAnswer(
        hash=tokenizer.hash,
        chat_template=template.read_text() if template.is_file() else facts.get("chat_template"),
        tokenizer_json=tokenizer_file.read_text() if tokenizer_file.is_file() else None,
        special_tokens=texts,
        stop_token_ids=list(tokenizer.stop_token_ids),
    )
