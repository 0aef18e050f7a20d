"""Downloads adapters and models from the hub into local folders."""

from __future__ import annotations

from pathlib import Path

from groupwise.core import hub_errors
from groupwise.core.errors import ModelError


def may_be_hub_id(reference: str) -> bool:
    """True if the reference could be `OWNER/NAME` or `OWNER/NAME@REVISION`, rather than a path."""
    name = reference.partition("@")[0]
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def fetch_weights(reference: str) -> Path:
    """The folder of `HUB_ID` or `HUB_ID@REVISION`, downloaded unless it is cached. Raises `ModelError` if it cannot be obtained."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = reference.partition("@")
    patterns = ["*.json", "*.safetensors"]
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=patterns,
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
