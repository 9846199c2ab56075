"""Configs and options that cannot be honoured are refused before weights are read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config import WorkerConfig
from octavo.errors import ConfigError
from octavo.models.quantization import cache_scales, read_scheme
from octavo.quant.scheme import matches
from octavo.worker.worker import Worker
from tests.quant.packers import FORMS
from tests.worker.tiny import write_tiny


def changed(form: str, **changes: Any) -> dict[str, Any]:
    return {"quantization_config": {**copy.deepcopy(FORMS[form].config), **changes}}


def group(form: str, part: str, **changes: Any) -> dict[str, Any]:
    config = changed(form)
    section = config["quantization_config"]["config_groups"]["group_0"]
    target = section if part == "" else section[part]
    target.update(changes)
    return config


BAD: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {}}, "quant_method"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "known are fp8"),
    (changed("awq-32", bits=8), "bits"),
    (changed("awq-32", version="gemv"), "version"),
    (changed("awq-32", zero_point=False), "zero_point"),
    (changed("awq-32", group_size=48), "group_size"),
    (changed("gptq-128", bits=3), "bits"),
    (changed("gptq-128", lm_head=True), "lm_head"),
    (changed("gptq-128", checkpoint_format="marlin"), "checkpoint_format"),
    (changed("gptq-128", modules_in_block_to_quantize=[["a"]]), "modules_in_block"),
    (changed("fp8-dynamic", fmt="e5m2"), "fmt"),
    (changed("fp8-dynamic", activation_scheme="none"), "activation_scheme"),
    (changed("fp8-block", weight_block_size=[64, 128]), "weight_block_size"),
    (changed("fp8-block", activation_scheme="static"), "activation_scheme"),
    (changed("compressed-int4", config_groups={}), "config_groups"),
    (group("compressed-int4", "", targets=["re:.*mlp.*"]), "targets"),
    (group("compressed-int4", "", weights=None), "weights"),
    (group("compressed-int4", "", output_activations={"num_bits": 8}), "output_activations"),
    (group("compressed-int4", "weights", num_bits=2), "num_bits"),
    (group("compressed-int4", "weights", strategy="tensor"), "strategy"),
    (group("compressed-int4", "weights", group_size=16), "group_size"),
    (group("compressed-int4", "weights", actorder="other"), "actorder"),
    (group("compressed-int4", "weights", dynamic=True), "dynamic"),
    (group("compressed-int4", "", input_activations={"num_bits": 8}), "num_bits"),
    (group("compressed-fp8-token", "weights", strategy="group"), "strategy"),
    (group("compressed-fp8-tensor", "input_activations", type="int"), "type"),
    (group("compressed-fp8-tensor", "input_activations", strategy="token"), "strategy"),
    (group("compressed-int8", "weights", symmetric=False), "strategy"),
]


@pytest.mark.parametrize(("config", "said"), BAD)
def test_what_is_not_known_is_refused_by_key(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_scheme(config)


def test_plain_weights_have_no_scheme() -> None:
    assert read_scheme({}) is None
    assert read_scheme({"quantization_config": None}) is None
    assert not cache_scales({})


@pytest.mark.parametrize(
    ("pattern", "module", "wanted"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_heads", False),
        ("mlp", "model.layers.0.mlp.down_proj", True),
        ("layers.1", "model.layers.11.mlp.down_proj", False),
        ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj", True),
        ("re:.*gate$", "model.layers.0.mlp.gate", True),
        ("re:gate", "model.layers.0.mlp.gate", False),
    ],
)
def test_patterns_of_modules(pattern: str, module: str, wanted: bool) -> None:
    assert matches(pattern, module) is wanted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "m", 5)


def refusal(folder: Path, **changes: Any) -> str:
    config = WorkerConfig(
        model=str(folder), **{"kernels": "reference", "kv_cache_memory_bytes": 1 << 20, **changes}
    )
    with pytest.raises(ConfigError) as caught:
        Worker(config).load()
    return caught.value.message


def test_options_that_contradict_the_checkpoint(folder: Path) -> None:
    assert "has plain weights" in refusal(folder, quantization="awq")
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changed("fp8-dynamic")}
    file.write_text(json.dumps(config))
    assert "the checkpoint is fp8" in refusal(folder, quantization="gptq")
    assert "quantized already" in refusal(folder, quantization="int4")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_kernels_that_cannot(folder: Path, quantization: str) -> None:
    assert "no weights of 8 bits" in refusal(folder, quantization=quantization)
    said = refusal(folder, quantization=quantization, kernels="auto", dtype="float32")
    assert "leave quantization out" in said


def test_groups_that_do_not_divide(folder: Path) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changed("awq-128")}
    file.write_text(json.dumps(config))
    assert "groups of 128 columns, which do not divide in_features 64" in refusal(
        folder, load_format="dummy"
    )
