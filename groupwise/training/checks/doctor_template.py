"""The checks of `groupwise doctor` on tokenizer and chat template, with a conversation of two turns.

Training renders each prompt once and trains exactly the sampled tokens, so most peculiarities of a template are harmless. They matter
if text is rendered again: in the next turn of a conversation, and in SFT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from groupwise.core.errors import TaskError
from groupwise.core.findings import Finding
from groupwise.core.types import Message
from groupwise.engine.models.chat_template import missing_turn_warning
from groupwise.engine.models.tokens import prompt_ids, text_ids

QUESTION = "What is two plus three?"
ANSWER = "It makes five."
THOUGHT = "<think>\nTwo and three.\n</think>\n\n"
AGAIN = "And plus four?"
ROUND_TRIP = "A plain line, 3 + 4 = 7 (roughly).\n  And an indented one: don't trim it!"
DATES = ("strftime_now", "datetime")
"""Functions by which a template writes today's date."""


def check_tokenizer(tokenizer: Any) -> Iterator[Finding]:
    """Run all checks that need no model."""
    yield round_trip(tokenizer)
    yield end_of_sequence(tokenizer)
    yield padding(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        yield beginning(tokenizer, QUESTION)
        yield Finding(
            "chat template",
            "skipped",
            "the tokenizer has none",
            "prompts must be text; chat messages would be refused",
            "model.chat_template names a file with one",
        )
        return
    opening = opening_messages(tokenizer)
    yield beginning(tokenizer, opening)
    yield generation_prompt(tokenizer, opening)
    yield own_turn(tokenizer, opening)
    yield earlier_turns(tokenizer, opening)
    yield from check_for_dates(tokenizer)


def opening_messages(tokenizer: Any) -> list[Message]:
    """A conversation up to the first question, without a system message if the template refuses one."""
    question: list[Message] = [{"role": "user", "content": QUESTION}]
    conversation: list[Message] = [{"role": "system", "content": "Be brief."}, *question]
    try:
        prompt_ids(tokenizer, conversation)
    except TaskError:
        return question
    return conversation


def round_trip(tokenizer: Any) -> Finding:
    """Report whether ordinary text survives encoding and decoding."""
    ids = tokenizer(ROUND_TRIP, add_special_tokens=False)["input_ids"]
    decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if decoded == ROUND_TRIP:
        return Finding("round trip", "ok", "text that is encoded and decoded is the same")
    return Finding(
        "round trip",
        "warning",
        f"{ROUND_TRIP!r} becomes {decoded!r}",
        "rewards see text that differs from what the model wrote, and SFT teaches other text than was given",
        "use the tokenizer that the model was trained with",
        {"back": decoded},
    )


def end_of_sequence(tokenizer: Any) -> Finding:
    """Report whether there is a token that ends a completion."""
    name, token = "end of sequence", getattr(tokenizer, "eos_token_id", None)
    if token is None:
        return Finding(
            name,
            "problem",
            "the tokenizer has no end-of-sequence token",
            "unless the model's generation config names one, every completion runs to its limit and is cut off",
            "set eos_token in the tokenizer's config, or sampler.stop_token_ids",
        )
    text = tokenizer.decode([token], skip_special_tokens=False)
    return Finding(name, "ok", f"{text!r} ({token})", data={"id": token, "text": text})


def padding(tokenizer: Any) -> Finding:
    """Report the padding token; any is harmless, because masks come from lengths."""
    pad, end = getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None)
    data = {"pad": pad, "eos": end}
    if pad is not None and pad == end:
        meaning = "it is the end-of-sequence token, which is harmless: masks come from lengths"
        return Finding("padding", "ok", meaning, data=data)
    return Finding("padding", "ok", "there is none" if pad is None else f"token {pad}", data=data)


def beginning(tokenizer: Any, prompt: str | list[Message]) -> Finding:
    """Report whether the beginning-of-sequence token occurs at the start once, or never."""
    name, bos_id = "begin of sequence", getattr(tokenizer, "bos_token_id", None)
    ids = prompt_ids(tokenizer, prompt)
    if bos_id is None:
        return Finding(name, "ok", "the tokenizer has no such token")
    count = next((index for index, token in enumerate(ids) if token != bos_id), len(ids))
    data = {"id": bos_id, "count": count}
    if count > 1:
        return Finding(
            name,
            "problem",
            f"a prompt begins with it {count} times",
            "the model has never seen that; answers get worse",
            "remove it from the chat template, or from the text of the prompts",
            data,
        )
    return Finding(
        name, "ok", f"a prompt begins with it {'once' if count else 'not at all'}", data=data
    )


def generation_prompt(tokenizer: Any, opening: list[Message]) -> Finding:
    """Report whether the template marks the start of the answer."""
    name = "generation prompt"
    without_turn, with_turn = (
        _render_ids(tokenizer, opening, ask=False),
        _render_ids(tokenizer, opening, ask=True),
    )
    addition = tokenizer.decode(with_turn[len(without_turn) :], skip_special_tokens=False)
    if with_turn == without_turn and missing_turn_warning(tokenizer, opening) is None:
        return Finding(name, "ok", "an answer follows its prompt at once", data={"added": addition})
    if with_turn == without_turn:
        return Finding(
            name,
            "warning",
            "the template adds nothing where the assistant's answer begins",
            "the model is not told that it is its turn",
            "let the template honour add_generation_prompt",
        )
    return Finding(name, "ok", f"the template adds {addition!r}", data={"added": addition})


