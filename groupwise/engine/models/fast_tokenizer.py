"""A tokenizer that needs `tokenizers` and Jinja, but not transformers, whose import alone costs a second and a half of a processor.

`read_fast_tokenizer` reads the folder of a model whose tokenizer transformers would load as its plain `TokenizersBackend`, or as that of
Qwen2 and Qwen3, and which has nothing that transformers would change while it loads it; for any other folder it returns None. Token ids,
texts, rendered chats and saved files equal those of transformers. What `FastTokenizer` cannot do itself, transformers' own tokenizer does:
it is loaded at that moment, and answers everything from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from groupwise.engine.models.template_program import run_template

CLASS = "TokenizersBackend"
"""transformers' class whose `tokenizer.json` is taken as it is."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
UNLIMITED = int(1e30)
"""transformers' `model_max_length` of a tokenizer that has no limit."""
_SAVED = {"backend": "tokenizers", "is_local": True, "local_files_only": True}
_KNOWN = {*NAMED, *_SAVED, "tokenizer_class", "model_max_length", "extra_special_tokens"}
_KNOWN |= {"clean_up_tokenization_spaces"}
QWEN = "Qwen2Tokenizer"
"""transformers' class that takes vocabulary, merges and added tokens from `tokenizer.json`, and cuts texts by `_QWEN_WORDS`."""
_QWEN_MODELS = ("qwen2", "qwen3")
_QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN_OLDER = {"added_tokens_decoder", "additional_special_tokens", "chat_template"}
"""Keys that only older releases of transformers write."""
_QWEN_FALSE = {"add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"}
"""Keys that are known here if they are false or null."""
_REPAIRED = ("mistral", "ministral", "voxtral", "pixtral")
"""Model types whose tokenizer transformers repairs if its vocabulary is large."""


def read_fast_tokenizer(folder: Path) -> FastTokenizer | None:
    """The tokenizer of a local folder, or None if only transformers loads it as it should be."""
    files = {entry.name for entry in folder.iterdir()}
    others = {"special_tokens_map.json", "added_tokens.json", "additional_chat_templates"}
    if not {"tokenizer.json", "tokenizer_config.json"} <= files or others & files:
        return None
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens, template = config.get("added_tokens_decoder"), config.get("chat_template")
    if "chat_template.jinja" in files:
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    qwen = str(config.get("tokenizer_class")).removesuffix("Fast") == QWEN
    if qwen:
        config = _saved_config_of_qwen(config)
    if not _is_known(config, qwen) or not isinstance(template, str | None):
        return None
    try:
        backend: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - it raises nothing more special for a damaged file, which transformers reports
        return None
    if not _is_complete(backend, config):
        return None
    facts = (
        json.loads((folder / "config.json").read_text("utf-8")) if "config.json" in files else {}
    )
    model_type = str(facts.get("model_type", _REPAIRED[0]))
    if qwen:
        if model_type not in _QWEN_MODELS or not _is_built_like_qwen(backend, tokens):
            return None
        _cut_like_qwen(backend)
    elif backend.get_vocab_size() > 100_000 and model_type.startswith(_REPAIRED):
        return None
    return FastTokenizer(str(folder), config, backend, template)


def _is_known(config: Mapping[str, Any], qwen: bool) -> bool:
    """True if the config names one of the two classes, and holds nothing else that changes what it does."""
    known = _KNOWN | {"errors", "add_prefix_space", "split_special_tokens"} if qwen else _KNOWN
    return (
        config.get("tokenizer_class") == (QWEN if qwen else CLASS)
        and not config.get("clean_up_tokenization_spaces")
        and config.keys() <= known
        and isinstance(config.get("extra_special_tokens", []), list | None)
    )


def _is_complete(backend: Any, config: Mapping[str, Any]) -> bool:
    """True if transformers would add neither a post-processor nor tokens that the config names, and texts keep their lengths."""
    named = [config[name] for name in NAMED if config.get(name) is not None]
    special = [*named, *(config.get("extra_special_tokens") or ())]
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    marked = {token.content for token in added.values() if token.special}
    return (
        not (backend.truncation or backend.padding or backend.post_processor is None)
        and all(isinstance(token, str) for token in special)
        and marked.issuperset(special)
    )


def _saved_config_of_qwen(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as transformers saves it; without a class if it would add tokens of its own, or act on a key that is not known here."""
    dropped = _QWEN_OLDER | {"add_bos_token", "add_eos_token"}
    saved = {name: value for name, value in config.items() if name not in dropped}
    if "additional_special_tokens" in config:
        saved.setdefault("extra_special_tokens", config["additional_special_tokens"])
    complete = {"unk_token", "bos_token", "eos_token", "pad_token"} <= config.keys()
    twice = {"additional_special_tokens", "extra_special_tokens"} <= config.keys()
    plain = complete and not twice and not any(config.get(name) for name in _QWEN_FALSE)
    return {**saved, "tokenizer_class": QWEN if plain else None}


def _is_built_like_qwen(backend: Any, tokens: Any) -> bool:
    """True if the tokenizer that transformers builds from these parts has the same tokens. `tokens`: those that the config adds, if any."""
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    flags = ("lstrip", "normalized", "rstrip", "single_word")
    described = {
        str(number): {name: getattr(token, name) for name in ("content", "special", *flags)}
        for number, token in added.items()
    }
    first, model = backend.get_vocab_size(with_added_tokens=False), backend.model
    return (
        tokens in (None, described)
        and sorted(added) == [*range(first, first + len(added))]
        and not any(getattr(token, flag) for token in added.values() for flag in flags)
        and isinstance(model, models.BPE)
        and (model.continuing_subword_prefix, model.end_of_word_suffix) == ("", "")
        and not (model.dropout or model.unk_token or model.fuse_unk)
        and not (model.byte_fallback or model.ignore_merges)
    )


def _cut_like_qwen(backend: Any) -> None:
    """Normalise, cut and decode texts as transformers' class does, whatever `tokenizer.json` says."""
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    backend.decoder = decoders.ByteLevel()


class _Encoded(dict[str, list[int]]):
    """Tokens of one text; it has what transformers' `BatchEncoding` has, which is made if it is asked for."""

    def __init__(self, tokenizer: FastTokenizer, text: str, special: bool) -> None:
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids
        super().__init__(input_ids=ids, attention_mask=[1] * len(ids))
        self._again = lambda: tokenizer._load()(text, add_special_tokens=special)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name] if name in self else getattr(self._again(), name)


