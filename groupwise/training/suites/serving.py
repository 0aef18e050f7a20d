"""Serves weights while suites run: starts the user's command, waits for the server, and ends it with all its processes.

    [vllm, serve, "{merged}", --host, 127.0.0.1, --port, "{port}", --tensor-parallel-size, "{gpus}"]

Placeholders are filled in: `{policy}` with the folder of the weights (an adapter, if one was trained), `{merged}` with a folder of the
whole model, `{base}` with the name of the base model, `{port}` with a free port of this machine, `{gpus}` with the number of GPUs that
the model needs. The costly ones (`{merged}`, `{gpus}`) are only computed if the command contains them.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.api.openai_client.client import Client, Endpoint
from groupwise.core.errors import EndpointError, RunError, UsageError
from groupwise.core.interruption import run_to_end
from groupwise.core.processes.program import ProcessGroup, free_port
from groupwise.engine.models.artefact import TOKENIZER, is_adapter
from groupwise.engine.models.config import ModelConfig, recorded_base
from groupwise.runs.folder import CONFIG, RECORD, read_config

logger = logging.getLogger(__name__)

PORT = "{port}"
WEIGHTS = ("{policy}", "{merged}")
PLACEHOLDERS = (*WEIGHTS, "{base}", PORT, "{gpus}")
PARAMETERS_PER_GPU = 30_000_000_000
"""Number of parameters that fit on one GPU of 80 GB: 60 GB in bfloat16, and room for keys and values."""
MIN_KEPT_SHARE = 0.95
"""Fraction of an adapter's change that must survive the rounding of a merged model; below it, a warning is logged."""
POLL_INTERVAL = 0.2
"""Seconds between two requests to a starting server."""
ANSWER_LIMIT = 10.0
"""Seconds that the server has to answer which models it serves."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights to serve."""

    folder: Path
    run: Path | None
    """The run that trained the weights; None if unknown."""

    @staticmethod
    def of(folder: Path, run: Path | None = None) -> Weights:
        """The weights in a folder. If it is inside a run's folder, they belong to that run."""
        run_folders = (parent for parent in folder.resolve().parents if (parent / RECORD).is_file())
        return Weights(folder, run or next(run_folders, None))

    def base(self) -> ModelConfig:
        """The base model that was trained. Raises UsageError if the run is unknown."""
        if self.run is None or not (self.run / CONFIG).is_file():
            raise UsageError(
                f"{self.folder} belongs to no run, so it is not known which model it was trained on: {{base}}, and of an adapter "
                "{merged} and {gpus}, cannot be filled in. Write them out, or give a run."
            )
        return recorded_base(read_config(self.run)["model"])

    def whole(self) -> ModelConfig:
        """The whole model, for its size: the base model of an adapter, otherwise the weights themselves."""
        return self.base() if is_adapter(self.folder) else ModelConfig(name=str(self.folder))


def check_command(command: Sequence[str]) -> None:
    """Raise UsageError for a command that could not serve a policy here."""
    if not any(PORT in argument for argument in command):
        raise UsageError(f"the command that serves does not contain {PORT}, the port to serve on.")
    if not any(placeholder in argument for argument in command for placeholder in WEIGHTS):
        raise UsageError(
            f"the command that serves says neither {' nor '.join(WEIGHTS)}, so it would serve something else."
        )
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]!r} that could serve.")


@contextmanager
def serving(
    command_template: Sequence[str],
    weights: Weights,
    folder: Path,
    *,
    model: str | None,
    api_key_env: str,
    time_limit: float,
) -> Generator[tuple[ProcessGroup, str, str]]:
    """The server's processes, its URL, and the model's name in requests. `folder` gets the log and, temporarily, a merged model.

    Raises RunError if the server ends, or does not answer within `time_limit` seconds.
    """
    port = free_port()
    try:
        command = [
            _fill_placeholders(argument, weights, folder, port) for argument in command_template
        ]
        with ProcessGroup(
            command, folder=Path.cwd(), log=folder / "server.txt", environment={}
        ) as group:
            url = f"http://127.0.0.1:{port}/v1"
            names = _await_models(group, Endpoint(url, "", api_key_env, ANSWER_LIMIT), time_limit)
            yield group, url, _choose_model(names, model)
    finally:
        shutil.rmtree(folder / "merged", ignore_errors=True)


