"""Finds a notebook's credentials, and puts them where the libraries that need them look.

Each is looked for in the config, the environment, the secrets of Colab, those of Kaggle; the first that has it counts. It is then put
into the environment of this process, under the name that huggingface_hub, wandb and kagglehub read, and into no file or output.

It stays there, since an earlier session may still train with it. So a later session that finds none uses that one, and reports an
earlier config or session as its source; but the environment's own value, and values from other sources, come first.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groupwise.notebook.config import SECRETS, TrainingConfig

Source = Callable[[str], str | None]

CONFIG = "the config"


@dataclass(frozen=True, slots=True)
class _Put:
    """An environment variable's value that was set here."""

    value: str
    place: str
    before: str | None
    """Its value from outside; None where it had none."""


_put: dict[str, _Put] = {}
"""Values set here, by variable."""


def provide(config: TrainingConfig) -> dict[str, str]:
    """Put what is found into the environment. Returns, for each credential that was found, which source had it."""
    sources: dict[str, Source] = {
        CONFIG: lambda name: _secret(config, name),
        "the environment": _from_outside,
        "Colab's secrets": _colab(),
        "Kaggle's secrets": _kaggle(),
    }
    found: dict[str, str] = {}
    for field in SECRETS:
        name = field.upper()
        for place, value in _looked_up(sources, name):
            _put[name] = _Put(value, place, _from_outside(name))
            os.environ[name] = value
            found[field] = place
            break
        else:
            if os.environ.get(name):
                found[field] = f"an earlier {'config' if _put[name].place == CONFIG else 'session'}"
    return found


def _from_outside(name: str) -> str | None:
    """The variable's value, or the one it had before a value was put there."""
    value, put = os.environ.get(name), _put.get(name)
    return put.before if put is not None and put.value == value else value


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
