"""The vocabulary's two ends: token embedding and output head, cut by vocabulary rows.

A vocabulary that ranks cannot share evenly is padded with rows of zeros at its end; the padding
never leaves this file. A tied head multiplies by the embedding's own PackedWeight.
Next file: `norm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.ops import PackedWeight
from octavo.layers.build import Build
from octavo.layers.parameters import Parameters
from octavo.parallel.collectives import all_gather, all_reduce
from octavo.parallel.mesh import Axis
from octavo.weights.spec import ParamSpec, Part


class VocabRows:
    """This rank's rows of a [V, H] matrix, padded to the same height on every rank."""

    __slots__ = ("_ops", "_parameters", "height", "part", "vocab_size")

    def __init__(self, build: Build, vocab_size: int, hidden_size: int) -> None:
        self.part, self.height = vocab_part(vocab_size, build.mesh.tp)
        self.vocab_size = vocab_size
        self._ops = build.ops
        shape = (self.part.size, hidden_size)
        spec = ParamSpec(shape, build.dtype, (self.part,), out_dim=0, in_dim=1, in_full=hidden_size)
        self._parameters = Parameters({"weight": spec})

    def param_specs(self) -> dict[str, ParamSpec]:
        """The matrix, without its padding."""
        return self._parameters.specs

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes the matrix [rows, H]."""
        self._parameters.set(name, tensor)

    def pack(self) -> PackedWeight:
        """Pads and repacks the matrix for the kernels; gives up the raw one."""
        weight = self._parameters.take()["weight"]
        missing = self.height - weight.shape[0]
        if missing:
            weight = torch.cat((weight, weight.new_zeros(missing, weight.shape[1])))
        return self._ops.pack(weight)


class VocabEmbedding:
    """Token id to vector. `packed` exists after `finish`."""

    __slots__ = ("_axis", "_ops", "_rows", "_scale", "packed")

    packed: PackedWeight

    def __init__(
        self, build: Build, vocab_size: int, hidden_size: int, *, scale: float = 1.0
    ) -> None:
        """Vectors are multiplied by `scale`, a tied head's are not."""
        self._axis = build.mesh.tp
        self._ops = build.ops
        self._rows = VocabRows(build, vocab_size, hidden_size)
        # The models that scale were trained with the factor in the activations' dtype.
        self._scale = torch.tensor(scale, dtype=build.dtype).item()

    def param_specs(self) -> dict[str, ParamSpec]:
        """One matrix, "weight"."""
        return self._rows.param_specs()

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes the matrix; see `Layer`."""
        self._rows.set_param(name, tensor)

    def finish(self) -> None:
        """Repacks the matrix for the kernels."""
        self.packed = self._rows.pack()

    def __call__(self, ids: Tensor) -> Tensor:
        """Ids i32[T] -> [T, H]."""
        vectors = self._look_up(ids)
        return vectors if self._scale == 1.0 else vectors * self._scale

    def _look_up(self, ids: Tensor) -> Tensor:
        if self._axis.size == 1:
            return self._ops.embed(ids, self.packed)
        part = self._rows.part
        local = ids - part.start
        mine = (local >= 0) & (local < part.size)
        vectors = self._ops.embed(local * mine, self.packed) * mine.unsqueeze(1)
        return all_reduce(vectors, self._axis)


class Head:
    """Hidden state to logits. `packed` exists after `finish`."""

    __slots__ = ("_axis", "_ops", "_rows", "_soft_cap", "_tied", "_vocab_size", "packed")

    packed: PackedWeight

    def __init__(
        self,
        build: Build,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: VocabEmbedding | None = None,
        soft_cap: float = 0.0,
    ) -> None:
        """With `tied` the head has no parameters of its own, and must be finished after it.

        With `soft_cap` logits are bent into (-soft_cap, soft_cap) by its tanh.
        """
        self._soft_cap = soft_cap
        self._axis = build.mesh.tp
        self._ops = build.ops
        self._vocab_size = vocab_size
        self._tied = tied
        self._rows = None if tied else VocabRows(build, vocab_size, hidden_size)

    def param_specs(self) -> dict[str, ParamSpec]:
        """One matrix, "weight", or none if tied."""
        return self._rows.param_specs() if self._rows else {}

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes the matrix; see `Layer`."""
        assert self._rows, "a tied head has no parameters"
        self._rows.set_param(name, tensor)

    def finish(self) -> None:
        """Repacks the matrix, or takes the embedding's."""
        if self._tied:
            self.packed = self._tied.packed
        elif self._rows:
            self.packed = self._rows.pack()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden [S, H] -> logits f32[S, V], whole on every rank."""
        logits = self._ops.linear(hidden, self.packed, None, torch.float32)
        logits = all_gather(logits, self._axis)[:, : self._vocab_size]
        if self._soft_cap:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return logits


def vocab_part(vocab_size: int, axis: Axis) -> tuple[Part, int]:
    """This rank's rows of the vocabulary, and the height that every rank pads to."""
    height = -(-vocab_size // axis.size)
    start = min(axis.rank * height, vocab_size)
    size = min(height, vocab_size - start)
    return Part("", size, vocab_size, start), height
