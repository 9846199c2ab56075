"""Every form of quantized checkpoint equals the float model with the weights that it means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import CheckpointError, ConfigError
from octavo.parallel.mesh import Axis, Mesh
from tests.models.driver import Driver, Row
from tests.models.test_parallel import ranks_of
from tests.quant.models import driver, load, quantized
from tests.quant.packers import FORMS

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_those_of_the_weights_meant(form: str, tmp_path: Path) -> None:
    model = quantized(FORMS[form], tmp_path / "m")
    prompt = model.twin.prompt(30)
    found = driver(model.folder).run(Row(list(prompt)), chunk=9)
    torch.testing.assert_close(found, model.twin.logits(prompt), **TOLERANCE)


@pytest.mark.parametrize("form", ["awq-64", "gptq-64-act-order", "compressed-int4", "fp8-block"])
def test_layers_that_are_kept(form: str, tmp_path: Path) -> None:
    """By the config's list; a family of biases; and a head that is not the embedding."""
    keep = ("layers.0.mlp.down_proj", "layers.1.self_attn.o_proj")
    model = quantized(FORMS[form], tmp_path / "m", "llama-biases", keep=keep)
    prompt = model.twin.prompt(20)
    found = driver(model.folder).run(Row(list(prompt)))
    torch.testing.assert_close(found, model.twin.logits(prompt), **TOLERANCE)


def test_kept_layers_are_known_by_their_tensors_too(tmp_path: Path) -> None:
    model = quantized(FORMS["awq-32"], tmp_path / "m", keep=("layers.0.mlp.down_proj",))
    file = model.folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["modules_to_not_convert"] = None
    file.write_text(json.dumps(config))
    prompt = model.twin.prompt(12)
    found = driver(model.folder).run(Row(list(prompt)))
    torch.testing.assert_close(found, model.twin.logits(prompt), **TOLERANCE)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """As GPTQ's writer adds them; others have no place in the model."""
    model = quantized(FORMS["gptq-128"], tmp_path / "m")
    file = model.folder / "model.safetensors"
    tensors = load_file(str(file))
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    save_file(tensors, str(file))
    prompt = model.twin.prompt(12)
    found = driver(model.folder).run(Row(list(prompt)))
    torch.testing.assert_close(found, model.twin.logits(prompt), **TOLERANCE)
    tensors["model.layers.0.self_attn.q_proj.bias"][5] = 1
    save_file(tensors, str(file))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        load(model.folder)


def test_fused_layers_must_be_alike(tmp_path: Path) -> None:
    model = quantized(FORMS["awq-32"], tmp_path / "m", keep=("layers.0.self_attn.k_proj",))
    with pytest.raises(ConfigError, match=r"k_proj is not quantized and .*q_proj is"):
        load(model.folder)


SMALL = {"num_hidden_layers": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 64, "v_head_dim": 32, "qk_nope_head_dim": 16}
EXPERTS = {
    "mixtral": {"intermediate_size": 64},
    "qwen3-moe": SMALL,
    "qwen2-moe": {**SMALL, "shared_expert_intermediate_size": 64},
    "deepseek-v2": {**SMALL, **LATENT, "num_key_value_heads": 4, "qk_rope_head_dim": 16},
    "deepseek-v3": {
        **SMALL,
        **LATENT,
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 16,
        "head_dim": 16,
    },
}


@pytest.mark.parametrize("case", EXPERTS)
@pytest.mark.parametrize("form", ["awq-32", "gptq-32-zeros", "fp8-block", "compressed-int8"])
def test_experts_and_latents(form: str, case: str, tmp_path: Path) -> None:
    """Layers without kernels for quantized weights, and ones whose rows are turned."""
    model = quantized(FORMS[form], tmp_path / "m", case, sizes=EXPERTS[case])
    prompt = model.twin.prompt(20)
    found = driver(model.folder).run(Row(list(prompt)), chunk=9)
    torch.testing.assert_close(found, model.twin.logits(prompt), **TOLERANCE)


@pytest.mark.parametrize("form", ["awq-32", "fp8-dynamic", "fp8-static"])
def test_rows_in_another_order(form: str, tmp_path: Path) -> None:
    """Rotary pairs of neighbours, and biases."""
    model = quantized(FORMS[form], tmp_path / "m", "glm4", sizes={"attention_bias": True})
    prompt = model.twin.prompt(20)
    found = driver(model.folder).run(Row(list(prompt)))
    torch.testing.assert_close(found, model.twin.logits(prompt), **TOLERANCE)


@pytest.mark.parametrize("form", [name for name in FORMS if name not in ("awq-128", "awq-rows")])
def test_two_ranks_equal_one(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4}
    model = quantized(FORMS[form], tmp_path / "m", sizes={**sizes, "head_dim": 64})
    prompt = model.twin.prompt(20)
    wanted = driver(model.folder).run(Row(list(prompt)))
    parts = [load(model.folder, mesh=Mesh(tp=Axis(rank, 2))) for rank in range(2)]
    drivers = [Driver(*part, num_blocks=20, seed=1) for part in parts]
    with ranks_of(2, monkeypatch) as ranks:
        found = ranks.run(lambda rank: drivers[rank].run(Row(list(prompt))))
    for logits in found:
        torch.testing.assert_close(logits, wanted, **TOLERANCE)


def test_a_rank_must_hold_whole_groups(tmp_path: Path) -> None:
    model = quantized(FORMS["awq-128"], tmp_path / "m")
    with pytest.raises(ConfigError, match="groups of 128 columns, which do not divide"):
        load(model.folder, mesh=Mesh(tp=Axis(0, 2)))
