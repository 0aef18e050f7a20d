"""The sink `mlflow`: the tracking server or database file of MLFLOW_TRACKING_URI; without it, `mlflow.db` in the current folder.

MLflow does not deduplicate: a point that is sent twice is stored twice. So the MLflow run has a tag whose name contains our run's id, by
which a resume finds it. The tag's value is the last row sent; it is set after the row. A process that was killed in between has sent
one more row, or a part of it: of that row, only the missing metrics are sent.

Only MLflow's client is used, not its global "active run", because that calls git and belongs to the code of tasks. The client is
configured by environment variables; they are set to wait less long for an unresponsive server than it does by default.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from groupwise.core import atomic_files
from groupwise.core.extras import not_installed
from groupwise.core.settings.view import View
from groupwise.training.callbacks.sinks import (
    NOTHING,
    TABLE,
    Finding,
    MetricsRow,
    ReportedRun,
    State,
)

logger = logging.getLogger(__name__)

EXPERIMENT = "groupwise"
STATUS: dict[State, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
LONGEST_VALUE = 500
"""Longest param in characters; older servers take no more. The file `config.json` has the full values."""
LONGEST_MESSAGE = 400
"""Longest quotation from the client's messages, in characters."""

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
NO_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Retries and timeout in seconds for the check of the config: the user waits for it, so at most half a minute."""
WITH_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""Retries and timeout in seconds during the run: about a minute, enough for a server to restart.

The client's own defaults are 7 retries (four minutes) and 120 s for each response.
"""


class MlflowError(Exception):
    """An error of the client without passwords, which its message may contain as part of an address."""


class Refusal(ValueError):
    """An error that this sink itself raises, with advice to the user."""


class MlflowSink:
    """Sends metrics by steps done, the config as params, and files: config.json, and a CSV table of rollouts for each row that has one."""

    package = "mlflow"

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""
        self._tag = ""
        self._ours = True
        """True if this sink created the MLflow run. A run given by MLFLOW_RUN_ID is closed by the program that created it."""
        self._reached: Mapping[str, int] = {}
        """Last step of each metric that the MLflow run had when this process started."""
        self._takes_files = True

    def check(self, config: View) -> None:
        """Raise ValueError if the server does not respond, or if packages for a database file are missing."""
        uri = "the place that it was told"
        try:
            with _client_settings(NO_RETRIES):
                uri = str(import_module("mlflow").get_tracking_uri())
                if urlsplit(uri).scheme in ("", "file", "sqlite"):
                    _check_files(uri)
                elif run_id := os.environ.get("MLFLOW_RUN_ID"):
                    _client().get_run(run_id)
                else:
                    _find_experiment(_client(), config)
        except MlflowError as error:
            raise ValueError(
                f"mlflow cannot write to {_without_password(uri)}: {error}. Start that server (mlflow server), or set "
                "MLFLOW_TRACKING_URI to another address, or to a database file such as sqlite:///mlflow.db."
            ) from None

    def begin(self, run: ReportedRun) -> int:
        """Find the MLflow run by its tag or by MLFLOW_RUN_ID, or create it; add the config's new params."""
        with _client_settings(WITH_RETRIES):
            self._client = _client()
            self._tag = f"groupwise.{run.id}"
            # A new MLflow run is created together with its tag, so no crash can cause a second one.
            if run_id := os.environ.get("MLFLOW_RUN_ID"):
                self._ours = False
                mlflow_run = self._client.get_run(run_id)
            else:
                experiment = _find_experiment(
                    self._client, run.config
                ) or self._client.create_experiment(_experiment_name(run.config))
                matches = self._client.search_runs(
                    [experiment], f"tags.`{self._tag}` LIKE '%'", max_results=1
                )
                if matches:
                    self._client.update_run(matches[0].info.run_id, status="RUNNING")
                    mlflow_run = matches[0]
                else:
                    mlflow_run = self._client.create_run(
                        experiment,
                        start_time=round(1000 * run.began_at),
                        tags={self._tag: str(NOTHING)},
                        run_name=run.name,
                    )
            self._run_id = mlflow_run.info.run_id
            steps_written = int(mlflow_run.data.tags.get(self._tag, NOTHING))
            if self._tag in mlflow_run.data.tags:
                self._reached = {
                    point.key: point.step for point in mlflow_run.data.to_proto().metrics
                }
            # MLflow cannot change a param, so keys that a resume changed are updated in config.json only.
            config = run.config.to_dict()
            param = import_module("mlflow.entities").Param
            values = {_metric_name(key): _shorten(value) for key, value in _flatten_config(config)}
            params = [
                param(key, value)
                for key, value in values.items()
                if key not in mlflow_run.data.params
            ]
            self._client.log_batch(self._run_id, params=params)
            self._log_file("config.json", json.dumps(config, indent=2, ensure_ascii=False))
        logger.info("mlflow has it as the run %s", self._run_id)
        return steps_written

    def write_row(self, row: MetricsRow) -> None:
        """Send the metrics and the table, then set the tag to this row."""
        with _client_settings(WITH_RETRIES):
            point = import_module("mlflow.entities").Metric
            timestamp_ms = round(1000 * row.finished_at)
            metrics = [(_metric_name(name), value) for name, value in row.values.items()]
            points = [
                point(name, value, timestamp_ms, row.steps)
                for name, value in metrics
                if self._reached.get(name) != row.steps
            ]
            points += [
                point(name, value, timestamp_ms, finding.steps)
                for finding in row.findings
                for name, value in self._missing_metrics(finding)
            ]
            self._client.log_batch(self._run_id, metrics=points)
            if row.table:
                columns, rows = row.cells()
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows([columns, *rows])
                self._log_file(f"{TABLE}/step-{row.steps:08d}.csv", text.getvalue())
            self._client.set_tag(self._run_id, self._tag, str(row.steps))

    def end(self, state: State) -> None:
        """Set the final state of the MLflow run."""
        if self._ours:
            with _client_settings(WITH_RETRIES):
                self._client.set_terminated(self._run_id, STATUS[state])

    def _missing_metrics(self, finding: Finding) -> Iterator[tuple[str, float]]:
        """The metrics of a finding that MLflow lacks. Findings may come out of order, so a metric's last step does not suffice."""
        for name, value in ((_metric_name(name), value) for name, value in finding.values.items()):
            is_known = name in self._reached
            history = self._client.get_metric_history(self._run_id, name) if is_known else ()
            if finding.steps not in [point.step for point in history]:
                yield name, value

    def _log_file(self, file: str, text: str) -> None:
        """Store a file. MLflow's file store is separate from its metrics and may be unavailable; metrics are sent without it."""
        if not self._takes_files:
            return
        try:
            self._client.log_text(self._run_id, text.encode("utf-8", "replace").decode(), file)
        except Exception as error:  # noqa: BLE001 — each kind of store raises errors of its own package
            self._takes_files = False
            logger.warning(
                "mlflow takes no files: %s. Only metrics are sent", _short_message(error)
            )


