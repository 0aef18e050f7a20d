"""Uploads a folder to a branch of the Hugging Face hub. An upload that failed can simply be repeated.

One upload is one commit, so a branch holds all of a folder or nothing of it. `push` first reads which files the branch holds. If they
are equal, it uploads nothing. An empty branch is filled. Other files are replaced only if `overwrite` is set. A run may also replace its
own earlier upload, as long as the branch has not been changed since: `hub.json` in the run's folder has the commit of each branch.
`check_access` checks the same before a run starts. huggingface_hub is imported only when needed, and finds the token itself (HF_TOKEN, or
its login); HF_ENDPOINT names another hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.extras import require_packages
from groupwise.core.hub_errors import TOKEN_ELSEWHERE
from groupwise.runs.folder import FINAL

MADE_BY_THE_HUB = frozenset({".gitattributes"})
"""Files that the hub itself adds; a branch with only these counts as empty."""
COMMITS = "hub.json"
"""File in a run's folder with the commit of its last upload to each branch, by `OWNER/NAME@REVISION`."""
_NO_REF = re.compile(
    r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|(^|/)\.|\.lock(/|$)|^[-/]|[/.]$|^@?$", re.ASCII
)
"""Matches names that git's rules forbid for a branch."""
_ONE_AT_A_TIME = threading.Lock()
_TOKEN = "The token comes from HF_TOKEN or `hf auth login`."


@dataclass(frozen=True, slots=True)
class Target:
    """Repository and branch to upload to."""

    repo_id: str
    revision: str = "main"
    private: bool = True
    """Visibility of a new repository; an existing public one is refused."""
    overwrite: bool = False

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.revision}"


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result of an upload."""

    url: str
    """Web address of the branch."""
    commit: str
    """The branch's commit after the upload. It names these files even when the branch changes later."""


def check_access(target: Target, run: Path | None = None) -> str | None:
    """Check before a run. Raises UsageError if the target may not be written to, or its files may not be replaced. Creates nothing.

    `run` is the folder of a run that is resumed. Returns a warning if the hub does not respond, because an upload may still succeed later.
    """
    from httpx2 import HTTPError
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    _check_revision(target.revision)
    if TOKEN_ELSEWHERE in os.environ:
        return (
            f"{target} is not looked at, since the token that may write there is where the job runs"
        )
    try:
        api = _hub_api()
        if _may_write(api, target.repo_id):
            _refuse_public(api, target)
            remote_files = _branch_files(api, target) or {}
            artefact = None if run is None else run / FINAL
            if not (
                artefact is not None
                and artefact.is_dir()
                and _same_contents(artefact, remote_files)
            ):
                _commit_to_replace(api, target, remote_files, run)
    except _UploadRefused as refused:
        raise UsageError(str(refused)) from refused
    except OfflineModeIsEnabled as error:
        raise UsageError(
            f"{target} cannot be written while HF_HUB_OFFLINE is set. Unset it, or leave the upload out."
        ) from error
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code >= 500:
            return _no_answer(target, error)
        raise UsageError(
            f"{target} on the hub cannot be written: {_error_text(error)} {_TOKEN}"
        ) from error
    except (HTTPError, OSError) as error:
        return _no_answer(target, error)
    return None


def push(folder: Path, target: Target, message: str, run: Path | None = None) -> Pushed:
    """Make a branch hold exactly the folder's files, as one commit; returns its address and commit.

    `run` is the folder of the run that uploads; it may replace its own earlier uploads. Raises UsageError if the branch holds other files
    that may not be overwritten, and EndpointError if the hub fails.
    """
    _check_revision(target.revision)
    with _explaining_hub_errors(target):
        api = _hub_api()
        api.create_repo(target.repo_id, private=target.private, exist_ok=True)
        _refuse_public(api, target)
        remote_files = _branch_files(api, target)
        if remote_files is None:
            # Branch from the first commit, which is usually empty; if it holds files, the upload may replace them.
            first_commit = api.list_repo_commits(target.repo_id)[-1].commit_id
            if run is not None:
                _note_commit(run, target, first_commit)
            api.create_branch(
                target.repo_id, branch=target.revision, revision=first_commit, exist_ok=True
            )
            remote_files = {}
        if not remote_files or not _same_contents(folder, remote_files):
            parent = _commit_to_replace(api, target, remote_files, run)
            commit_info = api.upload_folder(
                folder_path=folder,
                repo_id=target.repo_id,
                revision=target.revision,
                commit_message=message,
                delete_patterns="*",
                parent_commit=parent,
            )
            commit = commit_info.oid
        else:
            commit = _head_commit(api, target)  # a process may have died before noting it
        if run is not None:
            _note_commit(run, target, commit)
        return Pushed(f"{api.endpoint}/{target.repo_id}/tree/{target.revision}", commit)


