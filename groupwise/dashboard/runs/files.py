"""Downloads: files of checkpoints and of the final weights, and rollouts as JSON lines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from groupwise.core.errors import RunNotFoundError
from groupwise.dashboard.pages import Page, Visit, page_route
from groupwise.dashboard.runs.archive import archive, files_of
from groupwise.dashboard.runs.overview import run_header
from groupwise.dashboard.runs.rollouts import RolloutsQuery
from groupwise.dashboard.sources.evaluations import evaluations_of
from groupwise.runs.find import final_step
from groupwise.runs.folder import CHECKPOINTS, FINAL, RECORD
from groupwise.runs.record_files import rollout_lines
from groupwise.runs.records import RolloutFilter
from groupwise.runs.store import Store


def weights(visit: Visit) -> Page:
    """The files of a checkpoint, or of the final weights."""
    path = visit.context.run(visit.path_part("run"))
    folder = _weights_folder(path, visit.path_part("where"))
    files = [
        (file.relative_to(folder).as_posix(), status.st_size)
        for file, status in _files_with_status(folder)
    ]
    final = folder.name == FINAL
    step = final_step(path) if final else int(folder.name.removeprefix("step-"))
    with Store.open(path / RECORD, readonly=True) as store:
        evaluations = [
            evaluation for evaluation in evaluations_of(path, store) if evaluation.step == step
        ]
    data = {
        **run_header(visit, path),
        "where": visit.path_part("where"),
        "step": step,
        "evaluations": [asdict(evaluation) for evaluation in evaluations],
        "files": [{"name": name, "bytes": size} for name, size in files],
    }
    return Page("weights.html", data)


def download_archive(visit: Visit) -> Response:
    """All of them as one archive."""
    path = visit.context.run(visit.path_part("run"))
    folder = _weights_folder(path, visit.path_part("where"))
    _files_with_status(folder)
    name = f"{_header_safe(path.name)}-{folder.name}"
    headers = {"Content-Disposition": f'attachment; filename="{name}.zip"'}
    return ClosingStream(archive(folder, name), media_type="application/zip", headers=headers)


def download_file(visit: Visit) -> Response:
    """One of them."""
    folder = _weights_folder(visit.context.run(visit.path_part("run")), visit.path_part("where"))
    name = visit.path_part("file")
    for path, status in _files_with_status(folder):
        if path.relative_to(folder).as_posix() == name:
            return FileResponse(
                path,
                media_type="application/octet-stream",
                filename=path.name,
                stat_result=status,
            )
    raise RunNotFoundError(f"{folder.name} has no file {name[:100]!r}.")


def export(visit: Visit) -> Response:
    """All rollouts that a search finds, one JSON object a line, as `groupwise runs export --to jsonl` writes them."""
    path = visit.context.run(visit.path_part("run"))
    query = visit.query(RolloutsQuery)
    store = Store.open(path / RECORD, readonly=True)
    headers = {
        "Content-Disposition": f'attachment; filename="{_header_safe(path.name)}-rollouts.jsonl"'
    }
    return ClosingStream(
        _rollout_lines(store, query.rollout_filter),
        media_type="application/x-ndjson",
        headers=headers,
    )


def _rollout_lines(store: Store, rollout_filter: RolloutFilter) -> Generator[bytes]:
    with store, closing(rollout_lines(store, rollout_filter)) as lines:
        for line in lines:
            yield line.encode("utf-8", "replace")


class ClosingStream(StreamingResponse):
    """A long response that closes its generator at the end, even if the client has disconnected, so no file stays open."""

    def __init__(self, chunks: Generator[bytes], **more: Any) -> None:
        super().__init__(chunks, **more)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, as an ASGI application."""
        try:
            # If the run deletes a file that was still to be sent, the connection ends early, so that the client sees a broken download.
            with suppress(RunNotFoundError):
                await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(asyncio.to_thread(self._chunks.close))


def _weights_folder(run: Path, name: str) -> Path:
    """The folder of `final` or `step-N` in the run's folder. Raises RunNotFoundError."""
    is_step = name.startswith("step-") and name.removeprefix("step-").isdecimal()
    if name == FINAL or (is_step and len(name) < 30):
        folder = run / FINAL if name == FINAL else run / CHECKPOINTS / name
        if folder.is_dir() and folder.resolve().is_relative_to(run.resolve()):
            return folder
    raise RunNotFoundError(f"{run.name} has no weights called {name[:40]!r}.")


def _files_with_status(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """All files of a folder with weights. Raises RunNotFoundError if the run has just deleted it."""
    with suppress(FileNotFoundError):
        files = [(file, file.stat()) for file in files_of(folder)]
        if files or folder.is_dir():
            return files
    raise RunNotFoundError(f"{folder.name} was removed a moment ago.")


def _header_safe(name: str) -> str:
    """The name with characters that are unsafe in a header replaced."""
    return "".join(
        character if character.isascii() and (character.isalnum() or character in "-_.") else "_"
        for character in name
    )


ROUTES = (
    page_route("/runs/{run}/weights/{where}.zip", download_archive),
    page_route("/runs/{run}/weights/{where}", weights),
    page_route("/runs/{run}/weights/{where}/{file:path}", download_file),
    page_route("/runs/{run}/rollouts.jsonl", export),
)
