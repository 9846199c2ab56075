"""The bundled model's real file: every tensor, its tokenizer, its template."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.weights.tensors import read_tensor
from tests.checkpoint.test_gguf_tokenizer import PATTERNS, cut, merge, random_text, spell
from tests.checkpoint.toys import fresh_seed, gguf_name

pytestmark = pytest.mark.model
HEADS = {"q_proj": 9, "k_proj": 3}


def reference_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The gguf package's floats by GGUF name, rows as stored."""
    return {
        tensor.name: torch.from_numpy(
            np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        for tensor in gguf.GGUFReader(file).tensors
    }


def natural_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes the rotary pairs row by row."""
    height = weight.shape[0] // heads
    order = [
        head * height + 2 * (row % (height // 2)) + row // (height // 2)
        for head in range(heads)
        for row in range(height)
    ]
    return weight[order]


def test_every_tensor_equals_the_reference(smollm2_gguf: Path, smollm2_folder: Path) -> None:
    opened = open_checkpoint(str(smollm2_gguf))
    written = load_file(smollm2_folder / "model.safetensors")
    stored = reference_tensors(smollm2_gguf)
    assert len(opened.tensors) == len(stored) == 272
    assert written.keys() == opened.tensors.keys()
    for name, entry in opened.tensors.items():
        expected = stored[gguf_name(name)]
        for projection, heads in HEADS.items():
            if projection in name:
                expected = natural_order(expected, heads)
        assert torch.equal(read_tensor(entry, torch.float32), expected), name
        assert torch.equal(written[name], expected.bfloat16()), name


def test_config_and_template(smollm2_gguf: Path, smollm2_folder: Path) -> None:
    opened = open_checkpoint(str(smollm2_gguf))
    assert opened.config["architectures"] == ["LlamaForCausalLM"]
    assert opened.config["tie_word_embeddings"] is True
    assert opened.config["rope_theta"] == 100000.0
    assert opened.chat_template is not None
    assert "You are a helpful AI assistant named SmolLM" in opened.chat_template
    special = opened.special_tokens(opened.load_tokenizer())
    assert (special.bos_id, special.eos_ids, special.add_bos) == (1, (2,), False)
    assert special.ids == set(range(17))
    folder = open_checkpoint(str(smollm2_folder))
    assert folder.config == opened.config
    assert folder.chat_template == opened.chat_template
    assert folder.special_tokens(folder.load_tokenizer()) == special


def test_tokens_equal_plain_merging(smollm2_gguf: Path) -> None:
    rng = random.Random(fresh_seed())
    reader = gguf.GGUFReader(smollm2_gguf)
    vocabulary = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    ids = {token: number for number, token in enumerate(vocabulary)}
    ranks = {tuple(text.split(" ")): float(rank) for rank, text in enumerate(merges)}
    tokenizer = open_checkpoint(str(smollm2_gguf)).load_tokenizer()
    texts = ["\n\n1", "    2", "a  5", "", "日本語のテキスト", "😀👩‍👩‍👧", "don't 123"]
    for text in [*texts, *(random_text(rng) for _ in range(500))]:
        pieces = cut(text, PATTERNS["smollm"])
        expected = [ids[one] for piece in pieces for one in merge(spell(piece), ranks)]
        assert tokenizer.encode(text).ids == expected, repr(text)
        assert tokenizer.decode(expected) == text


def test_the_chat_prompt_has_known_ids(smollm2_gguf: Path) -> None:
    """Ids from another implementation."""
    tokenizer = open_checkpoint(str(smollm2_gguf)).load_tokenizer()
    found = tokenizer.encode("The capital of France is Paris.<|im_end|>").ids
    assert found == [504, 3575, 282, 4649, 314, 7042, 30, 2]
