"""Uploading a folder to a branch of the hub, so that it can be done again until it has been done.

One upload is one commit: a branch has all of a folder, or nothing of it yet. So `push` asks first what the branch holds. Equal content
is done, an empty branch goes on, and other files are refused without leave to overwrite. huggingface_hub is imported when it is
needed, and finds the token itself (HF_TOKEN, or its login); HF_ENDPOINT names another hub.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import EndpointError, UsageError

MADE_BY_THE_HUB = frozenset({".gitattributes"})
"""What an empty branch holds."""
_TOKEN = "The token comes from HF_TOKEN or `hf auth login`."


@dataclass(frozen=True, slots=True)
class Target:
    """Where a folder goes."""

    repo_id: str
    revision: str = "main"
    private: bool = True
    """Of a repository that is made."""
    overwrite: bool = False

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.revision}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        return asdict(self)


def check_access(target: Target) -> str | None:
    """Before a run: UsageError where one may not write there. Nothing is made.

    Returns what to warn of where the hub does not answer: an upload may succeed later all the same.
    """
    from httpx2 import HTTPError
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        _may_write(_api(), target.repo_id)
    except OfflineModeIsEnabled as error:
        raise UsageError(
            f"{target} cannot be written while HF_HUB_OFFLINE is set. Unset it, or leave the upload out."
        ) from error
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code >= 500:
            return _no_answer(target, error)
        raise UsageError(
            f"{target} on the hub cannot be written: {_told(error)} {_TOKEN}"
        ) from error
    except (HTTPError, OSError) as error:
        return _no_answer(target, error)
    return None


def push(folder: Path, target: Target, message: str) -> str:
    """Make a branch hold exactly what the folder holds, as one commit; returns where it is.

    Raises UsageError where the branch holds something else and may not be overwritten, EndpointError where the hub fails.
    """
    with _failures(target):
        api = _api()
        api.create_repo(target.repo_id, private=target.private, exist_ok=True)
        there = _files(api, target)
        if there is None:
            _make_branch(api, target)
            there = {}
        if there and not _equal(folder, there):
            if not target.overwrite:
                raise _Refused(_holds_others(target, there))
            there = {}
        if not there:
            api.upload_folder(
                folder_path=folder,
                repo_id=target.repo_id,
                revision=target.revision,
                commit_message=message,
                delete_patterns="*",
            )
        return f"{api.endpoint}/{target.repo_id}/tree/{target.revision}"


class _Refused(Exception):
    """Not a failure of the hub."""


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise UsageError(
            "The hub needs the package huggingface_hub: pip install 'groupwise[train]'."
        ) from error
    disable_progress_bars()
    return HfApi()


def _may_write(api: Any, repo_id: str) -> None:
    from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo_id)
    owner = repo_id.rpartition("/")[0]
    who = api.whoami()
    if who.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise LocalTokenNotFoundError(f"the token of {who['name']} may only read.")
    own = [who["name"], *(each["name"] for each in who.get("orgs", ()))]
    try:
        if owner:
            api.auth_check(repo_id, write=True)
            return
    except RepositoryNotFoundError:
        if owner in own:
            return
    raise LocalTokenNotFoundError(
        f"there is no such repository, and {who['name']} cannot make it: give OWNER/NAME with one of {', '.join(own)} as OWNER."
    )


def _files(api: Any, target: Target) -> dict[str, Any] | None:
    """What the branch holds beside what the hub made, by path; None where there is no such branch."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        listed = list(api.list_repo_tree(target.repo_id, recursive=True, revision=target.revision))
    except RevisionNotFoundError:
        return None
    return {
        each.path: each
        for each in listed
        if hasattr(each, "blob_id") and each.path not in MADE_BY_THE_HUB
    }


def _holds_others(target: Target, there: dict[str, Any]) -> str:
    names = sorted(there)
    more = f" and {len(names) - 4} more" if names[4:] else ""
    return (
        f"{target} on the hub holds other files ({', '.join(names[:4])}{more}), and may not be overwritten. Name another revision, "
        "or set overwrite: the branch's history keeps what is there."
    )


def _make_branch(api: Any, target: Target) -> None:
    """From the first commit of the repository, which holds nothing."""
    first = api.list_repo_commits(target.repo_id)[-1].commit_id
    api.create_branch(target.repo_id, branch=target.revision, revision=first, exist_ok=True)


def _equal(folder: Path, there: dict[str, Any]) -> bool:
    own = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return own.keys() == there.keys() and all(_same(own[name], there[name]) for name in own)


def _same(file: Path, entry: Any) -> bool:
    """Whether a file is the one on the hub, which knows large ones by SHA-256 and small ones as git does."""
    size = file.stat().st_size
    if size != entry.size:
        return False
    if entry.lfs is not None:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == entry.lfs.sha256
    blob = b"blob %d\0" % size + file.read_bytes()
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == entry.blob_id


@contextmanager
def _failures(target: Target) -> Generator[None]:
    """What the hub, or the way there, does wrong, as one error."""
    try:
        yield
    except _Refused as refused:
        raise UsageError(str(refused)) from refused
    except UsageError:
        raise
    except Exception as error:
        raise EndpointError(
            f"{target} on the hub could not be written: {_told(error)} {_TOKEN}"
        ) from error


def _no_answer(target: Target, error: Exception) -> str:
    return (
        f"the hub does not answer, so nobody knows whether {target} may be written: {_told(error)}"
    )


def _told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or type(error).__name__
