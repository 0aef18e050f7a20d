"""What looks like a credential, as a key or as a value, and that no message shows one."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.core.errors import ConfigError
from groupwise.core.settings.credentials import holds_secret, is_secret, names_secret, secrets_in
from groupwise.core.settings.tree import tree_of
from groupwise.training.config import load_config

SECRETS = (
    "https://user:passw0rd@host.org/rows", "https://hf_abcDEF123@host.org",
    "postgres://me:pw@localhost:5432/db", "${URL:-postgres://me:pw@host/db}", "see https://host.org/v1?lang=en&api_key=abc",
    "Bearer sk-0123456789", "bearer abcdefghijkl", "curl -H 'Authorization: Basic bWU6cHc='",
    "the header is Bearer abcdefghij0123456789", "sk-proj-0123456789abcdef",
    "use hf_AbCdEfGhIjKl, please",
)  # fmt: skip
HARMLESS = (
    "https://host.org/a@b", "git@github.com:me/it.git", "ssh://git@github.com/me/it.git",
    "https://${USER}:${PASSWORD}@host.org", "https://host.org/v1?api_key=$KEY&lang=en",
    "https://host.org/v1?page_token_count=3", "Bearer $TOKEN", "Authorization: Bearer {token}",
    "Authorization: Bearer …",
    "Return it to the bearer promptly", "The bearer responsibilities", "sk-learn-intelex",
    "hf_transformers", "hf_Testing1/tiny", "task-sk-0123456789", "me@example.org",
)  # fmt: skip


def test_a_value_with_a_credential_is_known_by_its_form():
    assert [text for text in SECRETS if not (holds_secret(text) and names_secret(text))] == []
    assert [text for text in HARMLESS if holds_secret(text)] == []


@pytest.mark.parametrize(
    "text", ["[{name: x, token: abc}]", '{"api_key": "abc"}', "[{name: x, token: abc", "token=abc"]
)
def test_a_text_that_gives_a_secret_key_names_one(text):
    assert names_secret(text)
    assert not names_secret(text.replace("token", "tokens").replace("api_key", "keys"))


def test_keys_are_looked_at_where_they_are_free_and_values_everywhere():
    tree = tree_of(
        {
            "task": {"api_key": "x", "urls": ["a", {"deep": SECRETS[0]}], "token": 5},
            "model": {"name": SECRETS[4], "token": "<eos>"},
        }
    )
    problems = secrets_in(tree, "task", "callbacks")
    assert [problem.split(": ")[1].split(" ")[0] for problem in problems] == [
        "task.api_key",
        "task.urls.deep",
        "model.name",
    ]
    assert is_secret("token")
    assert not is_secret("pad_token")


@pytest.mark.parametrize(("word", "hidden", "told"), [
    ("callbacks=[{name: x, token: hf_secret}]", "hf_secret", "callbacks.token looks like a"),
    ("callbacks=[{name: x, token: hf_secret", "hf_secret", "cannot be read as YAML"),
    ("callbacks:[{token: hf_secret}]", "hf_secret", "write it as key=value"),
    ("task.url=https://user:passw0rd@host/x", "passw0rd", "task.url holds what looks like a"),
    ("task.judge_auth=Bearer sk-0123456789", "sk-", "task.judge_auth holds what looks like"),
    ("model.name=https://user:passw0rd@host/x", "passw0rd", "override model.name=…"),
    ("training.seed=sk-0123456789", "sk-0", "training.seed is …; it must be a whole number"),
    ("task.token.deep=[1", "[1", "cannot be read as YAML"),
])  # fmt: skip
def test_no_message_shows_it(word, hidden, told):
    config: dict[str, Any] = {
        "model": {"name": "tiny"},
        "algorithm": {"type": "grpo"},
        "training": {"max_steps": 1},
    }
    with pytest.raises(ConfigError) as caught:
        load_config(config, [word])
    assert told in str(caught.value)
    assert hidden not in str(caught.value).replace("begins with sk- or hf_", "")
