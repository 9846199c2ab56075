"""Grammars on a GPU: masks as on the host, and whole answers as the CPU gives them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.sampling.masks import apply_masks
from octavo.types import Grammar
from tests.gpu.test_worker import nearly, serve, start
from tests.grammar.test_worker import check, compiled, demanding, vocabulary
from tests.worker.tiny import write_tiny


@pytest.fixture(autouse=True)
def _gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")


@pytest.mark.parametrize(("rows", "vocab"), [(1, 96), (7, 1001), (64, 151_936)])
def test_masks_are_those_of_the_host(
    device: torch.device, seed: int, rows: int, vocab: int
) -> None:
    draw = np.random.default_rng(seed)
    logits = torch.from_numpy(draw.standard_normal((2 * rows, vocab), np.float32))
    masked = sorted(draw.choice(2 * rows, rows, replace=False).tolist())
    words = torch.from_numpy(draw.integers(-(2**31), 2**31, (rows, -(-vocab // 32)), np.int32))
    on_device = logits.to(device)
    apply_masks(on_device, masked, words.to(device))
    apply_masks(logits, masked, words)
    assert torch.equal(on_device.cpu(), logits)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_those_of_the_cpu(tmp_path: Path, seed: int, depth: int, eager: bool) -> None:
    """In float32, with graphs and without, ahead or not, with preemptions."""
    grammars: list[Grammar] = compiled()
    folder = write_tiny(tmp_path, seed=1)
    requests, forms = demanding(grammars, random.Random(seed), 24)
    executor, info = start(folder, "cuda", enforce_eager=eager, vocabulary=vocabulary())
    got = serve(executor, info, requests, depth=depth)
    assert check(got, forms, f"seed {seed}") > 0
    cpu, cpu_info = start(folder, "cpu", vocabulary=vocabulary())
    expected = serve(cpu, cpu_info, requests, depth=1)
    for request in requests:
        nearly(got[request.id], expected[request.id])
