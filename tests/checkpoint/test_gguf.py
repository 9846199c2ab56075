"""GGUF files written by the gguf package: config, names, rotary order, and refusal of damage."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.checkpoint.gguf_file import TENSOR_TYPES, read_gguf
from octavo.checkpoint.records import ENCODINGS
from octavo.errors import CheckpointError
from octavo.weights.tensors import read_tensor
from tests.checkpoint.toys import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    ToyGguf,
    expect_error,
    fresh_seed,
    llama_config,
    random_llama,
)


def test_a_llama_file_is_the_same_model(tmp_path: Path) -> None:
    tensors = random_llama(fresh_seed())
    opened = open_checkpoint(str(ToyGguf().write(tmp_path / "a.gguf", tensors)))
    assert opened.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(opened.tensors[name]), tensor), name
    found = {key: opened.config[key] for key in llama_config() if key != "rms_norm_eps"}
    expected = {key: value for key, value in llama_config().items() if key != "rms_norm_eps"}
    assert found == expected
    assert opened.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert opened.config["rope_scaling"] is None
    assert opened.generation == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_boxes_of_stored_tensors(kind: str, tmp_path: Path) -> None:
    """Any rows and columns equal the same slice of the whole, rotary order undone."""
    seed = fresh_seed()
    rng = random.Random(seed)
    tensors = random_llama(seed)
    opened = open_checkpoint(str(ToyGguf().write(tmp_path / "a.gguf", tensors, kind)))
    for name, tensor in tensors.items():
        entry = opened.tensors[name]
        whole = tensor
        if tensor.dim() > 1:  # rows are quantized one by one, so their order does not matter
            raw_kind = gguf.GGMLQuantizationType[kind]
            packed = gguf.quantize(tensor.numpy(), raw_kind)
            whole = torch.from_numpy(np.array(gguf.dequantize(packed, raw_kind)))
        assert torch.equal(read_tensor(entry, torch.float32), whole), name
        for _ in range(8):
            rows = slice(*sorted(rng.randrange(tensor.shape[0] + 1) for _ in range(2)))
            columns = None
            expected = whole[rows]
            if tensor.dim() > 1:
                columns = slice(*sorted(rng.randrange(tensor.shape[1] + 1) for _ in range(2)))
                expected = expected[:, columns]
            found = read_tensor(entry, torch.float32, rows=rows, columns=columns)
            assert torch.equal(found, expected), (name, rows, columns)


def test_biases_of_llama_are_rotary_pairs_too(tmp_path: Path) -> None:
    tensors = random_llama(fresh_seed())
    for layer in range(2):
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            tensors[name] = torch.randn(heads * HEAD_DIM)
    opened = open_checkpoint(str(ToyGguf().write(tmp_path / "a.gguf", tensors)))
    assert opened.config["attention_bias"] is True
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(opened.tensors[name]), tensor), name
    name = "model.layers.0.self_attn.q_proj.bias"
    part = read_tensor(opened.tensors[name], rows=slice(5, 30))
    assert torch.equal(part, tensors[name][5:30])


@pytest.mark.parametrize(
    ("architecture", "class_name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_qwen_rows_are_in_order(architecture: str, class_name: str, tmp_path: Path) -> None:
    tensors = random_llama(fresh_seed())
    tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    if architecture == "qwen3":
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.q_norm.weight"] = torch.randn(HEAD_DIM)
            tensors[f"model.layers.{layer}.self_attn.k_norm.weight"] = torch.randn(HEAD_DIM)
    toy = ToyGguf(architecture, interleaved=False, pre="qwen2")
    opened = open_checkpoint(str(toy.write(tmp_path / "a.gguf", tensors)))
    assert opened.config["architectures"] == [class_name]
    assert opened.config["tie_word_embeddings"] is False
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(opened.tensors[name]), tensor), name


def test_a_window_makes_it_mistral(tmp_path: Path) -> None:
    toy = ToyGguf(extra=(("add_sliding_window", (64,)),))
    file = toy.write(tmp_path / "a.gguf", random_llama(fresh_seed()))
    config = open_checkpoint(str(file)).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 64


def llama3_factors(theta: float, factor: float) -> torch.Tensor:
    """As converters compute them: by wavelength, in three bands."""
    factors = []
    for index in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi / (theta ** -(index / HEAD_DIM))
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)


def test_llama3_scaling_is_read_back_from_its_factors(tmp_path: Path) -> None:
    tensors = random_llama(fresh_seed())
    toy = ToyGguf(extra=(("add_rope_freq_base", (500000.0,)),))
    tensors["rope_freqs.weight"] = llama3_factors(500000.0, 8.0)
    opened = open_checkpoint(str(toy.write(tmp_path / "a.gguf", tensors)))
    assert opened.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in opened.tensors
    tensors["rope_freqs.weight"][HEAD_DIM // 2 - 2] *= 1.1
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(toy.write(tmp_path / "b.gguf", tensors)))
    expect_error(caught, "rope_freqs")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (gguf.RopeScalingType.LINEAR, {"rope_type": "linear", "factor": 2.0}),
        (
            gguf.RopeScalingType.YARN,
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        ),
        (gguf.RopeScalingType.LONGROPE, None),
    ],
)
def test_rope_scaling_keys(
    kind: gguf.RopeScalingType, expected: dict[str, object] | None, tmp_path: Path
) -> None:
    extra = (
        ("add_rope_scaling_type", (kind,)),
        ("add_rope_scaling_factor", (2.0,)),
        ("add_rope_scaling_orig_ctx_len", (256,)),
    )
    file = ToyGguf(extra=extra).write(tmp_path / "a.gguf", random_llama(fresh_seed()))
    if expected is not None:
        assert open_checkpoint(str(file)).config["rope_scaling"] == expected
        return
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(file))
    expect_error(caught, "longrope")


def test_all_end_tokens_count(tmp_path: Path) -> None:
    toy = ToyGguf(extra=(("add_eot_token_id", (7,)), ("add_pad_token_id", (3,))))
    opened = open_checkpoint(str(toy.write(tmp_path / "a.gguf", random_llama(fresh_seed()))))
    assert opened.generation == {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 3}
    special = opened.special_tokens(opened.load_tokenizer())
    assert (special.eos_ids, special.pad_id) == ((2, 7), 3)


def test_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    toy = ToyGguf(extra=(("add_chat_template", (templates,)),))
    opened = open_checkpoint(str(toy.write(tmp_path / "a.gguf", random_llama(fresh_seed()))))
    assert opened.chat_template == "one"
    assert opened.chat_templates == {"default": "one", "tool_use": "two"}


def test_version_2_is_read_and_others_are_refused(tmp_path: Path) -> None:
    file = ToyGguf().write(tmp_path / "a.gguf", random_llama(fresh_seed()))
    whole = bytearray(file.read_bytes())
    whole[4] = 2
    file.write_bytes(whole)
    assert read_gguf(file).version == 2
    for version in (0, 1, 4, 0x33):
        whole[4] = version
        file.write_bytes(whole)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(str(file))
        expect_error(caught, str(file), "version")


@pytest.mark.parametrize(
    ("toy", "part"),
    [
        (ToyGguf("mamba"), "'mamba'"),
        (ToyGguf("qwen2vl"), "the nearest is qwen2"),
        (ToyGguf("qwen3", extra=(("add_expert_count", (8,)),)), "experts"),
        (ToyGguf(extra=(("add_expert_count", (8,)),)), "llama.expert_used_count"),
        (ToyGguf(extra=(("add_rope_dimension_count", (HEAD_DIM // 2,)),)), "rotary"),
        (ToyGguf(bos=VOCAB), "bos_token_id"),
    ],
)
def test_what_is_not_supported_is_named(toy: ToyGguf, part: str, tmp_path: Path) -> None:
    file = toy.write(tmp_path / "a.gguf", random_llama(fresh_seed()))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(file))
    expect_error(caught, str(file), part)


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    tensors = random_llama(fresh_seed())
    file = ToyGguf().write(tmp_path / "a.gguf", tensors)
    whole = file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    file.write_bytes(whole)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(file))
    expect_error(caught, "blk.1.ffn_xx.weight", "1 tensors")


def test_tensor_types_are_the_reference_s() -> None:
    for number, name in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (ENCODINGS[name].block, ENCODINGS[name].size)


def test_any_cut_is_refused(tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    file = ToyGguf().write(tmp_path / "a.gguf", random_llama(1), "Q4_0")
    whole = file.read_bytes()
    # The file may be padded behind its last tensor.
    end = max(tensor.offset + tensor.nbytes for tensor in read_gguf(file).tensors.values())
    for length in [0, 3, 4, 23, 24, end - 1, *(rng.randrange(end) for _ in range(100))]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(str(file))
        expect_error(caught, str(file), str(length) if length > 4 else "")


def test_any_damage_is_a_checkpoint_error_or_harmless(tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    toy = replace(ToyGguf(), vocabulary=("a", "b", "c", "ab"), merges=("a b",))
    file = toy.write(tmp_path / "a.gguf", random_llama(1), "Q4_0")
    header = min(tensor.offset for tensor in read_gguf(file).tensors.values())
    whole = file.read_bytes()
    refused: list[str] = []
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            opened = open_checkpoint(str(file))
            opened.load_tokenizer()
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert all(str(file) in message for message in refused)
