"""Which method each linear layer has: by the scheme, and by what the checkpoint holds of it.

Next file: `octavo/layers/linear.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch

from octavo.errors import ConfigError
from octavo.kernels.ops import Ops
from octavo.quant.base import QuantMethod
from octavo.quant.fp8 import Fp8Checkpoint, Int8Checkpoint
from octavo.quant.int4 import Int4
from octavo.quant.none import Unquantized
from octavo.quant.online import OnlineFp8, OnlineInt4
from octavo.quant.scheme import Scheme

ONLINE_GROUP = 32
# What a checkpoint has of a layer only if it is quantized.
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Methods:
    """The method of each layer, by the modules of the checkpoint that it is made of."""

    plain: QuantMethod
    scheme: Scheme | None = None
    quantized: QuantMethod | None = None
    tensors: Set[str] = frozenset()  # names in the checkpoint; empty if there is none

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
    return Methods(plain, scheme, make[scheme.kind](), tensors)


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
