"""Embeddings of the real model beside those of transformers: every kind, chunk and batch."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import openai
import pytest
import torch

from octavo import LLM, PoolingParams
from octavo.errors import InvalidRequest
from tests.e2e.servers import RunningServer

pytestmark = pytest.mark.model
# bfloat16 against float32; unrelated texts of this model are closer than one would think, about
# 0.9, so the bound is far below what another text or another pooling would give.
CLOSE = 0.998
# float32 on both sides. Of random tokens bfloat16 says little: transformers' own vectors of two
# such tokens are at times 0.6 from those in float32.
SAME = 1 - 1e-5


def oracle(folder: Path, prompts: list[list[int]], kind: str) -> np.ndarray:
    """Vectors of length 1, computed one prompt at a time in float32."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    rows = []
    with torch.inference_mode():
        for ids in prompts:
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
            rows.append((hidden.mean(0) if kind == "mean" else hidden[-1]).numpy())
    return np.stack([row / np.linalg.norm(row) for row in rows])


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_vectors_are_those_of_the_reference(smollm2_folder: Path, kind: str) -> None:
    """Prompts of many chunks, some with a common beginning, twice, so that prefixes are cached."""
    dice = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    shared = [dice.randrange(1000, 40_000) for _ in range(64)]
    prompts = [[dice.randrange(1000, 40_000) for _ in range(n)] for n in (1, 2, 15, 33, 150)]
    # Long tails: rounding must not move a mean further than a tail does.
    prompts += [[*shared, *(dice.randrange(1000, 40_000) for _ in range(n))] for n in (60, 90)]
    llm = LLM(
        str(smollm2_folder),  # whose weights are rounded to bfloat16, and those of the file are not
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    )
    try:
        params = PoolingParams(pooling=kind)
        made = [llm.embed(prompts, pooling_params=params, use_tqdm=False) for _ in range(2)]
        with pytest.raises(InvalidRequest, match="maximum context length"):
            llm.embed([[5] * 256], use_tqdm=False)
    finally:
        llm.shutdown()
    expected = oracle(smollm2_folder, prompts, kind)
    for outputs in made:
        found = np.array([output.outputs.embedding for output in outputs])
        assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
        likeness = (found * expected).sum(1)
        assert (likeness > SAME).all(), likeness
        others = found @ expected.T - np.eye(len(prompts))
        assert (others.max(1) < likeness).all(), "each is closest to its own"
    if kind == "last":
        assert max(output.num_cached_tokens or 0 for output in made[1]) > 0


def test_over_http_as_the_client_asks(
    client: openai.OpenAI, server: RunningServer, smollm2_folder: Path
) -> None:
    """The client asks for base64 by itself; answers run beside it."""
    texts = ["The capital of France is Paris.", "Owls hoot at night.", "Paris is in France."]
    stream = client.completions.create(
        model="small", prompt="1, 2,", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    made = client.embeddings.create(model="small", input=texts, extra_body={"pooling": "mean"})
    plain = client.embeddings.create(
        model="small", input=texts, encoding_format="float", extra_body={"pooling": "mean"}
    )
    stream.close()
    vectors = np.array([entry.embedding for entry in made.data])
    assert np.allclose(vectors, [entry.embedding for entry in plain.data], atol=1e-6)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    expected = oracle(smollm2_folder, [tokenizer(text).input_ids for text in texts], "mean")
    assert ((vectors * expected).sum(1) > CLOSE).all()
    assert made.usage.prompt_tokens == sum(len(tokenizer(text).input_ids) for text in texts)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="small", input="x", dimensions=64)
