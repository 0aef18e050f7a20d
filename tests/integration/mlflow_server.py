"""As much of MLflow's tracking server as a run needs: its REST interface over MLflow's own store, files included.

The store is the one of the real server, which refuses bad names and finds runs by their tags; the real server's web framework is not
installed here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos import service_pb2
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST
from mlflow.utils.proto_json_utils import message_to_json, parse_dict

wire: Any = service_pb2
FILES = "/api/2.0/mlflow-artifacts/artifacts/"


def experiment_by_name(store: Any, asked: Any) -> Any:
    found = store.get_experiment_by_name(asked.experiment_name)
    if found is None:
        raise MlflowException("no such experiment", RESOURCE_DOES_NOT_EXIST)
    return wire.GetExperimentByName.Response(experiment=found.to_proto())


def create_experiment(store: Any, asked: Any) -> Any:
    made = store.create_experiment(asked.name, asked.artifact_location or None, [])
    return wire.CreateExperiment.Response(experiment_id=made)


def create_run(store: Any, asked: Any) -> Any:
    tags = [RunTag(tag.key, tag.value) for tag in asked.tags]
    made = store.create_run(
        asked.experiment_id, asked.user_id, asked.start_time, tags, asked.run_name
    )
    return wire.CreateRun.Response(run=made.to_proto())


def get_run(store: Any, asked: Any) -> Any:
    return wire.GetRun.Response(run=store.get_run(asked.run_id).to_proto())


def search_runs(store: Any, asked: Any) -> Any:
    found = store.search_runs(asked.experiment_ids, asked.filter, asked.run_view_type)
    return wire.SearchRuns.Response(runs=[run.to_proto() for run in found])


def log_batch(store: Any, asked: Any) -> Any:
    metrics = [Metric(m.key, m.value, m.timestamp, m.step) for m in asked.metrics]
    params = [Param(param.key, param.value) for param in asked.params]
    store.log_batch(asked.run_id, metrics, params, [])
    return wire.LogBatch.Response()


def set_tag(store: Any, asked: Any) -> Any:
    store.set_tag(asked.run_id, RunTag(asked.key, asked.value))
    return wire.SetTag.Response()


def update_run(store: Any, asked: Any) -> Any:
    status = RunStatus.from_string(wire.RunStatus.Name(asked.status))
    ended = asked.end_time if asked.HasField("end_time") else None
    info = store.update_run_info(asked.run_id, status, ended, asked.run_name or None)
    return wire.UpdateRun.Response(run_info=info.to_proto())


ROUTES: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "experiments/get-by-name": (wire.GetExperimentByName, experiment_by_name),
    "experiments/create": (wire.CreateExperiment, create_experiment),
    "runs/create": (wire.CreateRun, create_run),
    "runs/get": (wire.GetRun, get_run),
    "runs/search": (wire.SearchRuns, search_runs),
    "runs/log-batch": (wire.LogBatch, log_batch),
    "runs/set-tag": (wire.SetTag, set_tag),
    "runs/update": (wire.UpdateRun, update_run),
}


@contextmanager
def serving(store: Any, files: Path) -> Generator[str]:
    """The address of a server over a store, which keeps the runs' files in a folder."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(dict(parse_qsl(urlsplit(self.path).query)))

        def do_POST(self) -> None:
            self._answer(json.loads(self._body()))

        def do_PUT(self) -> None:
            file = files / self.path.removeprefix(FILES)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self._body())
            self._send(200, "{}")

        def _answer(self, asked: dict[str, Any]) -> None:
            message, answer = ROUTES[urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/")]
            parsed = message()
            parse_dict(asked, parsed)
            try:
                self._send(200, message_to_json(answer(store, parsed)))
            except MlflowException as error:
                self._send(error.get_http_status_code(), error.serialize_as_json())

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers["Content-Length"]))

        def _send(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
