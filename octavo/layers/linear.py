"""Linear layers: y = x W^T + b, cut over tensor-parallel ranks by their kind.

    Replicated   every rank holds all of W
    Column       a rank holds some output rows; its output is its share
    Row          a rank holds some input columns; outputs are summed over the ranks
    QKV          Column, three tensors fused: query, key and value heads
    GateUp       Column, two tensors fused

How the weight is stored and multiplied is the quant method's affair, and how a checkpoint tensor
is cut is said in `param_specs`. Next file: `embedding.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from octavo.kernels.ops import PackedWeight
from octavo.layers.build import Build
from octavo.layers.parameters import Parameters
from octavo.models.spec import Activation
from octavo.parallel.collectives import all_reduce
from octavo.parallel.mesh import Axis
from octavo.quant.base import QuantMethod
from octavo.quant.turned import Turned
from octavo.weights.spec import ParamSpec, Part


class Linear:
    """The base: this rank's rows (`parts`) and columns of one matrix, and its bias.

    `packed` and `bias` exist after `finish`.
    """

    __slots__ = (
        *("_bias_spec", "_cut", "_parameters", "_quant", "bias", "in_features", "out_features"),
        *("packed", "parts"),
    )

    packed: PackedWeight
    bias: Tensor | None

    def __init__(
        self,
        build: Build,
        parts: tuple[Part, ...],
        in_features: int,
        *,
        bias: bool,
        in_start: int = 0,
        in_full: int | None = None,
    ) -> None:
        self.parts = parts
        self.in_features = in_features
        self.out_features = sum(part.size for part in parts)
        self._cut = (in_start, in_features if in_full is None else in_full)
        spec = ParamSpec((self.out_features,), build.dtype, parts, out_dim=0)
        self._bias_spec = spec if bias else None
        self.use(build.quant)

    def use(self, quant: QuantMethod) -> None:
        """Takes another method than the build's; before any parameter is set.

        Raises ConfigError if the method cannot cut the weight so.
        """
        self._quant = quant
        specs = quant.params(self.in_features, self.parts, *self._cut)
        if self._bias_spec is not None:
            specs["bias"] = self._bias_spec
        self._parameters = Parameters(specs)

    @property
    def turns(self) -> bool:
        """Whether the checkpoint's rows are put into another order; then there is a `turn`."""
        return False

    def turn(self, tensor: Tensor) -> Tensor:
        """Rows of the checkpoint's order in the layer's."""
        return tensor

    def param_specs(self) -> dict[str, ParamSpec]:
        """The quant method's parameters, and "bias" if there is one."""
        return self._parameters.specs

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes one parameter; see `Layer`."""
        self._parameters.set(name, tensor)

    def finish(self) -> None:
        """Repacks the weight for the kernels."""
        tensors = self._parameters.take()
        self.bias = tensors.pop("bias", None)
        self.packed = self._quant.finish(tensors)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], both this rank's share."""
        return self._quant.apply(x, self.packed, self.bias)


