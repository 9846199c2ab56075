"""The loader against layers that only write down what they are given."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from octavo.checkpoint.checkpoint import Checkpoint, open_checkpoint
from octavo.errors import CheckpointError
from octavo.weights.export import write_folder
from octavo.weights.loader import load, load_dummy
from octavo.weights.spec import ParamSpec, Part
from tests.checkpoint.toys import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    ToyGguf,
    expect_error,
    fresh_seed,
    random_llama,
    write_hf,
)

DTYPE = torch.float32


@dataclass
class FakeLayer:
    """Keeps its parameters; `log` is the whole model's order of events."""

    name: str
    specs: dict[str, ParamSpec]
    log: list[str] = field(default_factory=list)
    filled: dict[str, torch.Tensor] = field(default_factory=dict)

    def param_specs(self) -> dict[str, ParamSpec]:
        return self.specs

    def set_param(self, name: str, tensor: torch.Tensor) -> None:
        assert (tuple(tensor.shape), tensor.dtype) == (
            self.specs[name].shape,
            self.specs[name].dtype,
        )
        self.filled[name] = tensor
        self.log.append(f"set {self.name}.{name}")

    def finish(self) -> None:
        self.log.append(f"finish {self.name}")


def rows(parts: tuple[Part, ...], width: int, start: int = 0, full: int = 0) -> ParamSpec:
    shape = (sum(part.size for part in parts), width)
    return ParamSpec(shape, DTYPE, parts, 0, 1, in_start=start, in_full=full or width)


