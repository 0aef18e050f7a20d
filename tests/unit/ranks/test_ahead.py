"""Questions that a begun zygote answers, and the same without one."""

import os

import pytest

from groupwise.models import tokenizer as tokenizers
from groupwise.models.config import LoraConfig, ModelConfig
from groupwise.ranks import ahead
from tests.forked_zygote import fork_zygotes

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

TINY = ModelConfig(name="tiny")
MESSAGES = [{"role": "user", "content": "a1 {}"}]


@pytest.fixture
def begun(monkeypatch):
    fork_zygotes(monkeypatch)
    ahead.begin()
    yield
    ahead.give_up()


def answers():
    return (
        ahead.prompt_room(TINY, 10), ahead.vocabulary(TINY), ahead.all_parameters(TINY), ahead.trained_parameters(TINY, LoraConfig()),
        ahead.trained_parameters(TINY, None), ahead.choose_device(), ahead.choose_dtype(TINY, True, "cpu"),
        ahead.describe_processor("cpu"), ahead.torch_version(),
    )  # fmt: skip


def test_the_zygote_says_what_this_process_would_say(begun):
    found = answers()
    tokenizer = ahead.load_tokenizer(TINY)
    ahead.give_up()
    assert found == answers()
    own = ahead.load_tokenizer(TINY)
    assert type(tokenizer) is type(own)
    assert tokenizer.name_or_path == own.name_or_path
    assert tokenizer.get_vocab() == own.get_vocab()
    assert tokenizer.apply_chat_template(MESSAGES) == own.apply_chat_template(MESSAGES)


def test_it_is_asked_where_there_is_one(begun, monkeypatch):
    monkeypatch.setattr(tokenizers, "load_tokenizer", lambda config: os.getpid())
    assert ahead.load_tokenizer(TINY) != os.getpid(), "it was forked before the patch"
    assert ahead.load_tokenizer(ModelConfig(name="tiny", trust_remote_code=True)) == os.getpid()
    ahead.give_up()
    assert ahead.load_tokenizer(TINY) == os.getpid()


def test_it_sees_the_gpus_that_this_process_sees(monkeypatch):
    fork_zygotes(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    ahead.begin()
    asked, other = ahead.take(), ahead.take()
    seen = [each.ask("os:getenv", "CUDA_VISIBLE_DEVICES") for each in (asked, other)]
    asked.close()
    other.close()
    assert seen == ["0", ""], "the other one was not begun to be asked"
