"""Where a notebook's credentials come from, and where the libraries that need them look for them.

Each is looked for in the config, the environment, the secrets of Colab, those of Kaggle; the first that has it counts. It is then in the
environment of this process, under the name that huggingface_hub, wandb and kagglehub know, and nowhere else: in no file, no output.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from groupwise.notebook.config import SECRETS, TrainingConfig

Source = Callable[[str], str | None]


def provide(config: TrainingConfig) -> dict[str, str]:
    """Put what is found into the environment. Returns, for each credential that was found, which source had it."""
    sources: dict[str, Source] = {
        "the config": lambda name: _secret(config, name),
        "the environment": os.environ.get,
        "Colab's secrets": _colab(),
        "Kaggle's secrets": _kaggle(),
    }
    found: dict[str, str] = {}
    for name in SECRETS:
        for place, value in _looked_up(sources, name.upper()):
            os.environ[name.upper()] = value
            found[name] = place
            break
    return found


def _looked_up(sources: dict[str, Source], name: str) -> Iterator[tuple[str, str]]:
    for place, source in sources.items():
        value = None
        with suppress(
            Exception
        ):  # a secret that is not there, or not granted, is an error of another kind in each service
            value = source(name)
        if value:
            yield place, value


def _secret(config: TrainingConfig, name: str) -> str | None:
    held = getattr(config, name.lower())
    return None if held is None else held.get_secret_value()


def _colab() -> Source:
    userdata = _imported("google.colab.userdata")
    return lambda name: None if userdata is None else userdata.get(name)


def _kaggle() -> Source:
    secrets = _imported("kaggle_secrets")
    client = None
    if secrets is not None:
        with suppress(Exception):  # it looks for its service when it is made
            client = secrets.UserSecretsClient()
    return lambda name: None if client is None else client.get_secret(name)


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
