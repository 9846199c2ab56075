"""Which method each linear layer has: by the scheme, and by what the checkpoint holds of it.

Next file: `octavo/layers/linear.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.ops import Ops
from octavo.kernels.reference import reference_ops
from octavo.quant.base import QuantMethod
from octavo.quant.fp8 import Fp8Checkpoint, Int8Checkpoint
from octavo.quant.int4 import Int4
from octavo.quant.none import Unquantized
from octavo.quant.online import OnlineFp8, OnlineInt4
from octavo.quant.scheme import Scheme
from octavo.quant.turned import Turned

ONLINE_GROUP = 32
# What a checkpoint has of a layer only if it is quantized.
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Methods:
    """The method of each layer, by the modules of the checkpoint that it is made of."""

    plain: QuantMethod
    scheme: Scheme | None = None
    quantized: QuantMethod | None = None
    unpacked: QuantMethod | None = None  # the same with weights that come out plain
    tensors: Set[str] = frozenset()  # names in the checkpoint; empty if there is none

    @property
    def is_online(self) -> bool:
        """Whether the checkpoint's own weights are plain."""
        return self.scheme is not None and self.scheme.form == "online"

    def of(self, modules: Sequence[str]) -> QuantMethod:
        """The method of a layer. Raises ConfigError if its modules do not agree."""
        if self.quantized is None or self.scheme is None:
            return self.plain
        kept = [self._is_plain(module) for module in modules]
        if any(kept) and not all(kept):
            first, other = modules[kept.index(True)], modules[kept.index(False)]
            raise ConfigError(
                f"{first} is not quantized and {other} is, but they are multiplied as one; use a "
                "checkpoint in which both are alike",
                "quantization",
            )
        return self.plain if all(kept) else self.quantized

    def _is_plain(self, module: str) -> bool:
        assert self.scheme is not None
        if self.scheme.ignores(module):
            return True
        if self.scheme.form == "online" or f"{module}.weight" not in self.tensors:
            return False
        return not any(f"{module}.{mark}" in self.tensors for mark in MARKS)


def methods_of(
    scheme: Scheme | None, ops: Ops, dtype: torch.dtype, tensors: Set[str] = frozenset()
) -> Methods:
    """The methods for a scheme, None being plain weights, over the kernels of `ops`."""
    plain = Unquantized(ops, dtype)
    if scheme is None:
        return Methods(plain)
    make: dict[str, Callable[[], QuantMethod]] = {
        "fp8": lambda: Fp8Checkpoint(scheme, ops, dtype),
        "int8": lambda: Int8Checkpoint(scheme, ops, dtype),
        "int4": lambda: Int4(scheme, ops, dtype),
    }
    if scheme.form == "online":
        make["fp8"] = lambda: OnlineFp8(ops, dtype)
        make["int4"] = lambda: OnlineInt4(ops, dtype, scheme.group or ONLINE_GROUP)
    quantized = make[scheme.kind]()
    ops = reference_ops(dtype)
    return Methods(plain, scheme, quantized, make[scheme.kind](), tensors)


def layer_method(methods: Methods, layer: Turning, modules: Sequence[str]) -> QuantMethod:
    """The method of a linear layer, whose rows may have to be turned once they are plain."""
    method = methods.of(modules)
    if method.by_rows or not layer.turns:
        return method
    assert methods.unpacked is not None
    return Turned(methods.unpacked, layer.turn, methods.plain)


class Turning(Protocol):
    """A layer that may want rows in another order than the checkpoint's."""

    @property
    def turns(self) -> bool:
        """Whether it does."""

    def turn(self, tensor: Tensor) -> Tensor:
        """Rows of the checkpoint's order in the layer's."""


def note_of(scheme: Scheme, ops: Ops, dtype: torch.dtype) -> str:
    """One line: what the weights are, and what is multiplied."""
    name = str(dtype).removeprefix("torch.")
    if scheme.kind == "int4" and ops.pack_grouped is not None:
        how = f"multiplied in 4 bits by {ops.name} kernels"
    elif scheme.kind == "fp8" and ops.pack_fp8 is not None and scheme.activations != "plain":
        how = f"multiplied as they are by {ops.name} kernels"
    else:
        how = f"made {name} while they load, as {ops.name} kernels multiply no such weights"
    return f"weights: {scheme}; {how}"
