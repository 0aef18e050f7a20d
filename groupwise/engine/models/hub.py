"""Downloads adapters and models from the hub into local folders, without transformers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from groupwise.core import hub_errors
from groupwise.core.errors import ModelError

WEIGHTS = ("*.json", "*.safetensors")
"""Patterns of the files that make up an adapter or a model."""
OF_NATIVE_MODEL = ("*.json", "model*.safetensors")
"""The same without further copies of the weights, such as `consolidated.safetensors`."""
OF_TOKENIZER = ("*.json", "*.jinja")


def may_be_hub_id(reference: str) -> bool:
    """True if the reference could be `OWNER/NAME` or `OWNER/NAME@REVISION`, rather than a path."""
    name = reference.partition("@")[0]
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


@contextmanager
def without_progress_bars() -> Generator[None]:
    """Let huggingface_hub show no bars."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not disabled:
            enable_progress_bars()


def fetch_config(name: str, revision: str | None) -> Path:
    """The `config.json` of a model on the hub, downloaded unless it is cached. Raises OSError or ValueError if it cannot be obtained."""
    from huggingface_hub import hf_hub_download

    with without_progress_bars():
        return Path(
            hf_hub_download(
                name,
                "config.json",
                revision=revision,
                local_files_only=not hub_errors.is_reachable(),
            )
        )


def fetch_files(reference: str, patterns: Sequence[str] = WEIGHTS) -> Path:
    """The folder of `HUB_ID` or `HUB_ID@REVISION` with the files of these names, downloaded unless they are cached. Raises `ModelError` if
    it cannot be obtained."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = reference.partition("@")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=list(patterns),
                local_files_only=not hub_errors.is_reachable(),
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        where = (
            "the hub"
            if hub_errors.is_reachable()
            else "its cache on this machine (it cannot be reached)"
        )
        raise ModelError(
            f"{reference!r} could not be had from {where}: {reason[0] if reason else error!r} "
            "Offline, give a folder that holds an adapter or a model.",
            temporary=hub_errors.is_temporary(error),
        ) from error
