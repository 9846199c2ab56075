"""What a quantization is, as one record: of a checkpoint's config, or asked for at the start.

Imports no torch. Not for: reading configs (`octavo/models/quantization.py`) or weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

Form: TypeAlias = Literal["online", "fp8", "compressed-tensors", "awq", "gptq"]
Kind: TypeAlias = Literal["fp8", "int8", "int4"]
Scales: TypeAlias = Literal["tensor", "channel", "block", "group"]
Activations: TypeAlias = Literal["plain", "static", "dynamic"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the linear layers of a model are quantized."""

    form: Form  # whose layout and names of tensors
    kind: Kind
    scales: Scales = "channel"
    group: int = 0  # columns that share a scale; 0: all of a row
    symmetric: bool = True  # no zero points are stored
    act_order: bool = False  # a table says which group a column is of
    zero_less_one: bool = False  # zero points are stored less one
    activations: Activations = "plain"
    ignored: tuple[str, ...] = ()  # patterns of modules that are not quantized

    def ignores(self, module: str) -> bool:
        """True if the layer of that checkpoint name is kept as it is."""
        return any(matches(pattern, module) for pattern in self.ignored)

    def __str__(self) -> str:
        """For people."""
        bits = {"fp8": "8-bit floats", "int8": "8 bits", "int4": "4 bits"}[self.kind]
        per = {
            "tensor": "a scale a tensor",
            "channel": "a scale a row",
            "block": "a scale for 128 x 128",
            "group": f"a scale for {self.group} columns",
        }[self.scales]
        more = ", act-order" if self.act_order else ""
        act = "" if self.activations == "plain" else f", {self.activations} activations"
        return f"{self.form}, {bits}, {per}{more}{act}"


def matches(pattern: str, module: str) -> bool:
    """True if `pattern` names `module`.

    A pattern is a regular expression after "re:", to be found at the module's beginning, or a run
    of the dotted name's whole words.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."
