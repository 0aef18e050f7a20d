"""Uploads a generation as a dataset on the hub: the training rows and, as a second configuration, all generations.

`groupwise generate` checks before any request costs money that it may write there, and uploads at the end in one commit.
huggingface_hub finds the token (HF_TOKEN or its login).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.extras import require_packages
from groupwise.training.generation.results import GENERATIONS, TRAIN

CARD = f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: {TRAIN}
- config_name: generations
  data_files:
  - split: train
    path: {GENERATIONS}
---

Made with `groupwise generate`. `{TRAIN}` holds what was kept for training, `{GENERATIONS}` everything.
"""


def prepare_upload(name: str, *, private: bool) -> None:
    """Create the dataset if it does not exist. Raises UsageError if the user may not write to it, or if it is not private as configured."""
    with _converting_hub_errors(UsageError, f"The dataset {name} on the hub cannot be written"):
        _hub().create_repo(name, repo_type="dataset", private=private, exist_ok=True)
        public = private and _hub().repo_info(name, repo_type="dataset").private is False
    if public:
        raise UsageError(
            f"The dataset {name} on the hub is public already, so that everybody could read what is generated. Say --public if that is "
            "meant, or name another dataset."
        )


def upload(folder: Path, name: str, rewards_left_out: Sequence[str] = ()) -> str:
    """Upload the finished files; returns the commit's URL. Raises EndpointError; the local folder is complete in any case.

    `rewards_left_out` are the parts that the column `reward` does not include; the dataset card lists them.
    """
    failure = (
        f"{folder} is complete, but it could not be uploaded to {name}; run the same command again"
    )
    with _converting_hub_errors(EndpointError, failure):
        from huggingface_hub import CommitOperationAdd

        card = CARD
        if rewards_left_out:
            names = ", ".join(f"`{name}`" for name in rewards_left_out)
            card += f"\nNot in the rewards: {names}, which judge tokens, and a service gives text alone.\n"
        files: dict[str, Any] = {"README.md": card.encode()}
        files |= {file: str(folder / file) for file in (TRAIN, GENERATIONS)}
        commit = _hub().create_commit(
            name,
            [CommitOperationAdd(path, content) for path, content in files.items()],
            commit_message="Generations",
            repo_type="dataset",
        )
        return str(commit.commit_url)


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


@contextmanager
def _converting_hub_errors(kind: type[EndpointError | UsageError], failure: str) -> Generator[None]:
    require_packages("The hub", "train", "huggingface_hub")
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError, ValueError) as error:
        raise kind(
            f"{failure}:\n  {error}\nThe token comes from HF_TOKEN or `hf auth login`."
        ) from error