@contextmanager
def _client_settings(limits: Mapping[str, str]) -> Generator[None, None, None]:
    """Configure the client by environment variables, its only means; variables that are already set are kept. Converts its errors."""
    settings = {key: value for key, value in {**QUIET, **limits}.items() if key not in os.environ}
    os.environ.update(settings)
    try:
        yield
    except Refusal:
        raise
    except Exception as error:  # noqa: BLE001 — the client's own errors, and those of databases and of HTTP
        raise MlflowError(_short_message(error)) from None
    finally:
        for key in settings:
            os.environ.pop(key, None)


def _short_message(error: Exception) -> str:
    """The first line of the error's message, shortened and without passwords; without a message, the error's type."""
    message = _without_password(str(error).strip().partition("\n")[0]).removesuffix(".")
    return (
        message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]}…"
    ) or type(error).__name__


def _without_password(text: str) -> str:
    """Remove user and password from addresses."""
    return re.sub(r"://[^/\s]*@", "://", text)


def _client() -> Any:
    return import_module("mlflow").MlflowClient()


def _check_files(uri: str) -> None:
    """Check that mlflow can write to a file or database, without creating it."""
    if urlsplit(uri).scheme != "sqlite":
        if not import_module("mlflow.environment_variables").MLFLOW_ALLOW_FILE_STORE.get():
            raise Refusal(
                f"mlflow would write to the folder {uri}, which it gave up. Set MLFLOW_TRACKING_URI to a database file such as "
                "sqlite:///mlflow.db or to the address of a server; MLFLOW_ALLOW_FILE_STORE=true keeps the folder."
            )
        return
    if missing := [name for name in ("sqlalchemy", "alembic") if find_spec(name) is None]:
        raise Refusal(
            not_installed(f"Writing to {uri}", "mlflow", *missing)
            + " Or set MLFLOW_TRACKING_URI to the address of a server."
        )
    folder = Path(uri.removeprefix("sqlite:///")).parent
    try:
        atomic_files.try_to_write(folder)
    except OSError as error:
        raise Refusal(
            f"mlflow cannot write to {folder}: {error.strerror}. Set MLFLOW_TRACKING_URI to another place."
        ) from None


def _experiment_name(config: View) -> str:
    return (
        config["run"]["mlflow_experiment"] or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    )


def _find_experiment(client: Any, config: View) -> str | None:
    """The id of the experiment; None if it has to be created."""
    name = config["run"]["mlflow_experiment"] or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if not name and (experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID")):
        experiment = client.get_experiment(experiment_id)
    else:
        experiment = client.get_experiment_by_name(_experiment_name(config))
    if experiment is not None and experiment.lifecycle_stage == "deleted":
        raise Refusal(
            f"the experiment {experiment.name} of mlflow is deleted. Restore it by `mlflow experiments restore -x "
            f"{experiment.experiment_id}`, or name another one by run.mlflow_experiment."
        )
    return None if experiment is None else experiment.experiment_id


def _metric_name(name: str) -> str:
    """A metric's name in the characters that MLflow accepts on all systems. `pass@4` becomes `pass_at_4`."""
    safe_name = re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_"))
    parts = [part.strip(" ") for part in safe_name.split("/") if part.strip(" .")]
    return "/".join(parts).lstrip(".")[:250].rstrip("/") or "_"


def _flatten_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The config as pairs of dotted key and value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten_config(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
