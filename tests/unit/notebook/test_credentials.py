"""Credentials of a notebook: the first source that has one, in the environment afterwards, and nowhere else."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from groupwise.notebook import credentials
from groupwise.notebook.config import TrainingConfig

NAMES = ("HF_TOKEN", "WANDB_API_KEY", "KAGGLE_USERNAME", "KAGGLE_KEY")


@pytest.fixture(autouse=True)
def nothing(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is taken back afterwards, whatever the code sets
        monkeypatch.delenv(name)
    for module in ("google.colab.userdata", "kaggle_secrets"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(credentials, "_put", {})


def colab(monkeypatch, held):
    def get(name):
        if name not in held:
            raise LookupError(f"SecretNotFoundError: {name}")
        return held[name]

    module = ModuleType("google.colab.userdata")
    vars(module)["get"] = get
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "google.colab.userdata", module)


def kaggle(monkeypatch, held, *, works=True):
    class UserSecretsClient:
        def __init__(self):
            if not works:
                raise RuntimeError("no service")

        def get_secret(self, name):
            return held[name]

    module = ModuleType("kaggle_secrets")
    vars(module)["UserSecretsClient"] = UserSecretsClient
    monkeypatch.setitem(sys.modules, "kaggle_secrets", module)


def test_each_comes_from_the_first_source_that_has_it(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "of the environment")
    monkeypatch.setenv("HF_TOKEN", "of the environment")
    colab(monkeypatch, {"WANDB_API_KEY": "of colab", "KAGGLE_USERNAME": "of colab"})
    kaggle(monkeypatch, dict.fromkeys(NAMES, "of kaggle"))
    found = credentials.provide(TrainingConfig(hf_token="given"))
    assert found == {
        "hf_token": "the config",
        "wandb_api_key": "the environment",
        "kaggle_username": "Colab's secrets",
        "kaggle_key": "Kaggle's secrets",
    }
    assert [os.environ[name] for name in NAMES] == [
        "given", "of the environment", "of colab", "of kaggle",
    ]  # fmt: skip


def test_a_source_that_fails_is_passed_over(monkeypatch):
    colab(monkeypatch, {})
    kaggle(monkeypatch, {}, works=False)
    assert credentials.provide(TrainingConfig()) == {}
    kaggle(monkeypatch, {"KAGGLE_KEY": "k"})
    for _ in range(2):
        assert credentials.provide(TrainingConfig()) == {"kaggle_key": "Kaggle's secrets"}
    kaggle(monkeypatch, {}, works=False)
    assert credentials.provide(TrainingConfig()) == {"kaggle_key": "an earlier session"}
