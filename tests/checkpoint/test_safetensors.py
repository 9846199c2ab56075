"""safetensors files: round trips, shards, and refusal of what is cut, damaged or inconsistent."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.checkpoint.safetensors_file import read_entries
from octavo.errors import CheckpointError
from octavo.weights.tensors import PLAIN, read_tensor
from tests.checkpoint.toys import expect_error, fresh_seed, random_llama, write_hf


@pytest.mark.parametrize("encoding", sorted(PLAIN))
def test_every_plain_encoding_round_trips(encoding: str, tmp_path: Path) -> None:
    torch.manual_seed(fresh_seed())
    tensor = (torch.randn(7, 5) * 10).to(PLAIN[encoding])
    scalar = torch.tensor(3.0).to(PLAIN[encoding])
    save_file({"x": tensor, "scalar": scalar, "none": tensor[:0]}, tmp_path / "a.safetensors")
    entries = read_entries(tmp_path / "a.safetensors")
    raw = torch.uint8
    assert torch.equal(read_tensor(entries["x"]).view(raw), tensor.view(raw))
    assert read_tensor(entries["scalar"]).shape == ()
    assert read_tensor(entries["scalar"]).float() == scalar.float()
    assert read_tensor(entries["none"]).shape == (0, 5)
    if encoding not in ("BOOL",):
        found = read_tensor(entries["x"], torch.float32)
        assert torch.equal(found, tensor.float())


def test_slices_are_slices(tmp_path: Path) -> None:
    seed = fresh_seed()
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors = {"x": torch.randn(40, 33), "v": torch.randn(17), "cube": torch.randn(6, 3, 10)}
    save_file(tensors, tmp_path / "a.safetensors")
    entries = read_entries(tmp_path / "a.safetensors")
    for _ in range(100):
        name = rng.choice(sorted(tensors))
        tensor = tensors[name]
        first, last = sorted(rng.randrange(tensor.shape[0] + 1) for _ in range(2))
        columns = None
        expected = tensor[first:last]
        if tensor.dim() > 1 and rng.random() < 0.7:
            left, right = sorted(rng.randrange(tensor.shape[-1] + 1) for _ in range(2))
            columns = slice(left, right)
            expected = expected[..., columns]
        found = read_tensor(entries[name], rows=slice(first, last), columns=columns)
        assert torch.equal(found, expected)
        assert found.is_contiguous()


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.float32)
    for padding in range(8):
        header = {"x": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}
        raw = json.dumps(header).encode() + b" " * padding
        file = tmp_path / f"{padding}.safetensors"
        file.write_bytes(len(raw).to_bytes(8, "little") + raw + values.numpy().tobytes())
        assert torch.equal(read_tensor(read_entries(file)["x"]), values)


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(1000)}, file)
    found = read_tensor(read_entries(file)["x"])
    save = bytearray(file.read_bytes())
    save[-4000:] = b"\x11" * 4000
    with file.open("r+b") as stream:
        stream.write(save)
    assert torch.equal(found, torch.zeros(1000))


def test_any_cut_is_refused(tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.randn(8, 8), "y": torch.randn(3)}, file)
    whole = file.read_bytes()
    for length in {0, 1, 7, 8, 9, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(30))}:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError) as caught:
            read_entries(file)
        expect_error(caught, str(file), str(length) if length >= 8 else "")
    file.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError) as caught:
        read_entries(file)
    expect_error(caught, str(file), str(len(whole)), str(len(whole) + 1))


def test_any_damage_is_a_checkpoint_error_or_harmless(tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.randn(8, 8), "y": torch.randn(3)}, file)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    refused: list[str] = []
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            for entry in read_entries(file).values():
                read_tensor(entry)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert all(str(file) in message for message in refused)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"x": 1}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "Q4_0", "shape": [32], "data_offsets": [0, 18]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"x": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
    ],
)
def test_bad_headers_are_refused(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(CheckpointError) as caught:
        read_entries(file)
    expect_error(caught, str(file))


def test_an_absurd_header_length_reads_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    for length in (1 << 63, 200_000_000, (1 << 64) - 1):
        file.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(CheckpointError) as caught:
            read_entries(file)
        expect_error(caught, str(length), "10")


def shard(folder: Path, count: int = 3) -> dict[str, torch.Tensor]:
    """A model over `count` files with an index."""
    tensors = random_llama(fresh_seed())
    write_hf(folder, {"x": torch.zeros(1)})
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index in range(count):
        file = f"model-{index + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[index::count]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def edit_index(folder: Path, name: str, shard_name: object) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"][name] = shard_name
    file.write_text(json.dumps(index))


def test_shards_are_one_model(tmp_path: Path) -> None:
    tensors = shard(tmp_path / "m")
    opened = open_checkpoint(str(tmp_path / "m"))
    assert opened.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(opened.tensors[name]), tensor)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(tmp_path / "m")
    (tmp_path / "m" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path / "m"))
    expect_error(caught, "model-00002-of-00003.safetensors", "1 of the shards")


def test_a_tensor_that_no_shard_holds_is_named(tmp_path: Path) -> None:
    shard(tmp_path / "m")
    edit_index(tmp_path / "m", "ghost.weight", "model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path / "m"))
    expect_error(caught, "ghost.weight", "1 tensors")


def test_a_tensor_in_another_shard_than_the_index_says_is_named(tmp_path: Path) -> None:
    shard(tmp_path / "m")
    name = "model.norm.weight"
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    others = set(index["weight_map"].values()) - {index["weight_map"][name]}
    edit_index(tmp_path / "m", name, others.pop())
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path / "m"))
    expect_error(caught, name)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 7, None])
def test_the_index_cannot_leave_the_folder(name: object, tmp_path: Path) -> None:
    shard(tmp_path / "m")
    edit_index(tmp_path / "m", "model.norm.weight", name)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path / "m"))
    expect_error(caught, "model.safetensors.index.json")


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m", {"x": torch.zeros(1)})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    expect_error(caught, "pytorch_model.bin", "safetensors")


def test_a_file_that_shrinks_after_opening_is_an_error(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m", random_llama(fresh_seed()))
    opened = open_checkpoint(str(folder))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError) as caught:
        read_tensor(opened.tensors["model.norm.weight"])
    expect_error(caught, str(file), "model.norm.weight")