class _UploadRefused(Exception):
    """The upload is refused by our own rules, not by a failure of the hub."""


def _check_revision(revision: str) -> None:
    """Raise UsageError for a branch name that the hub would refuse, by git's rules."""
    if _NO_REF.search(revision):
        raise UsageError(
            f"{revision!r} cannot name a branch: git allows no spaces, none of ~ ^ : ? * [ \\ and @{{, no two dots or slashes after each "
            "other, no dash or slash at the beginning, no part that begins with a dot or ends in .lock, and no slash or dot at the end. "
            "Give something like main, or my-run/v2."
        )


def _refuse_public(api: Any, target: Target) -> None:
    if target.private and not api.repo_info(target.repo_id).private:
        raise _UploadRefused(
            f"{target.repo_id} on the hub is there and public, but what is uploaded is to be private. Set private: false if everybody may "
            "see it, or name another repository (or make that one private on the hub)."
        )


def _commit_to_replace(
    api: Any, target: Target, remote_files: dict[str, Any], run: Path | None
) -> str | None:
    """The commit that the upload must replace; None if it may replace any. Raises _UploadRefused if the branch holds other files."""
    if not remote_files or target.overwrite:
        return None
    own_commit = None if run is None else _own_commits(run).get(str(target))
    if own_commit is None or _head_commit(api, target) != own_commit:
        names = sorted(remote_files)
        suffix = f" and {len(names) - 4} more" if names[4:] else ""
        raise _UploadRefused(
            f"{target} on the hub holds other files ({', '.join(names[:4])}{suffix}), and may not be overwritten. Name another revision, "
            "or set overwrite: true: the branch's history keeps what is there."
        )
    return own_commit


def _head_commit(api: Any, target: Target) -> str:
    return api.repo_info(target.repo_id, revision=target.revision).sha


def _own_commits(run: Path) -> dict[str, str]:
    file = run / COMMITS
    return json.loads(file.read_bytes()) if file.is_file() else {}


def _note_commit(run: Path, target: Target, commit: str) -> None:
    """Record the commit of an upload. The lock is needed because two threads of a run may upload checkpoints and final weights."""
    with _ONE_AT_A_TIME:
        atomic_files.write_json(run / COMMITS, {**_own_commits(run), str(target): commit})


def _hub_api() -> Any:
    require_packages("The hub", "train", "huggingface_hub")
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    return HfApi()


def _may_write(api: Any, repo_id: str) -> bool:
    """True if the repository exists and is writable, False if it does not exist but can be created; raises otherwise."""
    from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo_id)
    owner = repo_id.rpartition("/")[0]
    user = api.whoami()
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise LocalTokenNotFoundError(f"the token of {user['name']} may only read.")
    owners = [user["name"], *(org["name"] for org in user.get("orgs", ()))]
    try:
        if owner:
            api.auth_check(repo_id, write=True)
            return True
    except RepositoryNotFoundError:
        if owner in owners:
            return False
    raise LocalTokenNotFoundError(
        f"there is no such repository, and {user['name']} cannot make it: give OWNER/NAME with one of {', '.join(owners)} as OWNER."
    )


def _branch_files(api: Any, target: Target) -> dict[str, Any] | None:
    """Entries on the branch by path, without those that the hub made; None if the branch does not exist."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        entries = list(api.list_repo_tree(target.repo_id, recursive=True, revision=target.revision))
    except RevisionNotFoundError:
        return None
    return {
        entry.path: entry
        for entry in entries
        if hasattr(entry, "blob_id") and entry.path not in MADE_BY_THE_HUB
    }


def _same_contents(folder: Path, remote_files: dict[str, Any]) -> bool:
    local_files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return local_files.keys() == remote_files.keys() and all(
        _same_file(local_files[name], remote_files[name]) for name in local_files
    )


def _same_file(file: Path, entry: Any) -> bool:
    """True if a file equals the one on the hub, which lists the SHA-256 of large files and git's blob hash of small ones."""
    size = file.stat().st_size
    if size != entry.size:
        return False
    if entry.lfs is not None:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == entry.lfs.sha256
    blob = b"blob %d\0" % size + file.read_bytes()
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == entry.blob_id


@contextmanager
def _explaining_hub_errors(target: Target) -> Generator[None]:
    """Turn all failures of the hub, or of the connection to it, into EndpointError."""
    try:
        yield
    except _UploadRefused as refused:
        raise UsageError(str(refused)) from refused
    except UsageError:
        raise
    except Exception as error:
        raise EndpointError(
            f"{target} on the hub could not be written: {_error_text(error)} {_TOKEN}"
        ) from error


def _no_answer(target: Target, error: Exception) -> str:
    return f"the hub does not answer, so it is unknown whether {target} may be written: {_error_text(error)}"


def _error_text(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or type(error).__name__