class FastTokenizer:
    """Acts as the tokenizer of transformers that the folder holds: methods and attributes have its names and meaning."""

    def __init__(
        self, folder: str, config: dict[str, Any], backend: Any, chat_template: str | None
    ) -> None:
        vars(self).update(
            _folder=folder,
            _config=config,
            _backend=backend,
            _whole=None,
            chat_template=chat_template,
        )

    def __call__(self, text: Any, *, add_special_tokens: bool = True, **options: Any) -> Any:
        if self._whole is None and isinstance(text, str) and not options:
            return _Encoded(self, text, add_special_tokens)
        return self._load()(text, add_special_tokens=add_special_tokens, **options)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        plain = not options or (
            options.keys() == {"clean_up_tokenization_spaces"} and not any(options.values())
        )
        if self._whole is None and plain and isinstance(token_ids, list | tuple):
            ids = cast("Sequence[Any]", token_ids)
            if all(type(token) is int for token in ids):
                return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self._load().decode(token_ids, skip_special_tokens=skip_special_tokens, **options)

    def get_chat_template(self, chat_template: Any = None, tools: Any = None) -> str:
        if self._whole is None and isinstance(chat_template or self.chat_template, str):
            return chat_template or self.chat_template
        return self._load().get_chat_template(chat_template, tools)

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        template = chat_template or self.chat_template
        plain = self._whole is None and not tokenize and isinstance(template, str)
        if plain and conversation and not _OPTIONS & options.keys():
            rows = (*conversation, *(tools or ()))
            if isinstance(conversation, list) and all(isinstance(row, Mapping) for row in rows):
                named = {name: self._config[name] for name in NAMED if self._config.get(name)}
                asks = {"add_generation_prompt": add_generation_prompt}
                return run_template(template, conversation, tools, {**named, **options, **asks})
        return self._load().apply_chat_template(
            conversation,
            tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            **options,
        )

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if self._whole is not None:
            return self._whole.convert_tokens_to_ids(tokens)
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._backend.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def get_vocab(self) -> dict[str, int]:
        if self._whole is not None:
            return self._whole.get_vocab()
        return self._backend.get_vocab(with_added_tokens=True)

    def save_pretrained(self, save_directory: Any, **options: Any) -> Any:
        if self._whole is not None or options or isinstance(self.chat_template, dict):
            return self._load().save_pretrained(save_directory, **options)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_max_length": UNLIMITED, **self._config, **_SAVED}
        text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        names = ["tokenizer_config.json"]
        (folder / names[0]).write_text(text, encoding="utf-8")
        if self.chat_template is not None:
            names.append("chat_template.jinja")
            (folder / names[-1]).write_text(self.chat_template, encoding="utf-8")
        names.append("tokenizer.json")
        self._backend.save(str(folder / names[-1]))
        return tuple(str(folder / name) for name in names)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return (self._whole or self).backend_tokenizer.get_added_tokens_decoder()

    @property
    def backend_tokenizer(self) -> Any:
        return self._backend if self._whole is None else self._whole.backend_tokenizer

    @property
    def all_special_tokens(self) -> list[str]:
        if self._whole is not None:
            return self._whole.all_special_tokens
        named = [self._config[name] for name in NAMED if self._config.get(name) is not None]
        return [*dict.fromkeys([*named, *(self._config.get("extra_special_tokens") or ())])]

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """transformers' class, for `isinstance`."""
        return type(self._load())

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_groupwise")):
            raise AttributeError(name)
        if self._whole is None and name.removesuffix("_id") in NAMED:
            text = self._config.get(name.removesuffix("_id"))
            return text if text is None or name in NAMED else self.convert_tokens_to_ids(text)
        return getattr(self._load(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NAMED or hasattr(type(self), name):
            setattr(self._load(), name, value)
            return
        vars(self)[name] = value
        if self._whole is not None:
            setattr(self._whole, name, value)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        return _unpickled, (vars(self),)

    def _load(self) -> Any:
        """transformers' own tokenizer, which answers everything once it is there."""
        if self._whole is None:
            import transformers

            kind = getattr(transformers, self._config["tokenizer_class"])
            whole = kind.from_pretrained(self._folder, local_files_only=True)
            for name, value in vars(self).items():
                if not name.startswith("_") or name.startswith("_groupwise"):
                    setattr(whole, name, value)
            vars(self)["_whole"] = whole
        return self._whole


_OPTIONS = {
    *("documents", "continue_final_message", "sanitize_control_tokens", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
}
"""Arguments of `apply_chat_template` that are none of the template's."""


def _unpickled(attributes: dict[str, Any]) -> FastTokenizer:
    made = FastTokenizer.__new__(FastTokenizer)
    vars(made).update(attributes)
    return made
