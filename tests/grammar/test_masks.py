"""Masks on logits: on the host, as a device does it, and beside all other rules of a request."""

from __future__ import annotations

import random

import numpy as np
import torch

from octavo.sampling import masks
from octavo.sampling.masks import allows_only, apply_masks


def test_both_ways_keep_what_is_allowed() -> None:
    seed = random.randrange(2**31)
    draw = np.random.default_rng(seed)
    for vocab in (1, 31, 32, 33, 96, 1000):
        rows = int(draw.integers(1, 40))
        logits = torch.from_numpy(draw.standard_normal((rows, vocab), np.float32))
        masked = sorted(draw.choice(rows, int(draw.integers(1, rows + 1)), replace=False).tolist())
        words = draw.integers(-(2**31), 2**31, (len(masked), -(-vocab // 32)), np.int32)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab]
        expected = logits.clone()
        for row, allowed in zip(masked, bits, strict=True):
            for token in range(vocab):
                if not allowed[token]:
                    expected[row, token] = -torch.inf
        for way in (apply_masks, masks._on_device):
            found = logits.clone()
            way(found, masked, torch.from_numpy(words))
            assert torch.equal(found, expected), f"seed {seed} vocab {vocab}"


def test_allows_only() -> None:
    mask = np.zeros(3, np.int32)
    assert allows_only(mask, [])
    mask.view(np.uint32)[1] = 1 << 31
    assert allows_only(mask, [63])
    assert allows_only(mask, [63, 5])
    assert not allows_only(mask, [62])
    mask[0] = 2
    assert not allows_only(mask, [63])
    assert mask.tolist() == [2, -(2**31), 0]
