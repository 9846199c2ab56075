"""Routed experts and latent attention by themselves: routing, products, what is refused or left."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.attention.base import LatentFactors
from octavo.attention.mla_sdpa import LatentSdpaAttention, expands
from octavo.attention.select import select
from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.errors import CheckpointError, ConfigError
from octavo.kernels import reference
from octavo.kernels.experts import ClampedExperts, LoopedExperts
from octavo.kernels.ops import ClampedForm
from octavo.layers.experts import route
from octavo.models.load import attention_need, build_model, load_weights
from octavo.models.quantization import read_scheme
from octavo.models.registry import read_spec
from octavo.models.spec import MoeSpec
from octavo.parallel.mesh import Mesh
from tests.models.driver import Driver, Row, fill, make_build, parts_of, start
from tests.models.twins import CASES, make_twin, shared_twin

MOE = MoeSpec(num_experts=8, top_k=3, intermediate_size=16, layers=(True,))


def seeded() -> int:
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return seed


def test_routing_by_hand() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0, 5.0, 4.0, -2.0]])
    experts, weights = route(logits, MOE, None)
    assert sorted(experts[0].tolist()) == [1, 5, 6]
    total = sum(math.exp(value) for value in logits[0].tolist())
    expected = [math.exp(logits[0, expert]) / total for expert in experts[0].tolist()]
    torch.testing.assert_close(weights[0], torch.tensor(expected))
    _, weights = route(logits, replace(MOE, renormalise=True, scale=2.5), None)
    torch.testing.assert_close(weights.sum(), torch.tensor(2.5))
    # The last two pairs hold the best single scores; expert 1 is in neither.
    grouped = replace(MOE, groups=4, top_groups=2, top_k=4)
    assert sorted(route(logits, grouped, None)[0][0].tolist()) == [4, 5, 6, 7]


def test_a_correction_moves_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5]])
    spec = replace(MOE, num_experts=4, top_k=1, scoring="sigmoid", correction=True)
    experts, weights = route(logits, spec, torch.tensor([0.0, 0.0, 0.0, 9.0]))
    assert experts.tolist() == [[3]]
    torch.testing.assert_close(weights, logits[:, 3:].sigmoid())
    # Groups are scored by their best two together: the first pair's two beat the second's best.
    pairs = replace(spec, groups=2, top_groups=1)
    assert route(logits, pairs, torch.tensor([2.0, 2.0, 3.0, -3.0]))[0].tolist() == [[0]]


@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_products_equal_the_reference(tokens: int) -> None:
    seeded()
    count, hidden, width = 8, 32, 16
    gate_up, down = torch.randn(count, 2 * width, hidden), torch.randn(count, hidden, width)
    x = torch.randn(tokens, hidden)
    chosen = torch.stack([torch.randperm(count)[:3] for _ in range(tokens)])
    weights = torch.rand(tokens, 3)
    expected = reference.experts(gate_up, down)(x, chosen, weights)
    by_hand = torch.zeros_like(x)
    for token in range(tokens):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            by_hand[token] += weight * (down[expert] @ (torch.sigmoid(gate) * gate * up))
    torch.testing.assert_close(expected, by_hand, rtol=1e-4, atol=1e-3)
    looped = LoopedExperts(reference.reference_ops(torch.float32), gate_up, down)
    torch.testing.assert_close(looped(x, chosen, weights), expected, rtol=1e-4, atol=1e-3)


def test_weights_of_experts_that_are_not_chosen_are_not_read() -> None:
    seeded()
    gate_up, down = torch.randn(4, 16, 8), torch.randn(4, 8, 8)
    gate_up[2], down[2] = torch.nan, torch.nan
    chosen = torch.tensor([[0, 3], [3, 1]])
    ops = reference.reference_ops(torch.float32)
    for found in (reference.experts(gate_up, down), LoopedExperts(ops, gate_up, down)):
        assert bool(found(torch.randn(2, 8), chosen, torch.rand(2, 2)).isfinite().all())


def test_grouped_products_name_a_width_that_they_cannot_read() -> None:
    form = ClampedForm(torch.zeros(2, 12), torch.zeros(2, 8), 1.702, 7.0)
    with pytest.raises(ConfigError, match="intermediate size on one rank is 6"):
        ClampedExperts(torch.zeros(2, 12, 8), torch.zeros(2, 8, 6), form)


def test_a_token_alone_and_among_others_is_the_same_bits() -> None:
    """Native products give a row the same bits in any batch, so experts must too."""
    seeded()
    need = attention_need(
        read_spec(shared_twin("qwen3-moe").config),
        mesh=Mesh.single(),
        device="cpu",
        block_size=16,
        dtype=torch.float32,
    )
    ops, _ = parts_of("native", need)
    product = LoopedExperts(ops, torch.randn(8, 48, 64), torch.randn(8, 64, 24))
    x, weights = torch.randn(19, 64), torch.rand(19, 3)
    chosen = torch.stack([torch.randperm(8)[:3] for _ in range(19)])
    whole = product(x, chosen, weights)
    for row in (0, 7, 18):
        own = slice(row, row + 1)
        assert torch.equal(product(x[own], chosen[own], weights[own]), whole[own])


def test_experts_in_mxfp4_are_refused_before_weights_are_read() -> None:
    config = shared_twin("gpt-oss").config
    with pytest.raises(ConfigError, match="mxfp4"):
        read_scheme({**config, "quantization_config": {"quant_method": "mxfp4"}})


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("gpt-oss", "layer_types", ["chunked_attention"] * 3),
        ("gpt-oss", "swiglu_limit", 0),
        ("gpt-oss", "hidden_act", "gelu"),
        ("gpt-oss", "num_experts_per_tok", 7),
        ("mixtral", "num_experts_per_tok", 6),
        ("mixtral", "num_local_experts", None),
        ("mixtral", "hidden_act", "gelu"),
        ("qwen2-moe", "use_sliding_window", True),
        ("qwen2-moe", "shared_expert_intermediate_size", 0),
        ("qwen3-moe", "mlp_only_layers", ["1"]),
        ("qwen3-moe", "norm_topk_prob", 1),
        ("deepseek-v2", "topk_method", "noaux_tc"),
        ("deepseek-v2", "scoring_func", "sigmoid"),
        ("deepseek-v2", "norm_topk_prob", True),
        ("deepseek-v2", "n_group", 3),
        ("deepseek-v2", "topk_group", 1),
        ("deepseek-v2", "topk_group", 5),
        ("deepseek-v2", "moe_layer_freq", 2),
        ("deepseek-v2", "attention_bias", True),
        ("deepseek-v2", "num_key_value_heads", 2),
        ("deepseek-v2-lite", "qk_rope_head_dim", 7),
        ("deepseek-v2-lite", "kv_lora_rank", None),
        ("deepseek-v3", "n_group", 8),
        ("deepseek-v3", "topk_method", "greedy"),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v3", "rope_interleave", "yes"),
    ],
)
def test_refused_by_name(case: str, key: str, value: object) -> None:
    config: dict[str, Any] = {**shared_twin(case).config, key: value}
    with pytest.raises(ConfigError) as caught:
        read_spec(config)
    assert caught.value.option == key
    assert key in caught.value.message


def test_draft_layers_are_left_in_the_file(tmp_path: Path) -> None:
    """Those the config tells of are accounted for; any more are an error."""
    twin = make_twin("deepseek-v3")
    config = {**twin.config, "num_nextn_predict_layers": 1}
    spec = read_spec(config)
    assert spec.extra_layers == 1
    twin.model.save_pretrained(tmp_path)
    extra = {f"model.layers.{spec.num_layers}.eh_proj.weight": torch.ones(3, 3)}
    state = {name: tensor.contiguous() for name, tensor in {**twin.state, **extra}.items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(tmp_path))
    decoder = build_model(spec, make_build(spec))
    assert load_weights(decoder, checkpoint).ignored == tuple(extra)
    without = replace(spec, extra_layers=0)
    with pytest.raises(CheckpointError, match="eh_proj"):
        load_weights(build_model(without, make_build(without)), checkpoint)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("deepseek")])
def test_backends_without_latent_attention_say_so(case: str) -> None:
    spec = read_spec(shared_twin(case).config)
    need = attention_need(
        spec, mesh=Mesh.single(), device="cpu", block_size=16, dtype=torch.float32
    )
    backend, notes = select(need)
    assert backend.name == "mla_sdpa"
    assert any("not native: it has no multi-head latent attention" in note for note in notes)
    with pytest.raises(ConfigError, match="no multi-head latent attention"):
        select(need, "sdpa")
    with pytest.raises(ConfigError, match="latent attention alone"):
        select(replace(need, latent=0), "mla_sdpa")
    for change in ({"window": 4}, {"sinks": True}, {"key_scale": 2.0}, {"num_kv_heads": 2}):
        assert LatentSdpaAttention().supports(replace(need, **change)) is not None


def test_long_prompts_cross_query_blocks_over_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.attention.mla_sdpa.QUERY_ROWS", 60)
    twin = shared_twin("deepseek-v2")
    spec = read_spec(twin.config)
    build = make_build(spec)
    decoder = build_model(spec, build)
    driver = Driver(fill(decoder, twin.state), build, num_blocks=40, seed=twin.seed)
    prompt = twin.prompt(100)
    found = driver.run(Row(list(prompt)), chunk=70)
    torch.testing.assert_close(found, twin.logits(prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3-halves"])
@pytest.mark.parametrize("always", [True, False])
def test_keys_and_values_may_be_made_or_not(
    case: str, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in chunks and after a shared prefix; a head at a time where they are made."""
    monkeypatch.setattr("octavo.attention.mla_sdpa.expands", lambda *_: always)
    monkeypatch.setattr("octavo.attention.mla_sdpa.EXPANDED", 1)
    twin = shared_twin(case)
    driver = start(read_spec(twin.config), twin.state, seed=twin.seed)
    first = Row(twin.prompt(50))
    exact = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(driver.run(first), twin.logits(first.tokens), **exact)
    hit = driver.share(first, first.tokens[:40] + twin.prompt(30))
    assert hit.computed == 32
    wanted = twin.logits(hit.tokens)[32:]
    torch.testing.assert_close(driver.run(hit, chunk=7), wanted, **exact)


