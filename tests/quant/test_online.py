"""Weights quantized while they load, and 4-bit checkpoints in native code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config import WorkerConfig
from octavo.worker.score import Scorer
from tests.kernels.native_parts import native_library
from tests.quant.models import Quantized, quantized
from tests.quant.packers import awq, gptq
from tests.quant.test_produce import plain_folder


@pytest.fixture(autouse=True)
def native() -> None:
    library = native_library(1)
    if library.refuse(torch.bfloat16, int8=True):
        pytest.skip(library.refuse(torch.bfloat16, int8=True))


def score(folder: Path, ids: list[int], **options: Any) -> tuple[Tensor, str]:
    config = WorkerConfig(model=str(folder), **{"dtype": "bfloat16", "threads": 1, **options})
    scorer = Scorer(config, 64)
    return scorer.logits(ids), "\n".join(scorer.notes)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("quantization", "limit"), [("int8", 0.15), ("int4", 0.6), ("fp8", 0.25), (None, 0.05)]
)
def test_a_plain_checkpoint(quantization: str | None, limit: float, tmp_path: Path) -> None:
    checkpoint, twin = plain_folder(tmp_path / "m", "llama")
    prompt = twin.prompt(40)
    found, notes = score(checkpoint.path, prompt, quantization=quantization)
    assert 1e-4 < error(found, twin.logits(prompt)) < limit
    if quantization == "int4":
        assert "multiplied in 4 bits by native kernels" in notes
    if quantization == "fp8":
        assert "made bfloat16 while they load" in notes


@pytest.mark.parametrize("act_order", [False, True])
def test_codes_of_a_checkpoint_stay_as_they_are(act_order: bool, tmp_path: Path) -> None:
    """Only activations are rounded: nearer than rounding the weights anew would be."""
    form = gptq(32, act_order=True, symmetric=False) if act_order else awq(32)
    model: Quantized = quantized(form, tmp_path / "m")
    prompt = model.twin.prompt(40)
    exact = model.twin.logits(prompt)
    plain, notes = score(model.folder, prompt)
    assert "made bfloat16 while they load" in notes
    small, notes = score(model.folder, prompt, quantization="int4")
    assert "multiplied in 4 bits by native kernels" in notes
    assert error(plain, exact) < 0.05
    assert error(small, exact) < 0.15


@pytest.mark.parametrize("cache", ["fp8_e4m3", "fp8_e5m2"])
def test_a_cache_of_bytes(cache: str, tmp_path: Path) -> None:
    checkpoint, twin = plain_folder(tmp_path / "m", "llama")
    prompt = twin.prompt(40)
    exact = twin.logits(prompt)
    for kernels in ("native", "reference"):
        found, _ = score(checkpoint.path, prompt, kv_cache_dtype=cache, kernels=kernels)
        assert 1e-3 < error(found, exact) < 0.3
