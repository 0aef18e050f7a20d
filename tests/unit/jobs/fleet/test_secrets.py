"""Which secrets of the control machine jobs may get: those that the operator named, and nothing that a link or a `..` leads to."""

import os
from pathlib import Path

import pytest

from groupwise.core.errors import ConfigError
from groupwise.jobs.fleet.secrets import (
    DEFAULT_PATTERNS,
    MAX_BYTES,
    AllowedSecrets,
    SecretMissing,
    pattern_problems,
)
from groupwise.jobs.fleet.settings import FleetPlace, FleetSettings, find

CANARY = "canary-of-the-operator"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a fleet, with what lies around it."""
    fleet = tmp_path / "fleet"
    (fleet / "secrets" / "deep").mkdir(parents=True)
    (fleet / "secrets" / "token").write_text("given\n")
    (fleet / "secrets" / "deep" / "token").write_text(CANARY)
    (fleet / "secrets-of-others").mkdir()
    (fleet / "secrets-of-others" / "token").write_text(CANARY)
    (tmp_path / "outside").write_text(CANARY)
    return fleet


def refused(allowed: AllowedSecrets, reference: str) -> str:
    """By admission and by whoever reads it alike."""
    [said] = allowed.problems({"TOKEN": reference})
    with pytest.raises(SecretMissing) as error:
        allowed.read({"TOKEN": reference})
    assert said == str(error.value)
    assert "TOKEN" in said
    assert "allowed_secrets" in said
    assert CANARY not in said
    return said


def test_by_default_three_variables_and_the_files_of_one_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf")
    allowed = FleetPlace(folder, FleetSettings()).secrets
    references = {"A": "env:HF_TOKEN", "B": f"file:{folder}/secrets/token"}
    assert allowed.problems(references) == []
    assert allowed.read(references) == {"A": "hf", "B": "given"}


@pytest.mark.parametrize("reference", [
    "env:GROUPWISE_API_KEY", "env:PGPASSWORD", "env:HF_TOKEN_2", "env:hf_token", "env:", "file:/etc/shadow", "file:{folder}/fleet.db",
    "file:{folder}/secrets/deep/token", "file:{folder}/secrets/../secrets-of-others/token", "file:{folder}/secrets/../../outside",
    "file:{folder}/secrets/./token", "file:{folder}//secrets/token", "file:{folder}/secrets/token/", "file:{folder}/secrets/",
    "file:{folder}/secrets-of-others/token", "file:secrets/token", "file:{folder}/secrets/a\0b", "FILE:{folder}/secrets/token", "",
])  # fmt: skip
def test_other_references_to_secrets_are_refused(
    folder: Path, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUPWISE_API_KEY", CANARY)
    allowed = FleetPlace(folder, FleetSettings()).secrets
    said = refused(allowed, reference.format(folder=folder))
    assert f"{folder}/fleet.yaml" in said
    assert all(pattern in said for pattern in DEFAULT_PATTERNS)


def test_a_link_is_followed_within_the_folder_and_not_out_of_it(folder: Path) -> None:
    allowed = FleetPlace(folder, FleetSettings()).secrets
    place = folder / "secrets"
    (place / "inside").symlink_to("deep/token")  # as Kubernetes lays them out
    (place / "outside").symlink_to("../../outside")
    (place / "beside").symlink_to(folder / "secrets-of-others" / "token")
    assert allowed.read({"T": f"file:{place}/inside"}) == {"T": CANARY}
    for name in ("outside", "beside"):
        with pytest.raises(SecretMissing, match="out of the folder") as error:
            allowed.read({"T": f"file:{place}/{name}"})
        assert CANARY not in str(error.value)


def test_secret_files_that_hold_no_usable_text_are_refused(folder: Path) -> None:
    allowed = FleetPlace(folder, FleetSettings()).secrets
    place = folder / "secrets"
    os.mkfifo(place / "pipe")  # whoever opened it plainly would wait for ever
    (place / "binary").write_bytes(b"\xff\xfe")
    (place / "nul").write_bytes(b"a\0b")
    (place / "long").write_bytes(b"x" * (MAX_BYTES + 1))
    for name in ("pipe", "binary", "nul", "long", "absent", "deep"):
        with pytest.raises(SecretMissing, match=f"{place}/{name}.*no text that can be read"):
            allowed.read({"T": f"file:{place}/{name}"})


def test_the_operator_names_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_A_KEY", "a")
    outside = folder.parent / "outside"
    allowed = AllowedSecrets(("env:TEAM_*", f"file:{outside}"), folder)
    references = {"A": "env:TEAM_A_KEY", "B": f"file:{outside}"}
    assert allowed.read(references) == {"A": "a", "B": CANARY}
    assert "env:TEAM_*" in refused(allowed, "env:HF_TOKEN")
    refused(AllowedSecrets((), folder), "env:HF_TOKEN")
    for without_settings in (AllowedSecrets(), AllowedSecrets(DEFAULT_PATTERNS)):
        refused(without_settings, f"file:{folder}/secrets/token")


def test_a_pattern_that_means_nothing_is_refused_with_the_settings(tmp_path: Path) -> None:
    odd = ("HF_TOKEN", "env:", "env:A=B", "file:", "file:../x", "file:/a/../b", "file:/a//b", "x:y")
    for pattern in odd:
        assert pattern_problems(pattern)
        (tmp_path / "fleet.yaml").write_text(f"allowed_secrets: ['{pattern}']\n")
        with pytest.raises(ConfigError, match="allowed_secrets"):
            find(str(tmp_path), {})
    (tmp_path / "fleet.yaml").write_text("allowed_secrets: ['env:A', 'file:/run/secrets/*']\n")
    found = find(str(tmp_path), {})
    assert isinstance(found, FleetPlace)
    assert found.secrets.patterns == ("env:A", "file:/run/secrets/*")
