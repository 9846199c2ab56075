"""Block formats against the gguf package's own dequantization, bit for bit, on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from octavo.checkpoint.records import ENCODINGS
from octavo.weights.gguf_blocks import CHUNK_WEIGHTS, DECODERS, dequantize

# Where the float16 fields lie in each block; random bytes there could be infinite or NaN.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(encoding: str, count: int, rng: np.random.Generator) -> np.ndarray:
    blocks = rng.integers(0, 256, (count, ENCODINGS[encoding].size), dtype=np.uint8)
    for start in HALVES[encoding]:
        scale = rng.normal(0, 0.02, count).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8).reshape(count, 2)
    return blocks


@pytest.mark.parametrize("encoding", sorted(DECODERS))
def test_equals_the_reference(encoding: str) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    # More than one chunk, and a last chunk that is not full.
    count = CHUNK_WEIGHTS // ENCODINGS[encoding].block + 3
    blocks = random_blocks(encoding, count, rng)
    kind = gguf.GGMLQuantizationType[encoding]
    expected = torch.from_numpy(gguf.dequantize(blocks, kind))
    found = dequantize(torch.from_numpy(blocks), encoding, torch.float32)
    assert torch.equal(found, expected)
    found = dequantize(torch.from_numpy(blocks), encoding, torch.bfloat16)
    assert torch.equal(found, expected.to(torch.bfloat16))


def test_sizes_are_the_reference_s() -> None:
    for name in DECODERS:
        kind = gguf.GGMLQuantizationType[name]
        assert gguf.GGML_QUANT_SIZES[kind] == (ENCODINGS[name].block, ENCODINGS[name].size)
