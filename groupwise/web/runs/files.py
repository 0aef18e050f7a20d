"""What a page lets one take home: files of checkpoints and of the final weights, and rollouts as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from starlette.responses import FileResponse, Response, StreamingResponse

from groupwise.errors import RunNotFoundError
from groupwise.runs.durable import without_nan
from groupwise.runs.folder import CHECKPOINTS, FINAL, RECORD
from groupwise.runs.records import RolloutFilter
from groupwise.runs.store import Store
from groupwise.web.pages import Page, Visit, shown
from groupwise.web.runs.overview import head_of
from groupwise.web.runs.reading import Asked


def weights(visit: Visit) -> Page:
    """The files of a checkpoint, or of the final weights."""
    path = visit.place.run(visit.named("run"))
    folder = _folder(path, visit.named("where"))
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    data = {
        **head_of(visit, path),
        "where": visit.named("where"),
        "files": [
            {"name": each.relative_to(folder).as_posix(), "bytes": each.stat().st_size}
            for each in files
        ],
    }
    return Page("weights.html", data)


def file(visit: Visit) -> Response:
    """One of them."""
    folder = _folder(visit.place.run(visit.named("run")), visit.named("where"))
    wanted = visit.named("file")
    for each in folder.rglob("*"):
        if each.is_file() and each.relative_to(folder).as_posix() == wanted:
            return FileResponse(each, media_type="application/octet-stream", filename=each.name)
    raise RunNotFoundError(f"{folder.name} has no file {wanted[:100]!r}.")


def export(visit: Visit) -> Response:
    """All rollouts that a search finds, one JSON object a line, as `groupwise runs export` writes them."""
    path = visit.place.run(visit.named("run"))
    asked = visit.query(Asked)
    headers = {"Content-Disposition": f'attachment; filename="{_plain(path.name)}-rollouts.jsonl"'}
    return StreamingResponse(
        _lines(path, asked.wanted), media_type="application/x-ndjson", headers=headers
    )


def _lines(path: Path, wanted: RolloutFilter) -> Iterator[bytes]:
    with Store.open(path / RECORD, readonly=True) as store:
        for each in store.every_rollout(wanted):
            line = json.dumps(without_nan(asdict(each)), ensure_ascii=False)
            yield line.encode("utf-8", "surrogatepass") + b"\n"


def _folder(run: Path, where: str) -> Path:
    """`final`, or `step-N`. Raises RunNotFoundError."""
    if where == FINAL and (run / FINAL).is_dir():
        return run / FINAL
    found = run / CHECKPOINTS / where
    if where.startswith("step-") and where.removeprefix("step-").isdecimal() and found.is_dir():
        return found
    raise RunNotFoundError(f"{run.name} has no weights called {where[:40]!r}.")


def _plain(name: str) -> str:
    """For a header."""
    return "".join(
        each if each.isascii() and (each.isalnum() or each in "-_.") else "_" for each in name
    )


ROUTES = (
    shown("/runs/{run}/weights/{where}", weights),
    shown("/runs/{run}/weights/{where}/{file:path}", file),
    shown("/runs/{run}/rollouts.jsonl", export),
)
