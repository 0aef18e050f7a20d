"""Settings of a server: the keys of `groupwise serve`, and the four sources that they are read from.

Defaults come first; then a YAML file (`--config`), environment variables (`GROUPWISE_SERVE_PORT=8001`), and options and `key=value`
arguments of the command line override them, in this order. The API keys are not settings: a plain key is read from `GROUPWISE_API_KEY`,
hashes of others from the key file, and none of them from the command line, where every user of the machine could read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from groupwise.api.schemas.keys import VARIABLE, Keyring, read_keys_in
from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.loopback import is_loopback
from groupwise.core.settings.credentials import secrets_in
from groupwise.core.settings.overrides import lay_environment_over, override
from groupwise.core.settings.schema import Conflict, Strict, setting
from groupwise.core.settings.tree import Tree, read_yaml
from groupwise.core.settings.validation import validate

ENVIRONMENT = "GROUPWISE_SERVE_"
"""Prefix of the environment variables that are settings."""
MIB = 1 << 20

KEY_ADVICE = (
    f"put a key into the variable {VARIABLE}, which the clients read too; or make one with `groupwise serve --new-key ROLE`, "
    "write the line that it prints into a file, and name the file with key_file."
)
"""The supported ways to give a server its keys, for messages."""


class ServerConfig(Strict):
    """Each key is also the variable GROUPWISE_SERVE_<KEY>, and the word key=value of the command line."""

    refused: ClassVar[Mapping[str, str]] = {
        "api_key": f"keys may not be in the settings: {KEY_ADVICE[:-1]}",
        "api_keys": f"keys may not be in the settings: {KEY_ADVICE[:-1]}",
    }

    output_dir: str = setting(
        ...,
        "The folder with everything that the server stores: its ledger and its runs.",
        min_length=1,
    )
    host: str = setting(
        "127.0.0.1",
        "The address to listen at; 0.0.0.0 means every address of the machine. Any but the machine's own (127.0.0.1) needs a key.",
        min_length=1,
    )
    port: int = setting(8000, "The port to listen at; 0 takes any free one.", ge=0, le=65535)
    model_dir: str = setting(
        "models",
        "Folder whose sub-folders clients may name as models: as `name`, or as `org/name` two levels down.",
        min_length=1,
    )
    allowed_models: tuple[str, ...] = setting(
        (), "Further models that clients may name: hub ids, or paths of folders."
    )
    key_file: str | None = setting(
        None, "A file with a line `id role sha256` for each key.", min_length=1
    )
    tls_certificate: str | None = setting(
        None, "A PEM file with the certificate, and the certificates above it.", min_length=1
    )
    tls_key: str | None = setting(None, "The PEM file with its private key.", min_length=1)
    proxy_headers: str | None = setting(
        None,
        "Address of a proxy whose headers X-Forwarded-For and -Proto are trusted; null: none is.",
        min_length=1,
    )

    dashboard: bool = setting(
        True, "Whether /dashboard has pages for browsers, for users with a key."
    )

    completions_wait: float = setting(
        300.0,
        "Seconds for which a request for completions waits for room before it gets 429; under /v1 also for an engine that starts again.",
        gt=0,
    )
    sampling_time_limit: float = setting(
        600.0, "Seconds in which one request must be sampled.", gt=0
    )
    step_time_limit: float = setting(3600.0, "Seconds in which one step must be done.", gt=0)
    start_time_limit: float = setting(600.0, "Seconds in which a run must be ready.", gt=0)
    engine_silence_limit: float = setting(
        600.0, "Seconds without a sign of life after which the engine is killed.", gt=0
    )
    max_engine_restarts: int = setting(
        5, "Restarts of the engine within restart_window; then the run has failed.", ge=0
    )
    restart_window: float = setting(
        600.0, "Seconds over which restarts of the engine are counted.", gt=0
    )
    max_open_groups: int = setting(
        1024, "Groups that may be open or rewarded at once with `steps: manual`.", ge=1
    )

    max_models: int = setting(
        4,
        "Models in memory at once: those that Tinker clients train, and the active run.",
        ge=1,
    )
    max_context_length: int = setting(
        2048,
        "Tokens of prompt and completion when a Tinker client samples; an active run has its own limit.",
        ge=16,
    )
    keep_models_every: int = setting(
        10,
        "Updates after which the state of a Tinker client's model is stored; after a failure, later calls are computed again.",
        ge=1,
    )

    parts_silence: float = setting(
        120.0,
        "Seconds without a sign of life after which a loop that runs elsewhere loses sampler and learner; it sends one every ten "
        "seconds.",
        gt=0,
    )

    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = setting(
        "auto",
        "How tool calls are read from a model's text at /v1; auto: as the model's chat template writes them.",
    )

    max_body_bytes: int = setting(
        32 * MIB,
        "Maximum bytes of a request; 1 MiB if it holds only settings or names.",
        ge=1024,
    )
    requests_per_second: float | None = setting(
        None,
        "Requests of each key per second in the long run, pages and routes together; null: no limit.",
        gt=0,
    )
    burst: int = setting(
        50, "Requests that a key may send at once before requests_per_second counts.", ge=1
    )
    max_event_streams: int = setting(64, "Streams of GET /events that may be open at once.", ge=1)
    shutdown_seconds: float = setting(
        30.0, "Maximum seconds that the server takes to end after SIGTERM.", gt=0
    )
    log_format: Literal["text", "json"] = setting(
        "text", "Form of the log's lines. text: for people. json: for programs."
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Combinations of settings that contradict each other."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            present, missing = "tls_certificate", "tls_key"
            if self.tls_certificate is None:
                present, missing = missing, present
            yield Conflict(
                f"{present} has no effect without {missing}; give both.", (present, missing)
            )
        if self.burst != 50 and self.requests_per_second is None:
            yield Conflict(
                "burst has no effect without requests_per_second.", ("burst", "requests_per_second")
            )

    @property
    def folder(self) -> Path:
        """`output_dir` as a path."""
        return Path(self.output_dir).expanduser()

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def scheme(self) -> str:
        """URL scheme of the server's address."""
        return "https" if self.tls_certificate else "http"


def read_settings(
    config: Path | None,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    words: Sequence[str],
) -> ServerConfig:
    """Read the settings of a server. Raises ConfigError with every error and its source.

    `options`: the command-line options that were given, by setting.
    """
    tree = Tree("settings") if config is None else read_yaml(config)
    lay_environment_over(tree, environment, ServerConfig, ENVIRONMENT)
    for key, value in options.items():
        tree.values[key] = value
        tree.origins[(key,)] = f"--{key.replace('_', '-')}"
    return validate(ServerConfig, override(tree, words), check=secrets_in)


def read_keys(config: ServerConfig, environment: Mapping[str, str]) -> Keyring | None:
    """The keys that the server accepts; None: there are none, and only this machine can send requests.

    Raises UsageError if there is no key but other machines can reach the server, ConfigError if the key file holds no key or cannot be
    read.
    """
    plain = environment.get(VARIABLE)
    stored_keys = (
        () if config.key_file is None else read_keys_in(Path(config.key_file).expanduser())
    )
    if plain is None and not stored_keys:
        if config.key_file is not None:
            raise ConfigError(
                f"key_file {config.key_file} holds no key, so no request could be answered. "
                "`groupwise serve --new-key admin` makes one."
            )
        if not config.is_local:
            raise UsageError(
                f"host is {config.host}, where others can reach the server, but it has no key. Either {KEY_ADVICE} "
                "Or leave host out: then only this machine can ask."
            )
        return None
    return Keyring(stored_keys, plain)
