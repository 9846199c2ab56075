"""Rope tables beyond what the parity twins see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.layers.rope import attention_gain, head_order, rope_frequencies, rope_table
from octavo.models.registry import read_spec
from octavo.models.spec import RopeSpec
from tests.models.twins import make_twin

PLAIN = RopeSpec(10000.0, 64)


def test_table_is_cosines_then_sines() -> None:
    table = rope_table(PLAIN, 50)
    assert table.shape == (50, 64)
    assert table.dtype == torch.float32
    for position, pair in ((0, 0), (7, 3), (49, 31)):
        angle = position * 10000.0 ** (-2 * pair / 64)
        assert table[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-5)
        assert table[position, pair + 32].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_dynamic_equals_transformers_at_the_length_of_the_table() -> None:
    """Beyond the trained length its base grows with the length; ours is that of the longest."""
    twin = make_twin("llama-dynamic")
    twin.logits(twin.prompt(400))
    theirs = twin.model.model.rotary_emb.inv_freq
    found = rope_frequencies(read_spec(twin.config).rope, 400)
    torch.testing.assert_close(found, theirs, rtol=1e-6, atol=0)


def test_dynamic_is_default_up_to_the_trained_length() -> None:
    dynamic = replace(PLAIN, kind="dynamic", factor=4.0, original_max_len=100)
    assert torch.equal(rope_table(dynamic, 100), rope_table(PLAIN, 100))
    assert not torch.equal(rope_table(dynamic, 101)[:100], rope_table(PLAIN, 100))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 40.0, "beta_fast": 24.0, "beta_slow": 1.5},
        {
            "rope_type": "longrope",
            "short_factor": [1 + pair / 100 for pair in range(64)],
            "long_factor": [1 + pair for pair in range(64)],
        },
    ],
)
def test_frequencies_of_real_sizes_equal_transformers(scaling: dict[str, Any]) -> None:
    """Heads of 128 and long contexts, where the ramps have many steps."""
    trained = {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={**trained, **scaling},
    )
    spec = read_spec({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope
    theirs = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(rope_frequencies(spec, 1), theirs.inv_freq, rtol=1e-6, atol=0)
    assert attention_gain(spec) == pytest.approx(theirs.attention_scaling)


def test_longrope_goes_by_the_longest_context() -> None:
    short, long = (1.0, 2.0), (3.0, 4.0)
    spec = RopeSpec(100.0, 4, "longrope", 2.0, 50, short_factors=short, long_factors=long)
    plain = rope_frequencies(replace(spec, kind="default"), 1)
    torch.testing.assert_close(plain / rope_frequencies(spec, 50), torch.tensor(short))
    torch.testing.assert_close(plain / rope_frequencies(spec, 51), torch.tensor(long))


def test_pairs_that_do_not_turn_stand_still() -> None:
    spec = RopeSpec(100.0, 4, "yarn", 2.0, 50, width=10, neighbours=True)
    table = rope_table(spec, 7)
    whole = rope_table(replace(spec, width=0), 7)
    assert torch.equal(table[:, [0, 1, 5, 6]], whole)
    assert bool((table[:, 2:5] == 1).all())
    assert bool((table[:, 7:] == 0).all())
    order = head_order(spec)
    assert order is not None
    assert order.tolist() == [0, 2, 4, 5, 6, 1, 3, 7, 8, 9]
    assert head_order(PLAIN) is None


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_short_waves_are_kept_and_long_ones_divided(kind: str) -> None:
    spec = RopeSpec(500000.0, 128, "llama3", 8.0, 8192)
    spec = spec if kind == "llama3" else replace(spec, kind="yarn")
    ratio = rope_frequencies(replace(spec, kind="default"), 1) / rope_frequencies(spec, 1)
    assert ratio[0].item() == pytest.approx(1.0)
    assert ratio[-1].item() == pytest.approx(8.0)
    assert bool((ratio.diff() >= -1e-4).all())


def test_gain_is_yarns_alone() -> None:
    assert attention_gain(PLAIN) == 1.0
    yarn = replace(PLAIN, kind="yarn", factor=4.0, original_max_len=64)
    assert attention_gain(yarn) == pytest.approx(1 + 0.1 * math.log(4))
    assert attention_gain(replace(yarn, attention_factor=1.5)) == 1.5
    assert rope_table(replace(yarn, attention_factor=1.5), 3)[0, 0].item() == 1.5
