"""Small tokenizers of both kinds, made here so that the tests need no download."""

from __future__ import annotations

import json
from functools import cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from octavo.text.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The capital of France is Paris. The owls 🦉🦉 hoot at night, 日本語 too.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, crème brûlée naïve",
    "system user assistant You are a helpful assistant named Sample.",
] * 3
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def _byte_level_json() -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["  added  "])
    return backend.to_str()


def byte_level() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(_byte_level_json())


def chat_tokenizer(**options: object) -> Tokenizer:
    """Byte-level, with `<|im_start|>` 1 as start and `<|im_end|>` 2 as end token."""
    values: dict = {"eos_ids": [2], "bos_id": 1, "named": {"bos_token": SPECIAL[1]}} | options
    return Tokenizer(byte_level(), **values)


def sentencepiece(*, legacy: bool = True, decoder: str = "sequence") -> tokenizers.Tokenizer:
    """As Llama 2's (legacy) or Mistral's later one: a mark for space, byte fallback."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [
        "▁",
        *"abcdefghijklmnopqrstuvwxyzABPT.,",
        "▁a",
        "in",
        "is",
        "▁P",
        "ar",
        "▁Par",
        "▁Paris",
    ]
    merges = [("▁", "a"), ("i", "n"), ("i", "s"), ("▁", "P"), ("a", "r"), ("▁P", "ar")]
    merges.append(("▁Par", "is"))
    vocabulary = {word: place for place, word in enumerate(words)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    if legacy:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    if decoder == "sequence":
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        backend.decoder = decoders.Metaspace("▁", prepend_scheme=decoder)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([tokenizers.AddedToken("▁▁▁", normalized=False)])
    return backend


def with_changes(backend: tokenizers.Tokenizer, **changes: object) -> tokenizers.Tokenizer:
    """A copy with parts of its JSON form replaced."""
    return tokenizers.Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | changes))
