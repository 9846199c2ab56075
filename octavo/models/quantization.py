"""Reads `quantization_config` of a config.json: fp8, compressed-tensors, AutoAWQ and GPTQ.

Whatever would change the weights and is not known is refused. Imports no torch. Not for: what a
scheme's tensors look like (`octavo/quant/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.models.reader import Reader
from octavo.quant.scheme import Activations, Form, Scheme

GROUPS = (32, 64, 128)
BLOCK = 128


def read_scheme(config: Mapping[str, object]) -> Scheme | None:
    """The scheme of a config, None if its weights are plain. Raises ConfigError."""
    reader = Reader(config)
    section = reader.child("quantization_config") or reader.child("compression_config")
    if section is None:
        return None
    match section.text("quant_method", ""):
        case "fp8":
            return _fp8(section)
        case "compressed-tensors":
            return _compressed(section)
        case "awq":
            return _awq(section)
        case "gptq":
            return _gptq(section)
        case "":
            raise section.error("quant_method", "must name the method")
    raise section.error(
        "quant_method",
        "is not supported; known are fp8, compressed-tensors, awq and gptq, and GGUF files; or "
        "take the model in bfloat16 with --quantization fp8, int8 or int4",
    )


def _fp8(section: Reader) -> Scheme:
    section.require("fmt", "e4m3", "float8_e4m3fn")
    activations = _choice(section, "activation_scheme", "dynamic", "static")
    ignored = (section.texts("ignored_layers") or ()) + (
        section.texts("modules_to_not_convert") or ()
    )
    if section.has("weight_block_size"):
        _require_block(section, "weight_block_size")
        if activations == "static":
            raise section.error("activation_scheme", "must be dynamic with weight_block_size")
        return Scheme("fp8", "fp8", "block", activations="dynamic", ignored=ignored)
    return Scheme("fp8", "fp8", "tensor", activations=_activation(activations), ignored=ignored)


def _awq(section: Reader) -> Scheme:
    if (section.text("version", "gemm")).lower() != "gemm":
        raise section.error("version", "has another layout of tensors; only gemm is supported")
    bits = section.integer("bits", section.integer("w_bit", 4))
    if bits != 4:
        raise section.error("bits", "must be 4")
    section.require("zero_point", True)
    group = _group(section, "group_size" if section.has("group_size") else "q_group_size")
    ignored = section.texts("modules_to_not_convert") or ()
    return Scheme("awq", "int4", "group", group, symmetric=False, ignored=ignored)


def _gptq(section: Reader) -> Scheme:
    if section.integer("bits") != 4:
        raise section.error("bits", "must be 4")
    section.require("lm_head", False)
    section.require("dynamic", {})
    if section.has("modules_in_block_to_quantize"):
        raise section.error(
            "modules_in_block_to_quantize", "quantizes a part of each block, which is not supported"
        )
    version = section.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise section.error("checkpoint_format", "must be gptq or gptq_v2")
    return Scheme(
        "gptq",
        "int4",
        "group",
        _group(section, "group_size"),
        symmetric=False,  # zero points are always stored
        act_order=section.boolean("desc_act", False),
        zero_less_one=version == "gptq",
        ignored=section.texts("modules_to_not_convert") or (),
    )


def _compressed(section: Reader) -> Scheme:
    groups = section.child("config_groups")
    names = groups.keys() if groups else ()
    if groups is None or len(names) != 1:
        raise section.error("config_groups", "must hold one group; models of several are refused")
    group = groups.child(names[0])
    assert group is not None, "a key of the section"
    if group.texts("targets") != ("Linear",):
        raise group.error("targets", "must be ['Linear']")
    if group.child("output_activations") is not None:
        raise group.error("output_activations", "are not supported")
    weights = group.child("weights")
    if weights is None:
        raise group.error("weights", "must say how weights are quantized")
    if weights.boolean("dynamic", False):
        raise weights.error("dynamic", "must be false")
    scheme = _compressed_weights(weights)
    activations = _compressed_activations(group.child("input_activations"), scheme)
    return replace(scheme, activations=activations, ignored=section.texts("ignore") or ())


def _compressed_weights(weights: Reader) -> Scheme:
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    strategy = weights.text("strategy", "tensor")
    symmetric = weights.boolean("symmetric", True)
    form: Form = "compressed-tensors"
    if kind == "float" and bits == 8:
        if strategy == "tensor":
            return Scheme(form, "fp8", "tensor")
        if strategy == "channel":
            return Scheme(form, "fp8", "channel")
        if strategy == "block":
            _require_block(weights, "block_structure")
            return Scheme(form, "fp8", "block")
        raise weights.error("strategy", "must be tensor, channel or block for 8-bit floats")
    if kind == "int" and bits == 8:
        if strategy != "channel" or not symmetric:
            raise weights.error("strategy", "must be channel, and symmetric, for 8 bits")
        return Scheme(form, "int8", "channel")
    if kind == "int" and bits == 4:
        if strategy not in ("group", "channel"):
            raise weights.error("strategy", "must be group or channel for 4 bits")
        order = weights.text("actorder", "")
        if order not in ("", "group", "weight", "static"):
            raise weights.error("actorder", "must be group, weight or static")
        size = 0 if strategy == "channel" else _group(weights, "group_size")
        return Scheme(form, "int4", "group", size, symmetric=symmetric, act_order=order == "group")
    raise weights.error("num_bits", f"of type {kind} is not supported; float 8, int 8 and 4 are")


def _compressed_activations(section: Reader | None, scheme: Scheme) -> Activations:
    if section is None:
        return "plain"
    if scheme.kind != "fp8":
        raise section.error("num_bits", "of activations is only supported with 8-bit floats")
    if section.text("type", "int") != "float" or section.integer("num_bits") != 8:
        raise section.error("type", "must be float of 8 bits, as the weights are")
    section.require("symmetric", True)
    if section.boolean("dynamic", False):
        return "dynamic"
    if section.text("strategy", "tensor") != "tensor":
        raise section.error("strategy", "must be tensor where it is not dynamic")
    return "static"


def _choice(section: Reader, key: str, *known: str) -> str:
    value = section.text(key, known[0])
    if value not in known:
        raise section.error(key, f"must be {' or '.join(known)}")
    return value


def _activation(name: str) -> Activations:
    return "static" if name == "static" else "dynamic"


def _require_block(section: Reader, key: str) -> None:
    if section.integers(key) != (BLOCK, BLOCK):
        raise section.error(key, f"must be [{BLOCK}, {BLOCK}]")


def _group(section: Reader, key: str) -> int:
    """Columns that share a scale; 0 for -1, which is a whole row."""
    size = section.integer(key, 128, least=-1)
    if size == -1:
        return 0
    if size not in GROUPS:
        raise section.error(key, f"must be {', '.join(map(str, GROUPS))} or -1")
    return size


def cache_scales(config: Mapping[str, object]) -> bool:
    """True if the checkpoint says that it has scales of keys and values."""
    section = Reader(config).child("quantization_config")
    scheme = section.child("kv_cache_scheme") if section is not None else None
    if scheme is None:
        return False
    if scheme.integer("num_bits") != 8 or scheme.text("type", "float") != "float":
        raise scheme.error("num_bits", "must be 8, of type float")
    scheme.require("strategy", "tensor")
    scheme.require("dynamic", False)
    scheme.require("symmetric", True)
    return True