class Replicated(Linear):
    """The whole matrix on every rank."""

    __slots__ = ()

    def __init__(
        self, build: Build, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        parts = (Part("", out_features, out_features, 0),)
        super().__init__(build, parts, in_features, bias=bias)


class Column(Linear):
    """Output rows divided evenly over the ranks."""

    __slots__ = ()

    def __init__(
        self, build: Build, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        parts = (even_part("", out_features, build.mesh.tp),)
        super().__init__(build, parts, in_features, bias=bias)


class Row(Linear):
    """Input columns divided evenly over the ranks; the partial outputs are summed."""

    __slots__ = ("_axis",)

    def __init__(
        self, build: Build, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        self._axis = build.mesh.tp
        start, size = self._axis.share(in_features)
        parts = (Part("", out_features, out_features, 0),)
        super().__init__(build, parts, size, bias=bias, in_start=start, in_full=in_features)

    def finish(self) -> None:
        """Repacks; only rank 0 keeps the bias, or the sum would hold it once for each rank."""
        super().finish()
        if self._axis.rank != 0:
            self.bias = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in], this rank's share -> [T, out], the whole sum."""
        return all_reduce(super().__call__(x), self._axis)


class QKV(Linear):
    """Query, key and value projections in one matrix, divided by heads.

    With fewer key/value heads than ranks, neighbouring ranks hold copies of the same head.
    """

    __slots__ = ("_order", "head_dim", "num_heads", "num_kv_heads")

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        joined: bool = False,
        order: Tensor | None = None,
    ) -> None:
        """`num_heads` and `num_kv_heads` are the whole model's; the attributes are the rank's.

        `joined`: the three are one tensor in the checkpoint too. `order` i64[D] says which
        dimension of a head in the checkpoint is which of ours, for query and key.
        """
        self._order = order
        axis = build.mesh.tp
        start, self.num_heads = axis.share(num_heads)
        kv_start, self.num_kv_heads = share_kv_heads(num_kv_heads, axis)
        self.head_dim = head_dim
        query = Part("q", self.num_heads * head_dim, num_heads * head_dim, start * head_dim)
        rows = (self.num_kv_heads * head_dim, num_kv_heads * head_dim, kv_start * head_dim)
        parts = (query, Part("k", *rows), Part("v", *rows))
        super().__init__(build, join(parts) if joined else parts, hidden_size, bias=bias)

    @property
    def turns(self) -> bool:
        """Whether the checkpoint's rows are put into another order."""
        return self._order is not None

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes one parameter, rows in the checkpoint's order; see `Layer`."""
        late = isinstance(self._quant, Turned) and name != "bias"
        super().set_param(name, tensor if late else self.turn(tensor))

    def turn(self, tensor: Tensor) -> Tensor:
        """Rows of the checkpoint's order in the layer's."""
        if self._order is not None:
            rows, turned = movable(tensor), (self.num_heads + self.num_kv_heads) * self.head_dim
            heads = rows[:turned].view(-1, self.head_dim, *rows.shape[1:])
            heads = heads.index_select(1, self._order.to(rows.device))
            joined = torch.cat((heads.view(turned, *rows.shape[1:]), rows[turned:]))
            tensor = joined.view(tensor.dtype)
        return tensor

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output [T, (Q + 2K) * D] -> q [T, Q, D], k and v [T, K, D], contiguous copies."""
        heads = fused.view(fused.shape[0], -1, self.head_dim)
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=1)
        return q.contiguous(), k.contiguous(), v.contiguous()


class GateUp(Linear):
    """The two input projections of a gated MLP in one matrix: gate rows, then up rows."""

    __slots__ = ("_fused", "_multiply")

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        activation: Activation = "silu",
        joined: bool = False,
    ) -> None:
        """`joined`: the two are one tensor in the checkpoint too."""
        axis = build.mesh.tp
        gate = even_part("gate", intermediate_size, axis)
        up = even_part("up", intermediate_size, axis)
        parts = (gate, up)
        super().__init__(build, join(parts) if joined else parts, hidden_size, bias=bias)
        silu = activation == "silu"
        self._multiply = build.ops.silu_mul if silu else build.ops.gelu_mul
        self._fused = build.ops.linear_silu if silu else None

    def gated(self, x: Tensor) -> Tensor:
        """x [T, in] -> activation(gate x) * up x [T, I], this rank's share."""
        if self._fused is not None:
            return self._fused(x, self.packed, self.bias)
        return self._multiply(self(x))


def movable(tensor: Tensor) -> Tensor:
    """The same memory as a type whose rows torch can move: 8-bit floats as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def even_part(name: str, full: int, axis: Axis) -> Part:
    """This rank's even share of `full` rows."""
    start, size = axis.share(full)
    return Part(name, size, full, start)


def join(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The same rows where the parts' tensors lie one after the other in one tensor."""
    full = sum(part.full for part in parts)
    starts = accumulate((part.full for part in parts), initial=0)
    return tuple(
        replace(part, full=full, start=first + part.start)
        for part, first in zip(parts, starts, strict=False)
    )


def share_kv_heads(num_kv_heads: int, axis: Axis) -> tuple[int, int]:
    """(first, count) of this rank's key/value heads; a head is copied if ranks outnumber heads."""
    if axis.size <= num_kv_heads:
        return axis.share(num_kv_heads)
    if axis.size % num_kv_heads:
        raise ValueError(f"{axis.size} ranks cannot share {num_kv_heads} key/value heads evenly")
    return axis.rank // (axis.size // num_kv_heads), 1
