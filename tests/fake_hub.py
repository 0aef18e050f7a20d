"""A small hub on loopback, for tests of whoever uploads models or datasets there: real HTTP, as much as huggingface_hub's uploads ask for.

    with serve_hub(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)      # before huggingface_hub is imported, so mostly in another process

Repositories live in memory, each a history of commits with branches on them. `Hub.interfere` is called with method and path of each
request before it is answered, and may answer in its place: with a failure, late, or never.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from urllib.parse import unquote

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.fake_openai_server import listening

TOKEN = "hf_of_the_tests"
LARGE = (".safetensors",)
"""Suffixes of files that go to the storage for large files."""

Files = dict[str, bytes]
Interference = Callable[[str, str], Awaitable[Response | None]]


@dataclass(slots=True)
class Repository:
    """A repository: all commits with their files, and the commits of each branch."""

    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    branches: dict[str, list[str]] = field(default_factory=dict)
    """Commits of each branch, the newest last."""

    def files(self, branch: str = "main") -> Files:
        """The files of a branch, without those that the hub made."""
        found = self.commits[self.branches[branch][-1]]
        return {path: data for path, data in found.items() if path != ".gitattributes"}


class Hub:
    """The hub; see the module."""

    def __init__(
        self, *, user: str = "me", orgs: tuple[str, ...] = (), role: str = "write"
    ) -> None:
        self.url = ""
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        """Large files by SHA-256."""
        self.asked: list[tuple[str, str]] = []
        self.interfere: Interference | None = None
        self._user, self._orgs, self._role = user, orgs, role
        self._numbers = count(1)

    def app(self) -> Starlette:
        repo = "{owner}/{name}"
        routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("GET", "/api/whoami-v2", self._whoami),
            ("POST", "/api/repos/create", self._create),
            ("POST", "/api/validate-yaml", self._validate),
            ("GET", f"/api/{{kind}}/{repo}/auth-check/write", self._auth_check),
            ("POST", f"/api/{{kind}}/{repo}/branch/{{revision:path}}", self._branch),
            ("GET", f"/api/{{kind}}/{repo}/commits/{{revision:path}}", self._commits),
            ("GET", f"/api/{{kind}}/{repo}/tree/{{revision:path}}", self._tree),
            ("GET", f"/api/{{kind}}/{repo}/revision/{{revision:path}}", self._info),
            ("GET", f"/api/{{kind}}/{repo}", self._info),
            ("POST", f"/api/{{kind}}/{repo}/preupload/{{revision:path}}", self._preupload),
            ("POST", f"/api/{{kind}}/{repo}/commit/{{revision:path}}", self._commit),
            ("POST", "/{owner}/{name}/info/lfs/objects/batch", self._batch),
            ("PUT", "/large/{oid}", self._put),
            ("GET", f"/{repo}/resolve/{{revision}}/{{path:path}}", self._resolve),
        ]
        return Starlette(
            routes=[Route(path, self._answering(do), methods=[verb]) for verb, path, do in routes]
        )

    def add(self, repo_id: str, files: Files | None = None, *, private: bool = True) -> Repository:
        """A repository with one commit as the hub makes it, and another one with these files."""
        made = self.repositories[repo_id] = Repository(private)
        self._add_commit(made, "main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial")
        if files:
            self._add_commit(made, "main", {**made.commits[made.branches["main"][-1]], **files}, "")
        return made

    def _answering(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            self.asked.append((request.method, request.url.path))
            if self.interfere is not None:
                instead = await self.interfere(request.method, request.url.path)
                if instead is not None:
                    return instead
            needs_token = not request.url.path.startswith("/large/")
            if needs_token and request.headers.get("Authorization") != f"Bearer {TOKEN}":
                return JSONResponse({"error": "Invalid user token."}, 401)
            return await answer(request)

        return answered

    # What is asked

    async def _whoami(self, request: Request) -> Response:
        return JSONResponse(
            {
                "name": self._user,
                "type": "user",
                "orgs": [{"name": name} for name in self._orgs],
                "auth": {"type": "access_token", "accessToken": {"role": self._role}},
            }
        )

    async def _create(self, request: Request) -> Response:
        asked = await request.json()
        repo_id = f"{asked.get('organization') or self._user}/{asked['name']}"
        if self._refused(repo_id) or self._role == "read":
            return _error(403, "Forbidden", "You may not create it.")
        kind = "datasets/" if asked.get("type") == "dataset" else ""
        url = {"url": f"{self.url}/{kind}{repo_id}"}
        if repo_id in self.repositories:
            return JSONResponse(url, 409)
        self.add(repo_id, private=asked.get("visibility") == "private")
        return JSONResponse(url)

    async def _validate(self, request: Request) -> Response:
        content = (await request.json())["content"]
        if not content.startswith("---\n"):
            return JSONResponse({"errors": [{"message": "no metadata"}]}, 400)
        return JSONResponse({"errors": [], "warnings": []})

    async def _auth_check(self, request: Request) -> Response:
        if self._id(request) not in self.repositories:
            return _error(404, "RepoNotFound", "Repository not found")
        if self._refused(self._id(request)) or self._role == "read":
            return _error(403, "Forbidden", "You may not write there.")
        return JSONResponse({})

    async def _branch(self, request: Request) -> Response:
        repository, name = self._of(request), self._revision(request)
        if name in repository.branches:
            return _error(409, "Conflict", "Reference already exists")
        start = (await request.json()).get("startingPoint") or repository.branches["main"][-1]
        before = repository.branches["main"]
        repository.branches[name] = before[: before.index(start) + 1]
        return JSONResponse({})

    async def _commits(self, request: Request) -> Response:
        repository = self._of(request)
        return JSONResponse(
            [
                {
                    "id": commit, "authors": [{"user": self._user}], "date": "2026-01-01T00:00:00.000Z",
                    "title": repository.messages[commit], "message": "",
                }
                for commit in reversed(repository.branches[self._revision(request)])
            ]
        )  # fmt: skip

    async def _tree(self, request: Request) -> Response:
        repository, revision = self._of(request), self._revision(request)
        if revision not in repository.branches:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        files = repository.commits[repository.branches[revision][-1]]
        return JSONResponse([_entry(path, data) for path, data in files.items()])

    async def _info(self, request: Request) -> Response:
        if self._id(request) not in self.repositories:
            return _error(404, "RepoNotFound", "Repository not found")
        repository = self._of(request)
        branch = repository.branches[self._revision(request)]
        return JSONResponse(
            {"id": self._id(request), "sha": branch[-1], "private": repository.private}
        )

    async def _preupload(self, request: Request) -> Response:
        asked = (await request.json())["files"]
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
            }
            for file in asked
        ]
        return JSONResponse({"files": modes})

    async def _batch(self, request: Request) -> Response:
        asked = (await request.json())["objects"]
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.url}/large/{each['oid']}"}}}
            if each["oid"] not in self.large
            else each
            for each in asked
        ]
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def _put(self, request: Request) -> Response:
        data = await request.body()
        assert hashlib.sha256(data).hexdigest() == request.path_params["oid"]
        self.large[request.path_params["oid"]] = data
        return Response()

    async def _commit(self, request: Request) -> Response:
        repository, revision = self._of(request), self._revision(request)
        lines = [json.loads(line) for line in (await request.body()).splitlines()]
        files = dict(repository.commits[repository.branches[revision][-1]])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            else:
                del files[value["path"]]
        commit = self._add_commit(repository, revision, files, lines[0]["value"]["summary"])
        kind = "datasets/" if request.path_params["kind"] == "datasets" else ""
        url = f"{self.url}/{kind}{self._id(request)}/commit/{commit}"
        return JSONResponse({"commitUrl": url, "commitOid": commit, "success": True})

    async def _resolve(self, request: Request) -> Response:
        files = self._of(request).files(self._revision(request))
        return Response(files[request.path_params["path"]])

    # What they share

    def _add_commit(self, repository: Repository, branch: str, files: Files, message: str) -> str:
        commit = f"{next(self._numbers):040x}"
        repository.commits[commit], repository.messages[commit] = files, message
        repository.branches[branch] = [*repository.branches.get(branch, []), commit]
        return commit

    def _id(self, request: Request) -> str:
        return f"{request.path_params['owner']}/{request.path_params['name']}"

    def _of(self, request: Request) -> Repository:
        return self.repositories[self._id(request)]

    def _revision(self, request: Request) -> str:
        return unquote(request.path_params.get("revision", "main"))

    def _refused(self, repo_id: str) -> bool:
        return repo_id.partition("/")[0] not in (self._user, *self._orgs)


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(data)}
    if path.endswith(LARGE):
        oid = hashlib.sha256(data).hexdigest()
        return {**entry, "oid": "0" * 40, "lfs": {"oid": oid, "size": len(data), "pointerSize": 9}}
    blob = b"blob %d\0" % len(data) + data
    return {**entry, "oid": hashlib.sha1(blob, usedforsecurity=False).hexdigest()}


def _error(status: int, code: str, message: str) -> Response:
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    return JSONResponse({"error": message}, status, headers)


@contextmanager
def serve_hub(hub: Hub) -> Generator[Hub]:
    """Serve it from a thread on a free port of loopback; `hub.url` says where."""
    with listening(hub.app()) as url:
        hub.url = url
        yield hub


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: Hub, token: str = TOKEN) -> None:
    """Make this process use this hub, although huggingface_hub may have read its variables before."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "0")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
