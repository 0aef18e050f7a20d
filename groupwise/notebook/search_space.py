"""The space of a search: for each field of a config, or key of the core, a range or a list of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from groupwise.core.errors import ConfigError
from groupwise.core.settings.credentials import is_secret
from groupwise.core.settings.schema import leaves
from groupwise.notebook.config import SECRETS, TrainingConfig, takes_whole_alone, without_secrets
from groupwise.notebook.core import core_config
from groupwise.notebook.friendly_errors import plain_number
from groupwise.training.config import RunConfig

FIXED = (*SECRETS, "experiment_name", "checkpoint_dir", "save_to_drive", "overrides")
"""Fields that no search can vary."""


@dataclass(frozen=True, slots=True)
class Between:
    """Numbers from `low` to `high`, integers for an integer field. With `log` they are drawn uniformly on a logarithmic scale."""

    low: float
    high: float
    log: bool = False


Space: TypeAlias = Mapping[str, Between | Sequence[Any]]
"""Maps each field, or dotted key of the core, to a range or a list of values."""


def with_values(config: TrainingConfig, values: Mapping[str, Any]) -> TrainingConfig:
    """The config with values of a space: its fields, and keys of the core."""
    field_values = {
        name: value for name, value in values.items() if name in type(config).model_fields
    }
    core_values = {name: value for name, value in values.items() if name not in field_values}
    return config.changed(**field_values, overrides={**config.overrides, **core_values})


def distributions(config: TrainingConfig, space: Any) -> dict[str, Any]:
    """Optuna's form of a space, after checking that each of its values is valid for training. Raises ConfigError."""
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(
            'The space is not a mapping, or empty. Say what to vary: {"learning_rate": Between(1e-6, 1e-4, log=True)}.'
        )
    result: dict[str, Any] = {}
    for name, values in cast("Space", space).items():
        if name in FIXED or is_credential(name):
            raise ConfigError(f"{name} is nothing that a search can vary.")
        fields = [leaf.key for leaf in leaves(RunConfig) if ".".join(leaf.path) == name]
        if (field := type(config).model_fields.get(name)) is not None:
            fields = [field]
        result[name] = distribution = _distribution(name, values, takes_whole_alone(*fields))
        ends = (
            [distribution.low, distribution.high]
            if isinstance(values, Between)
            else distribution.choices
        )
        if without_secrets(list(ends)) != list(ends):
            raise ConfigError(
                f"{name} holds what looks like a credential, and what is tried is written down. Take it from the environment instead."
            )
        for value in ends:
            core_config(with_values(config, {name: value}))
    return result


def _distribution(name: str, values: Any, whole_numbers: bool) -> Any:
    """Optuna's form of the values of one field or key; `whole_numbers`: only whole numbers are valid. Raises ConfigError."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Between):
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(
                f"{name}: expected Between(low, high) or a list of values, got {values!r}."
            )
        return CategoricalDistribution(
            [plain_number(value) for value in cast("Sequence[Any]", values)]
        )
    ends: list[float] = []
    for end in (values.low, values.high):
        value = plain_number(end)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name}: a range has numbers as its ends, not {end!r}.")
        ends.append(float(value))
    low, high = ends
    if not low < high:
        raise ConfigError(f"{name}: {low} is not below {high}.")
    if values.log and low <= 0:
        raise ConfigError(f"{name}: {low} has no logarithm; begin above 0.")
    if not whole_numbers:
        return FloatDistribution(low, high, log=values.log)
    for end in (low, high):
        if not end.is_integer():
            raise ConfigError(
                f"{name}: a range from {low:g} to {high:g}, but {name} takes whole numbers alone. Begin and end with such, or give a list."
            )
    return IntDistribution(int(low), int(high), log=values.log)


def is_credential(name: str) -> bool:
    """True if a field, or a key of the core, is a credential, which must not be written to a journal."""
    return is_secret(name.rpartition(".")[2])
