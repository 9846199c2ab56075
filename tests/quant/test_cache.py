"""A cache of 8-bit floats: twice the tokens, scales from the checkpoint, near the plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.config import WorkerConfig
from octavo.errors import CheckpointError
from octavo.models.load import set_cache_scales
from octavo.worker.worker import Worker
from tests.quant.models import Quantized, load, quantized
from tests.quant.packers import fp8_channel


@pytest.fixture
def model(tmp_path: Path) -> Quantized:
    """With scales of keys and values in both layers."""
    made = quantized(fp8_channel(), tmp_path / "m")
    add(made, {"model.layers.0.self_attn.k_scale": 0.5, "model.layers.1.self_attn.v_scale": 0.25})
    return made


def add(model: Quantized, scales: dict[str, float]) -> None:
    file = model.folder / "model.safetensors"
    tensors = load_file(str(file))
    save_file({**tensors, **{name: torch.tensor(v) for name, v in scales.items()}}, str(file))


def blocks(model: Quantized, **changes: object) -> tuple[int, str]:
    config = WorkerConfig(
        model=str(model.folder),
        max_model_len=64,
        kv_cache_memory_bytes=1 << 20,
        **{"dtype": "float32", "threads": 1, **changes},
    )
    info = Worker(config).load()
    return info.num_blocks, "\n".join(info.notes)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_bytes_hold_more_tokens(model: Quantized, name: str, kernels: str) -> None:
    plain, notes = blocks(model, kernels=kernels)
    assert "float8" not in notes
    small, notes = blocks(model, kernels=kernels, kv_cache_dtype=name)
    assert small == 4 * plain  # of float32
    assert "scales of 2 layers from the checkpoint" in notes


def test_scales_reach_the_layers(model: Quantized) -> None:
    decoder, _ = load(model.folder)
    set_cache_scales(decoder, open_checkpoint(str(model.folder)))
    needs = [block.attention.need for block in decoder.blocks]
    assert [(need.key_scale, need.value_scale) for need in needs] == [(0.5, 1.0), (1.0, 0.25)]


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_must_be_a_number_above_0(model: Quantized, value: float) -> None:
    add(model, {"model.layers.0.self_attn.v_scale": value})
    decoder, _ = load(model.folder)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.v_scale"):
        set_cache_scales(decoder, open_checkpoint(str(model.folder)))
