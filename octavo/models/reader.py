"""Strict reading of a Hugging Face `config.json`: each value has a type, or an error names it.

A config is foreign data: keys come and go with versions of the library that wrote it. So every
read states type, default and bound, and whatever would change the output but is not supported is
refused. Not for: what the values mean (`llama.py`, `qwen.py`, ...).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from octavo.errors import ConfigError
from octavo.models.spec import RopeKind, RopeSpec, yarn_gain

LARGEST = sys.float_info.max  # JSON has no infinity, but Python reads one, and numbers beyond


class Reader:
    """Typed access to one JSON object. Null counts as absent, as it does for its writer."""

    __slots__ = ("_values", "_where")

    def __init__(self, values: Mapping[str, object], where: str = "") -> None:
        """`where` is the dotted path of the object inside the config, "" for the config itself."""
        self._values = values
        self._where = where

    def has(self, key: str) -> bool:
        """True if the key is there and not null."""
        return self._values.get(key) is not None

    def keys(self) -> tuple[str, ...]:
        """All keys, in the file's order."""
        return tuple(self._values)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number not below `least`; without a default the key must be there."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"must be a whole number not below {least}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > above:
            raise self.error(key, f"must be a number above {above:g}")
        if value > LARGEST:
            raise self.error(key, "must be a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, a list, or none."""
        value = self._values.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
            raise self.error(key, "must be a token id or a list of them")
        return tuple(values)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, empty if absent."""
        value = self._values.get(key)
        values = [] if value is None else value
        if not isinstance(values, list) or not all(type(one) is int for one in values):
            raise self.error(key, "must be a list of whole numbers")
        return tuple(values)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None if absent."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.error(key, "must be a list of strings")
        return tuple(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        value = self._values.get(key)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(one, int | float) and 0 < one <= LARGEST for one in value)
        ):
            raise self.error(key, f"must be a list of {count} numbers above 0")
        return tuple(float(one) for one in value)

    def child(self, key: str) -> Reader | None:
        """The object under `key`, or None if absent."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return Reader(value, self._path(key))

    def require(self, key: str, *supported: object) -> None:
        """Refuses any value but the supported ones, of which the first is the default."""
        value = self._values.get(key)
        if value is not None and value not in supported:
            names = " or ".join(repr(one) for one in supported)
            raise self.error(key, f"changes the output and is not supported; only {names} is")

    def require_flat(self) -> None:
        """Refuses objects inside this one: settings that differ by kind of layer."""
        for key, value in self._values.items():
            if isinstance(value, dict):
                raise self.error(key, "differs by kind of layer, which is not supported")

    def error(self, key: str, problem: str) -> ConfigError:
        """The error for `key`; its value is shown."""
        value = self._values.get(key)
        shown = "missing" if value is None else repr(value)
        return ConfigError(f"config.json: {self._path(key)} ({shown}) {problem}", self._path(key))

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        return default if value is None else value

    def _path(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key


def read_dtype(config: Reader) -> str:
    """The checkpoint's dtype: "dtype", or "torch_dtype" in older files."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text(key, "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise config.error(key, "must be float32, bfloat16 or float16")
    return name


def read_quantization(config: Reader) -> str:
    """The name of the checkpoint's quantization method, "" if it has none."""
    section = config.child("quantization_config")
    if section is None:
        return ""
    name = section.text("quant_method", "")
    if not name:
        raise section.error("quant_method", "must name the method")
    return name


def read_rope(
    config: Reader, head_dim: int, max_len: int, *, partial: float | None = None
) -> RopeSpec:
    """Rotary positions, from `rope_parameters` (newer files) or `rope_scaling` beside the rest.

    `max_len` is the config's max_position_embeddings: the trained length where no other is named.
    `partial` is the family's default share of a head that turns; None: only whole heads.
    """
    # An old file's `rope_scaling` wins over `rope_parameters`, as in the library that writes both.
    section = config.child("rope_scaling") or config.child("rope_parameters") or Reader({})
    section.require_flat()
    theta = section.number("rope_theta", config.number("rope_theta", 10000.0))
    if partial is None:
        config.require("partial_rotary_factor", 1.0)
        section.require("partial_rotary_factor", 1.0)
        return rope_of(config, section, head_dim, max_len=max_len, theta=theta)
    where = section if section.has("partial_rotary_factor") else config
    share = where.number("partial_rotary_factor", partial)
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2:
        raise where.error("partial_rotary_factor", f"must leave an even part of {head_dim}")
    spec = rope_of(config, section, dim, max_len=max_len, theta=theta)
    return spec if dim == head_dim else replace(spec, width=head_dim)


def rope_of(
    config: Reader, section: Reader, head_dim: int, *, max_len: int, theta: float
) -> RopeSpec:
    """The rotary positions that one flat `section` describes; `head_dim` dimensions turn."""
    kind = _rope_kind(section)
    if kind == "default":
        return RopeSpec(theta, head_dim)
    trained = config if config.has("original_max_position_embeddings") else section
    original = trained.integer("original_max_position_embeddings", max_len)
    if kind == "dynamic":
        if head_dim == 2:
            raise section.error(_kind_key(section), "needs more than two dimensions that turn")
        # This kind stretches from max_position_embeddings, whatever else the file says.
        return RopeSpec(theta, head_dim, kind, section.number("factor"), max_len)
    if kind == "linear":
        return RopeSpec(theta, head_dim, kind, section.number("factor"), original)
    if kind == "llama3":
        return _llama3(section, theta, head_dim, original)
    if kind == "longrope":
        return _longrope(section, theta, head_dim, original=original, max_len=max_len)
    return _yarn(section, theta, head_dim, original=original, max_len=max_len)


def _rope_kind(section: Reader) -> RopeKind:
    """The kind, under its newer or older key."""
    key = _kind_key(section)
    name = section.text(key, "default")
    match name:
        case "default" | "linear" | "dynamic" | "llama3" | "yarn" | "longrope":
            return name
        case "su":  # its name before it had one
            return "longrope"
    raise section.error(
        key, "is not supported; known are default, linear, dynamic, llama3, yarn and longrope"
    )


def _kind_key(section: Reader) -> str:
    return "rope_type" if section.has("rope_type") else "type"


def _llama3(section: Reader, theta: float, dim: int, original: int) -> RopeSpec:
    low = section.number("low_freq_factor")
    high = section.number("high_freq_factor")
    if high <= low:
        raise section.error("high_freq_factor", f"must be above low_freq_factor, {low:g}")
    return RopeSpec(
        theta,
        dim,
        "llama3",
        section.number("factor"),
        original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _longrope(section: Reader, theta: float, dim: int, *, original: int, max_len: int) -> RopeSpec:
    if original == 1 and not section.has("attention_factor"):
        raise section.error("attention_factor", "must be there for a trained length of 1")
    return RopeSpec(
        theta,
        dim,
        "longrope",
        section.number("factor", max_len / original),
        original,
        attention_factor=(
            section.number("attention_factor") if section.has("attention_factor") else None
        ),
        short_factors=section.numbers("short_factor", dim // 2),
        long_factors=section.numbers("long_factor", dim // 2),
    )


def _yarn(section: Reader, theta: float, dim: int, *, original: int, max_len: int) -> RopeSpec:
    if theta <= 1:
        raise section.error("rope_theta", f"must be above 1 for yarn, and is {theta:g}")
    factor = section.number("factor", max_len / original)
    gain = section.number("attention_factor") if section.has("attention_factor") else None
    if gain is None and section.has("mscale") and section.has("mscale_all_dim"):
        gain = yarn_gain(factor, section.number("mscale"))
        gain /= yarn_gain(factor, section.number("mscale_all_dim"))
    return RopeSpec(
        theta,
        dim,
        "yarn",
        factor,
        original,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.boolean("truncate", True),
        attention_factor=gain,
    )