def _fill_placeholders(argument: str, weights: Weights, folder: Path, port: int) -> str:
    values = {
        "{policy}": lambda: str(weights.folder.resolve()),
        "{merged}": lambda: str(_merged_weights(weights, folder / "merged")),
        "{base}": lambda: weights.base().name,
        PORT: lambda: str(port),
        "{gpus}": lambda: str(_count_gpus(weights)),
    }
    for placeholder in PLACEHOLDERS:
        if placeholder in argument:
            argument = argument.replace(placeholder, values[placeholder]())
    return argument


def _merged_weights(weights: Weights, target: Path) -> Path:
    """Folder of the whole model: the adapter merged into its base, or the weights unchanged."""
    if not is_adapter(weights.folder):
        return weights.folder.resolve()
    if target.is_dir():  # another word of the command has asked for it already
        return target.resolve()
    from groupwise.engine.models.export import stored_tokenizer, write_merged
    from groupwise.engine.models.tokenizer import load_tokenizer

    base = weights.base()
    target.mkdir(parents=True)
    merge = write_merged(base, weights.folder, target)
    if merge.kept_share < MIN_KEPT_SHARE:
        logger.warning(
            "in %s, %.0f %% of the adapter's change is lost in rounding, so the suites are asked of less than was learnt; serve {policy} "
            "beside its base, where the server can",
            merge.dtype,
            100 * (1 - merge.kept_share),
        )
    has_own = any(next(weights.folder.glob(pattern), None) for pattern in TOKENIZER)
    tokenizer: Any = stored_tokenizer(weights.folder) if has_own else load_tokenizer(base)
    tokenizer.save_pretrained(target)
    return target.resolve()


def _count_gpus(weights: Weights) -> int:
    from groupwise.engine.models.plan import all_parameters

    # One GPU per started 30 billion parameters (a smaller model fits on one of 80 GB), rounded up to a power of two, because tensor
    # parallelism needs a divisor of the attention heads and a power of two divides those of nearly every model.
    count = all_parameters(weights.whole()) // PARAMETERS_PER_GPU + 1
    return 1 << (count - 1).bit_length()


def _await_models(group: ProcessGroup, endpoint: Endpoint, seconds: float) -> tuple[str, ...]:
    """Wait until the server reports its models. While it loads, it refuses connections or answers with an error."""
    deadline = time.monotonic() + seconds
    while True:
        if group.has_ended:
            code = group.end()
            raise RunError(
                f"The server ended before it answered (exit code {code}). Its log is {group.log}, and ends:\n{group.last_output()}"
            )
        try:
            return run_to_end(_list_models(endpoint))
        except EndpointError as error:
            if error.status in (401, 403):
                raise
            if time.monotonic() > deadline:
                raise RunError(
                    f"The server did not answer within {seconds:g} seconds ({error}). Its log is {group.log}, and ends:\n"
                    f"{group.last_output()}"
                ) from error
        time.sleep(POLL_INTERVAL)


async def _list_models(endpoint: Endpoint) -> tuple[str, ...]:
    async with Client(endpoint) as client:
        return await client.models(retries=0)


def _choose_model(names: Sequence[str], name: str | None) -> str:
    """The requested model, if the server has it; without a request, the server's only model."""
    if name is not None:
        if names and name not in names:
            raise RunError(f"The server has no model {name!r}. It has: {', '.join(names)}.")
        return name
    if len(names) != 1:
        raise RunError(
            f"The server has {len(names)} models ({', '.join(names)}). Say which one is the policy: --endpoint-model, or `model` of the "
            "callback."
        )
    return names[0]
