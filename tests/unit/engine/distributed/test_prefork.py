"""Questions that a begun zygote answers, and the same without one."""

import os

import pytest

from groupwise.engine.distributed import prefork
from groupwise.engine.models import tokenizer as tokenizers
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.fast_tokenizer import FastTokenizer
from tests.forked_zygote import fork_zygotes

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

TINY = ModelConfig(name="tiny")
MESSAGES = [{"role": "user", "content": "a1 {}"}]


@pytest.fixture
def begun(monkeypatch):
    fork_zygotes(monkeypatch)
    prefork.start_zygote()
    yield
    prefork.end_zygote()


def answers():
    return (
        prefork.prompt_room(TINY, 10), prefork.vocabulary(TINY), prefork.all_parameters(TINY),
        prefork.trained_parameters(TINY, LoraConfig()), prefork.trained_parameters(TINY, None),
        prefork.choose_device(), prefork.choose_dtype(TINY, True, "cpu"),
        prefork.describe_processor("cpu"), prefork.torch_version(),
    )  # fmt: skip


def test_the_zygote_says_what_this_process_would_say(begun):
    found = answers()
    tokenizer = prefork.load_tokenizer(TINY)
    prefork.end_zygote()
    assert found == answers()
    own = prefork.load_tokenizer(TINY)
    assert type(tokenizer) is type(own)
    assert tokenizer.name_or_path == own.name_or_path
    assert tokenizer.get_vocab() == own.get_vocab()
    assert tokenizer.apply_chat_template(MESSAGES) == own.apply_chat_template(MESSAGES)


def test_it_is_asked_for_a_tokenizer_that_only_transformers_can_load(begun, monkeypatch):
    assert type(prefork.load_tokenizer(TINY)) is FastTokenizer
    monkeypatch.setattr(tokenizers, "load_fast_tokenizer", lambda config: None)
    monkeypatch.setattr(tokenizers, "load_tokenizer", lambda config: os.getpid())
    assert prefork.load_tokenizer(TINY) != os.getpid(), "it was forked before the patch"
    assert prefork.load_tokenizer(ModelConfig(name="tiny", trust_remote_code=True)) == os.getpid()
    prefork.end_zygote()
    assert prefork.load_tokenizer(TINY) == os.getpid()


def test_it_sees_the_gpus_that_this_process_sees(monkeypatch):
    fork_zygotes(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    prefork.start_zygote()
    asked, other = prefork.take_zygote(), prefork.take_zygote()
    seen = [each.ask("os:getenv", "CUDA_VISIBLE_DEVICES") for each in (asked, other)]
    asked.close()
    other.close()
    assert seen == ["0", ""], "the other one was not begun to be asked"
