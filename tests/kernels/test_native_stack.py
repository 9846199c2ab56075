"""The fused stack is the decoder over the same kernels to the bit, in any batch, cut or not."""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.native import NativeAttention
from octavo.attention.sdpa import SdpaAttention
from octavo.kernels.reference import reference_ops
from octavo.layers.build import Build
from octavo.models.decoder import Decoder
from octavo.models.fused import FusedDecoder, fuse
from octavo.models.load import build_model
from octavo.models.spec import ModelSpec, RopeSpec
from tests.kernels.native_parts import native_library, native_ops
from tests.models.driver import Driver, Row, make_build

VOCABULARY = 101


@pytest.fixture(autouse=True)
def seed() -> None:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)
    random.seed(value)


def spec_of(**changes: Any) -> ModelSpec:
    head = changes.get("head_dim", 64)
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=3,
        hidden_size=96,
        intermediate_size=160,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_model_len=700,
        rms_eps=1e-5,
        rope=RopeSpec(1e4, head),
        tied=True,
    )
    return replace(spec, **changes)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied, all biases": {
        "tied": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    },
    "head norms, windows here and there": {
        "qk_norm": True,
        "window": 19,
        "window_layers": (True, False, True),
    },
    "heads that are no whole panels": {"head_dim": 48, "qkv_bias": True, "qk_norm": True},
    "an inner size that is no whole panels": {"intermediate_size": 90, "mlp_bias": True},
    "one key head": {"num_kv_heads": 1, "head_dim": 32},
}


def native_build(
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    threads: int,
    block: int = 16,
    int8: bool = False,
) -> Build:
    return make_build(
        spec,
        dtype=dtype,
        block_size=block,
        ops=native_ops(dtype, threads, int8=int8),
        attention=NativeAttention(native_library(threads)),
    )


def filled(spec: ModelSpec, build: Build) -> Decoder:
    """Random weights, the same ones for the same state of the generator."""
    decoder = build_model(spec, build)
    for name, layer in decoder.named_layers():
        for parameter, param in layer.param_specs().items():
            tensor = torch.randn(param.shape) * param.shape[-1] ** -0.5
            if "norm" in name:
                tensor = 1 + tensor
            layer.set_param(parameter, tensor.to(param.dtype))
    decoder.finish()
    return decoder


def prompts() -> list[list[int]]:
    return [[random.randrange(VOCABULARY) for _ in range(n)] for n in (300, 33, 1, 70, 17)]


def fused(decoder: Decoder, build: Build) -> FusedDecoder:
    result = fuse(decoder, build.ops)
    assert isinstance(result, FusedDecoder), result
    return result


def run(driver: Driver, tokens: list[list[int]], *, chunk: int = 0) -> list[Tensor]:
    """Logits of every token: all rows together, or each alone in random chunks."""
    rows = [Row(list(ids)) for ids in tokens]
    if chunk:
        return [driver.run(row, chunk=chunk) for row in rows]
    return driver.step([(row, len(row.tokens)) for row in rows], every=True)


KINDS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]


@pytest.mark.parametrize(("dtype", "int8"), KINDS)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("block", [1, 16, 33])
def test_it_is_the_decoder_to_the_bit(
    dtype: torch.dtype, int8: bool, case: str, block: int
) -> None:
    spec = spec_of(**CASES[case])
    build = native_build(spec, dtype, threads=2, block=block, int8=int8)
    decoder = filled(spec, build)
    tokens = prompts()
    size = 900 if block == 1 else 100
    plain = run(Driver(decoder, build, num_blocks=size, seed=1), tokens)

    driver = Driver(fused(decoder, build), build, num_blocks=size, seed=2)
    for found, wanted in zip(run(driver, tokens), plain, strict=True):
        assert torch.equal(found, wanted)

    driver = Driver(fused(decoder, build), build, num_blocks=size, seed=3)
    for found, wanted in zip(run(driver, tokens, chunk=37), plain, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("dtype", "int8"), KINDS)
def test_threads_change_nothing(dtype: torch.dtype, int8: bool) -> None:
    spec = spec_of()
    state, tokens = torch.get_rng_state(), prompts()
    results = []
    for threads in (1, 2, 5):
        torch.set_rng_state(state)
        build = native_build(spec, dtype, threads=threads, int8=int8)
        decoder = filled(spec, build)
        driver = Driver(fused(decoder, build), build, num_blocks=100, seed=threads)
        results.append(torch.cat(run(driver, tokens)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_it_is_near_plain_torch(dtype: torch.dtype, error: float) -> None:
    """Logits are of size 1; 30 roundings to bf16 on the way make some hundredths."""
    spec = spec_of(qk_norm=True, qkv_bias=True)
    state, tokens = torch.get_rng_state(), prompts()
    build = native_build(spec, dtype, threads=2)
    decoder = filled(spec, build)
    driver = Driver(fused(decoder, build), build, num_blocks=100, seed=1)
    torch.set_rng_state(state)
    plain = make_build(spec, dtype=dtype)
    reference = Driver(filled(spec, plain), plain, num_blocks=100, seed=1)
    found, wanted = torch.cat(run(driver, tokens)), torch.cat(run(reference, tokens))
    assert (found - wanted).abs().max().item() < error


def test_hidden_states_and_the_head_apart() -> None:
    spec = spec_of()
    build = native_build(spec, torch.float32, threads=2)
    decoder = filled(spec, build)
    driver = Driver(decoder, build, num_blocks=100, seed=1)
    batch, ids = driver._batch([], [(Row(list(range(60))), 60)], every=True)
    model = fused(decoder, build)
    hidden = model.hidden(ids, batch)
    assert torch.equal(hidden, decoder.hidden(ids, batch))
    assert torch.equal(model.logits(hidden), model.forward(ids, batch))
    assert model.spec is spec


def test_what_cannot_be_fused_says_why() -> None:
    spec = spec_of()
    plain = make_build(spec)
    assert "no fused stack" in str(fuse(filled(spec, plain), reference_ops(torch.float32)))
    build = replace(native_build(spec, torch.float32, threads=1), attention=SdpaAttention())
    assert "sdpa" in str(fuse(filled(spec, build), build.ops))
    small = spec_of(head_dim=24)
    assert "heads of 24" in str(
        fuse(filled(small, native_build(small, torch.float32, threads=1)), build.ops)
    )


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("positions", 700, "position"),
        ("slot_map", 100 * 16, "slot"),
        ("block_table", 100, "block table"),
        ("kv_lens", 10**6, "block table"),
        ("q_indptr", 61, "tokens do not agree"),
        ("sample_rows", 60, "sampled row"),
    ],
)
def test_a_step_that_would_read_out_of_bounds_is_refused(
    field: str, value: int, reason: str
) -> None:
    spec = spec_of()
    build = native_build(spec, torch.float32, threads=1)
    decoder = filled(spec, build)
    driver = Driver(decoder, build, num_blocks=100, seed=1)
    batch, ids = driver._batch([], [(Row(list(range(60))), 60)], every=False)
    model = fused(decoder, build)
    tensor = getattr(batch, field).clone()
    tensor.view(-1)[-1 if field != "block_table" else 0] = value
    with pytest.raises(ValueError, match=reason):
        model.forward(ids, replace(batch, **{field: tensor}))
    with pytest.raises(ValueError, match="token id"):
        model.forward(ids + VOCABULARY, batch)
    assert model.forward(ids, batch).isfinite().all()
