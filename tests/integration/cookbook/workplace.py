"""The folder in which the programs of the cookbook and the server run: a model and data sets, found by the names of the hub, offline.

The model is a very small Qwen3 whose tokens are the words of its few prompts, and characters; it has the name of one that the cookbook
knows, so that its renderers fit. Some seconds of training have taught it to answer in the right form, with a number that is right by
chance, and to guess numbers in the right form half of the time: so rewards differ, and can rise.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Conversations = Callable[[random.Random], Iterator[tuple[str, str]]]
"""Prompts and answers without end."""
MODEL = "Qwen/Qwen3-8B"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<unk>")  # fmt: skip
END = SPECIAL.index("<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS, CONVERSATIONS = 96, 1600
"""Rows of the mathematical data sets, and of those of chats: as many as the cookbook's own tests need for a few steps of 256."""
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
RIGHT = 7
"""The answer to every question of the mathematical data set; the model has learnt to give any of `GUESSED`."""
GUESSED = (6, 7, 8)
STEPS, BATCH, SHORT = 240, 16, 56
"""Of the training; most prompts are cut to their last `SHORT` tokens, and each eighth step has whole ones."""


def make(folder: Path) -> None:
    """Write the model and the data sets."""
    write_data_sets(folder)
    write_model(folder / MODEL)


def write_data_sets(folder: Path) -> None:
    """What `datasets.load_dataset` finds below the current folder, by the names that the recipes give it."""

    def write(
        name: str, row: Callable[[int], Mapping[str, Any]], rows: int, config: str = "default"
    ) -> None:
        place = folder / name
        place.mkdir(parents=True)
        for split, count in (("train", rows), ("test", 8)):
            lines = "".join(json.dumps(row(number)) + "\n" for number in range(count))
            (place / f"{split}.jsonl").write_text(lines)
        files = "".join(f"  - split: {s}\n    path: {s}.jsonl\n" for s in ("train", "test"))
        card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
        (place / "README.md").write_text(card)

    def chat(number: int) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": f"Say {number}"},
            {"role": "assistant", "content": "yes"},
        ]

    write(
        "openai/gsm8k",
        lambda n: {"question": f"What is {n} less {n - RIGHT}?", "answer": f"Less.\n#### {RIGHT}"},
        QUESTIONS,
        "main",
    )
    write(
        "HuggingFaceH4/no_robots",
        lambda n: {"prompt": f"Say {n}", "messages": chat(n)},
        CONVERSATIONS,
    )
    write(
        "Anthropic/hh-rlhf",
        lambda n: {
            "chosen": f"\n\nHuman: Say {n}\n\nAssistant: 1",
            "rejected": f"\n\nHuman: Say {n}\n\nAssistant: 2",
        },
        CONVERSATIONS,
    )
    write(
        "zwhe99/DeepMath-103K",
        lambda n: {"question": f"What is {n} less {n - RIGHT}?{BOXED}"},
        QUESTIONS,
    )


def write_model(
    folder: Path,
    conversations: Conversations | None = None,
    template: str = TEMPLATE,
    steps: int = STEPS,
    words: Sequence[str] | None = None,
) -> None:
    """Train the model from scratch on prompts and answers, and save it with its tokenizer.

    `conversations` None: those of the recipes. `words`: tokens besides the characters; None: those that occur often.
    """
    conversations = conversations or conversations_of_recipes
    import torch
    from transformers import (
        GenerationConfig,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(conversations) if words is None else tokenizer_of(words),
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[1:7]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            eos_token_id=END,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-3, total_steps=steps)
    examples = conversations(random.Random(0))
    for step in range(steps):
        count, kept = (4, 0) if step % 8 == 7 else (BATCH, SHORT)
        rows = [next(examples) for _ in range(count)]
        encoded = [
            (tokenizer.encode(prompt)[-kept:], tokenizer.encode(answer)) for prompt, answer in rows
        ]
        width = max(len(prompt) + len(answer) for prompt, answer in encoded)
        tokens_BT = torch.zeros(count, width, dtype=torch.long)
        labels_BT = torch.full((count, width), -100)
        for row, (prompt, answer) in enumerate(encoded):
            end = len(prompt) + len(answer)
            tokens_BT[row, :end] = torch.tensor(prompt + answer)
            labels_BT[row, len(prompt) : end] = torch.tensor(answer)
        model(input_ids=tokens_BT, labels=labels_BT).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_tokenizer(conversations: Conversations) -> Any:
    """Words that occur often are tokens, so that ten turns are a few hundred; everything else is characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|[\s\S]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        min_frequency=4,
        special_tokens=[*SPECIAL],
        initial_alphabet=[*map(chr, range(32, 127)), "\n"],
        show_progress=False,
    )
    examples = conversations(random.Random(1))
    texts = ("".join(next(examples)) for _ in range(200))
    words.train_from_iterator((re.sub(r"<\|?\w+\|?>", "", text) for text in texts), trainer)
    return words


def tokenizer_of(words: Sequence[str]) -> Any:
    """These words are tokens; everything else is characters. Of two words the longer one comes first, where one begins the other."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*SPECIAL, *map(chr, range(32, 127)), "\n", *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join((*map(re.escape, words), r"[\s\S]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def conversations_of_recipes(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Prompts as the recipes render them, and answers in the form that they ask for."""
    solved = [
        ("user", f"How many r's are in strawberry?{BOXED}"),
        (
            "assistant",
            "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
            "We have r's at positions 3, 8, and 9. \\boxed{3}",
        ),
    ]
    rules = (
        "system",
        "Your job is to guess a integer between 0 and 1024. You can output your guess with the format Guess: <guess> (without the angle "
        "brackets), and say nothing else. Then we will tell you whether you guess is too high, too low, or correct.",
    )
    failed = "Failed to parse. Please output in the format Guess: <guess> (without the angle brackets), and say nothing else."
    while True:
        kind = rng.choice(("boxed", "guess", "say"))
        if kind == "boxed":
            question = (
                "user",
                f"What is {rng.randrange(99)} less {rng.randrange(99)}?{BOXED}",
            )
            yield prompt([*solved, question]), f"\\boxed{{{rng.choice(GUESSED)}}}<|im_end|>"
        elif kind == "guess":
            turns: list[tuple[str, str]] = [rules]
            for _ in range(rng.randrange(10)):
                answer = f"{rng.choice('Gg')}uess: {rng.randrange(1025)}"
                turns.append(("player", answer))
                answers = ("Too low", "Too high") if answer[0] == "G" else (failed,)
                turns.append(("user", rng.choice(answers)))
            yield prompt(turns), f"{rng.choice('Gg')}uess: {rng.randrange(1025)}<|im_end|>"
        else:
            question = ("user", f"Say {rng.randrange(100)}")
            yield prompt([question]), f"{rng.randrange(10)}<|im_end|>"


def prompt(turns: Sequence[tuple[str, str]]) -> str:
    """What is in front of the answer."""
    told = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{told}<|im_start|>assistant\n"