def share(name: str, full: int, rank: int, size: int) -> Part:
    return Part(name, full // size, full, rank * (full // size))


class FakeModel:
    """The layers of the toy Llama on one of `size` ranks."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.log: list[str] = []
        whole = Part("", HIDDEN, HIDDEN, 0)
        vector = ParamSpec((HIDDEN,), DTYPE, (whole,))
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        qkv = (share("q", q, rank, size), share("k", kv, rank, size), share("v", kv, rank, size))
        gate_up = (share("gate", INNER, rank, size), share("up", INNER, rank, size))
        specs: dict[str, ParamSpec] = {
            "embed": rows((share("", VOCAB, rank, size),), HIDDEN),
        }
        for layer in range(LAYERS):
            specs[f"{layer}.norm1"] = vector
            specs[f"{layer}.qkv"] = rows(qkv, HIDDEN)
            specs[f"{layer}.o"] = rows((whole,), q // size, rank * q // size, q)
            specs[f"{layer}.norm2"] = vector
            specs[f"{layer}.gate_up"] = rows(gate_up, HIDDEN)
            specs[f"{layer}.down"] = rows((whole,), INNER // size, rank * INNER // size, INNER)
        specs["norm"] = vector
        self.layers = {name: FakeLayer(name, {"weight": s}, self.log) for name, s in specs.items()}
        self.layers["head"] = FakeLayer("head", {}, self.log)  # tied

    def named_layers(self) -> Iterator[tuple[str, FakeLayer]]:
        yield from self.layers.items()


def names(dotted: str, part: str) -> str:
    layer, _, parameter = dotted.rpartition(".")
    if layer == "embed":
        return f"model.embed_tokens.{parameter}"
    if layer == "norm":
        return f"model.norm.{parameter}"
    number, _, inner = layer.partition(".")
    theirs = {
        "norm1": "input_layernorm",
        "qkv": f"self_attn.{part}_proj",
        "o": "self_attn.o_proj",
        "norm2": "post_attention_layernorm",
        "gate_up": f"mlp.{part}_proj",
        "down": "mlp.down_proj",
    }
    return f"model.layers.{number}.{theirs[inner]}.{parameter}"


def open_toy(tmp_path: Path, kind: str, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    if kind == "hf":
        return open_checkpoint(str(write_hf(tmp_path / "m", tensors)))
    return open_checkpoint(str(ToyGguf().write(tmp_path / "m.gguf", tensors)))


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_gets_its_share(kind: str, size: int, tmp_path: Path) -> None:
    tensors = random_llama(fresh_seed())
    checkpoint = open_toy(tmp_path, kind, tensors)
    for rank in range(size):
        model = FakeModel(rank, size)
        seen: list[tuple[int, int]] = []
        report = load(model, checkpoint, names, progress=lambda *at, seen=seen: seen.append(at))
        assert report.num_tensors == len(tensors)
        assert seen[-1][0] == seen[-1][1] == report.file_bytes
        for layer in range(LAYERS):
            start = f"model.layers.{layer}."
            parts = [tensors[f"{start}self_attn.{part}_proj.weight"] for part in "qkv"]
            expected = torch.cat([part.chunk(size)[rank] for part in parts])
            assert torch.equal(model.layers[f"{layer}.qkv"].filled["weight"], expected)
            parts = [tensors[f"{start}mlp.{part}_proj.weight"] for part in ("gate", "up")]
            expected = torch.cat([part.chunk(size)[rank] for part in parts])
            assert torch.equal(model.layers[f"{layer}.gate_up"].filled["weight"], expected)
            expected = tensors[start + "mlp.down_proj.weight"].chunk(size, dim=1)[rank]
            assert torch.equal(model.layers[f"{layer}.down"].filled["weight"], expected)
            expected = tensors[start + "self_attn.o_proj.weight"].chunk(size, dim=1)[rank]
            assert torch.equal(model.layers[f"{layer}.o"].filled["weight"], expected)
            expected = tensors[start + "input_layernorm.weight"]
            assert torch.equal(model.layers[f"{layer}.norm1"].filled["weight"], expected)
        expected = tensors["model.embed_tokens.weight"].chunk(size)[rank]
        assert torch.equal(model.layers["embed"].filled["weight"], expected)
        if size == 1:
            assert report.param_bytes == sum(4 * tensor.numel() for tensor in tensors.values())


def test_each_layer_is_finished_before_the_next_is_read(tmp_path: Path) -> None:
    checkpoint = open_toy(tmp_path, "hf", random_llama(fresh_seed()))
    model = FakeModel()
    load(model, checkpoint, names)
    expected: list[str] = []
    for name, layer in model.layers.items():
        expected += [f"set {name}.{parameter}" for parameter in layer.specs] + [f"finish {name}"]
    assert model.log == expected


def test_missing_tensors_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    tensors = random_llama(1)
    gone = rng.sample(sorted(tensors), 3)
    checkpoint = open_toy(tmp_path, "hf", {n: t for n, t in tensors.items() if n not in gone})
    model = FakeModel()
    with pytest.raises(CheckpointError) as caught:
        load(model, checkpoint, names)
    expect_error(caught, "3 tensors", *gone)
    assert model.log == []


def test_left_over_tensors_are_listed_unless_ignored(tmp_path: Path) -> None:
    tensors = random_llama(fresh_seed())
    for number in range(25):
        tensors[f"extra.{number:02}.weight"] = torch.zeros(2)
    tensors["lm_head.weight"] = torch.zeros(2)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    checkpoint = open_toy(tmp_path, "hf", tensors)
    with pytest.raises(CheckpointError) as caught:
        load(FakeModel(), checkpoint, names, ignored=(r"lm_head\.weight",))
    expect_error(caught, "25 tensors", "extra.00.weight", "extra.19.weight", "and 5 more")
    assert "lm_head" not in str(caught.value)
    assert "extra.20" not in str(caught.value)
    report = load(FakeModel(), checkpoint, names, ignored=(r"lm_head\.weight", r"extra\..*"))
    assert len(report.ignored) == 27
    with pytest.raises(CheckpointError):  # a pattern must match the whole name
        load(FakeModel(), checkpoint, names, ignored=("lm_head", "extra"))


def test_another_shape_names_tensor_expected_and_found(tmp_path: Path) -> None:
    tensors = random_llama(fresh_seed())
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = torch.zeros(INNER + 1, HIDDEN)
    tensors["model.norm.weight"] = torch.zeros(1, HIDDEN)
    checkpoint = open_toy(tmp_path, "hf", tensors)
    with pytest.raises(CheckpointError) as caught:
        load(FakeModel(0, 2), checkpoint, names)
    expect_error(caught, name, f"[{INNER}, {HIDDEN}]", f"[{INNER + 1}, {HIDDEN}]")
    expect_error(caught, "model.norm.weight", f"[{HIDDEN}]", f"[1, {HIDDEN}]", "2 tensors")


def test_dummy_weights_depend_on_seed_and_name_only() -> None:
    first, again, other = FakeModel(), FakeModel(), FakeModel()
    load_dummy(first, seed=3)
    load_dummy(again, seed=3)
    report = load_dummy(other, seed=4)
    assert report.param_bytes == sum(4 * tensor.numel() for tensor in random_llama(0).values())
    for name, layer in first.layers.items():
        for parameter, tensor in layer.filled.items():
            assert torch.equal(tensor, again.layers[name].filled[parameter])
            assert not torch.equal(tensor, other.layers[name].filled[parameter])
            middle = 1.0 if tensor.dim() == 1 else 0.0
            assert abs(tensor.mean() - middle) < 0.02
            assert 0.005 < tensor.std() < 0.05
    layers = first.layers
    assert not torch.equal(layers["0.qkv"].filled["weight"], layers["1.qkv"].filled["weight"])
    assert first.log[-1] == "finish head"


def test_export_writes_the_same_model(tmp_path: Path) -> None:
    tensors = random_llama(fresh_seed())
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    toy = ToyGguf(extra=(("add_chat_template", ("{{ messages }}",)),))
    source = open_checkpoint(str(toy.write(tmp_path / "m.gguf", tensors)))
    written = open_checkpoint(str(write_folder(source, tmp_path / "out", torch.bfloat16)))
    assert written.config == {**source.config, "torch_dtype": "bfloat16"}
    assert written.generation == source.generation
    assert written.chat_template == "{{ messages }}"
    tokenizer = written.load_tokenizer()
    assert tokenizer.to_str() == source.load_tokenizer().to_str()
    assert written.special_tokens(tokenizer) == source.special_tokens(tokenizer)
    from safetensors.torch import load_file

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