def test_making_keys_and_values_is_chosen_by_the_work_that_it_saves() -> None:
    factors = LatentFactors(torch.empty(16, 128, 512), torch.empty(16, 512, 128))
    assert expands(0, 2, factors)  # nothing is made for the cache's sake
    assert not expands(1024, 32, factors)
    assert expands(1024, 128, factors)
    assert expands(30_000, 512, factors)
    assert not expands(0, 512, LatentFactors(torch.empty(4, 9, 8), torch.empty(4, 8, 9)))


@pytest.mark.parametrize("block_size", [1, 16])
def test_latents_in_8_bits_answer_as_rounding_allows(block_size: int) -> None:
    """The cache holds FP8, without NaN from unwritten cells, and the logits stay near."""
    twin = shared_twin("deepseek-v2")
    spec = read_spec(twin.config)
    need = attention_need(
        spec,
        mesh=Mesh.single(),
        device="cpu",
        block_size=block_size,
        dtype=torch.float32,
        cache_dtype=torch.float8_e4m3fn,
    )
    build = replace(make_build(spec, block_size=block_size), need=need)
    decoder = fill(build_model(spec, build), twin.state)
    driver = Driver(decoder, build, num_blocks=400, seed=twin.seed)
    assert driver.kv.keys[0].dtype == torch.float8_e4m3fn
    prompt = twin.prompt(60)
    found, exact = driver.run(Row(list(prompt)), chunk=9), twin.logits(prompt)
    error = float((found - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.2
