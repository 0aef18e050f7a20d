"""What a service is taken to compute, and what is refused because it does not."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.core.errors import UsageError
from groupwise.engine.backends.tinker import capabilities
from groupwise.training.config import load_config


def schema(*losses: str, **fields: tuple[str, ...]) -> dict[str, Any]:
    """That of SkyRL's server, with these losses and fields of its bodies."""
    bodies = {name: {"properties": {key: {} for key in names}} for name, names in fields.items()}
    bodies["ForwardBackwardInput"] = {"properties": {"loss_fn": {"enum": [*losses]}}}
    return {"info": {"title": capabilities.SKYRL}, "components": {"schemas": bodies}}


OLD = schema("cross_entropy", "importance_sampling", "ppo")
MORE = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dppo")
NEW = schema(*MORE, AdamParams=("grad_clip_norm",), LoRAConfig=("train_attn",))  # fmt: skip
USUAL = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def test_a_service_that_says_nothing_is_as_documented() -> None:
    for found in ({}, {"info": {"title": "groupwise"}}):
        assert capabilities.capabilities_from(found, None) == capabilities.Capabilities()
    assert capabilities.capabilities_from({}, "mean").averages


def test_skyrl_says_its_losses_and_fields() -> None:
    old, new = (
        capabilities.capabilities_from(OLD, "mean"),
        capabilities.capabilities_from(NEW, "sum"),
    )
    assert (old.averages, new.averages) == (True, False)
    assert [old.computes(name, {}) for name in ("cross_entropy", "cispo")] == [True, False]
    other = USUAL | {"clip_high_threshold": 1.3}
    assert [old.computes("ppo", clip) for clip in (USUAL, other)] == [True, False]
    assert new.computes("cispo", {})
    assert new.computes("ppo", other)
    assert (new.clips_gradients, new.chooses_layers) == (True, True)
    assert not old.samples_unloaded
    assert old.largest_seed < 2**31


@pytest.mark.parametrize(
    ("reduction", "settings", "keys"),
    [
        (None, {}, ["loss_reduction", "max_grad_norm"]),
        ("mean", {"training": {"max_grad_norm": None}}, []),
        ("mean", {"training": {"max_grad_norm": None}, "lora": {"target_modules": ["lm_head"]}}, ["target_modules"]),
    ],
)  # fmt: skip
def test_settings_without_effect_on_the_service_are_refused(
    reduction: str | None, settings: dict[str, Any], keys: list[str]
) -> None:
    config = load_config({"model": {"name": "tiny", "backend": "tinker"}, **settings}).config
    service = capabilities.capabilities_from(OLD, reduction)
    if not keys:
        capabilities.check(config, service)
        return
    with pytest.raises(UsageError) as refused:
        capabilities.check(config, service)
    lines = str(refused.value).splitlines()
    assert len(lines) == len(keys)
    assert all(key in line for key, line in zip(keys, lines, strict=True))
