"""Finds a notebook's credentials, and sets the environment variables that the libraries read.

Each credential is searched for in the config, the environment, Colab's secrets and Kaggle's secrets; the first source that has it
is used. It is then put into the environment of this process, under the name that huggingface_hub, wandb and kagglehub read, and
into no file or output.

It stays there, since an earlier session may still train with it. So a later session that finds none uses that one, and reports an
earlier config or session as its source; but the environment's own value, and values from other sources, come first.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groupwise.notebook.config import SECRETS, TrainingConfig

CONFIG = "the config"


@dataclass(frozen=True, slots=True)
class _Put:
    """A value that this module put into an environment variable."""

    value: str
    source: str
    previous: str | None
    """The variable's previous value; None if it was not set."""


_put: dict[str, _Put] = {}
"""Values set here, by variable."""


def provide(config: TrainingConfig) -> dict[str, str]:
    """Put the credentials into the environment. Returns the source of each one that was found."""

    def from_config(name: str) -> str | None:
        secret = getattr(config, name.lower())
        return None if secret is None else secret.get_secret_value()

    sources: dict[str, Callable[[str], str | None]] = {
        CONFIG: from_config,
        "the environment": _from_outside,
    }
    with suppress(ImportError):
        userdata: Any = importlib.import_module("google.colab.userdata")
        sources["Colab's secrets"] = userdata.get
    with suppress(Exception):  # the client connects to its service when it is created
        client: Any = importlib.import_module("kaggle_secrets").UserSecretsClient()
        sources["Kaggle's secrets"] = client.get_secret
    credential_sources: dict[str, str] = {}
    for field in SECRETS:
        name = field.upper()
        for source_name, source in sources.items():
            value = None
            # Each service raises a different error for a secret that does not exist or is not granted.
            with suppress(Exception):
                value = source(name)
            if value:
                _put[name] = _Put(value, source_name, _from_outside(name))
                os.environ[name] = value
                credential_sources[field] = source_name
                break
        else:
            if os.environ.get(name):
                credential_sources[field] = (
                    f"an earlier {'config' if _put[name].source == CONFIG else 'session'}"
                )
    return credential_sources


def _from_outside(name: str) -> str | None:
    """The variable's value, or the one it had before a value was put there."""
    value, placed = os.environ.get(name), _put.get(name)
    return placed.previous if placed is not None and placed.value == value else value
