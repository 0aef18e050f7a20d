"""Messages about start settings that a config cannot have, by the names that the client knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import StartRequest
from groupwise.core.settings.schema import leaves
from groupwise.server.run.run_config import (
    FLAT,
    AllowedModels,
    allowed_model,
    folders_in,
    to_open_request,
)
from groupwise.training.config import RunConfig

ALLOWED = AllowedModels(Path("models"), ())


def test_flat_names_are_config_keys_and_fields_of_the_start_request() -> None:
    keys = {".".join(leaf.path) for leaf in leaves(RunConfig)}
    assert {name for name in FLAT if "." in name} <= keys
    assert set(FLAT.values()) <= set(StartRequest.model_fields)


INVALID, CONFLICT = "invalid_request", "settings_conflict"
VLLM = {"engine": "vllm", "url": "http://169.254.169.254"}
SEVERAL = {"sed": 1, "weight_decay": "x"}
NUMBER = "num_completions_per_prompt"
CASES: list[tuple[dict[str, Any], str, list[str], str]] = [
    ({"algorithm": "dr_grp"}, INVALID, ["algorithm"], "did you mean dr_grpo?"),
    ({"algorithm": "own.py:Mine"}, INVALID, ["algorithm"], "runs no code that a client names"),
    ({"algorithm": {"type": "own.py:Mine"}}, INVALID, ["algorithm.type"], "runs no code"),
    ({"algorithm": "distillation"}, INVALID, ["algorithm"], "teacher may be a model, an endpoint"),
    ({"algorithm": {"type": "foo"}}, INVALID, ["algorithm.type"], "one of grpo, "),
    ({"sampler": {"num_generations": 3}}, INVALID, ["sampler.num_generations"], f"mean {NUMBER}?"),
    ({"sampler": {"max_tokens": 3}}, INVALID, ["sampler.max_tokens"], "max_completion_length"),
    ({"lora": {"rank": 3}}, INVALID, ["lora.rank"], "lora.r."),
    ({"training": {"seed": -1}}, INVALID, ["training.seed"], "at least 0"),
    ({"training": SEVERAL}, INVALID, ["training.weight_decay", "training.sed"], "a number"),
    ({NUMBER: 1}, CONFLICT, [NUMBER], f"{NUMBER} is 1, but dr_grpo"),
    ({"training": {"minibatches": 7}}, CONFLICT, ["training"], "groups_per_step = 1"),
    ({"sampler": {"temperature_schedule": {}}}, CONFLICT, ["sampler.temperature_schedule"], "with"),
    ({"sampler": VLLM}, CONFLICT, ["sampler.url"], "this server samples itself"),
    ({"sampler": {"engine": "vllm"}}, CONFLICT, ["sampler.engine"], "this server samples itself"),
]


@pytest.mark.parametrize(("settings", "code", "fields", "message"), CASES)
def test_each_setting_is_named_as_its_client_knows_it(
    settings: dict[str, Any], code: str, fields: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(Refusal) as refused:
        to_open_request(StartRequest.model_validate(settings), ALLOWED, tmp_path)
    assert (refused.value.code, [error.field for error in refused.value.errors]) == (code, fields)
    assert message in refused.value.detail
    assert "config" not in refused.value.detail
    advised = refused.value.detail.partition("did you mean ")[2]
    assert not any(name in advised for name in FLAT if "." in name)


def test_models_stand_in_the_folder_or_in_that_of_their_organisation(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for name in ("plain", "org/one", "org/two", "org/unfinished", "empty", "plain/checkpoint"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("plain", "org/one", "org/two", "plain/checkpoint"):
        (root / name / "config.json").write_text("{}")
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    assert folders_in(root) == ["empty", "link", "org/one", "org/two", "plain"]
    allowed = AllowedModels(root, ("org/hub",))
    assert allowed_model("m", "org/one", allowed) == str((root / "org/one").resolve())
    assert allowed_model("m", "org/hub", allowed) == "org/hub"
    for wrong in (
        "link",
        "org/../plain",
        "../models/plain",
        "plain/.",
        "org//one",
        "/",
        "org/none",
    ):
        with pytest.raises(Refusal, match="org/one"):
            allowed_model("m", wrong, allowed)
