"""A saved twin is read from its folder and answers like the original."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.errors import CheckpointError, ConfigError
from octavo.models.load import build_model, load_weights
from octavo.models.registry import read_spec
from octavo.weights.loader import load_dummy
from tests.models.driver import Driver, Row, make_build
from tests.models.twins import CASES, make_twin


@pytest.mark.parametrize("case", CASES)
def test_saved_twin_is_equal(case: str, tmp_path: Path) -> None:
    twin = make_twin(case)
    twin.model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    build = make_build(read_spec(checkpoint.config))
    seen: list[tuple[int, int]] = []
    decoder = build_model(read_spec(checkpoint.config), build)
    load_weights(decoder, checkpoint, progress=lambda *done: seen.append(done))
    assert seen[-1][0] == seen[-1][1] > 0
    prompt = twin.prompt(33)
    found = Driver(decoder, build, num_blocks=20, seed=twin.seed).run(Row(list(prompt)))
    torch.testing.assert_close(found, twin.logits(prompt), rtol=1e-4, atol=1e-4)


def test_weights_and_config_that_do_not_belong_together(tmp_path: Path) -> None:
    make_twin("llama-biases").model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "mlp_bias": False}))
    checkpoint = open_checkpoint(str(tmp_path))
    build = make_build(read_spec(checkpoint.config))
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.bias"):
        load_weights(build_model(read_spec(checkpoint.config), build), checkpoint)
    config.write_text(json.dumps({**values, "hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match="hidden_act"):
        read_spec(open_checkpoint(str(tmp_path)).config)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_whole_numbers_are_no_weights(kind: torch.dtype, tmp_path: Path) -> None:
    make_twin("llama").model.save_pretrained(tmp_path)
    name, file = "model.layers.1.mlp.down_proj.weight", tmp_path / "model.safetensors"
    state = load_file(file)
    save_file({**state, name: state[name].to(kind)}, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(tmp_path))
    spec = read_spec(checkpoint.config)
    with pytest.raises(CheckpointError, match=rf"{name} \(.*model\.safetensors\).*quantization"):
        load_weights(build_model(spec, make_build(spec)), checkpoint)


def test_dummy_weights_run_and_a_shorter_context_holds() -> None:
    spec = replace(read_spec(make_twin("qwen3-biases-window").config), max_model_len=40)
    build = make_build(spec)
    decoder = build_model(spec, build)
    load_dummy(decoder, seed=3)
    assert decoder.rope.cos_sin.shape == (40, spec.head_dim)
    found = Driver(decoder, build, num_blocks=20, seed=1).run(Row(list(range(40))))
    assert bool(found.isfinite().all())


def test_raw_tensors_are_given_up(tmp_path: Path) -> None:
    """After `finish` a layer holds its packed weight alone."""
    spec = read_spec(make_twin("llama").config)
    build = make_build(spec)
    decoder = build_model(spec, build)
    load_dummy(decoder)
    for _, layer in decoder.named_layers():
        if layer.param_specs():
            with pytest.raises(AssertionError, match="never set"):
                layer.finish()