def own_turn(tokenizer: Any, opening: list[Message]) -> Finding:
    """Report whether the rendering of a prompt is a prefix of its rendering with the answer."""
    prompt = _render_ids(tokenizer, opening, ask=True)
    full_ids = _render_ids(tokenizer, [*opening, _assistant_message(ANSWER)], ask=False)
    if full_ids[: len(prompt)] == prompt:
        return Finding(
            "template prefix", "ok", "a prompt is the beginning of the prompt with its answer"
        )
    index = _common_prefix_length(prompt, full_ids)
    turn_header = tokenizer.decode(prompt[index:], skip_special_tokens=False)
    answer_text = tokenizer.decode(full_ids[index:], skip_special_tokens=False)
    return Finding(
        "template prefix",
        "warning",
        f"a prompt ends with {_short_repr(turn_header)}, where the prompt with its answer reads {_short_repr(answer_text)}",
        "RL asks with one text and SFT teaches another; in a conversation each turn becomes a row of its own",
        "a template for training that renders both alike, as model.chat_template",
        {"prompt": turn_header, "with_answer": answer_text},
    )


def earlier_turns(tokenizer: Any, opening: list[Message]) -> Finding:
    """Report whether a further turn leaves the earlier turns unchanged."""
    name = "earlier turns"
    changes: list[str] = []
    for label, answer in (("answers", ANSWER), ("thoughts", THOUGHT + ANSWER)):
        conversation = [*opening, _assistant_message(answer)]
        ids = _render_ids(tokenizer, conversation, ask=False)
        longer_ids = _render_ids(
            tokenizer, [*conversation, {"role": "user", "content": AGAIN}], ask=True
        )
        prefix_length = _common_prefix_length(ids, longer_ids)
        lost_text = tokenizer.decode(ids[prefix_length:], skip_special_tokens=False)
        if lost_text.strip():
            changes.append(f"{label} (from {_short_repr(lost_text)})")
    if not changes:
        return Finding(name, "ok", "a further turn leaves them as they were")
    return Finding(
        name,
        "warning",
        f"a further turn changes earlier {' and '.join(changes)}",
        "in a conversation each such turn becomes a row of its own, so its prompt is computed again",
        "nothing for tasks of one turn; otherwise a template that keeps what was said, as model.chat_template",
        {"rewritten": changes},
    )


def check_for_dates(tokenizer: Any) -> Iterator[Finding]:
    """Warn about a template that writes the date, because prompts will then be different tomorrow."""
    template = str(tokenizer.chat_template)
    date_calls = [name for name in DATES if name in template]
    if date_calls:
        yield Finding(
            "template date",
            "warning",
            f"the template calls {', '.join(date_calls)}",
            "prompts change from day to day, so a run cannot be resumed or repeated tomorrow",
            "a template with a fixed date, as model.chat_template",
        )


def stop_tokens(tokenizer: Any, stops: Sequence[int], stop_texts: Sequence[str]) -> Finding:
    """Report whether the token with which the template ends an answer also ends a completion. `stops` are those of model and config."""
    name = "stop tokens"
    stop_list = ", ".join(
        f"{tokenizer.decode([token], skip_special_tokens=False)!r} ({token})" for token in stops
    )
    data = {"stop_token_ids": list(stops), "stop": list(stop_texts)}
    if not stops and not stop_texts:
        return Finding(
            name,
            "problem",
            "no token ends a completion",
            "every completion runs to its limit and is cut off",
            "set sampler.stop_token_ids or sampler.stop",
            data,
        )
    answer_end_id = answer_end(tokenizer)
    end_id = getattr(tokenizer, "eos_token_id", None)
    for token, owner in (
        (answer_end_id, "the chat template ends an answer with"),
        (end_id, "the end-of-sequence token is"),
    ):
        if token is not None and token not in stops and not stop_texts:
            text = tokenizer.decode([token], skip_special_tokens=False)
            return Finding(
                name,
                "problem",
                f"{owner} {text!r} ({token}), which is not a stop token; those are {stop_list or 'none'}",
                "completions go on beyond the end of the answer",
                f"sampler.stop_token_ids=[{token}]",
                {**data, "missing": token},
            )
    ends = [*([stop_list] if stop_list else []), *(repr(text) for text in stop_texts)]
    return Finding(name, "ok", f"a completion ends at {', '.join(ends)}", data=data)


def answer_end(tokenizer: Any) -> int | None:
    """The first special token after an answer in the chat template; None if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    ids = _render_ids(
        tokenizer, [*opening_messages(tokenizer), _assistant_message(ANSWER)], ask=False
    )
    special_ids: set[int] = set(getattr(tokenizer, "all_special_ids", ()))
    for index in range(len(ids), 0, -1):
        text = tokenizer.decode(ids[index - 1 :], skip_special_tokens=False)
        if ANSWER in text:
            return next((token for token in ids[index:] if token in special_ids), None)
    return None


def _render_ids(tokenizer: Any, messages: Sequence[Message], *, ask: bool) -> list[int]:
    """A conversation as token ids; `ask` appends the start of the next answer."""
    if ask:
        return list(prompt_ids(tokenizer, list(messages)))
    text = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=False, tokenize=False
    )
    return list(text_ids(tokenizer, text))


def _assistant_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two sequences, in tokens."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _short_repr(text: str) -> str:
    return repr(text[:40] + ("…" if len(text) > 40 else ""))
